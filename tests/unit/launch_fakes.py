"""Launches on a made-up device, told by its own clock."""

from __future__ import annotations

from collections import Counter

from cubatch.measure.runner import Reading


class FakeClock:
    """A clock that advances by what the variants are said to take."""

    def __init__(self):
        self.passed = 0.0

    def now(self):
        return self.passed

    def time(self, step, repeats):
        before = self.passed
        for _ in range(repeats):
            step()
        return Reading(seconds=(self.passed - before) / repeats)

    def sleep(self, seconds):
        self.passed += seconds


class FakeDevice:
    """Launches that take as long as they are told to, and counts them."""

    def __init__(self, seconds):
        self.clock, self.seconds, self.launched, self.bound = FakeClock(), seconds, Counter(), Counter()

    def prepare(self, split):
        name = split.kernel.name
        self.bound[name] += 1

        def work():
            self.launched[name] += 1
            self.clock.passed += self.seconds.get((name, split.slices), self.seconds.get(name, 5e-3))

        return work

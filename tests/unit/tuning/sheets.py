"""A subject for tests: a fake device of a known best, in one class."""

from __future__ import annotations

import attrs

from cubatch.hardware.facts import Device
from cubatch.hardware.memory_limit import MemoryLimit
from cubatch.tuning.ladder import of_memory
from cubatch.tuning.subject import Subject
from tests.fakes import FakeDevice

KIB = 1024


@attrs.frozen(kw_only=True)
class Sheet(Subject):
    """Samples of 1 KiB each; steps take 20 ms and 1 us a sample, so that the largest batch is the best by far."""

    device: Device
    memory: MemoryLimit
    fake: FakeDevice
    identity = {"spec": {"name": "sheet"}}  # noqa: RUF012 - a property in the protocol
    made: list = attrs.field(factory=list)

    def ladder(self, limits, cached, *, is_finished):
        largest = self.memory.bytes // KIB
        return cached or of_memory(limits, self.memory, largest, lambda n: KIB * n)

    def runner_factory(self, ladder, limits):
        def make():
            self.made.append(self.fake())
            return self.made[-1]

        return make

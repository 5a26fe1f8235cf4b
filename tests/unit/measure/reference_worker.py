"""Runner factories that a worker imports by name: runners that hold a reference step, or refuse to."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from cubatch.measure.runner import Reading
from tests.unit.worker_fakes import FakeRunner


class Holder(FakeRunner):
    """A runner that holds a reference of 1 ms a sample, times its block's steps after, and logs what it is asked."""

    can = True

    def __init__(self, habits: dict[str, str]) -> None:
        super().__init__(habits, "prepare", "")
        self.log, self.reference = list[list[object]](), (0, 0)

    def prepare(self, batch_size: int) -> None:
        self.log.append(["prepare", batch_size])
        super().prepare(batch_size)

    def hold_reference(self, repeats: int) -> bool:
        self.log.append(["hold", self.batch_size, repeats])
        if is_held := self.can and f"hold {self.batch_size}" not in self.habits:
            self.reference = self.batch_size, repeats
        return is_held

    def time(self, step: Callable[[], None], repeats: int) -> Reading:
        size, block = self.reference
        blocks = {"reference_before_seconds": 1e-3 * size, "reference_after_seconds": 1e-3 * size * block}
        reading = super().time(step, repeats)
        return attrs.evolve(reading, **blocks) if size else reading


def make_holder(habits: dict[str, str] | None = None) -> Holder:
    """Make a runner that holds references."""
    return Holder(habits or {})


def make_refusing() -> Holder:
    """Make a runner that refuses to hold a reference, as on a GPU."""
    runner = Holder({})
    runner.can = False
    return runner

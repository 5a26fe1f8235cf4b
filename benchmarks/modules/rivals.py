"""
Real modules for the rules of other finders: a runner without a memory plan, since those rules have none.

A step that takes more than the limit is an out-of-memory, as it would be on a device of that size, and is counted.  One
that should take far more is not run for it: this machine has to survive it.
"""

from __future__ import annotations

from typing import Any

from benchmarks.search import finders, timed_rivals
from benchmarks.search.finders import Rival, Task
from cubatch.errors import OutOfMemory
from cubatch.frameworks.module_runner import ModuleRunner

RIVALS: dict[str, Rival] = {
    "AITune": timed_rivals.aitune,
    "Lightning power": finders.lightning_power,
    "Lightning binsearch": finders.lightning_binsearch,
    "accelerate 128": finders.accelerate,
    "accelerate 2048": finders.accelerate_2048,
    "batchtune": timed_rivals.batchtune,
}
FAR = 2.0


class Unguarded:
    """
    A runner of a module that runs every size it is given.

    Attributes:
        failures: How often that did not fit.
        gave_up: Whether a size took too long for the time limit.
    """

    def __init__(self, runner: ModuleRunner, limit: int) -> None:
        self.runner, self.limit, self.clock = runner, limit, runner.clock
        self.peak_device_bytes = None
        self.failures, self.gave_up = 0, False

    @property
    def peak_bytes(self) -> int | None:
        return self.runner.peak_bytes

    def prepare(self, batch_size: int) -> None:
        if (planned := self.runner.predicted(batch_size) or 0) > FAR * self.limit:
            self._fail(batch_size, planned)
        self.runner.prepare(batch_size)
        taken = self.runner.peak_bytes
        if taken is not None and taken > self.limit:
            self._fail(batch_size, taken)

    def hold_reference(self, repeats: int) -> bool:
        return self.runner.hold_reference(repeats)

    def step(self) -> None:
        self.runner.step()

    def release(self) -> None:
        self.runner.release()

    def close(self) -> None:
        self.runner.close()

    def _fail(self, batch_size: int, num_bytes: int) -> None:
        self.failures += 1
        raise OutOfMemory(f"batch size {batch_size}", num_bytes, self.limit)


def task_of(*, top: int, limit: int, first: int, each: float, parameters: int, cores: int) -> Task:
    """Return the facts that a finder reads from its device: memory, used memory, and the user's maximum."""
    return Task(
        max_batch_size=top,
        total_bytes=limit,
        fixed_bytes=first,
        bytes_per_sample=each,
        parameters=parameters,
        cores=cores,
    )


def ask(name: str, runner: Unguarded, task: Task) -> dict[str, Any]:
    """Run a finder; return its result, its seconds and how often it ran out of memory."""
    began = runner.clock.now()
    error = ""
    try:
        answer = RIVALS[name](runner, task)
    except Exception as raised:  # noqa: BLE001 - a finder that ends so has no answer
        answer, error = None, f"{type(raised).__name__}: {raised}"
    return {
        "finder": name, "batch_size": answer, "seconds": runner.clock.now() - began, "failures": runner.failures,
        "error": error,
    }  # fmt: skip

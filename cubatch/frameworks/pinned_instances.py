"""Instances of a model that step at the same time, each in a worker process bound to CPUs of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import attrs

from cubatch.frameworks.remote_bounded_runner import RemoteBoundedRunner
from cubatch.measure.remote import RemoteRunner
from cubatch.measure.runner import FactoryRef, Reading

_TIMES = ("seconds", "reference_before_seconds", "reference_after_seconds")


class PinnedInstances(RemoteBoundedRunner):
    """
    Instances of a model that step at the same time, each in a worker process bound to CPUs of its own.

    Each batch size is prepared and timed in all of them.  The time of a step is the harmonic mean over the instances,
    so that instances / time is the number of steps per second of all.  Memory is that of the first instance.

    Args:
        factory: Builds the runner, in each worker.
        shares: Numbers of the CPUs of each instance.
        prepare_seconds, remedy: As for `RemoteBoundedRunner`.
    """

    def __init__(
        self, factory: FactoryRef, shares: Sequence[Sequence[int]], *, prepare_seconds: float, remedy: str
    ) -> None:  # fmt: skip
        super().__init__(factory, prepare_seconds=prepare_seconds, remedy=remedy, cpus=shares[0])
        self._other_shares, self._others = shares[1:], list[RemoteRunner]()
        self._pool = ThreadPoolExecutor(len(shares))  # its threads live as long as their workers must

    def prepare(self, batch_size: int) -> None:
        """Prepare a batch size in all instances; start the others with the first one, as a kind of compiling."""
        started = 0.0
        if len(self._others) < len(self._other_shares):  # not before: their CPU time counts as that of the measurement
            began = time.monotonic()
            self._others = list(self._pool.map(self._start_other, self._other_shares))
            started = time.monotonic() - began
        self._together(super().prepare, "prepare", batch_size)
        self.compile_seconds += started

    def _start_other(self, cpus: Sequence[int]) -> RemoteRunner:
        return RemoteRunner(self._factory, prepare_seconds=self._prepare_seconds, remedy=self._remedy, cpus=cpus)

    def time(self, repeats: int) -> Reading:
        """Run steps back to back in all instances at the same time, and return the harmonic mean of their times."""
        for other in self._others:
            other.step_seconds = self.step_seconds
        readings: list[Reading] = self._together(super().time, "time", repeats)
        means: dict[str, Any] = {}
        for name in _TIMES:
            seconds = [getattr(reading, name) for reading in readings]
            means[name] = None if None in seconds else statistics.harmonic_mean(seconds)
        return attrs.evolve(readings[0], **means)

    def hold_reference(self, repeats: int) -> bool:
        """Keep the prepared size for reference steps in all instances; return False if one cannot."""
        return all(self._together(super().hold_reference, "hold_reference", repeats))

    def release(self) -> None:
        """Free the memory of the last `prepare` in all instances."""
        self._together(super().release, "release")

    def restart(self) -> None:
        """End all workers; the next `prepare` starts new ones."""
        self._together(super().restart, "restart")

    def close(self) -> None:
        """Store the report of the first instance, and end all workers; the next `prepare` starts new ones."""
        self._together(super().close, "close")
        self._others = []

    def _together(self, own: Callable[..., Any], method: str, *arguments: Any) -> list[Any]:
        """Call a method of all instances at the same time, and return the results; raise the first error when done."""
        waiting = [self._pool.submit(getattr(other, method), *arguments) for other in self._others]
        try:
            result = own(*arguments)
        finally:
            wait(waiting)
        return [result, *(each.result() for each in waiting)]

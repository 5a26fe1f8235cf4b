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

_POLL_SECONDS = 0.1  # between attempts to end workers after Ctrl-C
_TIMES = ("seconds", "reference_before_seconds", "reference_after_seconds")


class PinnedInstances(RemoteBoundedRunner):
    """
    Instances of a model that step at the same time, each in a worker process bound to CPUs of its own.

    Each batch size is prepared and timed in all of them.  The time of a step is the harmonic mean over the instances,
    so that instances / time is the number of steps per second of all.  Memory is that of the first instance.

    Args:
        factory: Builds the runner, in each worker.
        shares: Indices of the CPUs that each instance is bound to.
        prepare_seconds, remedy: As for `RemoteBoundedRunner`.
    """

    def __init__(
        self, factory: FactoryRef, shares: Sequence[Sequence[int]], *, prepare_seconds: float, remedy: str
    ) -> None:  # fmt: skip
        super().__init__(factory, prepare_seconds=prepare_seconds, remedy=remedy, cpus=shares[0])
        self._others = [
            RemoteRunner(factory, prepare_seconds=prepare_seconds, remedy=remedy, cpus=cpus, starts=False)
            for cpus in shares[1:]
        ]
        self._is_started = False  # the others
        self._pool = ThreadPoolExecutor(len(shares))  # its threads live as long as their workers must

    def prepare(self, batch_size: int) -> float | None:
        """
        Prepare a batch size in all instances; return the seconds of the first one's first step, None if unknown.

        The first call starts the workers of all instances; its seconds are added to `compile_seconds`.
        """
        started = 0.0
        if not self._is_started:  # not before: their CPU time counts as that of the measurement
            began = time.monotonic()
            for other in self._others:
                other.factory = self.factory
            self._together(super().start, "start")
            self._is_started, started = True, time.monotonic() - began
        first: float | None = self._together(super().prepare, "prepare", batch_size)[0]
        self.compile_seconds += started
        return first

    def time(self, repeats: int) -> Reading:
        """
        Run `repeats` steps back to back in all instances at the same time, and return one timing.

        Its seconds of a step are the harmonic mean over the instances, so that their rates add up. The same holds for
        the reference steps; all other fields are those of the first instance.
        """
        for other in self._others:
            other.step_seconds = self.step_seconds
        readings: list[Reading] = self._together(super().time, "time", repeats)
        means: dict[str, Any] = {}
        for name in _TIMES:
            seconds = [getattr(reading, name) for reading in readings]
            means[name] = None if None in seconds else statistics.harmonic_mean(seconds)
        return attrs.evolve(readings[0], **means)

    def hold_reference(self, repeats: int) -> bool:
        """
        Keep the prepared step as the reference step in all instances; `repeats` of them run before and after a timing.

        Return whether all instances kept their step; if an instance cannot, the others drop their steps.
        """
        is_held = False
        try:
            is_held = all(self._together(super().hold_reference, "hold_reference", repeats))
        finally:
            if not is_held:
                self._together(super().drop_reference, "drop_reference")
        return is_held

    def release(self) -> None:
        """Free the memory of the last `prepare` in all instances."""
        self._together(super().release, "release")

    def restart(self) -> None:
        """End all workers; the next `prepare` starts new ones."""
        self._together(super().restart, "restart")

    def close(self) -> None:
        """Store the report of the first instance, and end all workers; the next `prepare` starts new ones."""
        self._together(super().close, "close")
        self._is_started = False

    def _together(self, own: Callable[..., Any], method: str, *arguments: Any) -> list[Any]:
        """
        Call a method of all instances at the same time; return their results, or raise the first error when done.

        `own` is the method of the first instance, `method` its name in the others. Ctrl-C ends the others without
        waiting for them.
        """
        waiting = [self._pool.submit(getattr(other, method), *arguments) for other in self._others]
        try:
            result = own(*arguments)
            wait(waiting)
        except BaseException as error:
            while wait(waiting, None if isinstance(error, Exception) else _POLL_SECONDS).not_done:
                for other in self._others:  # again: one may have been about to start a worker
                    other.kill()
            raise
        return [result, *(each.result() for each in waiting)]

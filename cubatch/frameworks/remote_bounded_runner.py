"""A `BoundedRunner` in a worker process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import attrs

from cubatch.errors import CubatchError, OutOfMemory, TimedOut, WorkerDied
from cubatch.measure.remote import RemoteRunner
from cubatch.measure.runner import FactoryRef, MemoryLook, MemoryReport

_LOOK_SHARE = 1 / 3
"""Share of the time limit of one `prepare` that all steps of small sizes may take: a hang costs a prediction alone."""


class RemoteBoundedRunner(RemoteRunner):
    """
    A `BoundedRunner` in a worker process.

    Args:
        factory: Builds the runner, in the worker. If it takes an argument `untraced`, a trace may end the worker: later
            ones get the reason and step small sizes instead.
        prepare_seconds: Most seconds to wait for one `prepare`.
        remedy: What the user should do if the worker fails, as a sentence for the error.
        cpus: Numbers of the CPUs that the worker is bound to; empty: not bound.
    """

    def __init__(
        self, factory: FactoryRef, *, prepare_seconds: float, remedy: str, cpus: Sequence[int] = ()
    ) -> None:  # fmt: skip
        super().__init__(factory, prepare_seconds=prepare_seconds, remedy=remedy, cpus=cpus)
        self.compile_seconds = self._start_again_seconds = 0.0
        self._report = MemoryReport(history=[], forecast=None, remarks=[])

    def start(self) -> None:
        """Start a worker, with its reference steps, if there is none."""
        began, is_new = self.clock.now(), self.worker_pid is None
        super().start()
        self._start_again_seconds += (self.clock.now() - began) * is_new

    def prepare(self, batch_size: int) -> float | None:
        """
        Draw a batch and run a first step in the worker, which is started if there is none.

        Return the seconds of the very first step of the size in its process, None if unknown. The seconds of the start
        are added to `compile_seconds`: they say nothing about the size.
        """
        self._start_again_seconds = 0.0
        first = super().prepare(batch_size)
        self.compile_seconds = self.call("compile_seconds") + self._start_again_seconds
        return first

    def look(self, *, seconds: float, top: int | None, trace_seconds: float) -> MemoryLook:
        """
        Return what `BoundedRunner.look` predicts in the worker. `top` None: no maximum.

        If the worker ends, runs out of memory or takes too long, the prediction is repeated from the trace alone, and
        then without a trace.
        """

        def look_for(seconds: float) -> MemoryLook:
            within = trace_seconds + _LOOK_SHARE * self._prepare_seconds
            look: MemoryLook = self.call(
                "look", within=within, seconds=seconds, top=top, trace_seconds=trace_seconds
            )  # fmt: skip
            return look

        if seconds:
            with contextlib.suppress(TimedOut, WorkerDied, OutOfMemory):
                return look_for(seconds)
        try:
            return look_for(0.0)
        except (TimedOut, WorkerDied) as error:
            if "untraced" not in self.factory.arguments:
                raise
            reason = "did not end" if isinstance(error, TimedOut) else f"failed: {error.reason.splitlines()[0]}"
            arguments = {**self.factory.arguments, "untraced": f"a trace of larger batches {reason}"}
            self.factory = attrs.evolve(self.factory, arguments=arguments)
        return look_for(0.0)

    def predicted(self, batch_size: int) -> int | None:
        """Return the predicted peak bytes of a step; None if there is no prediction or the worker failed."""
        with contextlib.suppress(CubatchError):  # whether a size fits is seen again when it is prepared
            num_bytes: int | None = self.call("predicted", batch_size=batch_size)
            return num_bytes
        return None

    def report(self) -> MemoryReport:
        """Return the worker's report on memory when it was closed; an empty one if the worker had died."""
        return self._report

    def close(self) -> None:
        """Store the worker's report, and end the worker."""
        if self.worker_pid is not None:
            with contextlib.suppress(CubatchError):
                self._report = self.call("report")
        super().close()

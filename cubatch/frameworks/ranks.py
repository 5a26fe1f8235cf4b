"""
Ranks of torch.distributed that tune a module together.

Rank 0 runs the search and sends commands to the others, so that all ranks step the same sizes in the same order. The
slowest rank's time and the fullest rank's memory count. A size that fails on one rank fails on all.

A collective operation that one rank never reaches would keep the others waiting. So every size first runs a step
without DistributedDataParallel, and a step with it only after all ranks have succeeded.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import operator
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from cubatch.errors import CubatchError, OutOfMemory, WorkerFailed, is_out_of_memory
from cubatch.frameworks.bounded_runner import BoundedRunner
from cubatch.frameworks.module_runner import ModuleRunner
from cubatch.frameworks.torch_memory import Peaks
from cubatch.hardware.facts import Device
from cubatch.hardware.memory_limit import MemoryLimit, memory_limit
from cubatch.measure.ranks_runner import SlowestClock
from cubatch.measure.runner import Remark

_PATIENCE = dt.timedelta(days=1)  # the others wait while rank 0 works; its death is noticed at once

_COMMANDS: Mapping[str, Callable[..., Any]] = {
    "put_aside": ModuleRunner.put_aside,
    "draw": ModuleRunner.draw,
    "rehearse": ModuleRunner.rehearse,
    "step": ModuleRunner.step,
    "time": lambda runner, repeats: runner.clock.time(runner.step, repeats),
    "peak": operator.attrgetter("peak_bytes"),
    "free_bytes": lambda runner: runner.clock.free_bytes(),
    "hold_reference": ModuleRunner.hold_reference,
    "drop_reference": ModuleRunner.drop_reference,
    "release": ModuleRunner.release,
    "forget_compiling": ModuleRunner.forget_compiling,
    "compile_seconds": operator.attrgetter("compile_seconds"),
    "note_compiling": ModuleRunner.note_compiling,
}
"""Commands that rank 0 sends to all ranks, itself included."""

_TOGETHER = ("step", "time")  # of these: in them ranks exchange something

T = TypeVar("T")

_log = logging.getLogger(__name__)


@attrs.frozen
class _Outcome:
    """The result of a command on one rank, or its error; the error is None if the command succeeded."""

    value: Any = None
    error: CubatchError | None = None


class Ranks:
    """
    The ranks of this torch.distributed job; constructing the object is a collective operation.

    Attributes:
        rank: The number of this rank.
        size: The number of ranks.
    """

    def __init__(self) -> None:
        from torch import distributed

        self._distributed = distributed
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        # A group of its own: commands must not mix with the module's collective operations.
        self._group = distributed.new_group(backend="gloo", timeout=_PATIENCE)

    @classmethod
    def present(cls) -> Ranks | None:
        """Return the ranks of this job; None if torch.distributed is not initialized or has one rank only."""
        distributed: Any = sys.modules.get("torch.distributed")  # initialized only if imported
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        return cls() if distributed.get_world_size() > 1 else None

    def room(self, device: Device, room: MemoryLimit, held: int) -> MemoryLimit:
        """
        Return the memory limit `room` of this rank, lowered to the smallest limit of all ranks; a collective operation.

        Ranks on the CPU of one host share its free memory. `held` are the bytes that this rank has allocated already.
        """
        mine = room.bytes
        if device.kind == "cpu":
            neighbors = self.gather(socket.gethostname()).count(socket.gethostname())
            mine = min(mine, memory_limit(device).bytes // neighbors + held)
        least = min(self.gather(mine))
        if least == room.bytes:
            return room
        note = f"the least that any of {self.size} ranks may take, which share what their hosts have"
        return attrs.evolve(room, bytes=least, note=note, is_lowered=True)

    def gather(self, value: Any) -> list[Any]:
        """Return a list of the values of all ranks, in order of rank; a collective operation."""
        values: list[Any] = [None] * self.size
        self._distributed.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any = None) -> Any:
        """Return the `value` that rank 0 passes; other ranks pass none. A collective operation."""
        values = [value]
        self._distributed.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def do(self, runner: ModuleRunner, command: str, *arguments: Any) -> list[Any]:
        """
        Run a command on the runners of all ranks; return their results in order of rank. Called on rank 0 only.

        Raises:
            Exception: Raised by the command on rank 0, whose runner is `runner`.
            CubatchError: Raised on another rank, which the message names.
        """
        self.broadcast((command, arguments))
        value, own = None, None
        try:
            with runner.compiling():
                value = _COMMANDS[command](runner, *arguments)
        except Exception as error:  # noqa: BLE001 - raised again when all have answered
            own = error
            self._log_failure(command, error)
        outcomes = self.gather(_Outcome(value, None if own is None else self._as_cubatch_error(own)))
        if own is not None:
            raise own
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.value for outcome in outcomes]

    def run(self, runner: ModuleRunner, decide: Callable[[Callable[[int, int], RankedRunner]], T]) -> T:
        """
        Run `decide` on rank 0 and its commands on all ranks; return its value, or raise its error, on every rank.

        `decide` gets a function that makes a runner of all ranks for a memory limit and a seed.
        """
        try:
            return self._run(runner, decide)
        finally:
            self._distributed.destroy_process_group(self._group)

    def _run(self, runner: ModuleRunner, decide: Callable[[Callable[[int, int], RankedRunner]], T]) -> T:
        if self.rank:
            followed: T = self._follow(runner)
            return followed
        try:
            result = decide(lambda limit, _seed: RankedRunner(self, runner, limit))
        except Exception as error:
            with contextlib.suppress(Exception):  # ranks may have died
                self.broadcast(
                    ("end", _Outcome(error=error if isinstance(error, CubatchError) else self._as_cubatch_error(error)))
                )
            raise
        self.broadcast(("end", _Outcome(result)))
        return result

    def _follow(self, runner: ModuleRunner) -> Any:
        while True:
            command, payload = self.broadcast()
            if command == "end":
                if payload.error is not None:
                    raise payload.error
                return payload.value
            try:
                with runner.compiling():
                    outcome = _Outcome(_COMMANDS[command](runner, *payload))
            except Exception as error:  # noqa: BLE001 - rank 0 raises it
                _log.info("rank %d could not %s", self.rank, command, exc_info=True)
                self._log_failure(command, error)
                outcome = _Outcome(error=self._as_cubatch_error(error))
            self.gather(outcome)

    def _log_failure(self, command: str, error: Exception) -> None:
        """Log an error if it occurred in a collective step, in which other ranks wait until their group's timeout."""
        if command in _TOGETHER:
            text = (
                "rank %d failed in a step with the others, who may wait for it until their process group's timeout: %s"
            )
            _log.warning(text, self.rank, f"{type(error).__name__}: {error}")

    def _as_cubatch_error(self, error: Exception) -> CubatchError:
        """Return an error of this rank as OutOfMemory or WorkerFailed, which another rank can receive and raise."""
        text = f"rank {self.rank} raised {type(error).__name__}: {error}"
        if is_out_of_memory(error):
            return OutOfMemory(text)
        return WorkerFailed(text, "Its log has more at the level INFO.")


class RankedRunner(BoundedRunner):
    """
    The steps of all ranks as one runner, for rank 0.

    Args:
        ranks: The ranks of the job.
        runner: The runner of this rank.
        memory_limit: Bytes that the module, a batch and its step may take together on any rank.
    """

    def __init__(self, ranks: Ranks, runner: ModuleRunner, memory_limit: int) -> None:
        super().__init__(SlowestClock(self._do), runner.meter, memory_limit, runner.dtype, runner.own_bytes)
        self._ranks, self._runner, self.is_compiled = ranks, runner, runner.is_compiled
        self.num_samples, self.multiple = runner.num_samples, runner.multiple

    @property
    def peak_bytes(self) -> int | None:
        """Peak bytes since `prepare` on the fullest rank; None where unknown."""
        if self._step is None:
            return self.own_bytes
        return max((peak for peak in self._do("peak") if peak is not None), default=None)

    @property
    def remarks(self) -> list[Remark]:
        """Return remarks on the memory of all ranks and on the inputs of this rank."""
        return [*self._runner.remarks, *super().remarks]

    def _do(self, command: str, *arguments: Any) -> list[Any]:
        return self._ranks.do(self._runner, command, *arguments)

    def prepare(self, batch_size: int) -> float | None:
        """
        Prepare the step of a batch size on all ranks; return the seconds of this rank's first step, never None.

        `compile_seconds` is set to the seconds of compiling on the slowest rank, without those of a step.
        """
        if not self.is_compiled:
            return super().prepare(batch_size)
        self._do("forget_compiling")
        first = super().prepare(batch_size)
        self.compile_seconds = max(self._do("compile_seconds"))
        if self.compile_seconds:
            began = time.monotonic()
            self.clock.time(self.step, 1)
            self.compile_seconds = max(0.0, self.compile_seconds - (time.monotonic() - began))
            self._do("note_compiling", batch_size, self.compile_seconds)
        return first

    def walk(self, num_bytes: int, top: int | None, seconds: float) -> Peaks:
        """Return peak bytes of traced steps by batch size, the same on all ranks; `top` None: no maximum."""
        return self._runner.walk(num_bytes, top, seconds)

    def put_aside(self, walked: Peaks | None) -> int:
        """
        Back up the parameters that a step modifies on each rank; return the smallest number of bytes left.

        `walked` is None if there is no trace: all parameters are backed up.
        """
        least: int = min(self._do("put_aside", walked))
        return least

    def _make(self, batch_size: int) -> tuple[Callable[[], None], int]:
        self._do("draw", batch_size)
        self._do("rehearse")

        def step() -> None:
            self._do("step")

        return step, 0

    def hold_reference(self, repeats: int) -> bool:
        """
        Keep the prepared step of every rank as the reference step; return whether all ranks could do so.

        `repeats` reference steps run before and after each timing.
        """
        taken = self.peak_bytes
        try:
            is_held = all(self._do("hold_reference", repeats))
        except Exception:
            self._do("drop_reference")
            raise
        if not is_held:  # in the steps of a held one, a rank would wait for those that hold none
            self._do("drop_reference")
        else:
            if self._plan is not None and taken is not None and self._steps:
                self._plan.learn(self._batch_size, taken)
            self._step, self._steps = None, 0
        return is_held

    def _drop(self) -> None:
        with contextlib.suppress(Exception):  # ranks that have died hold nothing
            self._do("release")

"""
Ranks of torch.distributed that tune a module together.

Rank 0 decides and the others do as they are told, so that all step the same sizes in the same order and their
collective operations meet.  A size takes as long as on its slowest rank and as much memory as on its fullest, and what
fails on one rank fails on all.

A collective operation that one rank never reaches would keep the others waiting.  So every size is first stepped
without DistributedDataParallel, and only what got through that on all ranks is stepped with it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import operator
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from cubatch.errors import CubatchError, OutOfMemory, WorkerFailed, is_out_of_memory
from cubatch.frameworks.bounded_runner import BoundedRunner
from cubatch.frameworks.module_runner import ModuleRunner
from cubatch.frameworks.torch_memory import Peaks
from cubatch.hardware.facts import Device
from cubatch.hardware.room import MemoryLimit, memory_limit
from cubatch.measure.ranks_runner import SlowestClock
from cubatch.measure.runner import Remark

_PATIENCE = dt.timedelta(days=1)  # the others wait for as long as rank 0 thinks; its end is noticed at once

_DEEDS: Mapping[str, Callable[..., Any]] = {
    "put_aside": ModuleRunner.put_aside,
    "draw": ModuleRunner.draw,
    "rehearse": ModuleRunner.rehearse,
    "step": ModuleRunner.step,
    "time": lambda runner, repeats: runner.clock.time(runner.step, repeats),
    "peak": operator.attrgetter("peak_bytes"),
    "free_bytes": lambda runner: runner.clock.free_bytes(),
    "hold_reference": ModuleRunner.hold_reference,
    "release": ModuleRunner.release,
}
"""What rank 0 has all ranks do to their runners, itself among them."""

_TOGETHER = ("step", "time")  # of these: in them ranks exchange something

T = TypeVar("T")

_log = logging.getLogger(__name__)


@attrs.frozen
class _Outcome:
    """What a deed gave on a rank, or the error that it ended with."""

    value: Any = None
    error: CubatchError | None = None


class Ranks:
    """
    The ranks of this job; all of them make it together.

    Attributes:
        rank: The number of this one.
        size: How many there are.
    """

    def __init__(self) -> None:
        from torch import distributed

        self._distributed = distributed
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        # A group of its own: what ranks say to each other must not meet what the module exchanges.
        self._group = distributed.new_group(backend="gloo", timeout=_PATIENCE)

    @classmethod
    def present(cls) -> Ranks | None:
        """Give the ranks of this job; None where torch.distributed was not initialised, or knows of one rank only."""
        distributed: Any = sys.modules.get("torch.distributed")  # whoever initialised it has imported it
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        return cls() if distributed.get_world_size() > 1 else None

    def room(self, device: Device, room: MemoryLimit, held: int) -> MemoryLimit:
        """Give the least that any rank may take; those on one host share what is free beside what each has `held`."""
        mine = room.bytes
        if device.kind == "cpu":
            neighbours = self.gathered(socket.gethostname()).count(socket.gethostname())
            mine = min(mine, memory_limit(device).bytes // neighbours + held)
        least = min(self.gathered(mine))
        if least == room.bytes:
            return room
        note = f"the least that any of {self.size} ranks may take, which share what their hosts have"
        return attrs.evolve(room, bytes=least, note=note, is_lowered=True)

    def gathered(self, value: Any) -> list[Any]:
        """Give what each rank has said, by its number; all ranks call it together."""
        values: list[Any] = [None] * self.size
        self._distributed.all_gather_object(values, value, group=self._group)
        return values

    def told(self, value: Any = None) -> Any:
        """Give what rank 0 has said; all ranks call it together."""
        values = [value]
        self._distributed.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def do(self, runner: ModuleRunner, deed: str, *arguments: Any) -> list[Any]:
        """
        Have all ranks do something to their runners, and give what it gave on each; called by rank 0.

        Raises:
            Exception: What it raised on this rank.
            CubatchError: What it raised on another, which it names.
        """
        self.told((deed, arguments))
        value, own = None, None
        try:
            value = _DEEDS[deed](runner, *arguments)
        except Exception as error:  # noqa: BLE001 - raised again when all have answered
            own = error
            self._tell(deed, error)
        outcomes = self.gathered(_Outcome(value, None if own is None else self._named(own)))
        if own is not None:
            raise own
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.value for outcome in outcomes]

    def answered(self, runner: ModuleRunner, decide: Callable[[Callable[[int, int], RankedRunner]], T]) -> T:
        """
        Let rank 0 decide, and all ranks do for it what it asks of their runners.

        Args:
            runner: Of this rank.
            decide: Is called on rank 0 with what gives a runner of all ranks for a limit of bytes and a seed.

        Returns:
            T: What rank 0 decided, on every rank.

        Raises:
            CubatchError: What rank 0 ended with, on every rank.
        """
        try:
            return self._decided(runner, decide)
        finally:
            self._distributed.destroy_process_group(self._group)

    def _decided(self, runner: ModuleRunner, decide: Callable[[Callable[[int, int], RankedRunner]], T]) -> T:
        if self.rank:
            followed: T = self._follow(runner)
            return followed
        try:
            result = decide(lambda limit, _seed: RankedRunner(self, runner, limit))
        except Exception as error:
            with contextlib.suppress(Exception):  # ranks that are gone hear nothing
                self.told(("end", _Outcome(error=error if isinstance(error, CubatchError) else self._named(error))))
            raise
        self.told(("end", _Outcome(result)))
        return result

    def _follow(self, runner: ModuleRunner) -> Any:
        while True:
            deed, said = self.told()
            if deed == "end":
                if said.error is not None:
                    raise said.error
                return said.value
            try:
                outcome = _Outcome(_DEEDS[deed](runner, *said))
            except Exception as error:  # noqa: BLE001 - rank 0 raises it
                _log.info("rank %d could not %s", self.rank, deed, exc_info=True)
                self._tell(deed, error)
                outcome = _Outcome(error=self._named(error))
            self.gathered(outcome)

    def _tell(self, deed: str, error: Exception) -> None:
        """Say at once what keeps the others waiting: what they exchange in a step ends with their group's timeout."""
        if deed in _TOGETHER:
            text = (
                "rank %d failed in a step with the others, who may wait for it until their process group's timeout: %s"
            )
            _log.warning(text, self.rank, f"{type(error).__name__}: {error}")

    def _named(self, error: Exception) -> CubatchError:
        """Turn what this rank has met into what another can raise."""
        text = f"rank {self.rank} raised {type(error).__name__}: {error}"
        if is_out_of_memory(error):
            return OutOfMemory(text)
        return WorkerFailed(text, "Its log has more at the level INFO.")


class RankedRunner(BoundedRunner):
    """
    The steps of all ranks as one runner, for rank 0, which bounds and times them.

    Args:
        ranks: Those of the job.
        runner: Of this rank.
        memory_limit: Bytes that a step may take on any of them.
    """

    def __init__(self, ranks: Ranks, runner: ModuleRunner, memory_limit: int) -> None:
        super().__init__(SlowestClock(self._do), runner.meter, memory_limit, runner.dtype, runner.own_bytes)
        self._ranks, self._runner = ranks, runner

    @property
    def peak_bytes(self) -> int | None:
        """High water of memory since `prepare`, on the fullest rank; None where it is not told."""
        if self._step is None:
            return self.own_bytes
        return max((peak for peak in self._do("peak") if peak is not None), default=None)

    @property
    def remarks(self) -> list[Remark]:
        """Return what a user should know of the memory of all ranks, and of the inputs of this one."""
        return [*self._runner.remarks, *super().remarks]

    @property
    def page_faults(self) -> list[dict[str, Any]]:
        """What page faults took of the steps of each size, on this rank."""
        return self._runner.page_faults

    def _do(self, deed: str, *arguments: Any) -> list[Any]:
        return self._ranks.do(self._runner, deed, *arguments)

    def walk(self, num_bytes: int, top: int | None) -> Peaks:
        """Say what steps take by a walk without data, alike on all ranks."""
        return self._runner.walk(num_bytes, top)

    def put_aside(self, walked: Peaks | None) -> int:
        """Keep what steps change, on each rank, and give the least that they may take beside."""
        least: int = min(self._do("put_aside", walked))
        return least

    def _make(self, batch_size: int) -> tuple[Callable[[], None], int]:
        self._do("draw", batch_size)
        self._do("rehearse")

        def step() -> None:
            self._do("step")

        return step, 0

    def hold_reference(self, repeats: int) -> bool:
        """Have every rank keep its share as the reference step; what the step took is learned from."""
        taken = self.peak_bytes
        is_held = all(self._do("hold_reference", repeats))
        if is_held:
            if self._plan is not None and taken is not None and self._steps:
                self._plan.learn(self._batch_size, taken)
            self._step, self._steps = None, 0
        return is_held

    def _drop(self) -> None:
        with contextlib.suppress(Exception):  # ranks that are gone hold nothing; whoever asked already knows
            self._do("release")

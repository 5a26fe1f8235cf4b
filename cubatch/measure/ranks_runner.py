"""Training steps of several devices together, as one runner: the slowest rank's time and the fullest one's memory."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from cubatch.hardware.several import several
from cubatch.measure.clocks import HostClock
from cubatch.measure.rank_group import RankGroup
from cubatch.measure.runner import Reading

_ROUNDS = 7
EXCHANGE_STEPS = 2 + 2 * _ROUNDS  # that `exchange` takes at least: of all, and of one alone
_LEAST_SECONDS = 0.05  # of a reading


class RanksRunner:
    """
    A data parallel step on several devices, each with the batch size that is prepared.

    Args:
        devices: Of the ranks: names as for `several`.
        arguments: Of `network_runner`, but for the device.
    """

    def __init__(self, devices: Sequence[str], arguments: Mapping[str, Any]) -> None:
        self._devices, self._names, self._arguments = several(list(devices)) or (), list(devices), arguments
        self.clock = SlowestClock(self._do)
        self._launch: dict[str, Any] | None = None
        self._batch_size = 0
        self._reference: tuple[int, int] | None = None  # batch size and steps of a block
        self._group = self._begun()

    @property
    def peak_bytes(self) -> int | None:
        """Bytes that the engine took, on the fullest rank."""
        return self._most("peak_bytes")

    @property
    def peak_device_bytes(self) -> int | None:
        """What the fullest rank's process holds; None where it is not told."""
        return self._most("peak_device_bytes")

    @property
    def launch(self) -> dict[str, Any] | None:
        """How steps were launched when memory was last asked for, on rank 0."""
        return self._launch

    def prepare(self, batch_size: int) -> None:
        """Have every rank prepare its share of a step."""
        if not self._group.is_open:  # one of them ended, and so all did
            self._group = self._begun()
            if self._reference is not None:
                self._do("prepare", self._reference[0])
                self._do("hold_reference", self._reference[1])
        self._do("prepare", batch_size)
        self._batch_size = batch_size

    def hold_reference(self, repeats: int) -> bool:
        """Have every rank keep its share as the reference step."""
        is_held = all(self._do("hold_reference", repeats))
        self._reference = (self._batch_size, repeats) if is_held else None
        return is_held

    def step(self) -> None:
        """Run one step on all ranks."""
        self._do("time", 1)

    def release(self) -> None:
        """Give back what the last `prepare` took; ranks that are gone have done so already."""
        if self._group.is_open:
            self._do("release")

    def close(self) -> None:
        """End the ranks."""
        self._group.close()

    def exchange(self, batch_size: int) -> dict[str, float]:
        """
        Return what it costs ranks to work together: steps of all and of rank 0 alone take turns.

        Returns:
            dict[str, float]: Medians of seconds of a step: "together", "alone"; that sums were under way, "exchange";
                and that computing waited for them, "exposed": of the slowest rank.
        """
        self.prepare(batch_size)
        first = max(reading.seconds for reading in self._do("time", 2))
        repeats = max(1, round(_LEAST_SECONDS / first))
        seconds: dict[str, list[float]] = {"together": [], "alone": [], "exchange": [], "exposed": []}
        for _ in range(_ROUNDS):
            self._do("exchanged")  # forgets what was before
            readings = self._do("time", repeats)
            sums = self._do("exchanged")
            seconds["together"].append(max(reading.seconds for reading in readings))
            seconds["exchange"].append(max(found.seconds for found in sums) / repeats)
            seconds["exposed"].append(max(found.exposed_seconds for found in sums) / repeats)
            (alone,) = self._do("time_alone", repeats, ranks=[0])
            seconds["alone"].append(alone.seconds)
        return {name: statistics.median(taken) for name, taken in seconds.items()}

    def _begun(self) -> RankGroup:
        group = RankGroup(self._devices)
        try:
            group.do("build", each=[(name, dict(self._arguments)) for name in self._names])
        except BaseException:
            group.close()
            raise
        return group

    def _do(self, deed: str, *arguments: Any, **which: Any) -> list[Any]:
        return self._group.do(deed, *arguments, **which)

    def _most(self, name: str) -> int | None:
        if not self._group.is_open:
            return None
        facts = self._do("facts")
        self._launch = facts[0]["launch"]
        return max((found[name] for found in facts if found[name] is not None), default=None)


class SlowestClock(HostClock):
    """Each rank's own stopwatch, of which the slowest counts, and this process's clock for budgets."""

    def __init__(self, do: Callable[..., list[Any]]) -> None:
        super().__init__()
        self._do = do

    def time(self, step: Callable[[], object], repeats: int) -> Reading:  # noqa: ARG002 - each rank has its own step
        """Run the step of every rank `repeats` times back to back, and say how long it took on the slowest."""
        return slowest(self._do("time", repeats))

    def free_bytes(self) -> int | None:
        """Bytes that nobody holds on the fullest rank's device; None where one is not told."""
        found = self._do("free_bytes")
        return None if None in found else min(found)


def slowest(readings: Sequence[Reading]) -> Reading:
    """
    Make one reading of those of all ranks.

    Returns:
        Reading: The slowest rank's, throttled if any was; joules are the mean of all ranks, per step of one.

    Example:
        >>> found = slowest([Reading(seconds=1.0, joules=3.0), Reading(seconds=2.0, joules=5.0)])
        >>> found.seconds, found.joules, found.throttled
        (2.0, 4.0, False)
    """
    found = max(readings, key=operator.attrgetter("seconds"))
    joules = [reading.joules for reading in readings if reading.joules is not None]
    mean = statistics.fmean(joules) if len(joules) == len(readings) else None
    is_throttled = any(reading.throttled for reading in readings)
    return attrs.evolve(found, throttled=is_throttled, joules=mean)


def ranks_runner(*, devices: Sequence[str], **arguments: Any) -> RanksRunner:
    """
    Build the runner of several devices from what JSON can hold: the factory that a worker is given.

    Args:
        devices: Of the ranks: names as for `several`.
        arguments: Of `network_runner`, but for the device.
    """
    return RanksRunner(devices, arguments)

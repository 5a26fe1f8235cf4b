"""The runner of data parallel training: the time of the slowest rank, and the memory of the fullest."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from cubatch.hardware.device_list import resolve_devices
from cubatch.measure.clocks import HostClock
from cubatch.measure.rank_group import RankGroup
from cubatch.measure.runner import Reading

_ROUNDS = 7
EXCHANGE_STEPS = 2 + 2 * _ROUNDS  # least steps of `measure_exchange`
_LEAST_SECONDS = 0.05  # of a timing


class RanksRunner:
    """
    Run data parallel steps on several devices, each with the prepared batch size.

    Args:
        devices: Names of the devices of the ranks, as for `resolve_devices`.
        arguments: Arguments of `network_runner`, except the device.
    """

    def __init__(self, devices: Sequence[str], arguments: Mapping[str, Any]) -> None:
        self._devices, self._names, self._arguments = resolve_devices(list(devices)) or (), list(devices), arguments
        self.clock = SlowestClock(self._do)
        self._launch: dict[str, Any] | None = None
        self._batch_size = 0
        self._reference: tuple[int, int] | None = None  # batch size and steps of a block
        self._group = self._begun()

    @property
    def peak_bytes(self) -> int | None:
        """Bytes that the engine holds on the fullest rank; None if unknown."""
        return self._most("peak_bytes")

    @property
    def peak_device_bytes(self) -> int | None:
        """Bytes that the process of the fullest rank holds; None if unknown."""
        return self._most("peak_device_bytes")

    @property
    def launch(self) -> dict[str, Any] | None:
        """How steps were launched on rank 0, at the last read of a `peak_...` property; None on CPUs or before that."""
        return self._launch

    def prepare(self, batch_size: int) -> None:
        """Prepare a batch size on each rank."""
        if not self._group.is_open:  # a rank ended, and with it all of them
            self._group = self._begun()
            if self._reference is not None:
                self._do("prepare", self._reference[0])
                self._do("hold_reference", self._reference[1])
        self._do("prepare", batch_size)
        self._batch_size = batch_size

    def hold_reference(self, repeats: int) -> bool:
        """
        Keep the prepared batch size for reference steps on each rank; return False if a rank cannot.

        `repeats` reference steps run before and after each timing.
        """
        is_held = False
        try:
            is_held = all(self._do("hold_reference", repeats))
        finally:
            if is_held:
                self._reference = self._batch_size, repeats
            else:  # a rank that holds it would wait in its steps for one that does not
                self._group.close()
        return is_held

    def step(self) -> None:
        """Run one step on all ranks."""
        self._do("time", 1)

    def release(self) -> None:
        """Free the memory of the last `prepare`; ranks that ended hold none."""
        if self._group.is_open:
            self._do("release")

    def close(self) -> None:
        """End the processes of the ranks."""
        self._group.close()

    def measure_exchange(self, batch_size: int) -> dict[str, float]:
        """
        Return the cost of exchanging gradients: steps of all ranks and of rank 0 alone take turns.

        Returns:
            dict[str, float]: Median seconds of a step of all ranks ("together") and of rank 0 alone ("alone").
                "exchange" are the seconds of a step that exchange gradients.  For "exposed" of these, computing waited.
                Both are of the slowest rank.
        """
        self.prepare(batch_size)
        first = max(reading.seconds for reading in self._do("time", 2))
        repeats = max(1, round(_LEAST_SECONDS / first))
        seconds: dict[str, list[float]] = {"together": [], "alone": [], "exchange": [], "exposed": []}
        for _ in range(_ROUNDS):
            self._do("exchanged")  # resets its sums
            readings = self._do("time", repeats)
            sums = self._do("exchanged")
            seconds["together"].append(max(reading.seconds for reading in readings))
            seconds["exchange"].append(max(each.seconds for each in sums) / repeats)
            seconds["exposed"].append(max(each.exposed_seconds for each in sums) / repeats)
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

    def _do(self, method: str, *arguments: Any, **which: Any) -> list[Any]:
        return self._group.do(method, *arguments, **which)

    def _most(self, name: str) -> int | None:
        if not self._group.is_open:
            return None
        facts = self._do("facts")
        self._launch = facts[0]["launch"]
        return max((rank[name] for rank in facts if rank[name] is not None), default=None)


class SlowestClock(HostClock):
    """A clock that times a step by its slowest rank; budgets use the clock of this process."""

    def __init__(self, do: Callable[..., list[Any]]) -> None:
        super().__init__()
        self._do = do

    def time(self, step: Callable[[], object], repeats: int) -> Reading:  # noqa: ARG002 - each rank has its own step
        """Run the step of each rank `repeats` times back to back and return the reading of the slowest rank."""
        return slowest(self._do("time", repeats))

    def free_bytes(self) -> int | None:
        """Return the free bytes of the device that has the fewest; None if a device's are unknown."""
        free = self._do("free_bytes")
        return None if None in free else min(free)


def slowest(readings: Sequence[Reading]) -> Reading:
    """
    Return the reading of the slowest rank; throttled if any rank was, with the mean joules of the ranks if all have it.

    Example:
        >>> reading = slowest([Reading(seconds=1.0, joules=3.0), Reading(seconds=2.0, joules=5.0)])
        >>> reading.seconds, reading.joules, reading.throttled
        (2.0, 4.0, False)
    """
    slow = max(readings, key=operator.attrgetter("seconds"))
    joules = [reading.joules for reading in readings if reading.joules is not None]
    mean = statistics.fmean(joules) if len(joules) == len(readings) else None
    is_throttled = any(reading.throttled for reading in readings)
    return attrs.evolve(slow, throttled=is_throttled, joules=mean)


def ranks_runner(*, devices: Sequence[str], **arguments: Any) -> RanksRunner:
    """Return the runner of the `devices`. `arguments` are `network_runner`'s, in JSON: a worker can call this."""
    return RanksRunner(devices, arguments)

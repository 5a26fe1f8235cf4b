"""The objective of a run and its tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import attrs

from cubatch.checks import MOST, number
from cubatch.errors import EnergyNotAvailable, InvalidArgument
from cubatch.hardware.facts import Device
from cubatch.measure import clocks


def pick(values: Mapping[int, float], goal: Goal) -> tuple[int, int]:
    """
    Return the recommended batch size and the size with the best value.

    The recommended size is the smallest within the tolerance of the best value, or the largest if the objective is
    latency.  Of several sizes with the best value the smallest counts as the best, for latency the largest.

    Args:
        values: Samples per second, seconds of a step (latency) or samples per joule, by batch size; at least one.
        goal: Objective and tolerance.

    Example:
        >>> pick({32: 99.5, 64: 100.0, 128: 90.0}, Goal(tolerance=0.01))
        (32, 64)
        >>> pick({1: 0.100, 8: 0.1005, 16: 0.2}, Goal(objective="latency", tolerance=0.01))
        (8, 1)
    """
    if goal.objective == "latency":
        fastest = min(values, key=lambda n: (values[n], -n))
        return max(n for n, value in values.items() if value <= (1 + goal.tolerance) * values[fastest]), fastest
    fastest = max(values, key=lambda n: (values[n], -n))
    return min(n for n, value in values.items() if value >= (1 - goal.tolerance) * values[fastest]), fastest


OBJECTIVES = ("throughput", "latency", "energy")


@attrs.frozen(kw_only=True)
class Goal:
    """
    The objective, and the tolerance: the share of its best value to give up for a smaller batch (latency: larger).

    Sizes are compared by `cost`: seconds per sample (throughput), seconds (latency), joules per sample (energy).

    Raises:
        InvalidArgument: If a field is out of range.
    """

    objective: str = "throughput"  # one of OBJECTIVES
    tolerance: float = 0.01  # share of the best value that may be lost, in [0, 1)
    latency_limit: float | None = None  # most seconds of a step; None: no limit

    def __attrs_post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InvalidArgument("objective", self.objective, "one of " + ", ".join(OBJECTIVES))
        if not 0 <= self.tolerance < 1:
            raise InvalidArgument("tolerance", self.tolerance, "at least 0 and below 1", "0.01 is 1 %.")
        if self.latency_limit is not None and not 1 / MOST <= self.latency_limit <= MOST:
            allowed = f"a number of seconds from {1 / MOST:g} to {MOST:g}, or None"
            raise InvalidArgument("latency_limit", self.latency_limit, allowed)

    @classmethod
    def of(cls, *, objective: str, tolerance: float, latency_limit: float | None) -> Self:
        """
        Return the goal of a public function's arguments, as floats; raise InvalidArgument if one is out of range.

        `latency_limit` is in seconds; None: no limit.
        """
        given = {"tolerance": tolerance} | ({} if latency_limit is None else {"latency_limit": latency_limit})
        for name, value in given.items():
            try:
                given[name] = number(value)
            except (TypeError, ValueError):
                unit = " of seconds" if name == "latency_limit" else ""
                raise InvalidArgument(name, value, f"a finite number{unit}") from None
        return cls(objective=objective, **given)

    def cost(self, batch_size: int, *, seconds: float, joules: float | None) -> float | None:
        """Return seconds or joules per sample, or for latency seconds of a step; None if energy was not measured."""
        if self.objective == "latency":
            return seconds
        if self.objective == "energy":
            return None if joules is None else joules / batch_size
        return seconds / batch_size

    def check_device(self, device: Device) -> None:
        """Raise EnergyNotAvailable if the objective is energy and the device has no energy counter."""
        if self.objective == "energy":
            monitor = clocks.monitor_of(device.uuid)
            if monitor is None or monitor.energy_joules() is None:
                raise EnergyNotAvailable(str(device))

    def allowed(self, best_cost: float) -> float:
        """Return the highest cost within the tolerance of the lowest cost, `best_cost`; both in the unit of `cost`."""
        if self.objective == "latency":
            return best_cost * (1 + self.tolerance)
        return best_cost / (1 - self.tolerance)

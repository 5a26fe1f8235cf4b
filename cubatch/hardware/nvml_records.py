"""What NVML tells of a GPU, as records; a figure that the GPU or driver does not give is None."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from cubatch.units import format_bytes

_MOST_NAMED = 3


@attrs.frozen(kw_only=True)
class Snapshot:
    """
    One look at a GPU; None is what this GPU or driver does not tell.

    Attributes:
        free_bytes, used_bytes, total_bytes: Device memory; of the slice for a MIG device.
        sm_clock_mhz: SM clock now.
        max_sm_clock_mhz: The highest it can be set to.
        throttle_reasons: Why the clock is held down, empty where it is not.
        power_watts: Drawn by the board; from Ampere on (not the A100) its mean over the last second.
        power_limit_watts: Limit in force.
        temperature_celsius: Of the GPU's die.
        utilization_percent: Share of the last sample period in which some kernel ran.
    """

    free_bytes: int | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    utilization_percent: float | None = None

    @property
    def throttled(self) -> bool | None:
        """Whether the GPU holds its clock down because of heat or power; None where it does not tell."""
        return None if self.throttle_reasons is None else bool(self.throttle_reasons)


@attrs.frozen
class Pace:
    """
    At what clock a GPU works; None is what it does not tell.

    Attributes:
        sm_clock_mhz: SM clock now.
        throttled: Whether it holds its clock down because of heat or power.
        event_reasons: All reasons for its clock, the power cap and what was set included: bits of nvml.h.
    """

    sm_clock_mhz: float | None = None
    throttled: bool | None = None
    event_reasons: int | None = None


@attrs.frozen(kw_only=True)
class Vitals:
    """
    What a GPU was like while something was measured; None is what it does not tell.

    Attributes:
        temperature_celsius: Of the GPU's die.
        power_watts: Drawn by the board; from Ampere on (not the A100) its mean over the last second.
        utilization_percent: Share of the last sample period in which some kernel ran.
        used_bytes: Device memory in use, by whomever.
    """

    temperature_celsius: float | None = None
    power_watts: float | None = None
    utilization_percent: float | None = None
    used_bytes: int | None = None


@attrs.frozen
class Process:
    """
    Who holds memory of a GPU.

    Attributes:
        pid: As NVML sees it: the host's number.
        name: Of the program, without its folder; None where NVML does not know it, as in a container.
        used_bytes: Device memory, the CUDA context included; None where it is not told.
    """

    pid: int
    name: str | None = None
    used_bytes: int | None = None

    def __str__(self) -> str:
        """Return it with what it holds."""
        held = "" if self.used_bytes is None else f" holds {format_bytes(self.used_bytes)}"
        return f"{self.name or 'a process'} (pid {self.pid}){held}"


@attrs.frozen(kw_only=True)
class Listed:
    """
    A GPU of this machine, or a slice of one, as NVML lists it.

    Attributes:
        index: Number of the board, in the order of the PCI bus.
        name: As the driver calls it.
        uuid: What `Monitor` takes; None where NVML lists a GPU and gives no access to it.
        problem: Why it gives none.
    """

    index: int
    name: str
    uuid: str | None = None
    problem: str = ""


def named(processes: Sequence[Process]) -> str:
    """
    Return who holds the most, and how many others there are.

    Example:
        >>> named([Process(7, "python", 2**31), Process(9)])
        'python (pid 7) holds 2.00 GiB, a process (pid 9)'
    """
    more = len(processes) - _MOST_NAMED
    return ", ".join(map(str, processes[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")

"""What a CPU quota withheld while something was measured."""

from __future__ import annotations

from collections.abc import Mapping

from cubatch.units import format_whole_percent

WORTH_SAYING = 0.02  # of the periods: a step that meets one that is used up ends up to 100 ms later
FEWEST_PERIODS = 10  # mostly of 100 ms: in fewer a single one says too much


def held_up(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> str | None:
    """
    Say how often a CPU quota held up what ran between two of `host.cpu_periods`; None where too seldom to matter.

    Example:
        >>> held_up({"job": (100, 7)}, {"job": (200, 50)})
        'A CPU quota (cgroup) was used up in 43 % of its periods while it was measured, and what ran stood still until \
the next one: use fewer threads, or raise it.'
        >>> held_up({"job": (100, 7)}, {"job": (200, 8)})
    """
    shares = [0.0]
    for group in before.keys() & after.keys():
        periods, throttled = (end - start for start, end in zip(before[group], after[group], strict=True))
        if periods >= FEWEST_PERIODS:
            shares.append(throttled / periods)
    if max(shares) < WORTH_SAYING:
        return None
    used_up = f"used up in {format_whole_percent(max(shares))} of its periods while it was measured"
    remedy = "use fewer threads, or raise it"
    return f"A CPU quota (cgroup) was {used_up}, and what ran stood still until the next one: {remedy}."

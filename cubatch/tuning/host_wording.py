"""What a result says of a host that was in another state at times while it was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from cubatch.measure.clocks import REFERENCE_ELEMENTS
from cubatch.measure.counting import HostState, is_comparable
from cubatch.measure.records import Timing
from cubatch.tuning.wording import join
from cubatch.units import format_seconds

WORTH_SAYING = 0.05  # of all timings: fewer may be anything


def sentences(timings: Sequence[Timing], state: HostState | None, used: Mapping[int, Sequence[Timing]]) -> list[str]:
    """
    Say how many timings were taken in another state of the host than that in which sizes are compared, where many were.

    Args:
        timings: All of a run.
        state: In which sizes are compared; None where there is but one.
        used: Timings by batch size, of which a row of the table is made.

    Example:
        >>> from cubatch.measure.counting import host_state
        >>> from cubatch.measure.goal import Goal
        >>> told = ((4, 0, 3.2, 8e-6), (4, 16, 4.0, 5e-6), (8, 0, 8.0, 5e-6))
        >>> read = [Timing(batch_size=n, round=r, seconds=s, reference_seconds=met) for n, r, s, met in told]
        >>> sentences(read, host_state(read, Goal()), {8: read[2:]})[0][:75]
        '1 of 3 timings was taken while this host was in its slow state: a sine of 4'
    """
    if state is None:
        return []
    met: dict[bool, list[float]] = {True: [], False: []}
    for timing in timings:
        if timing.reference_seconds is not None:
            met[state.holds(timing)].append(timing.reference_seconds)
    own, other = (format_seconds(statistics.median(met[alike])) for alike in (True, False))
    alone = [str(n) for n, those in sorted(used.items()) if not is_comparable(those, state)]
    if len(met[False]) < WORTH_SAYING * len(timings) and not alone:
        return []
    count, where = len(met[False]), "slow" if state.is_quick else "quick"
    times = f", and a step {1 / state.times:.2f} times as long" if state.times != 1 else ""
    rows = "its row says" if len(alone) == 1 else "their rows say"
    rest = f"; of {join(alone)} there are none, and {rows} what those timings do." if alone else "."
    text = (
        f"{count} of {len(timings)} timings {'was' if count == 1 else 'were'} taken while this host was in its {where} "
        f"state: a sine of {REFERENCE_ELEMENTS} elements took PyTorch {other} instead of {own}{times}. Virtual machines"
    )
    return [f"{text} have such states, for seconds each. Sizes are compared as read with the other timings{rest}"]

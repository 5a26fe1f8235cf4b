"""What a result says of a host that was in another state at times while it was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from cubatch.measure.clocks import REFERENCE_ELEMENTS
from cubatch.measure.counting import HostState, is_comparable, is_held_up
from cubatch.measure.records import Timing
from cubatch.tuning.wording import join
from cubatch.units import format_seconds

WORTH_SAYING = 0.05  # of all timings: fewer may be anything


def sentences(timings: Sequence[Timing], state: HostState | None, used: Mapping[int, Sequence[Timing]]) -> list[str]:
    """
    Say how many timings were not taken in the state of the host in which sizes are compared, where many were, and why.

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
    where, times = "slow" if state.is_quick else "quick", ""
    if state.times != 1:
        times = f", and a step {1 / state.times:.2f} times as long"
    held = [timing for timing in timings if state.was_held_up(timing)]
    other = [timing for timing in timings if not state.holds(timing) and not state.was_held_up(timing)]
    own = _reference([timing for timing in timings if state.holds(timing)])
    found = []
    read = {n: of for n, of in sorted(used.items()) if of and not is_comparable(of, state)}
    for those, is_held, met, rest in (
        (other, False, f"this host was in its {where} state",
         f"{times}. Virtual machines have such states, for seconds each"),
        (held, True, "another process held up a thread of this one", ""),
    ):  # fmt: skip
        alone = [str(n) for n, of in read.items() if is_held_up(of, state) == is_held]
        if len(those) < WORTH_SAYING * len(timings) and not alone:
            continue
        rows = "its row says" if len(alone) == 1 else "their rows say"
        only = f"; of {join(alone)} there are none, and {rows} what those timings do" if alone else ""
        found.append(
            f"{len(those)} of {len(timings)} timings {'was' if len(those) == 1 else 'were'} taken while {met}: a sine "
            f"of {REFERENCE_ELEMENTS} elements took PyTorch {_reference(those)} instead of {own}{rest}. Sizes are "
            f"compared as read with the other timings{only}."
        )
    return found


def _reference(timings: Sequence[Timing]) -> str:
    """Write the median of what the reference took."""
    return format_seconds(statistics.median(t.reference_seconds for t in timings if t.reference_seconds is not None))

"""Sizes that ended as a test says, and the answer that is chosen among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Outcome, Timing
from cubatch.tuning import answer as answers
from cubatch.tuning.results import TuningResult


def rounds(batch_size: int, seconds: Sequence[float], **more: Any) -> list[Timing]:
    """Give one timing per round."""
    return [Timing(batch_size=batch_size, round=number, seconds=value, **more) for number, value in enumerate(seconds)]


def answer_of(
    seconds: Mapping[int, Sequence[float]],
    statuses: dict[int, str] | None = None,
    goal: Goal | None = None,
    **more: Any,
) -> TuningResult:
    """Choose among sizes with these seconds by round."""
    timings = [timing for n, values in seconds.items() for timing in rounds(n, values)]
    outcomes = [Outcome(n, (statuses or {}).get(n, "ok")) for n in seconds]
    measured = Measured(timings=tuple(timings), outcomes=tuple(outcomes))
    ladder = [Candidate(n) for n in seconds]
    return answers.answer(ladder, measured, goal=goal or Goal(), setting={}, **more)


@attrs.frozen
class Ended:
    """How a size ended: its seconds by round, its status, and which limit it broke."""

    seconds: float | None = None
    status: str = "ok"
    limit: str | None = None
    times: int = 5
    could_gain: float | None = None


DROPPED, NOT_RUN, ERROR = Ended(status="dropped"), Ended(status="not_run"), Ended(status="error")
NO_MEMORY, PLANNED = Ended(status="out_of_memory"), Ended(status="over_limit", limit="memory")


def too_slow(seconds: float, times: int = 5) -> Ended:
    """End above the latency limit."""
    return Ended(seconds, "over_limit", "latency", times)


def decide(ended: Mapping[int, Ended], goal: Goal | None = None, **more: Any) -> TuningResult:
    """Choose among sizes that ended in these ways."""
    timings = [
        timing for n, how in ended.items() if how.seconds is not None for timing in rounds(n, [how.seconds] * how.times)
    ]
    outcomes = []
    for n, how in ended.items():
        facts = {"limit": how.limit, "could_gain": how.could_gain}
        kept = {name: value for name, value in facts.items() if value is not None}
        outcomes.append(Outcome(n, how.status, f"why of {n}", kept))
    measured = Measured(timings=tuple(timings), outcomes=tuple(outcomes))
    options = {"setting": {"budget_seconds": 60.0}} | more
    return answers.answer([Candidate(n) for n in ended], measured, goal=goal or Goal(), **options)


def rate(value: float, batch_size: int, status: str = "ok", times: int = 5) -> Ended:
    """End with so many samples per second."""
    return Ended(batch_size / value, status, times=times)


def steady(*pairs: tuple[int, float]) -> dict[int, list[float]]:
    """Give six rounds of the same seconds to each size."""
    return {n: [seconds] * 6 for n, seconds in pairs}

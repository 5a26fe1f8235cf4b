"""What a search may have before it: readings by a curve, and all else that a decision rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_VISIT, Timing
from cubatch.search.noise import Record
from cubatch.search.state import SearchInputs, SearchState

POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WIGGLE = (1.0, 1.001, 0.999, 1.002, 0.998)  # five readings about their median


def record(
    n: int, seconds: float | Sequence[Sequence[float]], *, goal: Goal | None = None, visits: int = 2, **more: Any
) -> Record:
    """Readings of a size: five in each visit about some seconds, or as they are given, visit by visit."""
    found = Record(n, goal or Goal())
    read = [[seconds * factor for factor in WIGGLE]] * visits if isinstance(seconds, float) else seconds
    for visit, values in enumerate(read):
        for number, value in enumerate(values):
            found.add(Timing(batch_size=n, round=PER_VISIT * visit + number, seconds=value, **more))
    return found


def records(
    read: Mapping[int, float], *, goal: Goal | None = None, visits: int | Mapping[int, int] = 2
) -> dict[int, Record]:
    """The same of several sizes."""
    count = (lambda n: visits) if isinstance(visits, int) else (lambda n: visits.get(n, 2))
    return {n: record(n, float(seconds), goal=goal, visits=count(n)) for n, seconds in read.items()}


def along(curve: Callable[[int], float], *sizes: int) -> dict[int, float]:
    """Seconds of these sizes."""
    return {n: curve(n) for n in sizes}


def view(
    read: Mapping[int, float | Record],
    *,
    ladder: Iterable[int] = POWERS,
    goal: Goal | None = None,
    visits: int | Mapping[int, int] = 2,
    failed: Iterable[int] = (),
    closed: Iterable[int] = (),
    left: float = 60.0,
    **more: Any,
) -> SearchState:
    """Look at a situation: what was read, each size in two visits, and else a minute and no model."""
    goal = goal or Goal()
    found = {n: one for n, one in read.items() if isinstance(one, Record)}
    found |= records({n: one for n, one in read.items() if not isinstance(one, Record)}, goal=goal, visits=visits)
    sizes = sorted({*ladder, *found, *failed})
    facts: dict[str, Any] = {
        "model": None,
        "trial_seconds": lambda n, step: 10 * step,
        "budget": 60.0,
        "extends": True,
        "requested": [] if more.get("extends", True) else sizes,
    }
    return SearchState(
        SearchInputs(
            goal=goal,
            ladder=sizes,
            records={n: found.get(n, Record(n, goal)) for n in sizes},
            closed={*closed, *failed},
            failed=set(failed),
            left=left,
            **facts | more,
        )
    )

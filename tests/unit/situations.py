"""What a search may have before it: readings by a curve, and all else that a decision rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_TRIAL, Candidate, Timing
from cubatch.search.state import SearchState

POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WIGGLE = (1.0, 1.001, 0.999, 1.002, 0.998)  # five readings about their median


def record(n: int, seconds: float | Sequence[Sequence[float]], *, visits: int = 2, **more: Any) -> list[Timing]:
    """Readings of a size: five in each visit about some seconds, or as they are given, visit by visit."""
    read = [[seconds * factor for factor in WIGGLE]] * visits if isinstance(seconds, float) else seconds
    return [
        Timing(batch_size=n, round=PER_TRIAL * visit + number, seconds=value, **more)
        for visit, values in enumerate(read)
        for number, value in enumerate(values)
    ]


def along(curve: Callable[[int], float], *sizes: int) -> dict[int, float]:
    """Seconds of these sizes."""
    return {n: curve(n) for n in sizes}


def view(
    read: Mapping[int, float | Sequence[Timing]],
    *,
    ladder: Iterable[int] = POWERS,
    goal: Goal | None = None,
    visits: int | Mapping[int, int] = 2,
    failed: Iterable[int] | Mapping[int, str] = (),
    closed: Iterable[int] = (),
    left: float = 60.0,
    model: Mapping[int, float] | None = None,
    **more: Any,
) -> SearchState:
    """Look at a situation: what was read, each size in two visits, and else a minute and no model; all are favored."""
    goal, model = goal or Goal(), model or {}
    count = (lambda n: visits) if isinstance(visits, int) else (lambda n: visits.get(n, 2))
    found = {n: one if isinstance(one, Sequence) else record(n, float(one), visits=count(n)) for n, one in read.items()}
    sizes = sorted({*ladder, *found, *failed})
    facts: dict[str, Any] = {
        "seconds_of_trial": lambda n, step: 10 * step,
        "budget": 60.0,
        "extends": True,
        "requested": [] if more.get("extends", True) else sizes,
    }
    return SearchState(
        goal=goal,
        ladder={n: Candidate(n, reasons=("asked for",), predicted_seconds=model.get(n)) for n in sizes},
        timings={n: found.get(n, []) for n in sizes},
        closed={*closed, *failed},
        failed=failed if isinstance(failed, Mapping) else dict.fromkeys(failed, "out_of_memory"),
        left=left,
        **facts | more,
    )

"""The request of a tuning run or a prediction, checked before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import attrs

from cubatch.errors import InvalidArgument
from cubatch.measure.goal import Goal
from cubatch.search.events import Event
from cubatch.tuning import store as stores
from cubatch.tuning.limits import Limits


@attrs.frozen(kw_only=True)
class Request:
    """The checked arguments of a tuning run or a prediction."""

    goal: Goal  # the objective, its tolerance and the latency limit
    limits: Limits  # the sizes to consider, the budget and the seed
    memory_limit: int | str | None = None  # as given: bytes, "8GiB", "80%" or None
    store: bool | str | Path = True  # where timings are cached: True, False, "refresh" or a path
    progress: Callable[[Event], None] | None = None  # called with every event; None shows a bar in a notebook

    @classmethod
    def of(
        cls, *, objective: str, tolerance: float, latency_limit: float | None, batch_sizes: Iterable[int] | None,
        max_batch_size: int | None, memory_limit: int | str | None, budget: float = 60.0, seed: int = 0,
        sweeps: int | None = None, current: int | None = None, multiple_of: int = 1, divides: int | None = None,
        store: bool | str | Path = False, progress: Callable[[Event], None] | None = None,
    ) -> Self:  # fmt: skip
        """
        Return the request, after checking the arguments of a public function.

        None has the meaning of the attribute of `Goal`, `Limits` or `Request`; as `memory_limit`: the available memory.

        Raises:
            InvalidArgument: If an argument is invalid.
        """
        goal = Goal.of(objective=objective, tolerance=tolerance, latency_limit=latency_limit)
        limits = Limits.of(
            batch_sizes, max_batch_size, budget=budget, seed=seed, sweeps=sweeps, current=current,
            multiple_of=multiple_of, divides=divides,
        )  # fmt: skip
        check_progress(progress)
        stores.check_place(store)
        return cls(goal=goal, limits=limits, memory_limit=memory_limit, store=store, progress=progress)

    @property
    def identity(self) -> dict[str, Any]:
        """The goal's fields, those of `Limits.identity` and `memory_limit`, equal if cached timings may be reused."""
        return {**attrs.asdict(self.goal), **self.limits.identity, "memory_limit": self.memory_limit}


def check_progress(progress: object) -> None:
    """Raise InvalidArgument if it is neither callable nor None."""
    if progress is not None and not callable(progress):
        raise InvalidArgument("progress", progress, "callable, or None")

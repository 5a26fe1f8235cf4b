"""The request of a tuning run or a prediction, checked before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import attrs

from cubatch import checks
from cubatch.errors import InvalidArgument
from cubatch.measure.goal import Goal
from cubatch.search.events import Event
from cubatch.tuning import store as stores

_LARGEST_SEED = 2**64 - 1  # SQLite and JSON readers take no larger integers


@attrs.frozen(kw_only=True)
class Request:
    """The arguments of a tuning run or a prediction; `Request.of` checks them."""

    goal: Goal = attrs.field(factory=Goal)  # the objective, its tolerance and the latency limit
    batch_sizes: tuple[int, ...] | None = None  # exactly these, ascending; None leaves them to the search
    max_batch_size: int | None = None  # the largest size; None for no limit but memory
    budget: float = 60.0  # time limit of measuring in seconds
    seed: int = 0  # draws parameters, data and the order of trials
    sweeps: int | None = None  # trials of each of `batch_sizes`; None leaves them to the search
    # the size that the user has now; it is measured second, and kept if no other is better. None: unknown
    current: int | None = None
    # multiple_of, divides: sizes that the workload accepts: multiples of one number, divisors of another. None
    # excludes no size
    multiple_of: int = 1
    divides: int | None = None
    memory_limit: int | str | None = None  # as given: bytes, "8GiB", "80%" or None
    store: bool | str | Path = True  # where timings are cached: True, False, "refresh" or a path
    progress: Callable[[Event], None] | None = None  # called with every event; None shows a bar in a notebook

    @classmethod
    def of(
        cls, *, objective: str = "throughput", tolerance: float = 0.01, latency_limit: float | None = None,
        batch_sizes: Iterable[int] | None = None, max_batch_size: int | None = None,
        memory_limit: int | str | None = None, budget: float = 60.0, seed: int = 0, sweeps: int | None = None,
        current: int | None = None, multiple_of: int = 1, divides: int | None = None,
        store: bool | str | Path = False, progress: Callable[[Event], None] | None = None,
    ) -> Self:  # fmt: skip
        """
        Return the request, after checking the arguments of a public function.

        None has the meaning of the attribute of `Goal` or `Request`; as `memory_limit`: the available memory.

        Raises:
            InvalidArgument: If an argument is invalid.
        """
        goal = Goal.of(objective=objective, tolerance=tolerance, latency_limit=latency_limit)
        checks.check_number("budget", budget, above=0.0, unit="seconds")
        seed = checks.check_whole("seed", seed, least=0, most=_LARGEST_SEED)
        if sweeps is not None:
            checks.check_whole("sweeps", sweeps)
            if batch_sizes is None:
                raise InvalidArgument("sweeps", sweeps, "given together with batch_sizes", "Name the sizes to compare.")
        top = None if max_batch_size is None else checks.check_batch_size(max_batch_size, "max_batch_size")
        if current is not None:
            current = checks.check_batch_size(current, "current")
            if top is not None and current > top:
                raise InvalidArgument("current", current, f"at most max_batch_size={top}", "Raise max_batch_size.")
        request = cls(
            goal=goal, batch_sizes=None if batch_sizes is None else _ascending(batch_sizes, top, current),
            max_batch_size=top, budget=float(budget), seed=seed, sweeps=sweeps, current=current,
            multiple_of=checks.check_batch_size(multiple_of, "multiple_of"),
            divides=None if divides is None else checks.check_batch_size(divides, "divides"),
            memory_limit=memory_limit, store=store, progress=progress,
        )  # fmt: skip
        request._check_accepted()
        check_progress(progress)
        stores.check_place(store)
        return request

    def accepts(self, batch_size: int) -> bool:
        """Return whether a batch size is a multiple of `multiple_of` and divides `divides`, unless that is None."""
        return batch_size % self.multiple_of == 0 and (self.divides is None or self.divides % batch_size == 0)

    def _check_accepted(self) -> None:
        if self.divides is not None and self.divides % self.multiple_of:
            raise InvalidArgument("multiple_of", self.multiple_of, f"a divisor of divides={self.divides}")
        if self.max_batch_size is not None and self.multiple_of > self.max_batch_size:
            raise InvalidArgument("multiple_of", self.multiple_of, f"at most max_batch_size={self.max_batch_size}")
        rule = f"a multiple of {self.multiple_of}" + (f" that divides {self.divides}" if self.divides else "")
        for field, sizes in (("batch_sizes", self.batch_sizes or ()), ("current", [self.current or self.multiple_of])):
            for size in sizes:
                if not self.accepts(size):
                    raise InvalidArgument(field, size, rule)

    @property
    def identity(self) -> dict[str, Any]:
        """
        The arguments by name that must be equal for cached timings of a subject to be used again.

        They are those of the goal, `batch_sizes`, `max_batch_size`, `seed`, `memory_limit`, and others where they are
        not the default.
        """
        sizes = None if self.batch_sizes is None else list(self.batch_sizes)
        optional = {
            "sweeps": self.sweeps, "current": self.current, "divides": self.divides,
            "multiple_of": self.multiple_of if self.multiple_of > 1 else None,
        }  # fmt: skip
        given = {name: value for name, value in optional.items() if value is not None}  # others keep an older identity
        return {
            **attrs.asdict(self.goal), "batch_sizes": sizes, "max_batch_size": self.max_batch_size, "seed": self.seed,
            **given, "memory_limit": self.memory_limit,
        }  # fmt: skip


def check_progress(progress: object) -> None:
    """Raise InvalidArgument if the argument `progress` is neither callable nor None."""
    if progress is not None and not callable(progress):
        raise InvalidArgument("progress", progress, "callable, or None")


def _ascending(batch_sizes: Iterable[int], top: int | None, current: int | None) -> tuple[int, ...]:
    """
    Return `batch_sizes` and the current size, each once, ascending; raise InvalidArgument if one is above `top`.

    `top` None: no maximum. `current` None: no current size.
    """
    if isinstance(batch_sizes, str) or not isinstance(batch_sizes, Iterable):
        raise InvalidArgument("batch_sizes", batch_sizes, "a list of whole numbers")
    sizes = tuple(sorted({checks.check_batch_size(size, "batch_sizes") for size in batch_sizes}))
    if not sizes:
        raise InvalidArgument("batch_sizes", [], "a list of at least one batch size, or None")
    if top is not None and sizes[-1] > top:
        raise InvalidArgument("batch_sizes", sizes[-1], f"at most max_batch_size={top}", "Raise max_batch_size.")
    return sizes if current is None else tuple(sorted({*sizes, current}))

"""What a search tells whoever shows progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from cubatch.measure.budget import Budget
from cubatch.measure.records import PER_VISIT, Timing
from cubatch.search.view import View
from cubatch.units import format_count, format_seconds, format_whole_percent

_SURELY = 0.9  # quantile of what may still be gained, that progress shows


@attrs.frozen(kw_only=True)
class Event:
    """
    One thing that happened, for whoever shows progress.

    Attributes:
        kind: "resume" (kept timings are gone on with), "round" (a sweep begins), "timing" (taken), "outcome" (a
            candidate is done), "end".
        round: Of a timing, its round; else that with which the present sweep began.
        batch_size: Which candidate; None for "round" and "end".
        done, total: Seconds that are spent, and the budget: measuring may end long before it is gone.
        seconds_left: Of the budget.
        message: What happened, for a person.
        best_batch_size: What the answer would be by the visits before this one, or before its sweep; None in the first.
        best_rate: Samples per second of it.
        could_gain: By what share the answer may still get better, at most in nine of ten cases, also by sizes that the
            budget does not hold: the least that was said so far. None where that is not known, or more than all that
            there is.
    """

    kind: str
    round: int
    batch_size: int | None
    done: float
    total: float
    seconds_left: float
    message: str
    best_batch_size: int | None = None
    best_rate: float | None = None
    could_gain: float | None = None

    @property
    def so_far(self) -> str:
        """The best size so far and what may still be gained; before there is one, what happened."""
        if self.best_batch_size is None:
            return self.message
        rate = "" if self.best_rate is None else f" ({format_count(self.best_rate)} samples/s)"
        gain = ""
        if self.could_gain is not None and math.isfinite(self.could_gain):
            gain = f", perhaps {format_whole_percent(self.could_gain, at_most=True)} more to gain"
        return f"{self.best_batch_size} best so far{rate}{gain}"


class Teller:
    """
    Makes events of what happens, for a callable that shows them.

    Args:
        progress: Called with each; None: nothing is told.
        budget: Of the run.

    Attributes:
        failed: What `progress` raised, which comes out as it is and is no fault of a size's; nothing is told after it.
    """

    def __init__(self, progress: Callable[[Event], None] | None, budget: Budget) -> None:
        self._progress, self._budget = progress, budget
        self._could_gain = math.inf
        self.failed: Exception | None = None

    def tell_resume(self, kept: Sequence[Timing], sweep: int) -> None:
        """Say that kept timings are gone on with; of the best so far the first visit tells."""
        if kept:
            spent = f"{format_seconds(self._budget.spent())} of {format_seconds(self._budget.seconds)} are spent"
            text = f"going on with {len(kept)} timing{'s' * (len(kept) > 1)}; {spent}"
            self.tell("resume", None, text, sweep * PER_VISIT, None)

    def tell(self, kind: str, batch_size: int | None, message: str, number: int, view: View | None) -> None:
        """Say what happened, and what the best was by this look."""
        if self._progress is None or self.failed is not None:
            return
        best = view.read.get(view.answer or 0) if view is not None else None
        if view is not None and best is not None:
            gain = float(np.expm1(np.sort(view.to_gain)[int(_SURELY * len(view.to_gain))]))
            self._could_gain = min(self._could_gain, gain)
        event = Event(
            kind=kind,
            round=number,
            batch_size=batch_size,
            done=min(self._budget.spent(), self._budget.seconds),
            total=self._budget.seconds,
            seconds_left=self._budget.left(),
            message=message,
            best_batch_size=view.answer if view is not None else None,
            best_rate=best.batch_size / view.seconds[best.batch_size] if best and view else None,
            could_gain=self._could_gain if best and self._could_gain <= 1 else None,
        )
        try:
            self._progress(event)
        except Exception as error:
            self.failed = error
            raise

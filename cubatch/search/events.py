"""Progress events of a search."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np

from cubatch.measure.budget import Budget
from cubatch.search.state import SearchState
from cubatch.units import format_count, format_whole_percent

_SURELY = 0.9  # quantile of the possible gain that progress shows


@attrs.frozen(kw_only=True)
class Event:
    """
    A progress event.

    Attributes:
        kind: "resume" (a run continues from cached timings), "round" (a round begins), "timing" (one was taken),
            "outcome" (a candidate is done), "end".
        round: Round of the timing; for other kinds, the first round number of the present round of trials.
        batch_size: The candidate; None for "round" and "end".
        done, total: Seconds spent, and the budget; measuring may end long before the budget is spent.
        seconds_left: Seconds left of the budget.
        message: What happened, for a person.
        best_batch_size: The recommended batch size before this trial or round; None in the first.
        best_rate: Its throughput in samples per second.
        could_gain: Share by which the recommendation may still improve, at most, with a probability of 90 %.  Sizes
            that the budget does not hold count too.  The smallest value so far; None if unknown or above 1.
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
        """The best size so far and the possible gain; the message while there is none."""
        if self.best_batch_size is None:
            return self.message
        rate = "" if self.best_rate is None else f" ({format_count(self.best_rate)} samples/s)"
        gain = ""
        if self.could_gain is not None and math.isfinite(self.could_gain):
            gain = f", up to {format_whole_percent(self.could_gain, at_most=True)} more possible"
        return f"{self.best_batch_size} best so far{rate}{gain}"


class EventReporter:
    """
    Pass events to the user's progress function.

    Args:
        progress: Called with each event; None: not called.
        budget: Budget of the run.

    Attributes:
        failed: The exception that `progress` raised.  It is raised unchanged, and no event follows it.
    """

    def __init__(self, progress: Callable[[Event], None] | None, budget: Budget) -> None:
        self._progress, self._budget = progress, budget
        self._could_gain = math.inf
        self.failed: Exception | None = None

    def report(self, kind: str, batch_size: int | None, message: str, number: int, state: SearchState | None) -> None:
        """
        Pass an event to the progress function, with the best size and the possible gain by this state.

        `kind`, `batch_size` and `message` are fields of the `Event`; `number` is its round.
        """
        if self._progress is None or self.failed is not None:
            return
        best = state.recommended if state is not None else None
        if state is not None and best is not None:
            gain = float(np.expm1(np.sort(state.unbounded_losses)[int(_SURELY * len(state.unbounded_losses))]))
            self._could_gain = min(self._could_gain, gain)
        event = Event(
            kind=kind,
            round=number,
            batch_size=batch_size,
            done=min(self._budget.spent(), self._budget.seconds),
            total=self._budget.seconds,
            seconds_left=self._budget.left(),
            message=message,
            best_batch_size=best,
            best_rate=best / state.seconds[best] if best and state else None,
            could_gain=self._could_gain if best and self._could_gain <= 1 else None,
        )
        try:
            self._progress(event)
        except Exception as error:
            self.failed = error
            raise

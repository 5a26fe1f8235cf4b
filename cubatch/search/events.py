"""Progress events of a search."""

from __future__ import annotations

import attrs

from cubatch.units import format_count, format_whole_percent


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
        best_rate: Its throughput in samples per second; None while there is no such size.
        could_gain: Share by which the recommendation may still improve, at most, with a probability of 90 %.  Sizes
            that the budget does not hold count too.  None if unknown or above 1.
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
        if self.best_batch_size is None or self.best_rate is None:
            return self.message
        gain = ""
        if self.could_gain is not None:
            gain = f", up to {format_whole_percent(self.could_gain, at_most=True)} more possible"
        return f"{self.best_batch_size} best so far ({format_count(self.best_rate)} samples/s){gain}"

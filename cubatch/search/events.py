"""Progress events of a search."""

from __future__ import annotations

import attrs

from cubatch.units import format_count, format_whole_percent


@attrs.frozen(kw_only=True)
class Event:
    """
    A progress event.

    Attributes:
        kind: "resume" (continues from cached timings), "round" (begin of a round), "timing" (a timing was taken),
            "outcome" (a candidate is done), "end" (measuring is done).
        round: Round of the timing; for other kinds, the first round number of the present round of trials.
        batch_size: The candidate; None for "resume", "round" and "end".
        done, total: Seconds spent, and the budget in seconds; measuring may end long before the budget is spent.
        seconds_left: Seconds left of the budget.
        message: What happened, for a person.
        best_batch_size: The recommended batch size before this trial or round; None in the first.
        best_rate: Throughput of `best_batch_size` in samples per second; None while there is no such size.
        could_gain: Share by which the recommendation may still improve, at most, with a probability of 90 %.  Sizes
            too expensive for the rest of the budget count too.  None if unknown or above 1.
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
        """Text: the best batch size so far, its samples/s and the possible gain; `message` while there is no size."""
        if self.best_batch_size is None or self.best_rate is None:
            return self.message
        gain = ""
        if self.could_gain is not None:
            gain = f", up to {format_whole_percent(self.could_gain, at_most=True)} more possible"
        return f"{self.best_batch_size} best so far ({format_count(self.best_rate)} samples/s){gain}"

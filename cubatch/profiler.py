"""
Rounds over the candidates: what is measured, in which order, and when it ends.

    round 0      ascending: tells what larger sizes will take, and meets the memory edge from below
    round 1, 2…  shuffled by the seed: slow drifts of the clock do not favour any size
    one visit    prepare, discarded steps, ONE timing of back-to-back steps, kept at once
    one round    then the rules of `stopping` close what is known well enough, or hopeless

A runner brings its own clock, so that hours pass in milliseconds on a fake.  Everything is handed
to a `Keeper` as it happens; a rerun that is given what was kept fills in only what is missing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import attrs
from numpy.random import default_rng  # not when it is first used: its import swallows a Ctrl-C that comes meanwhile

from cubatch import stopping
from cubatch.budget import Budget, OutOfBudget, extrapolate_seconds, rounds_seconds, why_not_first
from cubatch.errors import CubatchError, EnergyNotAvailable, OutOfMemory, TimedOut
from cubatch.foreign import is_out_of_memory
from cubatch.results import Candidate, Goal, Keeper, Measured, Outcome, Recorder, Timing
from cubatch.runner import RunnerFactory
from cubatch.stopping import MAX_ROUNDS, MIN_ROUNDS, StopRule
from cubatch.stopwatch import MIN_ENERGY_SPAN_SECONDS, MIN_SPAN_SECONDS, Stopwatch
from cubatch.units import format_seconds

__all__ = ["Event", "Goal", "is_out_of_memory", "measure"]

_log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Event:
    """
    One thing that happened, for whoever shows progress.

    Attributes:
        kind: "round" (begins), "timing" (taken), "outcome" (a candidate is done), "end".
        round: Round it belongs to, from 0.
        batch_size: Which candidate; None for "round" and "end".
        done, total: Timings there are, and how many there will be at least; the total moves as candidates end.
        seconds_left: Of the budget.
        message: What happened, for a person.
        best_batch_size: The best so far; None before there is one.
        best_rate: Its samples per second.
        could_gain: How much better than it the answer may still turn out, as a share: 0.03 is 3 %; None if unknown.
    """

    kind: str
    round: int
    batch_size: int | None
    done: int
    total: int
    seconds_left: float
    message: str
    best_batch_size: int | None = None
    best_rate: float | None = None
    could_gain: float | None = None


def measure(
    factory: RunnerFactory,
    ladder: Sequence[Candidate],
    *,
    goal: Goal,
    kept: Measured | None = None,
    keep: Keeper | None = None,
    budget: float,
    seed: int,
    progress: Callable[[Event], None] | None = None,
) -> Measured:
    """
    Measure the candidates until the answer is known well enough or the budget is spent.

    Candidates planned over the memory limit are never tried.  Whatever a candidate raises is its
    outcome and tuning goes on: "out_of_memory" by exception type and status code, "timeout",
    "error".  No size is ruled out because a smaller one failed: memory need not be monotone.

    Args:
        factory: Makes the runner; not called if nothing is left to measure.
        ladder: The candidates, in any order.
        goal: What is to be as good as possible.
        kept: What an earlier run left.  Its timings are not taken again, its outcomes are final,
            except "interrupted".
        keep: Told of every timing, outcome and second as it happens.
        budget: Seconds of measuring by the runner's clock, those of `kept` included.  The last step
            that is begun may exceed it.
        seed: Shuffles the rounds.
        progress: Called with an Event after everything that happens.

    Returns:
        Measured: everything, old and new; every candidate has an outcome.

    Raises:
        EnergyNotAvailable: If energy is the objective and a whole round gave no reading of it.
        KeyboardInterrupt, SystemExit: As they came; unfinished candidates are kept as "interrupted".

    Example:
        >>> import time
        >>> from cubatch.runner import Reading
        >>> class Sleeper:                                 # a runner of a virtual device: 1 ms and 10 us a sample
        ...     peak_bytes = peak_device_bytes = None
        ...     def __init__(self): self.clock, self.passed = self, 0.0
        ...     def now(self): return self.passed
        ...     def sleep(self, seconds): self.passed += seconds
        ...     def time(self, step, repeats):
        ...         before = self.passed
        ...         for _ in range(repeats): step()
        ...         return Reading(seconds=(self.passed - before) / repeats)
        ...     def prepare(self, batch_size): self.batch_size = batch_size
        ...     def step(self): self.passed += 1e-3 + 1e-5 * self.batch_size
        ...     def release(self): pass
        ...     def close(self): pass
        >>> ladder = [Candidate(32), Candidate(64)]
        >>> measured = measure(Sleeper, ladder, goal=Goal(), budget=60.0, seed=0)
        >>> [(outcome.batch_size, outcome.status) for outcome in measured.outcomes]
        [(32, 'dropped'), (64, 'ok')]
    """
    run = _Run(factory, ladder, goal, kept or Measured(), keep=keep, budget=budget, seed=seed, progress=progress)
    return run.run()


@attrs.define(eq=False)
class _Size:
    """A candidate that is being measured."""

    batch_size: int
    rule: StopRule
    predicted_seconds: float | None
    rounds: dict[int, Timing] = attrs.field(factory=dict)

    def add(self, timing: Timing, goal: Goal) -> None:
        self.rounds[timing.round] = timing
        cost = goal.cost(timing.batch_size, seconds=timing.seconds, joules=timing.joules)
        self.rule.add(cost, throttled=timing.throttled)

    def step_seconds(self) -> float | None:
        return stopping.median([timing.seconds for timing in self.rounds.values()]) if self.rounds else None

    def counting_seconds(self) -> list[float]:
        """Seconds of the timings that the result rests on: throttled ones only where there are no others."""
        clear = [timing.seconds for timing in self.rounds.values() if not timing.throttled]
        return clear or [timing.seconds for timing in self.rounds.values()]


class _Run:
    """One call of `measure`: which candidates are still open, and the walk over them."""

    def __init__(
        self,
        factory: RunnerFactory,
        ladder: Sequence[Candidate],
        goal: Goal,
        kept: Measured,
        *,
        keep: Keeper | None,
        budget: float,
        seed: int,
        progress: Callable[[Event], None] | None,
    ) -> None:
        self.factory, self.goal, self.seed, self.progress = factory, goal, seed, progress
        self.book = Recorder(kept, keep)
        self.budget = Budget(budget, kept.seconds_spent)
        self.span_seconds = MIN_ENERGY_SPAN_SECONDS if goal.objective == "energy" else MIN_SPAN_SECONDS
        self.clocks_mhz = [timing.sm_clock_mhz for timing in kept.timings if timing.sm_clock_mhz]
        self.stopwatch: Stopwatch | None = None
        self.round = 0
        self.sizes: dict[int, _Size] = {}
        predicted = {candidate.batch_size: candidate.predicted_seconds for candidate in ladder}
        for batch_size in sorted(predicted):
            rule = StopRule(stopping.target_width(goal))
            self.sizes[batch_size] = _Size(batch_size, rule, predicted[batch_size])
        for timing in kept.timings:
            if timing.batch_size in self.sizes:
                self.sizes[timing.batch_size].add(timing, goal)
        final = {outcome.batch_size: outcome.status for outcome in kept.outcomes if outcome.status != "interrupted"}
        self.open = [size for size in self.sizes.values() if size.batch_size not in final]
        self.good = [size for size in self.sizes.values() if final.get(size.batch_size) == "ok"]
        self.never = [candidate.batch_size for candidate in ladder if candidate.over_limit]

    # --- the walk ---

    def run(self) -> Measured:
        try:
            for size in tuple(self.open):
                if size.batch_size in self.never:
                    reason = "planned above the memory limit, so it was not tried"
                    self.end(size, "over_limit", reason, limit="memory")
            for self.round in range(MAX_ROUNDS):
                self.walk_round()
                self.close_what_is_known()
            self.tell("end", None, "measuring is done")
        except (KeyboardInterrupt, SystemExit):
            for size in tuple(self.open):
                self.end(size, "interrupted", f"interrupted after {len(size.rounds)} timings")
            raise
        finally:
            self.close_runner()
        return self.book.measured

    def walk_round(self) -> None:
        missing = [size for size in self.in_order() if size in self.open and self.round not in size.rounds]
        if not missing:
            return
        self.tell("round", None, f"round {self.round + 1}, {len(missing)} batch sizes")
        for size in missing:
            self.visit(size)
        timed = [size for size in self.sizes.values() if size.rounds]
        if self.goal.objective == "energy" and timed and not any(size.rule.costs for size in timed):
            raise EnergyNotAvailable("the device")

    def in_order(self) -> list[_Size]:
        """Round 0 ascends; the others are shuffled, the same way in every resume."""
        sizes = list(self.sizes.values())
        if self.round == 0:
            return sizes
        return [sizes[place] for place in default_rng((self.seed, self.round)).permutation(len(sizes))]

    def close_what_is_known(self) -> None:
        """Close the candidates that the rules have heard enough of."""
        for size in tuple(self.open):
            if self.is_over_latency_limit(size):
                self.end_over_latency_limit(size)
            elif size.rule.is_finished():
                self.end(size, "ok", size.rule.reason)
        leader = self.leader()
        for size in tuple(self.open):
            if leader is not None and stopping.is_clearly_worse(size.rule, leader.rule, self.goal):
                reason = f"clearly worse than batch size {leader.batch_size} after {len(size.rounds)} rounds"
                self.end(size, "dropped", reason)

    def is_over_latency_limit(self, size: _Size) -> bool:
        """Whether all timings of enough rounds are above the limit, or the final median is."""
        limit = self.goal.latency_limit
        if limit is None:
            return False
        seconds = size.counting_seconds()
        if size.rule.is_finished():
            return stopping.median(seconds) > limit
        return len(seconds) >= stopping.MIN_ROUNDS_TO_DROP and min(seconds) > limit

    def leader(self) -> _Size | None:
        """Give the best size so far of those that surely keep the latency limit."""
        limit = self.goal.latency_limit or math.inf
        able = [size for size in (*self.open, *self.good) if size.rule.costs and max(size.counting_seconds()) <= limit]
        return min(able, key=lambda size: size.rule.median or math.inf, default=None)

    # --- one visit ---

    def visit(self, size: _Size) -> None:
        stopwatch = self.stopwatch or self.open_runner()
        if (reason := self.why_not(size, stopwatch)) is not None:
            self.end_for_budget(size, reason)
            return
        # What is predicted tells a hang from a long step while no smaller size has run.
        likely = extrapolate_seconds(size.batch_size, self.known()) or size.predicted_seconds
        try:
            timing = stopwatch.time(
                size.batch_size, round_number=self.round, step_seconds=size.step_seconds(), likely=likely
            )
        except OutOfBudget:
            self.end_for_budget(size, f"the budget of {format_seconds(self.budget.seconds)} is spent")
        except Exception as error:  # noqa: BLE001 - what a candidate raises is its outcome
            self.fail(size, error, stopwatch)
        else:
            self.book.timing(timing)
            size.add(timing, self.goal)
            flag = ", throttled" if timing.throttled else ""
            self.tell("timing", size, f"batch size {size.batch_size}: {format_seconds(timing.seconds)}{flag}")
            stopwatch.rest(timing)
        self.book.spent(self.budget.spent())

    def why_not(self, size: _Size, stopwatch: Stopwatch) -> str | None:
        """Say why the budget does not hold a visit; None if it does."""
        left, step = self.budget.left(), size.step_seconds()
        if left <= 0:
            return f"the budget of {format_seconds(self.budget.seconds)} is spent"
        if step is not None:
            is_first = not stopwatch.has_visited(size.batch_size)
            need = rounds_seconds(step, self.span_seconds, 1, is_first=is_first)
            another = (
                f"the {format_seconds(left)} left of the budget do not hold another round of {format_seconds(need)}"
            )
            return another if need > left else None
        return why_not_first(
            size.batch_size,
            self.known(),
            left=left,
            unfinished={other.batch_size: len(other.rounds) for other in self.open if other.rounds},
            waiting=[other.batch_size for other in self.open if not other.rounds],
            prepare_seconds=stopwatch.prepare_seconds,
            span_seconds=self.span_seconds,
        )

    def known(self) -> dict[int, float]:
        return {size.batch_size: step for size in self.sizes.values() if (step := size.step_seconds()) is not None}

    def open_runner(self) -> Stopwatch:
        runner = self.factory()
        self.budget.start(runner.clock.now)
        self.stopwatch = Stopwatch(runner, self.budget, span_seconds=self.span_seconds, clocks_mhz=self.clocks_mhz)
        return self.stopwatch

    def close_runner(self) -> None:
        if self.stopwatch is None:
            return
        self.book.spent(self.budget.spent())
        try:
            self.stopwatch.runner.close()
        except Exception as error:  # noqa: BLE001 - everything measured is kept already
            _log.warning("closing the runner failed: %s", error)

    # --- what becomes of a candidate ---

    def end_for_budget(self, size: _Size, reason: str) -> None:
        limit = self.goal.latency_limit
        if not size.rounds:
            self.end(size, "not_run", reason)
        elif limit is not None and stopping.median(size.counting_seconds()) > limit:
            self.end_over_latency_limit(size, cut_short=True)
        else:
            self.end(size, "ok", f"{reason}; {size.rule.reason}", limit="budget")

    def end_over_latency_limit(self, size: _Size, **facts: object) -> None:
        median, limit = stopping.median(size.counting_seconds()), self.goal.latency_limit or 0.0
        reason = f"its median of {format_seconds(median)} is above the latency limit of {format_seconds(limit)}"
        self.end(size, "over_limit", reason, limit="latency", **facts)

    def fail(self, size: _Size, error: Exception, stopwatch: Stopwatch) -> None:
        """Keep what a candidate raised as its outcome, and clear up for the next one."""
        stopwatch.forget()
        facts: dict[str, object] = {"type": type(error).__name__, "message": str(error)}
        reason = str(error) if isinstance(error, CubatchError) else f"{type(error).__name__}: {error}"
        status = "timeout" if isinstance(error, TimedOut) else "error"
        if is_out_of_memory(error):
            status = "out_of_memory"
            if isinstance(error, OutOfMemory):
                facts |= {"needed_bytes": error.needed_bytes, "available_bytes": error.available_bytes}
        try:
            stopwatch.runner.release()
        except Exception as second:  # noqa: BLE001 - the next prepare will tell whether the runner still works
            _log.warning("releasing batch size %d failed: %s", size.batch_size, second)
        self.end(size, status, reason, **facts)

    def end(self, size: _Size, status: str, reason: str, **facts: object) -> None:
        self.open.remove(size)
        if status == "ok":
            self.good.append(size)
        self.book.outcome(Outcome(size.batch_size, status, reason, facts))
        self.tell("outcome", size, f"batch size {size.batch_size}: {status.replace('_', ' ')}; {reason}")

    def tell(self, kind: str, size: _Size | None, message: str) -> None:
        if self.progress is None:
            return
        done = sum(len(size.rounds) for size in self.sizes.values())
        needed = sum(max(1, MIN_ROUNDS - len(size.rounds)) for size in self.open)
        self.progress(
            Event(
                kind=kind,
                round=self.round,
                batch_size=size.batch_size if size else None,
                done=done,
                total=done + needed,
                seconds_left=self.budget.left(),
                message=message,
            )
        )

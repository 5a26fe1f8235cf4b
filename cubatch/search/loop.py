"""
The search loop: measure the sizes that the rules of `search.trial_rules` return, until they return none.

Sizes that the user wants compared instead each get the same number of trials, in shuffled rounds.  A `Keeper` receives
each timing and outcome, so that a later run continues from them.  A runner brings its own clock, so that a test
simulates hours in milliseconds.
"""

from __future__ import annotations

import contextlib
import logging
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
from threadpoolctl import ThreadpoolController

from cubatch import errors
from cubatch.errors import CubatchError, EnergyNotAvailable, InvalidArgument, OverLimit, TimedOut, WorkerDied
from cubatch.measure.budget import Budget, OutOfBudget, guess_prepare, trial_seconds
from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_TRIAL, Candidate, Keeper, Measured, Outcome, Recorder, Timing, by_trial
from cubatch.measure.runner import HasWorker, Runner, RunnerFactory
from cubatch.measure.stopwatch import MIN_ENERGY_SPAN_SECONDS, MIN_SPAN_SECONDS, Stopwatch
from cubatch.search import trial_rules, verdicts
from cubatch.search.curve_posterior import usual_errors
from cubatch.search.events import Event
from cubatch.search.noise import has_cost
from cubatch.search.state import SearchState
from cubatch.units import format_seconds

_log = logging.getLogger(__name__)

LEAST_REFERENCE_SECONDS, LONG_REFERENCE_SECONDS, WORK_SHARE = 0.01, 0.03, 1.5
"""Least seconds of a reference step that takes at least WORK_SHARE times the shortest step, and of any other.  Shorter
steps are mostly overhead, which host drift affects less."""
MOST_REFERENCE_SECONDS, MOST_REFERENCE_SHARE = 0.5, 0.007  # and of the seconds left: else few trials would remain

_FAILED = ("out_of_memory", "error", "timeout")
_REFUSED = OverLimit.__name__  # by a runner, which knows more about memory than the ladder once smaller sizes have run


@attrs.define(kw_only=True, eq=False, slots=False)  # without slots for the attributes set below
class Search:
    """
    A search: its request, the timings and outcome of each size, and the loop over trials.

    Candidates planned over the memory limit are never tried.  An exception of a candidate becomes its outcome
    ("out_of_memory", "timeout" or "error"), and the search continues.  A size that fails after it has run, or kills its
    worker, is tried once more in a new worker.  If it fails again, its timings still count.
    """

    factory: RunnerFactory  # makes the runner; not called if nothing is left to measure
    ladder: Sequence[Candidate]  # the candidate batch sizes, in any order
    goal: Goal
    # Results of an earlier run.  Its timings are not taken again.  Its outcomes are final, except "interrupted", and
    # "dropped" against a size that failed later.
    earlier: Measured = attrs.field(factory=Measured)
    # receives every timing, outcome and number of seconds as it happens; None: they are in the result only
    keeper: Keeper | None = None
    # Seconds of measuring by the runner's clock, those of `earlier` included.  The last step may exceed it.
    budget: Budget = attrs.field(converter=Budget)
    seed: int  # shuffles the rounds
    progress: Callable[[Event], None] | None = None  # called with every event; None: nothing is called
    # Makes a candidate of a size that the search adds.  None: the user requested these sizes; none is added, and each
    # has one trial before any has a second.
    extend: Callable[[int], Candidate] | None = None
    multiple: int = 1  # added sizes are multiples of this
    accepts: Callable[[int], bool] = lambda _: True  # whether the user allows an added size
    rounds: int | None = None  # number of trials of each candidate; None: as many as the recommendation needs
    # a candidate that is measured in any case, to compare the recommendation with; None: there is none
    current: int | None = None
    on_host: bool = True  # steps run on a CPU: a reference step is timed around them, if the runner supports it

    def __attrs_post_init__(self) -> None:
        earlier = self.earlier
        self.budget.spent_before = earlier.seconds_spent
        self.recorder = Recorder(earlier, self.keeper)
        self.stopwatch: Stopwatch | None = None
        self.span_seconds = MIN_ENERGY_SPAN_SECONDS if self.goal.objective == "energy" else MIN_SPAN_SECONDS
        self.candidates = {c.batch_size: c for c in sorted((*self.ladder, *earlier.added), key=lambda c: c.batch_size)}
        self.timings = {n: [t for t in earlier.timings if t.batch_size == n] for n in self.candidates}
        self.outcomes = {o.batch_size: o for o in earlier.outcomes if o.status != "interrupted"}
        self.retried: set[int] = set()
        self.round = max((timing.round // PER_TRIAL for timing in earlier.timings), default=0)
        # whether to hold a reference step; whether to replace one that proves too short, until that fails
        self.seeks_reference, self.replaces = self.on_host and len(self.candidates) > 1, True
        self.progress_error: Exception | None = None
        self.blas: ThreadpoolController | None = None
        with contextlib.suppress(OSError):  # without a file descriptor left, libraries cannot be listed
            self.blas = ThreadpoolController()
        self.state = self._update()

    # --- the loop ---

    def run(self) -> Measured:
        """
        Measure until the recommendation is certain enough or the budget is spent.

        Returns:
            Measured: all timings, old and new, and an outcome of every candidate.

        Raises:
            EnergyNotAvailable: If energy is the objective and none of the first timings has a value in joules.
            InvalidArgument: If a size raises it before any has a timing; of several requested sizes, if two do.
            BaseException: An error of no candidate, such as KeyboardInterrupt or an exception of `progress`, unchanged.
                Unfinished candidates have the outcome "interrupted".
        """
        try:
            for n, candidate in self.candidates.items():
                if candidate.over_limit and n not in self.outcomes:
                    reason = f"planned above the memory limit, so it was not tried{' again' * bool(self.timings[n])}"
                    self._finish(Outcome(n, "over_limit", reason, {"limit": "memory"}))
            if self._open:
                if count := sum(map(len, self.timings.values())):
                    spent = f"{format_seconds(self.budget.spent())} of {format_seconds(self.budget.seconds)} are spent"
                    self._report("resume", None, f"continuing from {count} timing{'s' * (count > 1)}; {spent}")
                self._measure()
                self._judge()
            self._report("end", None, "measuring is done")
        except CubatchError:  # its message is complete
            raise
        except BaseException:
            for n in self._open:
                reason = f"the run was interrupted after {len(self.timings[n])} timings of this size"
                self._finish(Outcome(n, "interrupted", reason))
            raise
        finally:
            self._close_runner()
        return self.recorder.measured

    @property
    def _open(self) -> list[int]:
        """Sizes without an outcome."""
        return [n for n in self.candidates if n not in self.outcomes]

    def _measure(self) -> None:
        """Run trials until none is worth its time or the budget is spent."""
        while self._open and (step := self._next()):
            if len(step) > 1 or step[0] in self.state.measured:
                self.round += 1
                self._report("round", None, f"round {self.round}: {', '.join(map(str, sorted(step)))}")
            for n in step:
                self._run_trial(n)
        best = self.outcomes.get(self._update().recommended or 0)
        if best is not None and best.status == "dropped":  # by an earlier run, against a size that failed later
            self.outcomes = {n: outcome for n, outcome in self.outcomes.items() if outcome.status != "dropped"}
            self._measure()

    def _next(self) -> list[int]:
        state = self._update()
        if self.stopwatch is not None and self.budget.left() <= 0:
            return []
        if self.goal.objective == "energy" and not state.measured and any(self.timings.values()):
            raise EnergyNotAvailable("the clock of these steps")
        if self.rounds is not None:
            return self._next_round(self.rounds)
        with self._computing():
            return trial_rules.next_trials(state)

    def _next_round(self, rounds: int) -> list[int]:
        """Return the sizes with the fewest trials in random order; an empty list if each has had `rounds` trials."""
        trials = {n: self.state.trials(n) for n in self._open}
        least = min(trials.values())
        due = [n for n in self._open if trials[n] == least] if least < rounds else []
        return self.state.shuffled(due)

    def _judge(self) -> None:
        """Set the outcome of every batch size that has none yet."""
        with self._computing():
            outcomes = verdicts.judge_sizes(self.state)
        for outcome in outcomes:
            if self.rounds is not None and outcome.status == "dropped":
                outcome = attrs.evolve(outcome, status="ok", stop_reason="compared, not searched")  # noqa: PLW2901
            cut = {"cut_short": True} if outcome.status == "over_limit" else {"limit": "budget"}
            is_cut = outcome.status in {"ok", "over_limit"} and not self.state.affordable(outcome.batch_size)
            self._finish(outcome, cut if is_cut else {})
        for n in self._open:
            self._finish(Outcome(n, "dropped", f"{self.state.trials(n)} trials gave no energy of a step"))

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Limit BLAS to one thread and use NumPy's default error handling in the block."""
        # Idle BLAS threads spin for about 0.1 s and would disturb the next timing.
        limited = self.blas.limit(limits=1, user_api="blas") if self.blas else contextlib.nullcontext()
        with limited, usual_errors():
            yield

    def _update(self) -> SearchState:
        """Compute the state from all timings and outcomes so far, with the recommendation, and return it."""
        prepare = self.stopwatch.prepare_seconds if self.stopwatch else {}
        span, around = (s.span_seconds, s.around_seconds) if (s := self.stopwatch) else (self.span_seconds, 0.0)
        left, outcomes = self.budget.left(), self.outcomes
        over_memory = {n for n, o in outcomes.items() if o.status == "over_limit" and o.facts.get("limit") == "memory"}
        lack_cost = {n for n, t in self.timings.items() if len(by_trial(t)) > 1 and not has_cost(t, self.goal)}
        self.state = SearchState(
            goal=self.goal, ladder=self.candidates, closed={*outcomes, *lack_cost},
            timings={n: taken for n, taken in self.timings.items() if n not in over_memory},
            failed={n: o.status if o.facts.get("type") != WorkerDied.__name__ else "timeout"
                    for n, o in outcomes.items() if o.status in _FAILED or o.facts.get("type") == _REFUSED},
            seconds_of_trial=lambda n, step: trial_seconds(
                step, span, prepare_seconds=guess_prepare(n, prepare), left=left, around_seconds=around
            ),
            left=left, budget=self.budget.seconds, extends=self.extend is not None,
            requested=[n for n in self.candidates if self.extend is None or n == self.current],
            multiple=self.multiple, accepts=self.accepts, seed=self.seed, on_host=self.on_host,
        )  # fmt: skip
        with self._computing():
            self.state.recommended  # noqa: B018 - fits the posterior
        return self.state

    # --- a trial ---

    def _run_trial(self, n: int) -> None:
        """Run a trial of a size; after an error, repeat the trial once or make the error the size's outcome."""
        if n in self.outcomes:
            return
        if n not in self.candidates and self.extend is not None:
            self.candidates[n], self.timings[n] = self.extend(n), []
            self.recorder.candidate(self.candidates[n])
        stopwatch = self.stopwatch or self._open_runner()
        if self.seeks_reference:
            self._choose_reference(stopwatch)
        number = 1 + max((timing.round // PER_TRIAL for timing in self.timings[n]), default=-1)
        if self.timings[n]:  # a size that is retried has timings of this round already
            number = self.round = max(self.round, number)
        try:
            with contextlib.suppress(OutOfBudget):  # the verdict at the end explains it
                stopwatch.run_trial(
                    n, first_round=number * PER_TRIAL, likely=self._likely_seconds(n), keep=self._record_timing,
                    expected=self._expected_seconds(n),
                )  # fmt: skip
        except Exception as error:
            is_argument = isinstance(error, InvalidArgument) and not any(self.timings.values())
            has_failed = any(outcome.status == "error" for outcome in self.outcomes.values())
            if error is self.progress_error or (is_argument and (self.extend or has_failed or self._open == [n])):
                raise
            self._fail(n, error, stopwatch)  # an error of a candidate is its outcome
        self.recorder.spent(self.budget.spent())

    def _choose_reference(self, stopwatch: Stopwatch) -> None:
        """Hold the smallest candidate with steps long enough to show drift; another if they prove far shorter."""
        state = self._update()
        if not state.seconds:
            return
        longest, largest = max(state.seconds.values()), max(state.seconds)
        shortest = max(LEAST_REFERENCE_SECONDS, min(WORK_SHARE * min(state.seconds.values()), LONG_REFERENCE_SECONDS))
        too_short = stopwatch.reference_batch_size or 0
        ladder = [n for n in state.sizes if 2 * too_short <= n <= largest and n in state.ladder]
        known = {n: float(state.step_seconds[state.place(n)]) for n in ladder}
        earlier = [t.reference_batch_size for t in self.earlier.timings if t.reference_batch_size and not too_short]
        n = earlier[-1] if earlier else min((size for size, step in known.items() if step >= shortest), default=largest)
        seconds, most = known.get(n, LEAST_REFERENCE_SECONDS), MOST_REFERENCE_SHARE * self.budget.left()
        self.seeks_reference = longest < shortest and largest < max(self.candidates)
        if self.seeks_reference or seconds > min(most, MOST_REFERENCE_SECONDS) or n == too_short:
            return
        try:
            with contextlib.suppress(OutOfBudget):
                self.replaces = stopwatch.hold_reference(n, seconds)
        except Exception as error:  # noqa: BLE001 - a size that fails here is measured without a reference
            _log.warning("no reference step of batch size %d: %s", n, error)
            self.replaces = False
            _release_runner(stopwatch.runner, error, restart=False)

    def _likely_seconds(self, n: int) -> float | None:
        """Return the expected seconds of a step of size `n`, to detect a hang; None if unknown."""
        if self.state.measured and n in self.state.sizes:
            return float(self.state.step_seconds[self.state.place(n)])
        return self.candidates[n].predicted_seconds

    def _expected_seconds(self, n: int) -> float | None:
        """Return the least step time in seconds that smaller sizes suggest; None if none of them was measured."""
        rates = [seconds / size for size, seconds in self.state.seconds.items() if size < n]
        by_line = [self._likely_seconds(n)] if len(rates) > 1 and n in self.state.sizes else []
        return min([*(n * rate for rate in rates), *filter(None, by_line)], default=None)

    def _record_timing(self, timing: Timing) -> None:
        n, text = timing.batch_size, format_seconds(timing.seconds) + ", throttled" * timing.throttled
        self.recorder.timing(timing)
        self.timings[n].append(timing)
        self.seeks_reference |= self.replaces and (timing.reference_seconds or math.inf) < LEAST_REFERENCE_SECONDS / 2
        self._report("timing", n, f"batch size {n}: {text}", timing.round)

    def _open_runner(self) -> Stopwatch:
        runner = self.factory()
        self.budget.start(runner.clock.now)
        clocks = [timing.sm_clock_mhz for timing in self.earlier.timings if timing.sm_clock_mhz]
        self.stopwatch = Stopwatch(runner, self.budget, span_seconds=self.span_seconds, clocks_mhz=clocks)
        return self.stopwatch

    def _close_runner(self) -> None:
        if self.stopwatch is None:
            return
        self.recorder.spent(self.budget.spent())
        self.recorder.launch = getattr(self.stopwatch.runner, "launch", None)  # only the cubatch engine has it
        try:
            self.stopwatch.runner.close()
        except Exception as error:  # noqa: BLE001 - all timings are stored already
            _log.warning("closing the runner failed: %s", error)

    # --- outcomes ---

    def _fail(self, n: int, error: Exception, stopwatch: Stopwatch) -> None:
        """Release the memory of a failed trial, and either repeat the trial once or set the size's outcome."""
        stopwatch.forget()
        failure, timings = _describe_failure(n, error), self.timings[n]
        if isinstance(error, OverLimit):  # it was not tried
            self._finish(failure)
            return
        # A size that has run before can run, and another process may have killed the worker.
        is_again = n not in self.retried and (bool(timings) or isinstance(error, WorkerDied))
        _release_runner(stopwatch.runner, error, restart=is_again)
        if is_again:
            self.retried.add(n)
            _log.warning("batch size %d failed and is tried once more: %s", n, failure.stop_reason)
            self._run_trial(n)
        elif timings:
            text = f"judged by its {len(timings)} timings, since it failed twice: {failure.stop_reason}"
            is_over = self._update().seconds.get(n, 0.0) > (self.goal.latency_limit or math.inf)
            status, limit = ("over_limit", {"limit": "latency"}) if is_over else ("ok", {})
            self._finish(Outcome(n, status, text, failure.facts), {"cut_short": True, **limit})
        else:
            self._finish(failure)

    def _finish(self, outcome: Outcome, facts: Mapping[str, object] | None = None) -> None:
        """Record a size's outcome; add `facts` (None: nothing), and number and seconds of its trials as in `Spent`."""
        n, spent = outcome.batch_size, self.stopwatch.spent.get(outcome.batch_size) if self.stopwatch else None
        more = {**(facts or {}), **(attrs.asdict(spent) if spent else {})}
        self.outcomes[n] = attrs.evolve(outcome, facts={**outcome.facts, **more})
        self.recorder.outcome(self.outcomes[n])
        self._report("outcome", n, f"batch size {n}: {outcome.status.replace('_', ' ')}; {outcome.stop_reason}")

    def _report(self, kind: str, n: int | None, message: str, number: int | None = None) -> None:
        """Pass an event to the progress function; `n` None: without a size, `number` None: of the present round."""
        if self.progress is None or self.progress_error is not None:
            return
        with self._computing():
            best = None if kind == "resume" else self.state.recommended  # the best so far follows with the first trial
            gain = self.state.could_gain if best else math.inf
        event = Event(
            kind=kind, batch_size=n, round=self.round * PER_TRIAL if number is None else number, message=message,
            done=min(self.budget.spent(), self.budget.seconds), total=self.budget.seconds,
            seconds_left=self.budget.left(), could_gain=gain if gain <= 1 else None, best_batch_size=best,
            best_rate=best / self.state.seconds[best] if best else None,
        )  # fmt: skip
        try:
            self.progress(event)
        except Exception as error:
            self.progress_error = error  # it is raised unchanged, and no event follows it
            raise


def _describe_failure(n: int, error: Exception) -> Outcome:
    """Return the outcome of a size that raised: "out_of_memory", "over_limit", "timeout" or "error", with a reason."""
    name = type(error).__name__
    text = str(error).encode(errors="backslashreplace").decode()  # SQLite rejects lone surrogates
    sizes = {key: getattr(error, key, None) for key in ("needed_bytes", "available_bytes")}  # of errors about memory
    facts = {"type": name, "message": text} | {key: value for key, value in sizes.items() if isinstance(value, int)}
    reason = text if isinstance(error, CubatchError) else f"{name}: {text}"
    if isinstance(error, OverLimit):
        return Outcome(n, "over_limit", reason, {"limit": "memory", **facts})
    if errors.is_out_of_memory(error):
        return Outcome(n, "out_of_memory", reason, facts)
    return Outcome(n, "timeout" if isinstance(error, TimedOut) else "error", reason, facts)


def _release_runner(runner: Runner, error: Exception, *, restart: bool) -> None:
    """
    Free the memory of a failed runner; restart its worker process if `restart` is set or the process may be broken.

    After a fault on a GPU every later call in its context fails; running out of memory leaves the context usable.
    """
    raised: BaseException | None = error
    while raised is not None:
        traceback.clear_frames(raised.__traceback__)  # they hold device arrays of the step
        raised = raised.__cause__ or raised.__context__
    try:
        if isinstance(runner, HasWorker) and (restart or not errors.is_out_of_memory(error)):
            runner.restart()
        else:
            runner.release()
    except Exception as second:  # noqa: BLE001 - the next prepare shows whether the runner still works
        _log.warning("clearing up after %s failed: %s", error, second)

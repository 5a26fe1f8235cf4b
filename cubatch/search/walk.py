"""
The search: measure the sizes that `search.rules` names, until it names none.

Where sizes are compared and not searched, each has equally many trials, in shuffled rounds.

This module runs trials, handles failures, and passes each timing and outcome to a `Keeper` and to the user's progress
function.  A runner brings its own clock, so that hours pass in milliseconds on a fake.  A rerun continues from what an
earlier run kept.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from random import Random

import attrs
from threadpoolctl import ThreadpoolController

from cubatch.errors import CubatchError, EnergyNotAvailable, OverLimit, WorkerDied, is_out_of_memory
from cubatch.measure.budget import Budget, OutOfBudget, guess_prepare, visit_seconds
from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_VISIT, Candidate, Keeper, Measured, Outcome, Recorder, Timing
from cubatch.measure.runner import RunnerFactory
from cubatch.measure.stopwatch import MIN_ENERGY_SPAN_SECONDS, MIN_SPAN_SECONDS, HasStepLimit, Stopwatch
from cubatch.measure.watch import Watch
from cubatch.search import rules, verdicts
from cubatch.search.events import Event, Teller
from cubatch.search.failures import Failure, clear
from cubatch.search.noise import Record
from cubatch.search.recommend import is_favored
from cubatch.search.view import Situation, View
from cubatch.units import format_seconds

__all__ = ["Event", "Goal", "is_out_of_memory", "measure"]

_log = logging.getLogger(__name__)

LEAST_REFERENCE_SECONDS, LONG_REFERENCE_SECONDS, WORK_SHARE = 0.01, 0.03, 1.5
"""Seconds of a step from which it suits as the reference, if it takes so many times the shortest step; seconds from
which it does in any case.  Shorter steps are mostly overhead, which host drift affects less."""
MOST_REFERENCE_SECONDS = 0.5  # longer steps average the host's drift themselves, and would double what timings take

_FAILED = ("out_of_memory", "error", "timeout")
_REFUSED = OverLimit.__name__  # by a runner, which knew of it only once smaller sizes had run: the ladder knew less


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
    extend: Callable[[int], Candidate] | None = None,
    multiple: int = 1,
    sweeps: int | None = None,
    on_host: bool = True,
) -> Measured:
    """
    Measure the candidates until the answer is known well enough or the budget is spent.

    Candidates planned over the memory limit are never tried.  Whatever a candidate raises is its
    outcome and tuning goes on: "out_of_memory" by exception type and status code, "timeout",
    "error".  A size that fails after it has run, or takes its worker with it, is tried once more, in a new worker;
    if it fails again its timings still count.

    Args:
        factory: Makes the runner; not called if nothing is left to measure.
        ladder: The candidates, in any order.
        goal: What is to be as good as possible.
        kept: What an earlier run left.  Its timings are not taken again, its outcomes are final, except "interrupted"
            and "dropped" against a size that has fallen since.
        keep: Told of every timing, outcome and second as it happens.
        budget: Seconds of measuring by the runner's clock, those of `kept` included.  The last step
            that is begun may exceed it.
        seed: Shuffles the sweeps.
        progress: Called with an Event after everything that happens.
        extend: Makes a candidate of a size that the search adds between those of the ladder; None: it adds none, and
            each candidate, which was then asked for by name, is visited once before any is visited again.
        multiple: Of which added sizes are multiples.
        sweeps: How often each candidate is visited, whatever its readings say; None: as often as the answer needs it.

        on_host: Whether steps run on a CPU.  A reference step is then timed around them, where the runner can hold one.

    Returns:
        Measured: everything, old and new; every candidate has an outcome.

    Raises:
        EnergyNotAvailable: If energy is the objective and none of the first readings had one of it.
        BaseException: What is no error of a candidate's, such as KeyboardInterrupt, or what `progress` raises: as it
            came; unfinished candidates are kept as "interrupted".

    Example:
        >>> import time
        >>> from cubatch.measure.runner import Reading
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
    run = _Run(
        factory, ladder, goal, kept or Measured(), keep=keep, budget=budget, seed=seed, progress=progress,
        extend=extend, multiple=multiple, sweeps=sweeps, on_host=on_host,
    )  # fmt: skip
    return run.run()


class _Run:
    """One call of `measure`: what was read, what is closed, and the walk."""

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
        extend: Callable[[int], Candidate] | None,
        multiple: int,
        sweeps: int | None,
        on_host: bool,
    ) -> None:
        self.factory, self.goal, self.seed = factory, goal, seed
        self.extend, self.multiple, self.sweeps = extend, multiple, sweeps
        self.book = Recorder(kept, keep)
        self.budget = Budget(budget, kept.seconds_spent)
        self.teller = Teller(progress, self.budget)
        self.span_seconds = MIN_ENERGY_SPAN_SECONDS if goal.objective == "energy" else MIN_SPAN_SECONDS
        self.clocks_mhz = [timing.sm_clock_mhz for timing in kept.timings if timing.sm_clock_mhz]
        self.stopwatch: Stopwatch | None = None
        self.resources = contextlib.ExitStack()
        self.candidates = {c.batch_size: c for c in sorted((*ladder, *kept.added), key=lambda c: c.batch_size)}
        self.records = {n: Record(n, goal) for n in self.candidates}
        for timing in kept.timings:
            if timing.batch_size in self.records:
                self.records[timing.batch_size].add(timing)
        self.outcomes = {o.batch_size: o for o in kept.outcomes if o.status != "interrupted"}
        self.retried: set[int] = set()
        self.sweep = max((timing.round // PER_VISIT for timing in kept.timings), default=0)
        model = {c.batch_size: c.predicted_seconds for c in ladder if c.predicted_seconds is not None}
        self.model = model if len(model) == len(ladder) else None
        self.reference = next((t.reference_batch_size for t in reversed(kept.timings) if t.reference_batch_size), None)
        self.seeks_reference = on_host
        self.view = self.look()

    # --- the walk ---

    def run(self) -> Measured:
        try:
            for n, candidate in self.candidates.items():
                if candidate.over_limit and n not in self.outcomes:
                    tried = "not tried again" if self.records[n].timings else "not tried"
                    reason = f"planned above the memory limit, so it was {tried}"
                    self.end(n, "over_limit", reason, limit="memory")
            if self.open:
                self.teller.tell_resume([timing for r in self.records.values() for timing in r.timings], self.sweep)
                self.walk()
            self.tell("end", None, "measuring is done")
        except CubatchError:  # says itself what became of the run
            raise
        except BaseException:
            for n in self.open:
                self.end(n, "interrupted", f"interrupted after {len(self.records[n].timings)} timings")
            raise
        finally:
            self.close_runner()
        return self.book.measured

    @property
    def open(self) -> list[int]:
        """Sizes without an outcome."""
        return [n for n in self.candidates if n not in self.outcomes]

    def walk(self) -> None:
        """Measure the sizes that the rules name until they name none; then set the outcome of every size."""
        while True:
            while self.open and (step := self.next()):
                if len(step) > 1 or step[0] in self.view.read:
                    self.sweep += 1
                    self.tell("round", None, f"sweep {self.sweep}: {', '.join(map(str, sorted(step)))}")
                for n in step:
                    self.visit(n)
            self.view = self.look()
            best = self.outcomes.get(self.view.answer or 0)
            if best is None or best.status != "dropped":
                break
            # An earlier run dropped it against a size that has fallen since.
            self.outcomes = {n: outcome for n, outcome in self.outcomes.items() if outcome.status != "dropped"}
        with self.one_thread():
            ends = verdicts.verdicts(self.view)
        for n, found in ends.items():
            is_compared = self.sweeps is not None and found.status == "dropped"
            verdict = attrs.evolve(found, status="ok", reason="compared, not searched") if is_compared else found
            cut: dict[str, object] = {"cut_short": True} if verdict.status == "over_limit" else {"limit": "budget"}
            is_cut = verdict.status in {"ok", "over_limit"} and self.budget.left() < self.next_seconds(n)
            self.end(n, verdict.status, verdict.reason, **{**verdict.facts, **(cut if is_cut else {})})
        for n in self.open:
            self.end(n, "dropped", f"{self.records[n].trials} visits gave no reading of its energy")

    def next_seconds(self, n: int) -> float:
        """Return the expected seconds of another trial of a measured size."""
        return float(self.view.visit_seconds[self.view.place(n)])

    def next(self) -> list[int]:
        self.view = self.look()
        if self.stopwatch is not None and self.budget.left() <= 0:
            return []
        if self.goal.objective == "energy" and not self.view.read and any(r.timings for r in self.records.values()):
            raise EnergyNotAvailable("what these steps were timed by")
        if self.sweeps is not None:
            return self.next_sweep(self.sweeps)
        with self.one_thread():
            return rules.next_visits(self.view)

    def next_sweep(self, sweeps: int) -> list[int]:
        """Return the sizes with the fewest trials, shuffled, until all have had so many."""
        least = min(self.records[n].trials for n in self.open)
        due = [n for n in self.open if self.records[n].trials == least] if least < sweeps else []
        Random(f"{self.seed}, {least}").shuffle(due)  # noqa: S311 - an order, not a secret
        return due

    @functools.cached_property
    def blas(self) -> ThreadpoolController:
        """The BLAS libraries of this process."""
        return ThreadpoolController()

    def one_thread(self) -> AbstractContextManager[object]:
        """Limit BLAS to one thread: idle BLAS threads spin for about 0.1 s and would disturb the next timing."""
        limited: AbstractContextManager[object] = self.blas.limit(limits=1, user_api="blas")
        return limited

    def look(self) -> View:
        """Return a view of all that is known now."""
        prepare = self.stopwatch.prepare_seconds if self.stopwatch else {}
        around = self.stopwatch.around_seconds if self.stopwatch else 0.0
        left = self.budget.left()
        refused = {n for n, o in self.outcomes.items() if o.status == "over_limit" and o.facts.get("limit") == "memory"}

        def seconds(n: int, step: float) -> float:
            return visit_seconds(
                step, self.span_seconds, prepare_seconds=guess_prepare(n, prepare), left=left, around_seconds=around
            )

        return View(
            Situation(
                goal=self.goal,
                ladder=self.candidates,
                favored=None if self.extend is None else {n for n, c in self.candidates.items() if is_favored(c)},
                model=self.model,
                records={n: record for n, record in self.records.items() if n not in refused},
                closed={*self.outcomes, *(n for n, record in self.records.items() if record.lacks_cost)},
                failed={n for n, o in self.outcomes.items() if o.status in _FAILED or o.facts.get("type") == _REFUSED},
                broken={n: o.status for n, o in self.outcomes.items() if o.status in ("error", "timeout")},
                visit_seconds=seconds,
                left=left,
                budget=self.budget.seconds,
                extends=self.extend is not None,
                multiple=self.multiple,
                seed=self.seed,
            )
        )

    # --- one visit ---

    def visit(self, n: int) -> None:
        """Run a trial of a size; an error it raises is its outcome, at once or at the second time."""
        if n in self.outcomes:
            return
        if n not in self.candidates and self.extend is not None:
            self.candidates[n], self.records[n] = self.extend(n), Record(n, self.goal)
            self.book.candidate(self.candidates[n])
        stopwatch = self.stopwatch or self.open_runner()
        if self.seeks_reference:
            self.choose_reference(stopwatch)
        record = self.records[n]
        number = 1 + max((timing.round // PER_VISIT for timing in record.timings), default=-1)
        if record.timings:  # one that is tried again has readings of this sweep already
            number = self.sweep = max(self.sweep, number)
        try:
            stopwatch.visit(
                n,
                first_round=number * PER_VISIT,
                likely=self.likely_seconds(n),
                keep=functools.partial(self.keep, record),
                expected=self.expected_seconds(n),
                at_least=rules.timings_wanted(self.view, n),
            )
        except OutOfBudget:
            pass  # what became of the size is said at the end
        except Exception as error:
            if error is self.teller.failed:
                raise
            self.fail(n, error, stopwatch)  # what a candidate raises is its outcome
        self.book.spent(self.budget.spent())

    def choose_reference(self, stopwatch: Stopwatch) -> None:
        """Hold the smallest size of the ladder with long steps that are more than overhead as the reference, once."""
        view = self.view = self.look()
        if not view.seconds:
            return
        longest, largest = max(view.seconds.values()), max(view.seconds)
        wanted = max(LEAST_REFERENCE_SECONDS, min(WORK_SHARE * min(view.seconds.values()), LONG_REFERENCE_SECONDS))
        ladder = [n for n in view.sizes if n <= largest and n in view.of.ladder]
        known = {n: float(view.steps[view.place(n)]) for n in ladder}
        n = self.reference or min((size for size, step in known.items() if step >= wanted), default=largest)
        if longest < wanted and largest < max(self.candidates):
            return
        self.seeks_reference, seconds = False, known.get(n, LEAST_REFERENCE_SECONDS)
        if seconds > MOST_REFERENCE_SECONDS:
            return
        try:
            stopwatch.hold_reference(n, seconds)
        except OutOfBudget:
            pass
        except Exception as error:  # noqa: BLE001 - a size that fails here is measured without a reference
            _log.warning("no reference step of batch size %d: %s", n, error)
            stopwatch.forget()
            clear(stopwatch.runner, error, anew=False)

    def likely_seconds(self, n: int) -> float | None:
        """Return the expected seconds of a step, by which a hang is recognized; None where nothing is known."""
        if self.view.seen and n in self.view.sizes:
            return float(self.view.steps[self.view.place(n)])
        return self.candidates[n].predicted_seconds

    def expected_seconds(self, n: int) -> float | None:
        """Return the seconds of a step by smaller sizes, at their best rate or on the line through two of them."""
        rates = [seconds / size for size, seconds in self.view.seconds.items() if size < n]
        by_line = [float(self.view.steps[self.view.place(n)])] if len(rates) > 1 and n in self.view.sizes else []
        return min([*(n * rate for rate in rates), *by_line], default=None)

    def keep(self, record: Record, timing: Timing) -> None:
        self.book.timing(timing)
        record.add(timing)
        n, text = record.batch_size, format_seconds(timing.seconds) + ", throttled" * timing.throttled
        self.tell("timing", n, f"batch size {n}: {text}", timing.round)

    def open_runner(self) -> Stopwatch:
        runner = self.factory()
        self.budget.start(runner.clock.now)
        watch = None if isinstance(runner, HasStepLimit) else self.resources.enter_context(Watch())
        self.stopwatch = Stopwatch(
            runner, self.budget, span_seconds=self.span_seconds, clocks_mhz=self.clocks_mhz, watch=watch
        )
        return self.stopwatch

    def close_runner(self) -> None:
        if self.stopwatch is None:
            return
        self.book.spent(self.budget.spent())
        self.book.launch = getattr(self.stopwatch.runner, "launch", None)  # those of our own engine know
        try:
            self.stopwatch.runner.close()
        except Exception as error:  # noqa: BLE001 - everything measured is kept already
            _log.warning("closing the runner failed: %s", error)
        finally:
            self.resources.close()

    # --- what becomes of a candidate ---

    def fail(self, n: int, error: Exception, stopwatch: Stopwatch) -> None:
        """
        Release what a failed candidate held, and set its outcome, unless it is tried once more.

        A size that has run before can run, and another process may have killed a worker: both are tried once more.  A
        size with timings that fails again is judged by them.
        """
        stopwatch.forget()
        failure, has_run = Failure.of(error), bool(self.records[n].timings)
        is_again = n not in self.retried and (has_run or isinstance(error, WorkerDied))
        if isinstance(error, OverLimit):  # it was not tried
            self.end(n, failure.status, failure.reason, **failure.facts)
            return
        clear(stopwatch.runner, error, anew=is_again)
        if is_again:
            self.retried.add(n)
            _log.warning("batch size %d failed and is tried once more: %s", n, failure.reason)
            self.visit(n)
        elif has_run:
            text = f"judged by its {len(self.records[n].timings)} timings, since it failed twice: {failure.reason}"
            is_over = self.goal.latency_limit is not None and self.look().seconds.get(n, 0.0) > self.goal.latency_limit
            limit = {"limit": "latency"} if is_over else {}
            self.end(n, "over_limit" if is_over else "ok", text, cut_short=True, **failure.facts, **limit)
        else:
            self.end(n, failure.status, failure.reason, **failure.facts)

    def end(self, n: int, status: str, reason: str, **facts: object) -> None:
        spent = self.stopwatch.spent.get(n) if self.stopwatch else None
        if spent is not None:
            facts |= attrs.asdict(spent)
        self.outcomes[n] = Outcome(n, status, reason, facts)
        self.book.outcome(self.outcomes[n])
        self.tell("outcome", n, f"batch size {n}: {status.replace('_', ' ')}; {reason}")

    def tell(self, kind: str, n: int | None, message: str, number: int | None = None) -> None:
        with self.one_thread():
            self.teller.tell(kind, n, message, self.sweep * PER_VISIT if number is None else number, self.view)

"""The tuning pipeline: every public tuning call builds a `Subject` and a `Request`, and calls `tune`."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from cubatch.engine.conditions import conditions, environment
from cubatch.errors import CubatchError, NothingMeasured
from cubatch.frameworks.loader_rate import LoaderRate
from cubatch.measure.records import Measured, Recorder
from cubatch.search import loop
from cubatch.tuning import answer as answers, machine_lock, progress, store
from cubatch.tuning.ladder import Ladder
from cubatch.tuning.notes import Note, measure_again, memory_notes, note
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.store import Run
from cubatch.tuning.subject import Subject

_DEVICE_FACTS = (
    "name", "kind", "slug", "compute_capability", "num_sms", "uuid", "mig", "memory_bytes", "power_limit_watts",
    "threads",
)  # fmt: skip


def tune(subject: Subject, request: Request) -> TuningResult:
    """
    Measure a subject; return the result with the recommended batch size.

    Raises:
        DoesNotFit: If not even one sample fits.
        NothingMeasured: If no candidate could be measured.
        EnergyNotAvailable: If energy is the objective, and was measured for no candidate.
        KeyboardInterrupt, or an exception that `request.progress` raises: It has the result so far as `partial`.
    """
    with _open(subject, request) as run:
        notes = [*subject.start(refresh=request.store == "refresh" and run.is_kept), *memory_notes(subject.memory)]
        try:
            cached = _cached_ladder(run)
            ladder = subject.ladder(request, cached, is_finished=run.finished)
            session = _Session(subject=subject, request=request, run=run, ladder=ladder, notes=[*notes, *ladder.notes])
            if cached is None or not run.finished:
                session.save_ladder()
            measured = session.measure()
        finally:
            subject.close()
        measured = session.revise(measured)
        try:
            result = session.result(measured)
        except NothingMeasured as error:
            if not (remedy := subject.remedy(session.ladder)):
                raise
            raise NothingMeasured(error.reason, f"{error.remedy} {remedy}") from error
        with session.partial_on_interrupt(lambda: result):
            for look in (subject.measure_loader, subject.run_loop):
                loader = look(result, request)
                if loader is not None:
                    session.count_loader(loader)
                    result = session.result(measured)
            return subject.complete(result, run, request)


def _open(subject: Subject, request: Request) -> Run:
    budget = request.budget
    if subject.identity is None:
        return store.Run(None, identity={}, conditions={}, budget=budget)
    device = subject.device
    identity = {"device": device.uuid or device.name, "mig": device.mig, **subject.identity, **request.identity}
    return store.Run(
        store.path_of(request.store), identity=identity, conditions={**subject.conditions, **conditions(device)},
        budget=budget, memory_bytes=subject.memory.bytes, refresh=request.store == "refresh",
    )  # fmt: skip


def _cached_ladder(run: Run) -> Ladder | None:
    if run.ladder is None:
        return None
    facts = run.limit or {}
    return Ladder(run.ladder, facts.get("largest_batch_size"), facts.get("memory_bytes"), facts)


@attrs.define(kw_only=True)
class _Session:
    """A tuning run: its subject, request, cache and candidates, and the notes collected on the way."""

    subject: Subject
    request: Request
    run: Run
    ladder: Ladder
    notes: list[Note]
    loader: LoaderRate | None = None  # the measured rate of the user's data loader; None: not measured, or no loader

    def save_ladder(self, measured: Measured | None = None) -> None:
        """
        Cache the candidate batch sizes, and the memory limit that they were chosen for.

        `measured` has the sizes that the search added, which are cached too; None: there are none.
        """
        ladder, added = self.ladder, () if measured is None else measured.added
        facts = {**ladder.facts, "memory_bytes": ladder.memory_bytes, "largest_batch_size": ladder.largest}
        self.run.save_ladder([*ladder.candidates, *added], facts)

    def measure(self) -> Measured:
        """Return all timings and outcomes, cached or taken now; after Ctrl-C the exception has the result so far."""
        self.notes += self._cache_notes()
        run, ladder, request, device = self.run, self.ladder, self.request, self.subject.device
        if run.finished:
            return run.earlier
        recorder = Recorder(run.earlier, run)
        with (
            self.partial_on_interrupt(lambda: self.result(recorder.measured, is_partial=True)),
            self._exclusive(),
            progress.shown(self.request.progress) as show,
        ):
            measured = loop.Search(
                factory=self.subject.runner_factory(ladder, request), ladder=ladder.candidates, goal=request.goal,
                earlier=run.earlier, keeper=recorder, budget=request.budget, seed=request.seed, rounds=request.sweeps,
                progress=show,
                extend=None if request.batch_sizes else functools.partial(self.subject.candidate, ladder),
                multiple=self._multiple, accepts=request.accepts, current=request.current, on_host=device.kind == "cpu",
            ).run()  # fmt: skip
        run.finish()
        return measured

    @property
    def _multiple(self) -> int:
        return math.lcm(self.subject.multiple, self.request.multiple_of, self.ladder.facts.get("multiple", 1))

    @property
    def _largest_allowed(self) -> int | None:
        """The largest candidate, if it is below the largest batch size that fits by the memory plan; else None."""
        last = max((step.batch_size for step in self.ladder.candidates), default=None)
        return last if last is not None and last < (self.ladder.largest or 0) else None

    def revise(self, measured: Measured) -> Measured:
        """Return the timings with memory predictions updated after measuring; update the candidates and notes too."""
        revision = self.subject.revise(self.ladder, measured, self.request)
        self.notes += revision.notes
        if revision.ladder is not self.ladder:
            self.ladder = revision.ladder
            self.save_ladder(revision.measured)
        return revision.measured

    def count_loader(self, loader: LoaderRate | Note) -> None:
        """Store the data loader's rate for later results, or the note on why the rate is unknown."""
        if isinstance(loader, LoaderRate):
            self.loader = loader
        else:
            self.notes.append(loader)

    def result(self, measured: Measured, *, is_partial: bool = False) -> TuningResult:
        """Return the tuning result of these timings, partial or whole: recommendation, reasons and notes."""
        notes = [*self.run.notes, *self.notes]
        launch = measured.launch or {}
        if launch.get("launches") is not None and launch["refusal"]:
            notes.append(note("launched_singly", launches=launch["launches"], refusal=launch["refusal"]))
        rungs = [*self.ladder.candidates, *measured.added]
        return answers.answer(
            rungs, measured, goal=self.request.goal, setting=self._setting(measured.launch),
            largest_batch_size=self.ladder.largest, is_rough=bool(self.ladder.facts.get("is_rough")),
            largest_allowed=self._largest_allowed,
            is_listed=self.request.batch_sizes is not None,
            current=self.request.current, multiple=self._multiple,
            facts=self.subject.facts([rung.batch_size for rung in rungs]), notes=notes, partial=is_partial,
        )  # fmt: skip

    @contextlib.contextmanager
    def partial_on_interrupt(self, make_result: Callable[[], TuningResult]) -> Iterator[None]:
        """Add the result so far (`partial`) and whether it is cached (`is_kept`) to an exception such as Ctrl-C."""
        try:
            yield
        except CubatchError:  # its message explains the run's end
            raise
        except BaseException as stop:
            stop.partial, stop.is_kept = make_result(), self.run.is_kept  # type: ignore[attr-defined]
            raise

    def _setting(self, launch: Mapping[str, Any] | None) -> dict[str, Any]:
        """
        Return the fields of the result that do not come from timings, by their names in its JSON.

        `launch` is `Measured.launch`, None if unknown.
        """
        device, request, fields = self.subject.device, self.request, dict(self.subject.describe(self.ladder))
        facts, added = device.to_mapping(), fields.pop("environment", {})
        launched = {} if launch is None else {"launch": dict(launch)}
        return {
            **fields,
            "created": self.run.created,
            "limits": {
                "max_batch_size": request.max_batch_size,
                "memory_bytes": self.ladder.memory_bytes,
                "latency_seconds": self.request.goal.latency_limit,
            },
            "budget_seconds": request.budget,
            "seed": request.seed,
            "device": {name: facts[name] for name in _DEVICE_FACTS} | {"free_bytes": self.subject.memory.free_bytes},
            "environment": {**environment(device), **added, **launched},
            "loader": self.loader,
            "disturbed": bool(self.run.disturbed),
        }

    def _cache_notes(self) -> list[Note]:
        run = self.run
        interference = [note("cached_interference", message=message) for message in run.disturbed]
        remedy = measure_again(run.id, None if run.is_default else run.path)
        if run.finished:
            return [note("answered_from_cache", remedy=remedy), *interference]
        return [note("cache_continued", remedy=remedy), *interference] if interference else []

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Measure exclusively in the block; note and cache interference by other processes, also after an error."""
        interference: list[str] = []
        try:
            with machine_lock.exclusive(self.subject.device, self.subject.worker_pid) as interference:
                self.run.save_disturbed(interference)  # so that it is known after a kill
                yield
        finally:
            self.run.save_disturbed(interference)
            self.notes += [note("interference", message=message) for message in interference]

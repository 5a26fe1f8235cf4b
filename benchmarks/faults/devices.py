"""Runs on misbehaving devices in virtual time, kept in a real store: hours of faults in milliseconds."""

from __future__ import annotations

import contextlib
import functools
import random
import sqlite3
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import attrs

from benchmarks.faults import judging
from benchmarks.faults.judging import Key, Trial
from cubatch.errors import DeviceFailed, NothingMeasured, WorkerDied
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Outcome, Timing
from cubatch.search import loop
from cubatch.search.events import Event
from cubatch.tuning import answer, ladder
from cubatch.tuning.notes import sentence
from cubatch.tuning.request import Request
from cubatch.tuning.store import Run
from tests.fakes import Behaviour, FakeDevice, FakeRunner, ImpatientFakeRunner, affine, sawtooth

BUDGET = 20.0
GOAL = Goal()
MOST_SESSIONS = 6
DISK_SHARE = 0.02  # of the writes, at which the disk begins to misbehave
_SLACK_SECONDS = 5.0  # the last step that is begun may exceed the budget
_COSTS = {"hang": 60.0, "suspension": 4000.0}  # at most: 20 times what is expected, or the budget; and as it was drawn


class Killed(BaseException):
    """The process is gone: nothing that comes after it happens."""


# --- bad habits: each draws its moments from its own generator ------------------------------------------------


@attrs.define
class Habit(Behaviour):
    """A fault that happens now and then; `events` lists it for all sessions of a trial."""

    draw: random.Random
    share: float
    events: list[str]

    def happens(self, what: str) -> bool:
        """Decide whether it happens now."""
        if self.draw.random() >= self.share:
            return False
        self.events.append(what)
        return True

    def __deepcopy__(self, _: object) -> Habit:
        return self  # a session gets the very one, so that the next session's faults are others

    def restart(self) -> None:
        """Continue in a new process of the runner."""


@attrs.define
class RunsOut(Habit):
    """Memory runs out at any step, though there was enough a moment ago."""

    def step(self, batch_size: int) -> None:
        """Raise what NumPy raises."""
        if self.happens("out of memory"):
            raise MemoryError(f"a step of batch size {batch_size}")


@attrs.define
class Dies(Habit):
    """The worker is killed, in a step or while it prepares."""

    def prepare(self, batch_size: int) -> None:
        """Be gone."""
        self.step(batch_size)

    def step(self, batch_size: int) -> None:
        """Be gone."""
        if self.happens("death"):
            raise WorkerDied(f"SIGKILL ended it at batch size {batch_size}")


@attrs.define
class Sticks(Habit):
    """A fault after which every call fails, until there is a new process."""

    is_broken: bool = False

    def prepare(self, _: int) -> None:
        """Fail too, once it is broken."""
        if self.is_broken:
            raise DeviceFailed.by_driver("cuMemAlloc", 700)

    def step(self, batch_size: int) -> None:
        """Break, and fail."""
        self.is_broken = self.is_broken or self.happens("sticky error")
        self.prepare(batch_size)

    def restart(self) -> None:
        """Work again."""
        self.is_broken = False


@attrs.define
class Hangs(Habit):
    """A step never returns."""

    hangs: bool = False

    def step(self, _: int) -> None:
        """Decide."""
        self.hangs = self.happens("hang")

    def delay(self) -> float:
        """Return a time beyond any deadline."""
        return 1e9 if self.hangs else 0.0


@attrs.define
class Pauses(Habit):
    """The process is suspended for minutes, in a step that then comes back."""

    seconds: float = 0.0

    def step(self, _: int) -> None:
        """Decide."""
        self.seconds = self.draw.uniform(40.0, 4000.0) if self.happens("suspension") else 0.0

    def delay(self) -> float:
        """Return the time of the suspension in seconds."""
        return self.seconds


class _Renewed:
    """A runner whose faults end with its process."""

    behaviours: tuple[Behaviour, ...]

    def restart(self) -> None:
        """Start a new process."""
        for behaviour in self.behaviours:
            if isinstance(behaviour, Habit):
                behaviour.restart()


class Session(_Renewed, ImpatientFakeRunner):
    """A runner in a process of its own, which is waited for so long and no longer."""


class PatientSession(FakeRunner):
    """A runner in this process: what does not come back is waited for."""


# --- a trial -------------------------------------------------------------------------------------------------


@attrs.frozen
class Kind:
    """
    Faults of a trial.

    Attributes:
        habits: Classes of faults, each with its share of the steps.
        kills: Whether the tuning process is killed at random moments and started again.
        disk: "full" for a while, or "failing" now and then.
        holes: Whether sizes need memory that does not grow with them.
    """

    habits: tuple[tuple[type[Habit], float], ...] = ()
    kills: bool = False
    disk: str = ""
    holes: bool = False


KINDS: dict[str, Kind] = {
    "memory runs out at random steps": Kind(habits=((RunsOut, 0.001),)),
    "memory that is not monotone": Kind(holes=True, habits=((RunsOut, 0.0005),)),
    "sticky device errors": Kind(habits=((Sticks, 0.001),)),
    "steps that hang": Kind(habits=((Hangs, 0.0005),)),
    "a worker that dies": Kind(habits=((Dies, 0.001),)),
    "suspended in a step": Kind(habits=((Pauses, 0.001),)),
    "killed and begun again": Kind(kills=True),
    "a disk that is full for a while": Kind(disk="full"),
    "a disk whose writes fail now and then": Kind(disk="failing", kills=True),
    "all of it": Kind(
        habits=((RunsOut, 0.0005), (Sticks, 0.0003), (Hangs, 0.0001), (Dies, 0.0005)),
        kills=True,
        disk="full",
        holes=True,
    ),
}


class Book:
    """A keeper that lists timings once the store has written them, until its process is killed."""

    def __init__(self, run: Run, reported: list[tuple[Key, float]]) -> None:
        self.run, self.reported, self.is_dead = run, reported, False
        self.held: list[tuple[Key, float]] = []

    def timing(self, timing: Timing) -> None:
        """Store a timing."""
        if not self.is_dead:
            self.run.timing(timing)
            self.held.append(((timing.batch_size, timing.round), timing.seconds))
            self.settle()

    def settle(self) -> None:
        """Count what was held back as kept, once it is."""
        if self.run.is_kept:
            self.reported += self.held
            self.held = []

    def candidate(self, candidate: Candidate) -> None:
        """Keep a size."""
        if not self.is_dead:
            self.run.candidate(candidate)

    def outcome(self, outcome: Outcome) -> None:
        """Keep how a size ended."""
        if not self.is_dead:
            self.run.outcome(outcome)

    def spent(self, seconds: float) -> None:
        """Keep the seconds."""
        if not self.is_dead:
            self.run.spent(seconds)


def device_of(draw: random.Random, kind: Kind) -> FakeDevice:
    """Make a device of a known curve."""
    overhead, slope = 10 ** draw.uniform(-4, -2), 10 ** draw.uniform(-5.5, -4)
    curve = affine(overhead, slope) if draw.random() < 0.5 else sawtooth(overhead, slope * 16, 16)
    holes = set(draw.sample(range(1, 257), 60)) if kind.holes else set()
    return FakeDevice(
        curve,
        noise=draw.choice([0.002, 0.01]),
        prepare_seconds=0.05,
        memory_bytes=256 * 1024,
        bytes_needed=lambda n: 1 << 40 if n in holes else 1024 * n,
        seed=draw.randrange(1 << 30),
    )


def try_once(name: str, seed: int) -> Trial:
    """Run once with faults of a kind, with a rerun after each kill, and judge it."""
    kind, draw = KINDS[name], random.Random(f"{name}/{seed}")
    events: list[str] = []
    habits = [habit(random.Random(draw.random()), share, events) for habit, share in kind.habits]
    device = attrs.evolve(device_of(draw, kind), behaviours=tuple(habits))
    session = PatientSession if any(isinstance(habit, Pauses) for habit in habits) else Session
    reported: list[tuple[Key, float]] = []
    with tempfile.TemporaryDirectory(dir=_memory()) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "store.sqlite3"
        for number in range(MOST_SESSIONS):
            kill_at = draw.randrange(1, 60) if kind.kills and number < MOST_SESSIONS - 1 else None
            with _disk(kind, draw, events):
                try:
                    outcome, notes = _session(path, lambda: session(device), reported, kill_at)
                    break
                except Killed:
                    events.append("kill")
        return _judged(
            name, path, device, outcome, notes, reported=reported, events=events, sessions=number + 1
        )  # fmt: skip


def _session(
    path: Path, factory: Callable[[], FakeRunner], reported: list[tuple[Key, float]], kill_at: int | None
) -> tuple[object, list[str]]:
    """Tune until the end, or a kill at this timing (None: no kill); return the answer, or what there was instead."""
    left = kill_at

    def progress(event: Event) -> None:
        nonlocal left
        if left is not None and event.kind == "timing":
            left -= 1
            if left <= 0:
                book.is_dead = True
                raise Killed

    with Run(path, identity={"device": "fake"}, conditions={}, budget=BUDGET) as run:
        book = Book(run, reported)
        steps = list(run.ladder or ladder.plain(Request(max_batch_size=256)))
        if run.ladder is None:
            run.save_ladder(steps, {})
        measured = run.earlier
        if not run.finished:
            measured = loop.Search(
                factory=factory, ladder=steps, goal=GOAL, earlier=run.earlier, keeper=book, budget=BUDGET, seed=0,
                progress=progress, extend=lambda n: ladder.between(n, steps), on_host=False,
            ).run()  # fmt: skip
            run.finish()
            book.settle()
        try:
            rungs = [*steps, *measured.added]
            reply: object = answer.answer(rungs, measured, goal=GOAL, setting={}).batch_size
        except NothingMeasured as error:
            reply = error
        return reply, [sentence(note) for note in run.notes]


def _judged(
    name: str, path: Path, device: FakeDevice, outcome: object, notes: list[str], *,
    reported: list[tuple[Key, float]], events: list[str], sessions: int,
) -> Trial:  # fmt: skip
    (measured,) = judging.kept_rows(path).values()
    lost, twice = judging.lost_and_twice(reported, measured.timings)
    is_warned = any(note.startswith("Timings are not cached") for note in notes)
    reply = outcome if isinstance(outcome, int) else None
    why = "" if is_warned else judging.is_wrong(reply, measured, GOAL, device.curve)
    most = BUDGET + _SLACK_SECONDS + sum(_COSTS.get(fault, 0.0) for fault in events)
    return Trial(
        kind=name,
        faults=len(events),
        sessions=sessions,
        timings=len(reported),
        lost=0 if is_warned else lost,
        warned=is_warned,
        twice=twice,
        no_answer=reply is None,
        wrong=bool(why),
        late=measured.seconds_spent > most,
        what=why or (str(outcome) if reply is None else ""),
    )


@contextlib.contextmanager
def _disk(kind: Kind, draw: random.Random, events: list[str]) -> Iterator[None]:
    """Make the disk under the store full for some writes, or fail at some, while the block runs."""
    if not kind.disk:
        yield
        return
    left = 0

    class Failing(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            nonlocal left
            if statement.startswith(("INSERT INTO timings", "INSERT OR REPLACE", "UPDATE runs SET")):
                if left <= 0 and draw.random() < DISK_SHARE:
                    events.append(f"{kind.disk} disk")
                    left = draw.randrange(1, 40) if kind.disk == "full" else 1
                if left > 0:
                    left -= 1
                    error = sqlite3.OperationalError("injected")
                    error.sqlite_errorname = "INJECTED"
                    error.sqlite_errorcode = sqlite3.SQLITE_FULL if kind.disk == "full" else sqlite3.SQLITE_IOERR_WRITE
                    raise error
            return super().execute(statement, *values)

    connect = functools.partial(sqlite3.connect, factory=Failing)
    with mock.patch.object(sqlite3, "connect", connect):
        yield


def _memory() -> str | None:
    """Return a folder in memory, since thousands of stores are made; None if there is none."""
    place = Path("/dev/shm")  # noqa: S108 - a folder of its own is made in it
    return str(place) if place.is_dir() else None

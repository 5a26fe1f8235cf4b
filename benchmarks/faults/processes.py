"""Runs in real processes that are killed, suspended, interrupted, in a crowd, and on disks that fail."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from benchmarks.faults import judging, sleeper, tuner
from benchmarks.faults.judging import Key, Trial
from cubatch.errors import StoreError
from cubatch.measure.goal import Goal

MOST_SECONDS = 90.0  # of a session: the budget, three hangs, the start of workers, and all that on a busy machine
MOST_SESSIONS = 6
ORPHAN_SECONDS = 5.0
_PRELOADED = Path(__file__).with_name("failing_disk.c")


@attrs.define
class Scene:
    """
    The state of a trial.

    Attributes:
        folder: Folder of all files.
        draw: Draws the faults and their times.
        share: Share of the steps at which memory runs out.
        events: Faults that happened.
    """

    folder: Path
    draw: random.Random
    share: float = 0.0
    events: list[str] = attrs.field(factory=list)
    full_bytes: int | None = None
    environment: dict[str, str] = attrs.field(factory=dict)

    def begin(self, question: str = "one") -> int:
        """Begin or go on with a run, in a process of its own; gives its id."""
        seed = self.draw.randrange(1 << 30)
        if self.environment:  # a library can only be put under a process that is begun
            command = [sys.executable, "-m", "benchmarks.faults.tuner", self.folder, seed, self.share, question]
            to_nowhere = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
            return os.posix_spawn(
                sys.executable, [*map(str, command)], os.environ | self.environment, file_actions=[to_nowhere],
                setsid=True,
            )  # fmt: skip
        if (pid := os.fork()) == 0:
            status = 1
            with contextlib.suppress(BaseException):
                signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore it
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                tuner.tune(self.folder, seed, self.share, question, full_bytes=self.full_bytes)
                status = 0
            os._exit(status)
        return pid

    def wait(self, pid: int, seconds: float) -> int | None:
        """Wait for a process; return its exit status, `None` if it still runs."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        return None

    def worker(self) -> int | None:
        """Return the latest worker, if it runs."""
        pids = [pid for pid in self.workers() if runs(pid)]
        return pids[-1] if pids else None

    def workers(self) -> list[int]:
        """Return all workers so far."""
        file = self.folder / "workers"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def send(self, pid: int | None, number: signal.Signals, whom: str) -> bool:
        """Send a signal to a process that runs."""
        if pid is None or not runs(pid):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            self.events.append(f"{number.name} of the {whom}")
        return True

    def sleep(self, most: float) -> None:
        """Wait for a random time."""
        time.sleep(self.draw.uniform(0.0, most))


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- kinds of faults: each takes a run that has started -------------------


def worker_killed(scene: Scene, _: int) -> None:
    """The worker is killed, up to three times."""
    for _ in range(scene.draw.randint(1, 3)):
        scene.sleep(1.0)
        scene.send(scene.worker(), scene.draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV]), "worker")


def worker_suspended(scene: Scene, _: int) -> None:
    """The worker is stopped, and perhaps continued."""
    scene.sleep(1.5)
    pid = scene.worker()
    scene.send(pid, signal.SIGSTOP, "worker")
    if scene.draw.random() < 0.5:
        scene.sleep(1.0)
        scene.send(pid, signal.SIGCONT, "worker")


def parent_killed(scene: Scene, pid: int) -> None:
    """The tuning process is killed, now and then with a worker that is suspended."""
    scene.sleep(1.5)
    if scene.draw.random() < 0.3:
        scene.send(scene.worker(), signal.SIGSTOP, "worker")
    scene.send(pid, scene.draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]), "parent")


def parent_interrupted(scene: Scene, pid: int) -> None:
    """Ctrl-C, once or twice."""
    scene.sleep(1.5)
    for _ in range(scene.draw.randint(1, 2)):
        scene.send(pid, signal.SIGINT, "parent")
        scene.sleep(0.1)


def parent_suspended(scene: Scene, pid: int) -> None:
    """Ctrl-Z, longer than any deadline of a step or shorter, and fg."""
    scene.sleep(1.5)
    scene.send(pid, signal.SIGSTOP, "parent")
    scene.sleep(2 * tuner.HANG_SECONDS)
    scene.send(pid, signal.SIGCONT, "parent")


def quiet(scene: Scene, _: int) -> None:
    """Nothing but what the worker and the disk do by themselves."""


KINDS: dict[str, Callable[[Scene, int], None]] = {
    "worker killed": worker_killed,
    "worker suspended": worker_suspended,
    "parent killed": parent_killed,
    "parent interrupted": parent_interrupted,
    "parent suspended": parent_suspended,
    "memory runs out in the worker": quiet,
    "no file may grow for a while": quiet,
    "several tuners of one store": parent_killed,
    "reads of the store fail (EIO)": quiet,
}


def try_once(name: str, seed: int) -> Trial:
    """Start a run with faults again and again until it ends by itself, and judge it."""
    scene = Scene(Path(tempfile.mkdtemp(prefix="cubatch-faults-")), random.Random(f"{name}/{seed}"))
    questions = ["one"]
    try:
        if name == "memory runs out in the worker":
            scene.share = 0.01
        elif name == "no file may grow for a while":
            scene.full_bytes = scene.draw.randrange(20, 120) * 1024
        elif name == "several tuners of one store":
            questions = ["one", "one", "another"]
        elif name.startswith("reads of the store"):
            scene.environment = failing_reads(scene)
        return _tried(name, scene, questions)
    finally:
        shutil.rmtree(scene.folder, ignore_errors=True)


def _tried(name: str, scene: Scene, questions: list[str]) -> Trial:
    late, number = False, 0
    for number in range(1, MOST_SESSIONS + 1):
        pids = [scene.begin(question) for question in questions]
        if number < MOST_SESSIONS:
            KINDS[name](scene, scene.draw.choice(pids))
        statuses = []
        for pid in pids:
            statuses.append(scene.wait(pid, MOST_SECONDS))
            if statuses[-1] is None:
                late = True
                os.kill(pid, signal.SIGKILL)
                scene.wait(pid, MOST_SECONDS)
        if name.startswith("reads of the store") and number == 1:
            scene.environment = {}
            continue
        if all(status == 0 for status in statuses):
            break
    return _judged(name, scene, sorted(set(questions)), number, late=late)


def _judged(name: str, scene: Scene, questions: list[str], sessions: int, *, late: bool) -> Trial:
    deadline = time.monotonic() + ORPHAN_SECONDS
    while any(map(runs, scene.workers())) and time.monotonic() < deadline:
        time.sleep(0.05)
    orphans = [pid for pid in scene.workers() if runs(pid)]
    faults = scene.folder / "faults"  # faults of the processes themselves, a line each
    scene.events += faults.read_text().splitlines() if faults.exists() else []
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    trial = Trial(kind=name, faults=len(scene.events), sessions=sessions, timings=0, orphans=len(orphans), late=late)
    if list(scene.folder.glob("*.old-*Z")):
        trial = attrs.evolve(trial, wrong=True, what="a good store was renamed")
    try:
        run_ids = {run.identity["question"]: run.id for run in judging.store.list_runs(scene.folder / "store.sqlite3")}
        rows = judging.kept_rows(scene.folder / "store.sqlite3")
    except StoreError as error:
        return attrs.evolve(trial, no_answer=True, what=str(error))
    for question in questions:
        file = scene.folder / f"answer-{question}"
        reply = json.loads(file.read_text()) if file.exists() else {"batch_size": None, "notes": []}
        is_warned = any(note.startswith("Timings are not cached") for note in reply["notes"])
        measured = rows[run_ids[question]] if question in run_ids else None
        reported = _reported(scene.folder / f"reported-{question}")
        lost, twice = judging.lost_and_twice(reported, measured.timings if measured else ())
        why = ""
        if measured is not None and not is_warned:
            why = judging.is_wrong(reply["batch_size"], measured, Goal(), sleeper.seconds)
        trial = attrs.evolve(
            trial,
            timings=trial.timings + len(reported),
            lost=trial.lost + lost,
            twice=trial.twice + twice,
            warned=trial.warned or is_warned,
            no_answer=trial.no_answer or reply["batch_size"] is None,
            wrong=trial.wrong or bool(why),
            what=trial.what or why or ("; ".join(reply["notes"]) if reply["batch_size"] is None else ""),
        )
    return trial


def _reported(path: Path) -> list[tuple[Key, float]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [((n, number), seconds) for n, number, seconds in rows]


def failing_reads(scene: Scene) -> dict[str, str]:
    """Put a library under the next process, by which reads of the store fail from some moment on."""
    library = library_of_failing_reads(Path(tempfile.gettempdir()))
    first = scene.draw.randrange(1, 10)
    first_run = scene.begin()
    scene.wait(first_run, MOST_SECONDS)
    return {
        "LD_PRELOAD": str(library),
        "FAILING_FROM": str(first),
        "FAILING_FOR": str(scene.draw.choice([1, 3, 1 << 30])),
        "FAILING_LOG": str(scene.folder / "faults"),
    }


def library_of_failing_reads(folder: Path) -> Path:
    """Compile it, once."""
    library = folder / f"cubatch-failing-disk-{os.getuid()}.so"
    if not library.exists() or library.stat().st_mtime < _PRELOADED.stat().st_mtime:
        made = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(made), str(_PRELOADED), "-ldl"], check=True)
        made.rename(library)
    return library

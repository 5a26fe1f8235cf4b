"""
A tuning process as a trial runs it, to be killed, suspended and begun again.

    python -m benchmarks.faults.tuner FOLDER SEED SHARE QUESTION

It stores its timings in FOLDER/store.sqlite3 and writes each stored timing to FOLDER/reported-QUESTION.  Finally it
writes the result and its notes to FOLDER/answer-QUESTION.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import sys
import warnings
from io import RawIOBase
from pathlib import Path

from benchmarks.faults.devices import Book
from cubatch.errors import NothingMeasured
from cubatch.measure import remote, stopwatch
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate
from cubatch.measure.remote import RemoteRunner
from cubatch.measure.runner import FactoryRef
from cubatch.search import loop
from cubatch.search.events import Event
from cubatch.tuning import answer
from cubatch.tuning.notes import sentence
from cubatch.tuning.store import Run

BUDGET, HANG_SECONDS = 2.0, 3.0
SIZES = (1, 4, 16, 64)
SWEEPS = 12  # more than the budget holds, so that a session is as long as that


class Aloud(Book):
    """A book in a file, which survives its process."""

    def __init__(self, run: Run, out: RawIOBase) -> None:
        super().__init__(run, [])
        self._out = out

    def settle(self) -> None:
        """Write the timings that are stored."""
        before = len(self.reported)
        super().settle()
        text = "".join(f"{json.dumps([*key, seconds])}\n" for key, seconds in self.reported[before:])
        if text:
            self._out.write(text.encode())


def tune(folder: Path, seed: int, share: float, question: str, *, full_bytes: int | None = None) -> None:
    """
    Tune once, or continue a run.

    Args:
        folder: Folder of all files.
        seed: Draws the faults of the worker.
        share: Share of the steps at which memory runs out.
        question: Identity of the run.
        full_bytes: Largest size of a file for a quarter of the budget, as on a full disk.
    """
    warnings.simplefilter("ignore")
    stopwatch.HANG_SECONDS = remote.ASK_SECONDS = HANG_SECONDS
    out = (folder / f"reported-{question}").open("ab", buffering=0)
    runner = FactoryRef("benchmarks.faults.sleeper:make", {"folder": str(folder), "seed": seed, "share": share})

    is_noted = False

    def progress(event: Event) -> None:
        nonlocal is_noted
        if full_bytes is not None:
            is_full = BUDGET / 4 < event.done < BUDGET / 2
            resource.setrlimit(resource.RLIMIT_FSIZE, (full_bytes if is_full else resource.RLIM_INFINITY, -1))
            if is_full and not run.is_kept and not is_noted:
                is_noted = True
                (folder / "faults").write_text("full disk\n")

    identity = {"question": question}
    with Run(folder / "store.sqlite3", identity=identity, conditions={}, budget=BUDGET, wait_seconds=60.0) as run:
        steps = list(run.ladder or [Candidate(n) for n in SIZES])
        if run.ladder is None:
            run.save_ladder(steps, {})
        measured, book = run.earlier, Aloud(run, out)
        if not run.finished:
            measured = loop.measure(
                functools.partial(RemoteRunner, runner, prepare_seconds=20.0), steps, goal=Goal(), earlier=run.earlier,
                keeper=book, budget=BUDGET, seed=seed, progress=progress, rounds=SWEEPS,
            )  # fmt: skip
            if full_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, -1))
            run.finish()
            book.settle()
        notes = [sentence(note) for note in run.notes]
        try:
            reply = answer.answer(steps, measured, goal=Goal(), setting={}).batch_size
        except NothingMeasured as error:
            reply, notes = None, [*notes, str(error)]
        file = folder / f"answer-{question}.{os.getpid()}"
        file.write_text(json.dumps({"batch_size": reply, "notes": notes}))
        file.rename(folder / f"answer-{question}")


if __name__ == "__main__":
    tune(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])

"""
A stage in processes that may hang or die: all results are stored, and a new process continues with the next item.

A process writes lines of JSON. "count" is the number of its items, and "begins" an item with its time limit.  "tries"
is a kernel that is launched for the first time, and "ends" the result of an item.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

READY_SECONDS = 180.0  # Python, CuPy, PyTorch, a context and a first kernel, from a cold disk
NEXT_SECONDS = 40.0  # from the end of an item to the next
END_SECONDS = 10.0
MAX_RESTARTS = 4
_TAIL = 2000
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

Record = dict[str, Any]


def end_with(parent: int) -> None:
    """Have the kernel of the system end this process after its parent, also in a call of the driver."""
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


@attrs.define
class Run:
    """
    A stage while it runs.

    Attributes:
        name: Name of the stage.
        limit_seconds: Its time limit.
        status: "not begun", "running", "ok", "timeout" (its time was over) or "failed" (it could not continue).
        message: Reason of the status.
        seconds: Its time.
        ready_seconds: Time until its first process was ready, which the limit does not count.
        items: Results of its items in order, each with its name and status.
        skipped: Names of items that were not reached; at first all.
    """

    name: str
    limit_seconds: float = 0.0
    status: str = "not begun"
    message: str = ""
    seconds: float = 0.0
    ready_seconds: float = 0.0
    items: list[Record] = attrs.field(factory=list)
    skipped: list[str] = attrs.field(factory=list)

    def keep(self, item: Record) -> None:
        """Add the result of an item."""
        self.items.append(item)
        if item["name"] in self.skipped:
            self.skipped.remove(item["name"])


@attrs.define
class Position:
    """
    Progress of a process, from its lines.

    Attributes:
        item: Line of its current item; `None` between items.
        kernel: Kernel that it launches for the first time; empty for none.
        patience: Factor on every limit except those of items.
        limit_seconds: The process hangs if it writes nothing for longer.
        start_time: Monotonic time of its start.
    """

    item: Record | None = None
    kernel: str = ""
    patience: float = 1.0
    limit_seconds: float = attrs.Factory(lambda self: self.patience * READY_SECONDS, takes_self=True)
    start_time: float = attrs.field(factory=time.monotonic)

    def hear(self, facts: Record, run: Run) -> None:
        """Read a line; a result goes into the run."""
        if "count" in facts:
            self.limit_seconds = self.patience * NEXT_SECONDS
            run.ready_seconds = run.ready_seconds or time.monotonic() - self.start_time
        elif "begins" in facts:
            self.item, self.limit_seconds = facts, facts["limit"]
        elif "tries" in facts:
            self.kernel = facts["tries"]
        elif "ends" in facts:
            self.item, self.limit_seconds = None, self.patience * NEXT_SECONDS
            run.keep(facts["item"])


@attrs.frozen
class Fall:
    """
    How a process ended early.

    Attributes:
        why: Its last output, or the time without any.
        status: "hung" or "crashed".
        at: Its progress.
    """

    why: str
    status: str
    at: Position

    @property
    def reason(self) -> str:
        """The last line of `why`, which is the error of a traceback."""
        return self.why.splitlines()[-1] if self.why else "no message"


def run_stage(
    command: Callable[[int, float], Sequence[str]],
    run: Run,
    save: Callable[[], None],
    skipped: dict[str, str],
    patience: float = 1.0,
) -> None:
    """
    Run a stage to its end or limit, even if its processes hang or die.

    Args:
        command: Returns the command line of a child for the first item and the seconds left.
        run: Filled in.
        save: Called after each new result.
        skipped: Reasons of kernels that are left out, by name; a kernel that ends a process is added.
        patience: Factor on limits, for a slow machine.
    """
    start_time, start, fallen, restarts, left = time.monotonic(), 0, 0, 0, run.limit_seconds
    run.status = "running"
    while True:
        before = len(run.items)
        fall = _run_child(command(start, left), run, save, patience)
        run.seconds = time.monotonic() - start_time
        left = run.limit_seconds - (run.seconds - run.ready_seconds)
        if fall is None:
            break
        fallen += 1
        run.message = f"{fallen} processes ended early, the last: {fall.reason}"
        item, variant = fall.at.item, fall.at.kernel
        if item is not None and variant and variant not in skipped:
            skipped[variant] = f"{run.name}, {item['name']}: {fall.reason}"
            if left > 0:
                start = item["begins"]
                continue
        if item is not None:
            run.keep({"name": item["name"], "status": fall.status, "message": fall.why})
        restarts = restarts + 1 if len(run.items) - before <= 1 else 1  # it got no further than to what broke it
        if item is None or restarts > MAX_RESTARTS:  # it did not even begin, or does nothing but fall
            run.status, run.message = "failed", fall.why
            break
        start = item["begins"] + 1
        if left <= 0:
            run.status = "timeout"
            break
    if run.status == "running":
        run.status = "timeout" if run.skipped else "ok"
        if run.skipped:
            run.message = f"{len(run.skipped)} items did not fit {run.limit_seconds:.0f} s"
    save()


def _run_child(command: Sequence[str], run: Run, save: Callable[[], None], patience: float) -> Fall | None:
    """Follow a process; return how it ended early, or `None`."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        at = Position(patience=patience)  # its time begins before the process can
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )  # fmt: skip
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read_lines, args=(process, lines), daemon=True)
        reader.start()
        try:
            hung = _follow(lines, at, run, save)
        except BaseException:  # Ctrl-C too
            _end(process, 0.0)
            raise
        # The child keeps to the stage's time between items; an item may run over by its own limit.
        if not _end(process, 0.0 if hung else END_SECONDS):  # its pipe stays with the thread that reads it
            return Fall(f"{hung or 'it reported everything'}, and it cannot be ended: stuck in the driver", "hung", at)
        reader.join()
        if hung:
            return Fall(hung, "hung", at)
        errors.seek(0)
        last_words = errors.read()[-_TAIL:].strip()
    if process.returncode == 0:
        return None
    return Fall(last_words or f"exit status {process.returncode}", "crashed", at)


def _follow(lines: queue.Queue[str | None], at: Position, run: Run, save: Callable[[], None]) -> str:
    """Read the lines of a process to the end; return what hangs, if anything does."""
    while True:
        try:
            line = lines.get(timeout=at.limit_seconds)
        except queue.Empty:
            what = at.item["name"] if at.item else "the start of the process"
            return f"{what} took longer than {at.limit_seconds:g} s"
        if line is None:
            return ""
        facts = json.loads(line)
        at.hear(facts, run)
        if "ends" in facts:
            save()


def _read_lines(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    for line in process.stdout or ():
        lines.put(line)
    lines.put(None)
    if process.stdout:
        process.stdout.close()


def _end(process: subprocess.Popen[str], patience: float) -> bool:
    """End a process with its children, if it does not end by itself; return whether it has ended."""
    for seconds in (patience, END_SECONDS):
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.killpg(process.pid, signal.SIGKILL)
        else:
            return True
    return False

"""
Everything that only a GPU can show, in one command of under eight minutes.

    python -m benchmarks.gpu_pass --out benchmarks/results/<device>/<date>-<commit>.json
    python -m benchmarks.gpu_pass --dry-run [--device h200-sxm] [--no-compile]     # needs no GPU

Stages run one after another, each in a process of its own with its own time limit, and each useful if the next
fails.  Within a stage the most valuable comes first; what does not fit the time is listed as skipped.  What hangs
or crashes is noted, and a new process goes on behind it.  Where it was a kernel that had just been launched for the
first time, the new process does the same item without that kernel, which is left out of all that follows; the file
says why.  The JSON is put in place whole after every item, at most once a second; the sweeps go into a CSV file
beside it.  It needs NumPy, CuPy and cubatch's own dependencies; with PyTorch, cuDNN takes part.

--stage NAME runs only this stage (may be given again), --only REGEX only items whose name it finds (and the facts),
--seconds bounds the whole.  Where kernels hang, --skip-kernel NAME and --without FAMILY measure the others from the
start.  --commit NAME says what a tree without a repository is a copy of.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs

from benchmarks import gpu_items, gpu_plan, gpu_stages, gpu_sweep
from benchmarks.gpu_stages import Stage
from benchmarks.provenance import provenance
from cubatch.errors import CubatchError, DeviceFailed
from cubatch.hardware import catalogue, probe
from cubatch.kernels import variant

SECONDS = 450.0
READY_SECONDS = 180.0  # Python, CuPy, PyTorch, a context and a first kernel, from a cold disk
NEXT_SECONDS = 40.0  # from the end of an item to the next
END_SECONDS = 10.0
MAX_RESTARTS = 4
SAVE_SECONDS = 1.0
_TAIL = 2000

Record = dict[str, Any]


@attrs.define
class Run:
    """
    A stage while it runs.

    Attributes:
        name: Of the stage.
        limit_seconds: Its time.
        status: "ok", "timeout": its time was over, "failed": it could not go on.
        message: Why.
        seconds: What it took.
        ready_seconds: What its first process took of that until it was ready, which is no part of the stage's time.
        items: What its items gave, in order, each with its name and status.
        skipped: Names of items that did not fit the time.
    """

    name: str
    limit_seconds: float
    status: str = "ok"
    message: str = ""
    seconds: float = 0.0
    ready_seconds: float = 0.0
    items: list[Record] = attrs.field(factory=list)
    skipped: list[str] = attrs.field(factory=list)


@attrs.define
class Position:
    """
    Where a process is, by what it told.

    Attributes:
        item: What it told of the item that it is at; None: it is at none.
        kernel: The kernel that it is launching for the first time; empty for none.
        limit_seconds: It hangs if it says nothing for longer.
        begun: When it was started, on the monotone clock.
    """

    item: Record | None = None
    kernel: str = ""
    limit_seconds: float = READY_SECONDS
    begun: float = attrs.field(factory=time.monotonic)

    def hear(self, facts: Record, run: Run) -> None:
        """Take in a line; what the stage keeps of it goes into the run."""
        if "count" in facts:
            self.limit_seconds = NEXT_SECONDS
            run.ready_seconds = run.ready_seconds or time.monotonic() - self.begun
        elif "begins" in facts:
            self.item, self.limit_seconds = facts, facts["limit"]
        elif "tries" in facts:
            self.kernel = facts["tries"]
        elif "ends" in facts:
            self.item, self.limit_seconds = None, NEXT_SECONDS
            run.items.append(facts["item"])
        elif "skipped" in facts:
            run.skipped = facts["skipped"]


@attrs.frozen
class Fall:
    """
    How a process ended early.

    Attributes:
        why: What it said last, or for how long it said nothing.
        status: "hung" or "crashed".
        at: Where it was.
    """

    why: str
    status: str
    at: Position

    @property
    def reason(self) -> str:
        """The last line of why: of a traceback, the error."""
        return self.why.splitlines()[-1] if self.why else "no message"


# --- the child: one stage's items, a line of JSON for each ---------------------------------------------------------


def child(
    stage: Stage,
    *,
    start: int,
    seconds: float,
    only: str,
    lines: TextIO,
    without: Sequence[str] = (),
    skipped: Sequence[str] = (),
) -> None:
    """Run a stage's items from one on; say which begins, and what it gave."""

    def tell(**facts: Any) -> None:
        lines.write(json.dumps(facts, allow_nan=False) + "\n")
        lines.flush()

    session = gpu_items.session_here(seconds, without, skipped, tell)
    items = gpu_stages.chosen(stage, session.device, only)
    tell(count=len(items))
    for index, item in enumerate(items[start:], start):
        if not session.seconds_left():
            tell(skipped=[left.name for left in items[index:]])
            return
        tell(begins=index, name=item.name, limit=item.limit_seconds)
        begun = time.monotonic()
        try:
            found = {"status": "ok"} | item.run(session)
        except (CubatchError, MemoryError) as error:
            if isinstance(error, DeviceFailed) and error.is_fatal:
                raise  # nothing more runs in this process
            found = {"status": "error", "message": f"{type(error).__name__}: {error}"}
        tell(ends=index, item={"name": item.name, **found, "took_seconds": time.monotonic() - begun})


# --- the parent ----------------------------------------------------------------------------------------------------


def run_stage(
    command: Callable[[int, float], Sequence[str]], run: Run, save: Callable[[], None], skipped: dict[str, str]
) -> None:
    """
    Run a stage to its end or limit, whatever its processes do.

    Args:
        command: Gives the child's command line for the first item and the seconds left.
        run: Filled in.
        save: Called when there is something new to keep.
        skipped: Why kernels are left out, by their names; each that ends a process is added.
    """
    begun, start, fallen, restarts, left = time.monotonic(), 0, 0, 0, run.limit_seconds
    while True:
        before = len(run.items)
        fall = _run_child(command(start, left), run, save)
        run.seconds = time.monotonic() - begun
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
            run.items.append({"name": item["name"], "status": fall.status, "message": fall.why})
        restarts = restarts + 1 if len(run.items) - before <= 1 else 1  # it got no further than to what broke it
        if item is None or restarts > MAX_RESTARTS:  # it did not even begin, or does nothing but fall
            run.status, run.message = "failed", fall.why
            break
        start = item["begins"] + 1
        if left <= 0:
            run.status = "timeout"
            break
    save()


def _run_child(command: Sequence[str], run: Run, save: Callable[[], None]) -> Fall | None:
    """Follow one process; say how it ended early, None if it did not."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )  # fmt: skip
        told: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read_lines, args=(process, told), daemon=True)
        reader.start()
        # The child keeps to the stage's time between items; an item may run over by its own limit.
        at, patience = Position(), END_SECONDS
        try:
            while True:
                try:
                    line = told.get(timeout=at.limit_seconds)
                except queue.Empty:
                    patience = 0.0
                    what = at.item["name"] if at.item else "the start of the process"
                    return Fall(f"{what} took longer than {at.limit_seconds:g} s", "hung", at)
                if line is None:
                    break
                facts = json.loads(line)
                at.hear(facts, run)
                if "ends" in facts:
                    save()
        finally:
            _end(process, patience)
            reader.join()
            if process.stdout:
                process.stdout.close()
        errors.seek(0)
        said = errors.read()[-_TAIL:].strip()
    if process.returncode == 0:
        if run.skipped:
            run.status, run.message = "timeout", f"{len(run.skipped)} items did not fit {run.limit_seconds:.0f} s"
        return None
    return Fall(said or f"exit status {process.returncode}", "crashed", at)


def _read_lines(process: subprocess.Popen[str], told: queue.Queue[str | None]) -> None:
    for line in process.stdout or ():
        told.put(line)
    told.put(None)


def _end(process: subprocess.Popen[str], patience: float) -> None:
    """End a process with all that it started; one that is through ends by itself."""
    try:
        process.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_all(
    stages: Sequence[Stage],
    out: Path,
    *,
    seconds: float,
    only: str,
    facts: Mapping[str, Any],
    without: Sequence[str] = (),
    skipped: Sequence[str] = (),
    commit: str = "",
) -> dict[str, Any]:
    """Run stages into a file, below the facts; time that a stage leaves goes to those after it, by their shares."""
    begun, last = time.monotonic(), 0.0
    found: dict[str, Any] = {
        "schema": 1, "benchmark": "gpu_pass", **provenance(commit), **facts, "seconds": seconds,
        "without": list(without), "skipped_kernels": dict.fromkeys(skipped, "named by --skip-kernel"), "stages": [],
    }  # fmt: skip
    left_out: dict[str, str] = found["skipped_kernels"]
    runs: list[Run] = []

    def save(*, always: bool = False) -> None:
        nonlocal last
        if always or time.monotonic() - last >= SAVE_SECONDS:
            found["stages"] = [attrs.asdict(run) for run in runs]
            found["seconds_spent"] = time.monotonic() - begun
            found["environment"] = {**facts["environment"], **libraries_of(runs)}
            atomically(out, json.dumps(found, indent=1, allow_nan=False) + "\n")
            last = time.monotonic()

    for index, stage in enumerate(stages):
        left = seconds - (time.monotonic() - begun)
        limit = left * stage.seconds / sum(later.seconds for later in stages[index:])
        run = Run(stage.name, limit)
        runs.append(run)
        if limit <= 0:
            run.status, run.message = "timeout", "no time was left"
            continue

        def command(start: int, rest: float, name: str = stage.name) -> list[str]:
            return [
                sys.executable, "-m", "benchmarks.gpu_pass", "--child", name, "--start", str(start),
                "--seconds", str(rest), "--only", only, *(part for name in without for part in ("--without", name)),
                *(part for name in left_out for part in ("--skip-kernel", name)),
            ]  # fmt: skip

        run_stage(command, run, save, left_out)
        save(always=True)
        print(_line(run), flush=True)
    rows = [row for run in runs if run.name == "sweep" for item in run.items for row in item.get("rows", ())]
    if rows:
        write_csv(out.with_suffix(".csv"), rows)
    save(always=True)
    return found


def libraries_of(runs: Sequence[Run]) -> dict[str, str | None]:
    """Find the versions of the vendor's libraries among what the stage of facts gave."""
    items = {item["name"]: item for run in runs if run.name == "facts" for item in run.items}
    return {name: items.get("libraries", {}).get(name) for name in ("torch", "cudnn")}


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the sweeps: a line for each layer, pass and batch size."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, gpu_sweep.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)


def atomically(path: Path, text: str) -> None:
    """Put a whole file in the place of another at once."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _line(run: Run) -> str:
    counts: dict[str, int] = {}
    for item in run.items:
        counts[item["status"]] = counts.get(item["status"], 0) + 1
    said = ", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing"
    rest = f", {len(run.skipped)} skipped" if run.skipped else ""
    return f"{run.name:12} {run.status:8} {run.seconds:6.1f} of {run.limit_seconds:.0f} s: {said}{rest} {run.message}"


def _problem(given: argparse.Namespace) -> str:  # noqa: PLR0911 - one for each
    """Say what is wrong with the options, before anything is started; empty for nothing."""
    try:
        re.compile(given.only)
        if given.seconds <= 0:
            return f"--seconds must be positive, got {given.seconds:g}"
        if given.dry_run:
            catalogue.find(given.device)
            return ""
        if probe.device().kind != "cuda":
            return "there is no GPU in this machine; --dry-run plans and compiles without one"
    except re.error as error:
        return f"--only {given.only!r} is no regular expression: {error}"
    except CubatchError as error:
        return str(error)
    if given.out is None:
        return "--out FILE.json says where the results go"
    return "" if given.out.parent.is_dir() else f"there is no folder {given.out.parent}"


def main(arguments: Sequence[str] | None = None) -> int:
    names = [stage.name for stage in gpu_stages.STAGES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stage", action="append", choices=names)
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--without", action="append", default=[], choices=sorted({k.family for k in variant.kernels()}))
    parser.add_argument("--skip-kernel", action="append", default=[], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--commit", default="", help="of this tree; else $CUBATCH_COMMIT, else what git says")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--device", default="h200-sxm", help="for --dry-run: a GPU of the catalogue")
    parser.add_argument("--no-compile", action="store_true", help="for --dry-run: do not compile the kernels")
    parser.add_argument("--child", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    stages = [stage for stage in gpu_stages.STAGES if given.stage is None or stage.name in given.stage]
    if given.child:
        # What libraries print must not get among the lines.
        lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        child(
            gpu_stages.stage_named(given.child), start=given.start, seconds=given.seconds, only=given.only, lines=lines,
            without=given.without, skipped=given.skip_kernel,
        )  # fmt: skip
        return 0
    if problem := _problem(given):
        parser.error(problem)
    if given.dry_run:
        return gpu_plan.dry_run(stages, given.device, only=given.only, compiled=not given.no_compile)
    found = run_all(
        stages, given.out, seconds=given.seconds, only=given.only, without=given.without, skipped=given.skip_kernel,
        commit=given.commit, facts=gpu_items.device_facts(probe.resolve("cuda")),
    )  # fmt: skip
    broken = [run["name"] for run in found["stages"] if run["status"] == "failed"]
    wrong = [item["name"] for run in found["stages"] for item in run["items"] if item["status"] != "ok"]
    for name, reason in found["skipped_kernels"].items():
        print(f"left out {name}: {reason}")
    print(f"wrote {given.out}; {len(wrong)} items not ok, {len(broken)} stages failed")
    return 1 if broken or wrong else 0


if __name__ == "__main__":
    sys.exit(main())

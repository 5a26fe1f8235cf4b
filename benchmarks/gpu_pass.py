"""
Everything that only a GPU can show, in one command of under eight minutes.

    python -m benchmarks.gpu_pass --out benchmarks/results/<device>/<date>-<commit>.json
    python -m benchmarks.gpu_pass --dry-run [--device h200-sxm] [--no-compile]     # needs no GPU

Stages run one after another, each in a process of its own with its own time limit, and each useful if the next
fails.  Within a stage the most valuable comes first; what does not fit the time is listed as skipped.  What hangs
or crashes is noted, and a new process goes on behind it.  The JSON is put in place whole after every item, at
most once a second; the sweeps go into a CSV file beside it.  It needs NumPy, CuPy and cubatch's own
dependencies; with PyTorch, cuDNN takes part.

--stage NAME runs only this stage (may be given again), --only REGEX only items whose name it finds (and the facts),
--seconds bounds the whole.  Where a family of kernels hangs, --without FAMILY measures the others.  --commit NAME
says what a tree without a repository is a copy of.
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

from benchmarks import gpu_plan, gpu_stages, gpu_sweep
from benchmarks.gpu_stages import Stage
from benchmarks.provenance import provenance
from cubatch import catalogue, kernel, probe
from cubatch.errors import CubatchError

SECONDS = 450.0
START_SECONDS = 40.0  # Python, CuPy, PyTorch and a context, on a slow disk
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
        items: What its items gave, in order, each with its name and status.
        skipped: Names of items that did not fit the time.
    """

    name: str
    limit_seconds: float
    status: str = "ok"
    message: str = ""
    seconds: float = 0.0
    items: list[Record] = attrs.field(factory=list)
    skipped: list[str] = attrs.field(factory=list)


# --- the child: one stage's items, a line of JSON for each ---------------------------------------------------------


def child(stage: Stage, *, start: int, seconds: float, only: str, lines: TextIO, without: Sequence[str] = ()) -> None:
    """Run a stage's items from one on; say which begins, and what it gave."""
    from benchmarks.gpu_items import session_here
    from cubatch.errors import CubatchError, DeviceFailed

    def tell(**facts: Any) -> None:
        lines.write(json.dumps(facts, allow_nan=False) + "\n")
        lines.flush()

    session = session_here(seconds, without)
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


def run_stage(command: Callable[[int, float], Sequence[str]], run: Run, save: Callable[[], None]) -> None:
    """
    Run a stage to its end or limit, whatever its processes do.

    Args:
        command: Gives the child's command line for the first item and the seconds left.
        run: Filled in.
        save: Called when there is something new to keep.
    """
    begun, start, fallen, restarts = time.monotonic(), 0, 0, 0
    while True:
        left, before = run.limit_seconds - (time.monotonic() - begun), len(run.items)
        ended, reached = _run_child(command(start, left), run, save)
        run.seconds = time.monotonic() - begun
        if ended is None:
            break
        fallen += 1
        restarts = restarts + 1 if len(run.items) - before <= 1 else 1  # it got no further than to what broke it
        if reached is None or restarts > MAX_RESTARTS:  # it did not even begin, or does nothing but fall
            run.status, run.message = "failed", ended
            break
        start = reached + 1
        run.message = f"{fallen} processes ended early, the last: {ended.splitlines()[-1] if ended else 'no message'}"
        if run.limit_seconds - run.seconds <= 0:
            run.status = "timeout"
            break
    save()


def _run_child(command: Sequence[str], run: Run, save: Callable[[], None]) -> tuple[str | None, int | None]:
    """Follow one process; give why it ended early, None if it did not, and the item it was at."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )  # fmt: skip
        told: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read_lines, args=(process, told), daemon=True)
        reader.start()
        # The child keeps to the stage's time between items; an item may run over by its own limit.
        current: Record | None = None
        limit, patience = START_SECONDS, END_SECONDS
        try:
            while True:
                try:
                    line = told.get(timeout=limit)
                except queue.Empty:
                    patience = 0.0
                    what = current["name"] if current else "the start of the process"
                    _keep_broken(run, current, "hung", f"no end within {limit:g} s")
                    return f"{what} took longer than {limit:g} s", current["begins"] if current else None
                if line is None:
                    break
                facts = json.loads(line)
                if "begins" in facts:
                    current, limit = facts, facts["limit"]
                elif "ends" in facts:
                    run.items.append(facts["item"])
                    current, limit = None, START_SECONDS
                    save()
                elif "skipped" in facts:
                    run.skipped = facts["skipped"]
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
        return None, None
    _keep_broken(run, current, "crashed", said)
    return said or f"exit status {process.returncode}", current["begins"] if current else None


def _keep_broken(run: Run, current: Record | None, status: str, message: str) -> None:
    if current is not None:
        run.items.append({"name": current["name"], "status": status, "message": message})


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
    stages: Sequence[Stage], out: Path, *, seconds: float, only: str, without: Sequence[str] = (), commit: str = ""
) -> dict[str, Any]:
    """Run stages into a file; time that one leaves goes to those after it, by their shares."""
    begun, last = time.monotonic(), 0.0
    found: dict[str, Any] = {
        "schema": 1, "benchmark": "gpu_pass", **provenance(commit), "seconds": seconds, "without": list(without),
        "stages": [],
    }  # fmt: skip
    runs: list[Run] = []

    def save(*, always: bool = False) -> None:
        nonlocal last
        if always or time.monotonic() - last >= SAVE_SECONDS:
            found["stages"] = [attrs.asdict(run) for run in runs]
            found["seconds_spent"] = time.monotonic() - begun
            found.update(facts_of(runs))
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
            ]  # fmt: skip

        run_stage(command, run, save)
        save(always=True)
        print(_line(run), flush=True)
    rows = [row for run in runs if run.name == "sweep" for item in run.items for row in item.get("rows", ())]
    if rows:
        write_csv(out.with_suffix(".csv"), rows)
    save(always=True)
    return found


def facts_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Find device and environment among what the stage of facts gave."""
    items = {item["name"]: item for run in runs if run.name == "facts" for item in run.items}
    device = items.get("device", {})
    return {name: device.get(name) for name in ("device", "environment")}


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
    parser.add_argument("--without", action="append", default=[], choices=sorted({k.family for k in kernel.kernels()}))
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
            without=given.without,
        )  # fmt: skip
        return 0
    if problem := _problem(given):
        parser.error(problem)
    if given.dry_run:
        return gpu_plan.dry_run(stages, given.device, only=given.only, compiled=not given.no_compile)
    found = run_all(
        stages, given.out, seconds=given.seconds, only=given.only, without=given.without, commit=given.commit
    )
    broken = [run["name"] for run in found["stages"] if run["status"] == "failed"]
    wrong = [item["name"] for run in found["stages"] for item in run["items"] if item["status"] != "ok"]
    print(f"wrote {given.out}; {len(wrong)} items not ok, {len(broken)} stages failed")
    return 1 if broken or wrong else 0


if __name__ == "__main__":
    sys.exit(main())

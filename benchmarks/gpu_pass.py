"""
Everything that only a GPU can show, in one command of under eight minutes.

    python -m benchmarks.gpu_pass --out benchmarks/results/<device>/<date>-<commit>.json
    python -m benchmarks.gpu_pass --dry-run [--device h200-sxm] [--no-compile]     # needs no GPU

Stages run one after another, each in its own process with its own time limit.  Within a stage the most valuable items
come first; items without time are listed as skipped.  A hang or crash is recorded, and a new process continues with the
next item.  If a kernel at its first launch caused it, the new process repeats the item without that kernel.  The file
names the kernel with the reason, and nothing launches it again.  The JSON is replaced after every item, at most once a
second.  The pass needs NumPy, CuPy and cubatch's dependencies.  With PyTorch, cuDNN and PyTorch's kernels take part.

- --stage NAME (repeatable) runs only this stage, --only REGEX only the facts and items whose name it matches.
- --seconds bounds the pass.  --skip-kernel NAME and --without FAMILY leave out kernels that hang.
- --commit NAME is the commit of a tree without a repository.
- --resume FILE continues an earlier pass, which may be the file of --out: items that are ok are not run again.
- --patience FACTOR lengthens all time limits, for a slow machine or compute-sanitizer.
- --small shrinks all arrays, to rehearse a pass on a simulated GPU.

    python -m benchmarks.gpu_pass --pending --minutes 12 --out FILE    # with --dry-run: lists it, needs no GPU

--pending runs the items of benchmarks/pending.toml instead, from the top and within the minutes.  The same FILE again
continues: items that are ok there are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs

from benchmarks.gpu import items as gpu_items, pending, plan, stages as gpu_stages
from benchmarks.gpu.form import text_of
from benchmarks.gpu.process import Run, end_with, run_stage
from benchmarks.gpu.resume import Earlier
from benchmarks.gpu.stages import Stage
from benchmarks.provenance import provenance
from cubatch import whole_file
from cubatch.errors import CubatchError, DeviceFailed, InvalidData
from cubatch.hardware import catalogue, probe
from cubatch.hardware.facts import Device
from cubatch.kernels import variant
from cubatch.report.tables.common import plain

SECONDS = 450.0
SAVE_SECONDS = 1.0
UNAVAILABLE = "unavailable"
"""Status of an item that lacks a package: neither measured nor failed, and tried again on resuming."""


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
    done: Collection[str] = (),
    patience: float = 1.0,
    small: bool = False,
) -> None:
    """Run the items of a stage from `start` on that are not done; report each beginning and each result."""

    def report(**facts: Any) -> None:
        lines.write(json.dumps(plain(facts), allow_nan=False) + "\n")
        lines.flush()

    session = gpu_items.session_here(seconds, report, without=without, skipped=skipped, small=small)
    items = gpu_stages.chosen(stage, session.device, only)
    report(count=len(items))
    left = [(index, item) for index, item in enumerate(items) if index >= start and item.name not in done]
    for index, item in left:
        if not session.seconds_left():
            return
        report(begins=index, name=item.name, limit=patience * item.limit_seconds)
        begun = time.monotonic()
        try:
            result = {"status": "ok"} | item.run(session)
        except (CubatchError, MemoryError) as error:
            if isinstance(error, DeviceFailed) and error.is_fatal:
                raise  # nothing more runs in this process
            result = {"status": "error", "message": f"{type(error).__name__}: {error}"}
        report(ends=index, item={"name": item.name, **result, "took_seconds": time.monotonic() - begun})


# --- the parent ----------------------------------------------------------------------------------------------------


def run_all(
    stages: Sequence[Stage],
    out: Path,
    device: Device,
    *,
    seconds: float,
    only: str,
    facts: Mapping[str, Any],
    without: Sequence[str] = (),
    skipped: Sequence[str] = (),
    commit: str = "",
    resumed: Path | None = None,  # the file of an earlier pass, whose results are taken over; None: there is none
    patience: float = 1.0,
    small: bool = False,
) -> dict[str, Any]:
    """
    Run stages into a file; unused time of a stage goes to later stages by their shares.

    The file names every item from the beginning, under `items` or `skipped` of its stage.

    Raises:
        InvalidData: If the file to resume is no pass, or one of another device.
    """
    begun, last, earlier = time.monotonic(), 0.0, Earlier()
    if resumed is not None:
        earlier = Earlier.read(resumed)
        earlier.check(facts["device"], resumed)
    result: dict[str, Any] = {
        "schema": 1, "benchmark": "gpu_pass", **provenance(commit), **facts, "seconds": seconds,
        "resumed": earlier.calls(), "patience": patience, "small": small, "without": list(without),
        "skipped_kernels": {}, "stages": [],
    }  # fmt: skip
    left_out: dict[str, str] = result["skipped_kernels"]
    left_out |= earlier.skipped_kernels(result["commit"]) | dict.fromkeys(skipped, "named by --skip-kernel")
    planned = {stage.name: [item.name for item in gpu_stages.chosen(stage, device, only)] for stage in stages}
    done = {stage.name: frozenset() if stage.always else earlier.done(stage.name, result["commit"]) for stage in stages}
    runs = [
        Run(stage.name, skipped=[name for name in planned[stage.name] if name not in done[stage.name]])
        for stage in stages
    ]

    def save(*, always: bool = False) -> None:
        nonlocal last
        if always or time.monotonic() - last >= SAVE_SECONDS:
            result["stages"] = earlier.joined([attrs.asdict(run) for run in runs], result["commit"])
            result["seconds_spent"] = time.monotonic() - begun
            result["environment"] = {**facts["environment"], **libraries_of(result["stages"])}
            whole_file.write(out, text_of(result).encode())
            last = time.monotonic()

    save(always=True)
    for index, stage in enumerate(stages):
        left = seconds - (time.monotonic() - begun)
        limit = left * stage.seconds / sum(later.seconds for later in stages[index:])
        run = runs[index]
        run.limit_seconds = limit
        if limit <= 0:
            run.status, run.message = "timeout", "no time was left"
            continue

        def command(start: int, rest: float, name: str = stage.name) -> list[str]:
            return [
                sys.executable, "-m", "benchmarks.gpu_pass", "--child", name, "--parent", str(os.getpid()),
                "--start", str(start), "--seconds", str(rest), "--patience", str(patience), "--only", only,
                "--commit", result["commit"],
                *(() if resumed is None else ("--resume", str(resumed))), *(("--small",) if small else ()),
                *(part for name in without for part in ("--without", name)),
                *(part for name in left_out for part in ("--skip-kernel", name)),
            ]  # fmt: skip

        run_stage(command, run, save, left_out, patience)
        save(always=True)
        print(_line(run), flush=True)
    save(always=True)
    return result


def libraries_of(stages: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return the versions of the vendor's libraries from the stage `facts`."""
    items = {item["name"]: item for run in stages if run["name"] == "facts" for item in run["items"]}
    return {name: items.get("libraries", {}).get(name) for name in ("torch", "cudnn")}


def _line(run: Run) -> str:
    counts: dict[str, int] = {}
    for item in run.items:
        counts[item["status"]] = counts.get(item["status"], 0) + 1
    counted = ", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing"
    rest = f", {len(run.skipped)} skipped" if run.skipped else ""
    return (
        f"{run.name:12} {run.status:8} {run.seconds:6.1f} of {run.limit_seconds:.0f} s: {counted}{rest} {run.message}"
    )


def _problem(given: argparse.Namespace) -> str:  # noqa: PLR0911 - one for each
    """Return what is wrong with the options; empty if nothing is."""
    try:
        re.compile(given.only)
        if given.minutes is not None:
            return "--minutes goes with --pending; --seconds bounds the pass"
        if given.seconds <= 0:
            return f"--seconds must be positive, got {given.seconds:g}"
        if not 1 <= given.patience < math.inf:
            return f"--patience must be at least 1, got {given.patience:g}"
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
        return "--out FILE.json is needed for the results"
    return "" if given.out.parent.is_dir() else f"there is no folder {given.out.parent}"


def _pending(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run or list the pending items; return the exit status, 1 if an item failed."""
    out, minutes = given.out or Path("pending.json"), pending.MINUTES if given.minutes is None else given.minutes
    others = given.stage or given.without or given.skip_kernel or given.resume or given.small
    if others or (given.seconds, given.patience) != (SECONDS, 1.0):
        parser.error("--pending goes with --minutes, --out, --only, --commit, --dry-run and --device only")
    if not 0 < minutes < math.inf:
        parser.error(f"--minutes must be positive, got {minutes:g}")
    if not out.parent.is_dir():
        parser.error(f"there is no folder {out.parent}")
    try:
        items = [item for item in pending.load(given.pending) if re.search(given.only, item.name)]
        if given.dry_run:
            pending.dry_run(items, out, pending.Machine(catalogue.find(given.device)), minutes)
            return 0
        if probe.device().kind != "cuda":
            parser.error("there is no GPU in this machine; --pending --dry-run lists the items without one")
        device = probe.resolve("cuda")
        machine = pending.Machine(device, sum(each.kind == "cuda" for each in probe.devices()))
        facts = provenance(given.commit) | gpu_items.device_facts(device)
        result = pending.run_items(items, out, machine, minutes, facts)
    except (CubatchError, re.error) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(f"interrupted; {out} names every item, and the same command continues")
        return 130
    statuses = [item["status"] for item in result["items"]]
    print(f"wrote {out}; " + ", ".join(f"{statuses.count(each)} {each}" for each in dict.fromkeys(statuses)))
    return 1 if {"failed", "timeout"} & set(statuses) else 0


def _done(given: argparse.Namespace) -> Collection[str]:
    """Return the items that need not run again; earlier stages of this call may have added some to the file."""
    if given.resume is None or gpu_stages.stage_named(given.child).always:
        return ()
    return Earlier.read(given.resume).done(given.child, given.commit)


def main(arguments: Sequence[str] | None = None) -> int:
    names = [stage.name for stage in gpu_stages.STAGES]
    parser = argparse.ArgumentParser(
        usage="python -m benchmarks.gpu_pass --out FILE [options]; --help lists them",  # an error prints it too
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stage", action="append", choices=names)
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--without", action="append", default=[], choices=sorted({k.family for k in variant.kernels()}))
    parser.add_argument("--skip-kernel", action="append", default=[], metavar="NAME")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="continue this pass: items that are ok are not run again"
    )
    parser.add_argument("--patience", type=float, default=1.0, metavar="FACTOR", help="lengthens all time limits")
    parser.add_argument("--small", action="store_true", help="shrink all arrays, to rehearse on a simulated GPU")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--commit", default="", help="of this tree; else $CUBATCH_COMMIT, else of git")
    parser.add_argument(
        "--pending", nargs="?", type=Path, const=pending.LIST, metavar="FILE",
        help="run the items of benchmarks/pending.toml, or of another list",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, help=f"for --pending: time of all items; {pending.MINUTES:g}")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--device", default="h200-sxm", help="for --dry-run: a GPU of the catalogue")
    parser.add_argument("--no-compile", action="store_true", help="for --dry-run: do not compile the kernels")
    parser.add_argument("--child", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    stages = [stage for stage in gpu_stages.STAGES if given.stage is None or stage.name in given.stage]
    if given.child:
        # Output of libraries must not mix with the lines.
        lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        end_with(given.parent)
        try:
            child(
                gpu_stages.stage_named(given.child), start=given.start, seconds=given.seconds, only=given.only,
                lines=lines, without=given.without, skipped=given.skip_kernel, done=_done(given),
                patience=given.patience, small=given.small,
            )  # fmt: skip
        except Exception:  # noqa: BLE001 - the parent reads its last line
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # on a broken GPU the cleanup of libraries fails too
        return 0
    if given.pending:
        return _pending(given, parser)
    if problem := _problem(given):
        parser.error(problem)
    if given.dry_run:
        return plan.dry_run(stages, given.device, only=given.only, compiled=not given.no_compile)
    try:
        device = probe.resolve("cuda")
        result = run_all(
            stages, given.out, device, seconds=given.seconds, only=given.only, without=given.without,
            skipped=given.skip_kernel, commit=given.commit, resumed=given.resume, patience=given.patience,
            small=given.small, facts=gpu_items.device_facts(device),
        )  # fmt: skip
    except InvalidData as error:
        parser.error(str(error))
    broken = [run["name"] for run in result["stages"] if run["status"] == "failed"]
    statuses = [item["status"] for run in result["stages"] for item in run["items"]]
    unavailable = statuses.count(UNAVAILABLE)
    wrong = len(statuses) - statuses.count("ok") - unavailable
    for name, reason in result["skipped_kernels"].items():
        print(f"left out {name}: {reason}")
    rest = f"{unavailable} unavailable, " if unavailable else ""
    print(f"wrote {given.out}; {wrong} items not ok, {rest}{len(broken)} stages failed")
    return 1 if broken or wrong else 0


if __name__ == "__main__":
    sys.exit(main())

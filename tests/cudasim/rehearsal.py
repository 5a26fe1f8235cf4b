"""
Rehearse the GPU pass on a simulated GPU while something goes wrong: nothing may be lost.

    python -m tests.cudasim.rehearsal --out FILE.json

It makes the three calls of benchmarks/gpu/README.md, cut down (`--small`, a few items of every stage) and each with
faults planted, then kills a pass in the middle of a kernel that hangs and resumes it. Every item that was planned must
be ok, named as faulty, or listed as not reached; every kernel that broke something must be named; no process may be
left. The result says how many of each there were, and what is wrong; the status is 1 where anything is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.gpu import stages
from benchmarks.provenance import provenance
from cubatch.hardware import catalogue
from tests.cudasim import building, environment

_GPU, _CATALOGUED = "h100", "h100-sxm"
_MARK = "CUBATCH_REHEARSAL"
_SECONDS = 900.0
"""Of a call, before it counts as hung: what it may take is for its own limits to see to."""

_FACTS = ("facts", "compile", "conformance", "correctness")
_SPEEDS = ("gemm", "steps")
_NETWORKS = ("training", "memory", "tune")


@attrs.frozen
class Call:
    """
    A call of the pass.

    Attributes:
        name: Of what it rehearses.
        stages, only: What of it is done.
        seconds: As --seconds.
        faults: Planted, as src/faults.cpp has them.
        named: Kernels that must be named as left out, by a part of their names.
    """

    name: str
    stages: tuple[str, ...]
    only: str
    seconds: float
    faults: tuple[str, ...] = ()
    named: tuple[str, ...] = ()


CALLS = (
    Call(
        "first call: a kernel faults, one hangs, tensor maps of convolutions are refused, NVML is slow",
        _FACTS,
        "^(TMA|im2col|m16n8|cp.async|probes|wgmma)|linear .*, float16$|conv2d .*fprop, b?float16|depthwise/scalar",
        150.0,
        ("trap:gemm_nt_implicit_gemm_f16_mma_64x64", "hang:gemm_nn_implicit_gemm_f16_mma_64x64", "tensor-map:im2col",
         "nvml:slow", f"memory:{4 << 30}"),
        ("gemm_nt_implicit_gemm_f16_mma_64x64", "gemm_nn_implicit_gemm_f16_mma_64x64"),
    ),
    Call(
        "second call: an allocation fails, a kernel kills its process, time ends before the last items",
        _SPEEDS,
        "^gemm .*, float16$|(56x56x64|14x14x256) .*n=256, .*, float16",
        60.0,
        ("oom:25", "die:gemm_tn_implicit_gemm_f16_mma_64x64", f"memory:{4 << 30}"),
        ("gemm_tn_implicit_gemm_f16_mma_64x64",),
    ),
    Call(
        "third call: a kernel of every training step faults, NVML tells nothing",
        _NETWORKS,
        "resnet50, batch 32|^(resnet50|mnist-cnn), (training|inference), batch (32|128|2048), float32, (cub|im2)"
        "|^mnist-cnn|^resnet18, inference",
        120.0,
        ("trap:softmax_cross_entropy", "nvml:none", f"memory:{4 << 30}"),
    ),
)  # fmt: skip
KILLED = Call(
    "killed in the middle of a kernel",
    ("gemm",),
    "^gemm (nt|tn) 4096 .*, b?float16$",
    120.0,
    ("hang:gemm_tn_implicit_gemm_f16_mma_64x64", f"memory:{4 << 30}"),
)
RESUMED = attrs.evolve(KILLED, name="resumed after the kill, with nothing planted", faults=(f"memory:{4 << 30}",))


@attrs.define
class Rehearsal:
    """
    Calls in one folder, each of which resumes the one before.

    Attributes:
        home: Of the simulation.
        folder: Where the files go.
        mark: By which the processes of this rehearsal are known.
        problems: What is wrong.
    """

    home: Path
    folder: Path
    mark: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    problems: list[str] = attrs.field(factory=list)

    def run(self, call: Call, out: Path, resumed: Path | None = None) -> dict[str, Any]:
        """Make a call and say what became of its items."""
        begun = time.monotonic()
        process = self._start(call, out, resumed)
        try:
            said = process.communicate(timeout=_SECONDS)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()[0]
            self.problems.append(f"{call.name}: it did not end within {_SECONDS:g} s")
        print(said, file=sys.stderr, flush=True)  # noqa: T201 - a command's output
        return self._told(call, out, time.monotonic() - begun)

    def kill(self, call: Call, out: Path) -> dict[str, Any]:
        """Begin a call and kill it when it has been silent: its kernel hangs."""
        begun, process = time.monotonic(), self._start(call, out, None)
        while process.poll() is None and time.monotonic() - begun < _SECONDS:
            quiet = out.exists() and time.time() - out.stat().st_mtime
            if quiet and quiet > 5 and any(run["items"] for run in json.loads(out.read_text())["stages"]):
                break
            time.sleep(0.1)
        if process.poll() is not None:
            self.problems.append(f"{call.name}: it ended before it could be killed")
        process.send_signal(signal.SIGKILL)
        process.wait()
        until = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.1)
        return self._told(call, out, time.monotonic() - begun) | {"processes_left": left}

    def processes(self) -> int:
        """Count the processes that this rehearsal has left running."""
        wanted, found = f"{_MARK}={self.mark}".encode(), 0
        for place in Path("/proc").glob("[0-9]*/environ"):
            try:
                found += wanted in place.read_bytes()
            except OSError:  # another user's, or it has just ended
                continue
        return found

    def _start(self, call: Call, out: Path, resumed: Path | None) -> subprocess.Popen[str]:
        if resumed is None:
            out.unlink(missing_ok=True)  # of an earlier rehearsal
        command = [sys.executable, "-m", "benchmarks.gpu_pass", "--small", "--out", out, "--only", call.only]
        command += [part for name in call.stages for part in ("--stage", name)]
        command += ["--seconds", f"{call.seconds:g}", *(() if resumed is None else ("--resume", resumed))]
        found = environment.of(self.home, devices=_GPU, faults=",".join(call.faults), late=True)
        return subprocess.Popen(
            command, env=found | {_MARK: self.mark}, cwd=environment.ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _told(self, call: Call, out: Path, seconds: float) -> dict[str, Any]:
        found = json.loads(out.read_text(encoding="utf-8"))
        device, runs = catalogue.find(_CATALOGUED), {run["name"]: run for run in found["stages"]}
        counts: dict[str, Any] = {"planned": 0, "ok": 0, "faulty": 0, "not_reached": 0}
        faulty = {}
        for stage in map(stages.stage_named, call.stages):
            run = runs[stage.name]
            items = {item["name"]: item for item in run["items"]}
            planned = [item.name for item in stages.chosen(stage, device, call.only)]
            counts["planned"] += len(planned)
            for name in planned:
                status = items[name]["status"] if name in items else None
                counts["ok"] += status == "ok"
                counts["faulty"] += status not in ("ok", None)
                counts["not_reached"] += status is None and name in run["skipped"]
                if status is None and name not in run["skipped"]:
                    self.problems.append(f"{call.name}: nothing is told of {stage.name}, {name}")
                if status not in ("ok", None):
                    reason = str(items[name].get("message", "")).splitlines()
                    faulty[f"{stage.name}: {name}"] = f"{status}: {reason[-1][:200] if reason else ''}"
        for part in call.named:
            if not any(part in name for name in found["skipped_kernels"]):
                self.problems.append(f"{call.name}: no kernel {part} is named")
        return {
            "name": call.name, "faults": list(call.faults), "seconds": round(seconds, 1), **counts,
            "stages": {name: runs[name]["status"] for name in call.stages},
            "kernels_left_out": found["skipped_kernels"], "faulty_items": faulty,
        }  # fmt: skip


def rehearse(home: Path, folder: Path) -> dict[str, Any]:
    """Make all calls and give what is known of them."""
    rehearsal, told, before = Rehearsal(home, folder), [], None
    for number, call in enumerate(CALLS):
        out = folder / f"{number}.json"
        told.append(rehearsal.run(call, out, before))
        before = out
    killed = folder / "killed.json"
    told.append(rehearsal.kill(KILLED, killed))
    if left := told[-1]["processes_left"]:
        rehearsal.problems.append(f"{KILLED.name}: {left} processes are left")
    told.append(rehearsal.run(RESUMED, killed, killed))
    if told[-1]["faulty"]:
        rehearsal.problems.append(f"{RESUMED.name}: {told[-1]['faulty']} items are faulty")
    if left := rehearsal.processes():
        rehearsal.problems.append(f"{left} processes are left at the end")
    names = ("planned", "ok", "faulty", "not_reached", "seconds")
    return {
        "schema": 1, "benchmark": "gpu_rehearsal", **provenance(), "simulated_device": _GPU,
        "cpus": len(os.sched_getaffinity(0)), **{name: round(sum(each[name] for each in told), 1) for name in names},
        "problems": rehearsal.problems, "calls": told,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse, write the result, and say in one line what it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the files of the calls")
    given = parser.parse_args(arguments)
    if reason := building.reason_to_skip():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as scratch:
        found = rehearse(building.built(), given.keep or Path(scratch))
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in found.items() if name != "calls"}))  # noqa: T201
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

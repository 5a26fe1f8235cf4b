"""
Run the GPU work listed in benchmarks/pending.toml, most valuable first, within a number of minutes.

Each item is a command with a time limit.  An item starts only if its limit fits into the minutes that are left, so the
run ends in time.  The results file is replaced after every item and names all items from the beginning.  A second run
with the same file continues: items that are ok there are not run again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import attrs

from benchmarks.gpu.process import END_SECONDS
from benchmarks.provenance import ROOT, write
from cubatch.errors import InvalidData
from cubatch.hardware.facts import Device

LIST = ROOT / "benchmarks" / "pending.toml"
MINUTES = 12.0
_TAIL = 4000
_MNIST = ROOT / "mnist"
# Asks the kernel to end the item when this process ends, even by SIGKILL, then becomes the item.
_START = (
    "import os, sys; from benchmarks.gpu.process import end_with; end_with(int(sys.argv[1]));"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)

Record = dict[str, Any]


@attrs.frozen
class Machine:
    """The first GPU of a machine and the number of its GPUs."""

    device: Device
    num_gpus: int = 1


def _without_module(name: str) -> Callable[[Machine], str]:
    return lambda _: "" if importlib.util.find_spec(name) else f"{name} is not installed"


def _fewer_than(number: int) -> Callable[[Machine], str]:
    return lambda machine: "" if machine.num_gpus >= number else f"this machine has {machine.num_gpus} of {number} GPUs"


# Each returns why a need is not met, or an empty text.  The name of a GPU is a need as well.
NEEDS: Mapping[str, Callable[[Machine], str]] = {
    **{f"{word} GPUs": _fewer_than(number) for word, number in (("two", 2), ("four", 4), ("eight", 8))},
    "no Hopper": lambda machine: f"{machine.device.name} is a Hopper GPU" if machine.device.arch == "sm_90" else "",
    "MNIST": lambda _: (
        "" if _MNIST.is_dir() else f"{_MNIST} is missing; `cubatch train mnist-cnn --data mnist --download` writes it"
    ),
    "WSL 2": lambda _: "" if "microsoft" in platform.release().lower() else "this machine does not run WSL 2",
    **{name: _without_module(name) for name in ("torch", "torchvision", "pytorch_lightning", "pytest")},
}


@attrs.frozen
class Item:
    """
    A piece of work that needs a GPU.

    Attributes:
        name: Unique in the list; part of file names.
        command: As in a shell.  "{out}" stands for the path of the item's results without a suffix.
        minutes: Its time limit.
        expectation: The figure that is expected, with its source.
        decision: What depends on the figure.
        needs: Keys of `NEEDS`, or names of GPUs such as "titan-x" or "h100-sxm".
    """

    name: str
    command: str
    minutes: float
    expectation: str
    decision: str
    needs: Sequence[str] = ()

    def arguments(self, out: Path) -> list[str]:
        """Return the arguments for Python; the item's own results go next to the file `out`."""
        prefix = f"{out.absolute().with_suffix('')}-{self.name}"
        return [word.replace("{out}", prefix) for word in shlex.split(self.command)[1:]]

    def reason_to_skip(self, machine: Machine, minutes_left: float) -> str:
        """Return why the item cannot run now; empty if it can."""
        slug = machine.device.slug  # empty for a GPU outside the catalogue: then the item runs
        for need in self.needs:
            if need in NEEDS:
                reason = NEEDS[need](machine)
            else:
                is_other = slug and not f"{slug}-".startswith(f"{need}-")  # "h100" names "h100-sxm" too
                reason = f"it needs {need}, and this is {slug}" if is_other else ""
            if reason:
                return reason
        if self.minutes > minutes_left:
            return f"it may take {self.minutes:g} minutes, and {max(0.0, minutes_left):.1f} are left"
        return ""


def load(path: Path = LIST) -> list[Item]:
    """
    Return the items of a list, in its order.

    Raises:
        InvalidData: If the file cannot be read, or an item lacks a field or has an unknown one.
    """
    try:
        return [Item(**table) for table in tomllib.loads(path.read_text(encoding="utf-8"))["item"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidData(str(path), f"it cannot be read: {error}") from error


def _records(items: Sequence[Item], out: Path, device_name: str = "") -> dict[tuple[str, str], Record]:
    """
    Return a record for each item by name and command: that of the results file if it has one, else "skipped".

    Other records of the file follow: items that left the list, or had another command.  Without a device's name, the
    file may be of any device.

    Raises:
        InvalidData: If the file holds something else, or results of another device.
    """
    earlier: dict[tuple[str, str], Record] = {}
    if out.exists():
        remedy = "Name another file with --out"
        try:
            result = json.loads(out.read_text(encoding="utf-8"))
            kind, device = (result["benchmark"], result["schema"]), result["device"]["name"]
            earlier = {(record["name"], record["command"]): record for record in result["items"] if record["status"]}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidData(str(out), f"it is not a result of `gpu_pass --pending`: {error}", remedy) from error
        if kind != ("gpu_pending", 1) or device_name not in ("", device):
            raise InvalidData(str(out), f"it is a result of {kind[0]} on {device}, and this is {device_name}", remedy)
    records = {}
    for item in items:
        key, facts = (item.name, item.command), attrs.asdict(item)
        records[key] = facts | {"status": "skipped", "reason": "not reached"} | earlier.get(key, {}) | facts
    return records | {key: record for key, record in earlier.items() if key not in records}


def run_items(items: Sequence[Item], out: Path, machine: Machine, minutes: float, facts: Mapping[str, Any]) -> Record:
    """
    Run the items that are not ok yet and return the content of the results file.

    Args:
        items: In the order in which they are tried.
        out: The results file; it is continued if it exists.
        machine: The machine that the needs of items are compared with.
        minutes: The time of all items together.
        facts: Device, commit and date, for the file.

    Raises:
        InvalidData: If the file holds something else, or results of another device.
        KeyboardInterrupt: After the interrupted item is recorded.
    """
    end = time.monotonic() + 60 * minutes
    records = _records(items, out, facts["device"]["name"])
    result: Record = {"schema": 1, "benchmark": "gpu_pending", **facts, "minutes": minutes}

    def save() -> None:
        write(out, result | {"items": list(records.values())})

    save()
    for item in items:
        record = records[item.name, item.command]
        if record["status"] == "ok":
            continue
        if reason := item.reason_to_skip(machine, (end - time.monotonic()) / 60):
            if record["status"] == "skipped":  # else keep how an earlier run of the item ended
                record["reason"] = reason
            print(f"{item.name:36} skipped: {reason}", flush=True)
        else:
            # Saved before the item starts: if this process is killed, the file names the item that was running.
            record |= {"status": "failed", "reason": "the run ended before the item did"}
            record |= {name: facts[name] for name in ("date", "commit")}
            save()
            try:
                record |= _run(item, out, facts["commit"])
            except KeyboardInterrupt:
                record["reason"] = "interrupted with Ctrl-C"
                save()
                raise
            print(f"{item.name:36} {record['status']} in {record['seconds']:.1f} s {record['reason']}", flush=True)
        save()
    return result | {"items": list(records.values())}


def _run(item: Item, out: Path, commit: str) -> Record:
    """Run an item in a process group of its own; return its status, exit status, seconds and output."""
    begun, is_over = time.monotonic(), False
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(os.getpid()), *item.arguments(out)], cwd=ROOT,
            env=os.environ | ({"CUBATCH_COMMIT": commit} if commit else {}), stdin=subprocess.DEVNULL,
            stdout=stdout, stderr=stderr, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(60 * item.minutes)
        except subprocess.TimeoutExpired:
            is_over = True
        finally:
            # Also after a normal end: a worker that is left would disturb the next item.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits in the driver may not end
            process.wait(END_SECONDS)
        record = {"seconds": time.monotonic() - begun, "stdout": _tail(stdout), "stderr": _tail(stderr)}
    code = process.returncode
    status, reason = ("failed", f"exit status {code}") if code else ("ok", "")
    if is_over:
        status, reason = "timeout", f"killed after its limit of {item.minutes:g} minutes"
        reason += "; the process still waits in the driver" if code is None else ""
    elif code and code < 0:
        reason = f"ended by {signal.Signals(-code).name}"
    return {"status": status, "reason": reason, "returncode": code, **record}


def _tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * _TAIL))  # a character has at most four bytes
    return file.read().decode(errors="replace")[-_TAIL:]


def dry_run(items: Sequence[Item], out: Path, machine: Machine, minutes: float) -> None:
    """Print what would run within some minutes if each item took all of its time.  It needs no GPU."""
    records, left, able = _records(items, out), minutes, []
    for item in items:
        is_done = records[item.name, item.command]["status"] == "ok"
        able += [] if is_done or item.reason_to_skip(machine, math.inf) else [item.minutes]
        plan = "is ok already" if is_done else item.reason_to_skip(machine, left) or "would run"
        left -= item.minutes if plan == "would run" else 0
        print(f"{item.name:36} {item.minutes:5g} min  {plan}")
    print(
        f"{minutes - left:g} of {minutes:g} minutes are planned. {machine.device.name} can run {len(able)} of "
        f"{len(items)} items, in at most {sum(able):g} minutes; the list has their commands and decisions."
    )

"""Runner factories that a worker imports by name: each misbehaves in one way, at the batch sizes it is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

import cubatch
from cubatch.errors import DeviceNotAvailable, OutOfMemory
from cubatch.measure.runner import Reading
from tests import fakes


class SilentCubatchError(OutOfMemory):
    """A child of ours that errors.py does not have."""


def _grandchild(path: str) -> None:
    child = subprocess.Popen(["sleep", "600"])  # keeps the worker's standard output and error open
    Path(path).write_text(str(child.pid))


def _forked(path: str) -> None:
    if (pid := os.fork()) == 0:  # keeps every pipe of the worker open
        time.sleep(600)
    Path(path).write_text(str(pid))
    os.kill(os.getpid(), signal.SIGSEGV)


def _raise(error: Exception) -> None:
    raise error


def _stick(_: str) -> None:
    """Fail, and from now on at everything, as a CUDA context does after an illegal access."""

    def fail(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    FakeRunner.prepare = FakeRunner.step = fail  # type: ignore[assignment,method-assign]
    fail()


HABITS: dict[str, Callable[[str], None]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda _: (sys.stderr.write("the driver said no\n"), sys.stderr.flush(), os._exit(3)),
    "hang": lambda _: time.sleep(600),
    "nap": lambda _: time.sleep(1.2),
    "sticky": _stick,
    "grandchild": _grandchild,
    "forked": _forked,
    "out of memory": lambda _: _raise(OutOfMemory("conv1", 300, 200, "conv1.y (8, 4, 4, 2)", 7)),
    "own child": lambda _: _raise(SilentCubatchError("conv2")),
    "memory error": lambda _: _raise(MemoryError("numpy could not")),
    "mistake": lambda _: _raise(ZeroDivisionError("in the step")),
    "chatter": lambda _: (
        sys.stdout.write("a library prints\n"),
        sys.stdout.flush(),
        os.write(1, b"and so does C\n"),
        sys.stdin.read(),
    ),
}


class FakeRunner:
    """A runner with a step of known time, that takes up its habit at the batch sizes of `habits`."""

    def __init__(self, habits: dict[str, str], at: str, path: str) -> None:
        self.habits, self.at, self.path = habits, at, path
        self.clock = self
        self.peak_bytes, self.peak_device_bytes, self.compile_seconds = 0, 70, 0.0
        self.steps = 0

    def _live(self, moment: str) -> None:
        habit = self.habits.get(str(self.batch_size))
        if habit is not None and moment == self.at:
            HABITS[habit](self.path)

    def prepare(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.peak_bytes = 10 * batch_size
        self._live("prepare")

    def step(self) -> None:
        self.steps += 1
        self._live("step")

    def now(self) -> float:
        return time.monotonic()

    def time(self, step: Callable[[], None], repeats: int) -> Reading:
        for _ in range(repeats):
            step()
        # 0.1 + 0.2 is no short decimal, so a reading that were rounded on the way would show.
        seconds = (0.1 + 0.2) * self.batch_size
        return Reading(seconds=seconds, sm_clock_mhz=float(self.steps), temperature_celsius=61.0, used_bytes=2**53 + 1)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def free_bytes(self) -> int | None:
        return 2**53 + self.batch_size

    def release(self) -> None:
        self.peak_bytes = 0

    def close(self) -> None:
        if self.path and not self.habits:
            Path(self.path).write_text("closed")


def make(habits: dict[str, str] | None = None, at: str = "prepare", path: str = "") -> FakeRunner:
    """Make a runner; `habits` is {batch size: habit}, `at` is when: "prepare" or "step"."""
    return FakeRunner(habits or {}, at, path)


class LooksRunner(FakeRunner):
    """A runner that steps small sizes to learn of memory, if it has seconds to."""

    def look(self, *, seconds: float, top: int | None, trace_seconds: float) -> dict[str, object]:
        self.batch_size = 1
        if seconds:
            self._live("look")
        return {"largest": top, "seconds": trace_seconds}


def make_look(habit: str) -> LooksRunner:
    """Make a runner that has a habit in the steps by which it learns of memory."""
    return LooksRunner({"1": habit}, "look", "")


class TracedRunner(LooksRunner):
    """A runner whose trace has a habit, unless it is made with the reason why it must not trace."""

    untraced: str | None

    def look(self, *, seconds: float, top: int | None, trace_seconds: float) -> dict[str, object]:
        self.batch_size = 1
        if self.untraced is None:
            self._live("look")
        return {"largest": top, "why_not": self.untraced}


def make_traced(habit: str, untraced: str | None) -> TracedRunner:
    """Make a runner that has a habit in the trace by which it learns of memory."""
    runner = TracedRunner({"1": habit}, "look", "")
    runner.untraced = untraced
    return runner


def make_graphs(path: str = "") -> FakeRunner:
    """Make a runner whose steps are said to be graphs of 7 launches, and which fails at a step of batch size 16."""
    runner = FakeRunner({"16": "mistake"}, "step", path)
    runner.launch = {"launches": 7, "graph": True, "refusal": None}
    return runner


def report(path: str) -> FakeRunner:
    """Make a runner, after writing down what this process is like."""
    facts = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "session": os.getsid(0),
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
        "path": sys.path,
        "pythonpath": os.environ.get("PYTHONPATH"),
        "cubatch": cubatch.__file__,
        "numpy": np.__file__,
        "safe_path": sys.flags.safe_path,
    }
    Path(path).write_text(json.dumps(facts))
    return make()


class NumberedRunner(FakeRunner):
    """An instance: steps of the first one take 1 s, those of others 3 s; others hold no reference and may fail."""

    def __init__(self, number: int, fails_at: int, habit: str) -> None:
        super().__init__({str(fails_at): habit} if number else {}, "prepare", "")
        self.holds, self.seconds = not number, 3.0 if number else 1.0

    def hold_reference(self, repeats: int) -> bool:
        return self.holds

    def time(self, step: Callable[[], None], repeats: int) -> Reading:
        return Reading(seconds=self.seconds)


def numbered(folder: str, fails_at: int = 0, habit: str = "out of memory") -> NumberedRunner:
    """Make a runner, and write the facts of its process into the file of its number."""
    number = len(list(Path(folder).iterdir()))
    facts = {
        "pid": os.getpid(), "cpus": sorted(os.sched_getaffinity(0)), "threads": os.environ.get("OMP_NUM_THREADS"),
    }  # fmt: skip
    Path(folder, f"{number}.json").write_text(json.dumps(facts))
    return NumberedRunner(number, fails_at, habit)


def refuse_once(folder: str) -> FakeRunner:
    """Make a runner in a process that leaves its number; the first one that is bound to several CPUs fails."""
    refused = Path(folder, "refused")
    if len(os.sched_getaffinity(0)) > 1 and not refused.exists():
        refused.touch()
        raise DeviceNotAvailable("cpu", "it is refused once")
    Path(folder, str(os.getpid())).touch()
    return make()


def refuse() -> FakeRunner:
    """Fail to make a runner, in a way that the caller can act on."""
    raise DeviceNotAvailable("cuda", "no driver")


def from_facts(
    *,
    overhead_seconds: float = 1e-3,
    seconds_per_sample: float = 1e-5,
    noise: float = 0.0,
    bytes_per_sample: int = 1024,
    memory_bytes: int | None = None,
    fails_at: Iterable[int] = (),
    dies_at: Iterable[int] = (),
    dies_of: int = signal.SIGKILL,
    hangs_at: Iterable[int] = (),
    hang_seconds: float = 3600.0,
    seed: int = 0,
) -> fakes.FakeRunner:
    """
    Open a session on a device given in numbers, as a worker process is told of one (JSON).

    Its curve is affine.  `fails_at` raises, `dies_at` kills the process by the signal `dies_of`, and
    `hangs_at` sleeps for real.

    Example:
        >>> from_facts(fails_at=[3]).device.throughput(100)
        50000.0
    """
    device = fakes.FakeDevice(
        fakes.affine(overhead_seconds, seconds_per_sample),
        noise=noise,
        bytes_needed=lambda batch_size: bytes_per_sample * batch_size,
        memory_bytes=memory_bytes,
        behaviours=(
            fakes.Fails(fails_at),
            fakes.Dies(dies_at, dies_of),
            fakes.Hangs(hangs_at, hang_seconds, really=True),
        ),
        seed=seed,
    )
    return device()

"""
A runner whose work is done in a worker process, which may die.

The other end of the pipes is `worker`, which says what goes over them.  Here is what must never
go wrong in the user's process: the worker is started with this very cubatch, whatever the folder
holds; each request has a deadline; and however it ends, nothing of the worker stays behind.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import cubatch
from cubatch import checks
from cubatch.errors import CubatchError, InvalidArgument, OutOfMemory, TimedOut, WorkerDied, WorkerFailed
from cubatch.measure import replies
from cubatch.measure.runner import FactoryRef, Reading
from cubatch.units import shown

_REMEDY = "Pass isolate=False (--no-isolate) to have it in this process."
START_SECONDS = 120.0  # imports, and building a module
COMPILE_SECONDS = 120.0  # compiling the kernels of a network on a GPU, in the first `prepare`
LEAST_PREPARE_SECONDS, PREPARE_SHARE = 30.0, 3.0  # least wait for one size, and its share of the budget
PREPARE_SECONDS = 180.0  # of the usual budget
ASK_SECONDS = 30.0  # for what is known or given back
CLOSE_SECONDS = 10.0
SAY_SECONDS = 10.0  # of waiting for one answer, after which it is said what for
_POLL_SECONDS = 0.5
_STDERR_TAIL_BYTES = 4000
_OPENBLAS_FULL = "OpenBLAS error: Memory allocation still failed"  # its only sign: it ends the process by exit(1)

_log = logging.getLogger(__name__)


def prepare_limit(budget: float, *, compiles: bool = False) -> float:
    """
    Return the seconds after which preparing one size counts as hung, by the budget in seconds.

    Args:
        budget: Of the whole run.
        compiles: Whether preparing a size compiles kernels.

    Example:
        >>> prepare_limit(6.0), prepare_limit(60.0), prepare_limit(6.0, compiles=True)
        (30.0, 180.0, 120.0)
    """
    return max(COMPILE_SECONDS if compiles else LEAST_PREPARE_SECONDS, PREPARE_SHARE * budget)


def identify() -> dict[str, str]:
    """Return which cubatch this process runs, so that a worker can tell whether it runs the same."""
    return {"version": cubatch.__version__, "file": str(Path(cubatch.__file__).resolve())}


class RemoteRunner:
    """
    A runner whose work is done in a worker process that may die.

    The worker is started with the runner, and anew by the first `prepare` after its death.

    Args:
        factory: Builds the real runner, in the worker.
        prepare_seconds: Longest wait for one `prepare`; at least START_SECONDS for the start or a `call`.
        remedy: What to do about a WorkerFailed.

    Attributes:
        step_seconds: How long one clock reading may take; None for ever.
        launch: How steps were launched when memory was last asked for, as `NetworkRunner.launch`; None where unknown.

    Raises:
        OutOfMemory: From any call: the worker ran out of memory, or the kernel killed it for memory.
        TimedOut: From any call: it took too long; the worker is gone.
        WorkerFailed: From any call: the worker could not start, died otherwise, was suspended until its time was up,
            or its runner raised an exception that is not cubatch's.
        CubatchError: From any call: whatever the runner itself raised of them.
    """

    def __init__(self, factory: FactoryRef, *, prepare_seconds: float = PREPARE_SECONDS, remedy: str = _REMEDY) -> None:
        self._factory, self._prepare_seconds, self._remedy = factory, prepare_seconds, remedy
        self._start_seconds = max(START_SECONDS, prepare_seconds)
        self.step_seconds: float | None = None
        self.launch: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._doing, self._batch_size = "the start", 0
        self._reference: tuple[int, int] | None = None  # batch size and steps of a block
        self._said = ""
        self.clock = _RemoteClock(self)
        self._start()

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def peak_bytes(self) -> int | None:
        """High water of device memory taken by the engine since the last `prepare`; None where unknown."""
        return self._memory("peak_bytes")

    @property
    def peak_device_bytes(self) -> int | None:
        """What the driver says the worker holds, context included; None where unknown."""
        return self._memory("peak_device_bytes")

    def prepare(self, batch_size: int) -> None:
        """Make the worker ready for steps of this batch size; start it if there is none."""
        self._doing, self._batch_size = f"batch size {batch_size}", batch_size
        if self._process is None:
            self._start()
            self._hold_again()
        self._ask({"do": "prepare", "batch_size": batch_size}, self._prepare_seconds)

    def hold_reference(self, repeats: int) -> bool:
        """Have the worker keep the prepared batch size as the reference; a worker started later holds it again."""
        is_held: bool = self._ask({"do": "hold_reference", "repeats": repeats}, self._prepare_seconds)
        self._reference = (self._batch_size, repeats) if is_held else None
        return is_held

    def _hold_again(self) -> None:
        """Hold the reference in a new worker; where that fails, go on without one: it is no fault of the next size."""
        if self._reference is None:
            return
        size, repeats = self._reference
        try:
            self._ask({"do": "prepare", "batch_size": size}, self._prepare_seconds)
            self._ask({"do": "hold_reference", "repeats": repeats}, self._prepare_seconds)
        except CubatchError as error:
            _log.warning("no reference step of batch size %d in the new measuring process: %s", size, error)
            self._reference = None
            if self._process is None:
                self._start()

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the worker's runner, or read an attribute; start a worker if there is none."""
        self._doing = f"{method}()"
        if self._process is None:
            self._start()
        return self._ask({"do": "call", "method": method, "arguments": arguments}, self._start_seconds)

    def step(self) -> None:
        """Run one step in the worker, and wait for it."""
        self.time(1)

    def time(self, repeats: int) -> Reading:
        """Run so many steps back to back in the worker, and say how long one took there."""
        answer = self._ask({"do": "time", "repeats": repeats}, self.step_seconds)
        try:
            return Reading(**answer)
        except TypeError as error:
            raise WorkerFailed(f"it answered with no reading: {answer!r}", self._remedy) from error

    def free_bytes(self) -> int | None:
        """Ask the worker how much of its device's memory nobody holds."""
        answer = self._ask({"do": "free"}, ASK_SECONDS)
        try:
            return checks.count(answer)
        except (TypeError, ValueError) as error:
            raise WorkerFailed(f"it answered with no number of bytes: {shown(answer)}", self._remedy) from error

    def release(self) -> None:
        """Give back what the last `prepare` took; a dead worker has done so already."""
        if self._process is not None:
            self._ask({"do": "release"}, ASK_SECONDS)

    def restart(self) -> None:
        """End the worker: the next `prepare` has a new one."""
        self._end()

    def close(self) -> None:
        """End the worker: ask it to close its runner, and kill it if it does not."""
        if self._process is not None:
            with contextlib.suppress(CubatchError):  # it ends either way
                self._ask({"do": "close"}, CLOSE_SECONDS)
        self._end()

    def _memory(self, name: str) -> int | None:
        if self._process is None:
            return None
        facts = self._ask({"do": "facts"}, ASK_SECONDS)
        try:
            self.launch, figure = facts["launch"], checks.count(facts[name])
        except (LookupError, TypeError, ValueError) as error:
            raise WorkerFailed(f"it answered with no figures of memory: {shown(facts)}", self._remedy) from error
        return figure

    def _start(self) -> None:
        if not sys.executable:
            raise WorkerFailed("this Python does not know where its own executable is", self._remedy)
        behind = _split_path(sys.path)[1]
        # Memory: no pipe that must be emptied, no disk that may be full.
        self._stderr = os.fdopen(os.memfd_create("cubatch-worker-stderr"), "rb")
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this very cubatch
                [sys.executable, "-P", "-m", "cubatch.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=own_environment(),
                start_new_session=True,
            )
        except OSError as error:
            self._end()
            raise WorkerFailed(f"{sys.executable} cannot be started: {error.strerror}", self._remedy) from error
        start = {
            "do": "start", "factory": self._factory.path, "arguments": dict(self._factory.arguments),
            "expected": identify(), "paths": behind, "pythonpath": os.environ.get("PYTHONPATH"),
        }  # fmt: skip
        try:
            self._ask(start, self._start_seconds)
        except BaseException:
            self._end()
            raise

    def _ask(self, request: dict[str, Any], seconds: float | None) -> Any:
        """Send one request and wait for its answer; on anything but an answer the worker is ended."""
        if self._process is None or self._process.stdin is None:
            raise WorkerFailed("it has ended", "Call prepare() to start another.")
        try:
            line = json.dumps(request).encode() + b"\n"
        except TypeError as error:
            raise InvalidArgument("factory arguments", request, "what JSON can hold") from error
        kills = oom_kills()
        try:
            with contextlib.suppress(BrokenPipeError):  # its end is seen below
                self._process.stdin.write(line)
                self._process.stdin.flush()
            answer = self._read_line(seconds, f"{request['do']} of {self._doing}")
            reply = None if answer is None else replies.parsed(answer)
        except ValueError as error:
            self._end()
            raise WorkerFailed(f"it answered with something that is no answer: {error}", self._remedy) from error
        except TimeoutError:
            is_suspended = _is_suspended(self._process.pid)
            self._end()
            if is_suspended:  # by somebody else, so that it says nothing of what it did
                reason = f"it was suspended at {self._doing}, for all of {seconds or 0.0:g} s"
                raise WorkerDied(reason, self._remedy) from None
            raise TimedOut(f"{request['do']} of {self._doing}", seconds or 0.0) from None
        except BaseException:  # such as Ctrl-C: the answer is still to come, so nothing more can be asked
            self._end()
            raise
        if reply is None:
            raise self._death(kills)
        if "error" in reply:
            raise replies.rebuilt(reply["error"], self._doing, self._remedy)
        return reply["ok"]

    def _read_line(self, seconds: float | None, what: str) -> bytes | None:
        """Read one line within so many seconds (TimeoutError); None where the worker has ended."""
        if self._process is None or self._process.stdout is None:
            return None
        pipe = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        line, waited = b"", 0.0
        while not line.endswith(b"\n"):
            left = _POLL_SECONDS if seconds is None else min(_POLL_SECONDS, seconds - waited)
            before = time.monotonic()
            is_there = poll.poll(max(0.0, left) * 1000)
            waited += min(time.monotonic() - before, 2 * _POLL_SECONDS)  # more is this process's own suspension
            if is_there:
                if not (chunk := os.read(pipe, 65536)):
                    return None
                line += chunk
            elif _has_ended(self._process):  # something that it started holds the pipe open
                return None
            elif left <= 0:
                raise TimeoutError
            if waited >= SAY_SECONDS and what != self._said:
                self._say(what, seconds)
        return line

    def _say(self, what: str, seconds: float | None) -> None:
        """Return what is waited for, once for each thing."""
        self._said = what
        until = "" if seconds is None else f", {seconds:.0f} s at most"
        is_suspended = self._process is not None and _is_suspended(self._process.pid)
        state = " It is suspended: somebody sent it SIGSTOP." if is_suspended else ""
        _log.warning("waiting for %s in the measuring process%s.%s", what, until, state)

    def _death(self, kills_before: int | None) -> CubatchError:
        """Return why the worker is gone; the kernel's count of out-of-memory kills tells those from other kills."""
        code, tail = self._end(grace_seconds=5.0)
        if code == -signal.SIGKILL:
            kills = oom_kills()
            if kills is None or kills_before is None or kills > kills_before:
                return OutOfMemory(f"the kernel killed the measuring process at {self._doing}")
            reason = f"SIGKILL ended it at {self._doing}, and the kernel counted no out-of-memory kill"
        elif code is not None and code > 0 and _OPENBLAS_FULL in tail:
            return OutOfMemory(f"OpenBLAS found no memory at {self._doing}, and ended the measuring process")
        elif code is None:
            reason = f"it closed its pipe at {self._doing} and did not end"
        elif code < 0:
            reason = f"signal {-code} ({signal.strsignal(-code)}) ended it at {self._doing}"
        else:
            reason = f"it ended with exit status {code} at {self._doing}"
        return WorkerDied(f"{reason}; its last words: {tail}" if tail else reason, self._remedy)

    def _end(self, grace_seconds: float = 0.0) -> tuple[int | None, str]:
        """End the worker's whole session, wait for it, and close what led to it; exit code if by itself, last words."""
        code, tail = None, ""
        if (process := self._process) is not None:
            deadline = time.monotonic() + grace_seconds
            while not (ended := _has_ended(process)) and time.monotonic() < deadline:
                time.sleep(0.01)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # not yet waited for, so the number is still its own
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # stuck in a driver: better left behind than waited for
                process.wait(timeout=CLOSE_SECONDS)
            code = process.returncode if ended else None
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):  # what was not sent is nobody's loss
                    if pipe is not None:
                        pipe.close()
            self._process = None  # last, so that a second Ctrl-C leaves it to be ended by close()
        if self._stderr is not None:
            size = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
            tail = self._stderr.read().decode(errors="replace").strip()
            self._stderr.close()
            self._stderr = None
        return code, tail


class _RemoteClock:
    """The worker's stopwatch, and this process's clock for budgets."""

    def __init__(self, runner: RemoteRunner) -> None:
        self._runner = runner

    def now(self) -> float:
        """Seconds on a monotone clock, for budgets and deadlines."""
        return time.monotonic()

    def time(self, step: Callable[[], object], repeats: int) -> Reading:  # noqa: ARG002 - the worker has the step
        """Run the worker's own step `repeats` times back to back and say how long one took on the device."""
        return self._runner.time(repeats)

    def sleep(self, seconds: float) -> None:
        """Let the device rest."""
        time.sleep(seconds)

    def free_bytes(self) -> int | None:
        """Bytes of the device's memory that nobody holds; None where the worker's clock is not told."""
        return self._runner.free_bytes()


def oom_kills() -> int | None:
    """
    Count the processes that the kernel killed for memory so far, in this process's cgroup or else on this machine.

    Both versions of cgroups and /proc/vmstat write it as a line "oom_kill 3"; the kernel counts before it
    kills.  None where none of them can be read.
    """
    files = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if not controllers:
                files.append(f"/sys/fs/cgroup{place}/memory.events")
            elif "memory" in controllers.split(","):
                files.append(f"/sys/fs/cgroup/memory{place}/memory.oom_control")
    # In a container the cgroup's own folder is often mounted at the root.
    files += ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat"]
    for file in files:
        with contextlib.suppress(OSError):
            for line in Path(file).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def own_environment() -> dict[str, str]:
    """Return environment variables with which another Python imports this cubatch from any folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(_split_path(sys.path)[0])}


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether it has ended, without waiting for it, so that its process group can still be named."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # whoever ignores SIGCHLD has it waited for by the kernel
        return True


def _is_suspended(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger, as proc(5) tells its state."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in {"T", "t"}
    return False


def _split_path(entries: Sequence[str]) -> tuple[list[str], list[str]]:
    """
    Split this process's `sys.path` into what the worker's own imports use, and what only the factory may need.

    The folders of the script and of the shell come last in the worker: either may hold a `numpy.py` or
    another `cubatch/`.  The folder that this cubatch came from keeps its place, wherever it is.
    """
    home = Path(cubatch.__file__).resolve().parents[1]
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    by_chance = {Path(main).resolve().parent} if main else set()
    try:
        by_chance.add(Path.cwd().resolve())
    except FileNotFoundError:  # the folder of the shell is gone, and nothing is found through it
        entries = [entry for entry in entries if Path(entry).is_absolute()]
    ahead: list[str] = []
    behind: list[str] = []
    for entry in entries:
        place = Path(entry).resolve()
        is_behind = place != home and (place in by_chance or os.pathsep in entry)
        (behind if is_behind else ahead).append(str(Path(entry).absolute()))
    return [*ahead, str(home)], behind

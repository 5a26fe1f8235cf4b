"""
A runner whose steps run in a worker process, which may die.

`cubatch.worker` is the other end of the pipes and documents the protocol.  The worker runs the same cubatch as this
process, regardless of the current folder.  Each request has a deadline, and the worker and its children always end.
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
from cubatch.errors import CubatchError, InvalidArgument, OutOfMemory, TimedOut, WorkerDied, WorkerFailed
from cubatch.measure import replies
from cubatch.measure.runner import FactoryRef, Reading

_REMEDY = "Pass isolate=False (--no-isolate) to measure in this process."
START_SECONDS = 120.0  # least wait for imports and building a module, and for compiling the kernels of a network
LEAST_PREPARE_SECONDS, PREPARE_SHARE = 30.0, 3.0  # least wait for one size, and its share of the budget
PREPARE_SECONDS = 180.0  # of the usual budget
ASK_SECONDS = 30.0  # for requests without a computation
CLOSE_SECONDS = 10.0
WARN_SECONDS = 10.0  # of waiting for one answer, after which a warning names the request
_POLL_SECONDS = 0.5
_STDERR_TAIL_BYTES = 4000
_OPENBLAS_FULL = "OpenBLAS error: Memory allocation still failed"  # its only sign: it ends the process by exit(1)

_log = logging.getLogger(__name__)


def prepare_limit(budget: float, *, compiles: bool = False) -> float:
    """
    Return the seconds after which preparing one batch size counts as hung, by the budget in seconds.

    Example:
        >>> prepare_limit(6.0), prepare_limit(60.0), prepare_limit(6.0, compiles=True)
        (30.0, 180.0, 120.0)
    """
    return max(START_SECONDS if compiles else LEAST_PREPARE_SECONDS, PREPARE_SHARE * budget)


def identify() -> dict[str, str]:
    """Return "version" and "file" of the cubatch that this process imports; its worker must import the same."""
    return {"version": cubatch.__version__, "file": str(Path(cubatch.__file__).resolve())}


class RemoteRunner:
    """
    A runner whose steps run in a worker process that may die.

    The worker starts with the runner, unless `starts` is False.  The first `prepare` without a worker starts a new one.

    Args:
        factory: Makes the runner in the worker.
        prepare_seconds: Time limit of one `prepare` in seconds. The limit of the start and of a `call` is equal, but at
            least START_SECONDS.
        remedy: The next step that the message of a WorkerFailed suggests.
        cpus: Numbers of the CPUs that the worker is bound to, with as many OpenMP threads; empty: not bound.
        starts: Whether to start the worker now.

    Attributes:
        factory: The argument of this name, which the next start of a worker uses.
        step_seconds: Most seconds of one timing; None: no limit.
        launch: How steps were launched at the last query of memory, as `NetworkRunner.launch`; None if unknown.
        suspended_seconds: Seconds for which this process was suspended while it waited.

    Raises:
        OutOfMemory: From any call: the worker ran out of memory, or the kernel killed it for memory.
        TimedOut: From any call: the answer took longer than the limit, and the worker was ended.
        WorkerFailed: From any call: the worker did not start, died or was suspended, or its runner raised an error
            that is not a CubatchError.
        CubatchError: From any call: an error of the runner.
    """

    def __init__(
        self, factory: FactoryRef, *, prepare_seconds: float = PREPARE_SECONDS, remedy: str = _REMEDY,
        cpus: Sequence[int] = (), starts: bool = True,
    ) -> None:  # fmt: skip
        self.factory, self._prepare_seconds, self._remedy, self._cpus = factory, prepare_seconds, remedy, list(cpus)
        self._start_seconds = max(START_SECONDS, prepare_seconds)
        self.step_seconds: float | None = None
        self.launch: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._doing, self._batch_size = "the start", 0
        self._reference: tuple[int, int] | None = None  # batch size and steps of a block
        self._warned = ""
        self.suspended_seconds = 0.0
        self.clock = _RemoteClock(self)
        if starts:
            self._start()

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def peak_bytes(self) -> int | None:
        """Peak bytes of device memory that the engine allocated since `prepare`; None if unknown, or without worker."""
        return self._memory("peak_bytes")

    @property
    def peak_device_bytes(self) -> int | None:
        """Bytes of device memory that the worker holds by the driver, with its context; None as for `peak_bytes`."""
        return self._memory("peak_device_bytes")

    def prepare(self, batch_size: int) -> float | None:
        """
        Prepare a batch size in the worker, as its runner does; start a worker if there is none.

        Return the seconds of the size's very first step, None if none has run yet, as `Runner.prepare`.
        """
        self._doing, self._batch_size = f"batch size {batch_size}", batch_size
        self.start()
        first: float | None = self._ask({"do": "prepare", "batch_size": batch_size}, self._prepare_seconds)
        return first

    def start(self) -> None:
        """Start a worker, with its reference steps, if there is none."""
        if self._process is None:
            self._start()
            self._hold_again()

    def kill(self) -> None:
        """Kill the worker while another thread waits for its answer; that thread gets an error and ends the worker."""
        if (process := self._process) is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def hold_reference(self, repeats: int) -> bool:
        """
        Keep the prepared batch size for reference steps, also in later workers; return False if the runner cannot.

        `repeats` reference steps run before and after each timing.
        """
        is_held: bool = self._ask({"do": "hold_reference", "repeats": repeats}, self._prepare_seconds)
        if is_held:
            self._reference = self._batch_size, repeats
        return is_held

    def drop_reference(self) -> None:
        """Run no reference steps from now on: end a worker that holds one."""
        if self._reference is not None:
            self._reference = None
            self._end()

    def _hold_again(self) -> None:
        """Hold the reference in a new worker; if that fails, continue without reference steps."""
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

    def call(self, method: str, /, within: float | None = None, **arguments: Any) -> Any:
        """
        Call a method of the worker's runner, or read an attribute, and return the result.

        If there is no worker, one is started, with its reference steps. `within` None: the seconds allowed for a start.
        """
        before, self._doing = self._doing, f"{method}()"
        try:
            self.start()
            return self._ask({"do": "call", "method": method, "arguments": arguments}, within or self._start_seconds)
        finally:
            self._doing = before

    def step(self) -> None:
        """Run one step in the worker and wait for it."""
        self.time(1)

    def time(self, repeats: int) -> Reading:
        """Run `repeats` steps back to back in the worker; return the mean seconds of a step and the GPU's state."""
        return Reading(**self._ask({"do": "time", "repeats": repeats}, self.step_seconds))

    def free_bytes(self) -> int | None:
        """Return the free bytes of the worker's device; None if unknown."""
        free: int | None = self._ask({"do": "free_bytes"}, ASK_SECONDS)
        return free

    def release(self) -> None:
        """Free the memory of the last `prepare`; a dead worker holds none."""
        if self._process is not None:
            self._ask({"do": "release"}, ASK_SECONDS)

    def restart(self) -> None:
        """End the worker; the next `prepare` starts a new one."""
        self._end()

    def close(self) -> None:
        """Close the runner in the worker and end the worker."""
        if self._process is not None:
            with contextlib.suppress(CubatchError):  # it ends either way
                self._ask({"do": "close"}, CLOSE_SECONDS)
        self._end()

    def _memory(self, name: str) -> int | None:
        if self._process is None:
            return None
        facts = self._ask({"do": "facts"}, ASK_SECONDS)
        self.launch = facts["launch"]
        num_bytes: int | None = facts[name]
        return num_bytes

    def _start(self) -> None:
        if not sys.executable:
            raise WorkerFailed("sys.executable is empty, so no other Python can be started", self._remedy)
        behind = _split_path(sys.path)[1]
        # In memory: a pipe would have to be read, and a disk may be full.
        self._stderr = os.fdopen(os.memfd_create("cubatch-worker-stderr"), "rb")
        # The worker inherits the blocked SIGINT: `close` ends it, and no KeyboardInterrupt at any point of its start.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this cubatch
                [sys.executable, "-P", "-m", "cubatch.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=own_environment() | ({"OMP_NUM_THREADS": str(len(self._cpus))} if self._cpus else {}),
                process_group=0,  # a new session would be another scheduling group (sched(7), autogroup)
            )
        except OSError as error:
            self._end()
            raise WorkerFailed(f"{sys.executable} cannot be started: {error.strerror}", self._remedy) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        start = {
            "do": "start", "factory": self.factory.path, "arguments": dict(self.factory.arguments),
            "expected": identify(), "paths": behind, "pythonpath": os.environ.get("PYTHONPATH"), "cpus": self._cpus,
        }  # fmt: skip
        try:
            self._ask(start, self._start_seconds)
        except BaseException:
            self._end()
            raise

    def _ask(self, request: dict[str, Any], seconds: float | None) -> Any:
        """
        Send a request to the worker and return its answer; end the worker if no answer comes within `seconds`.

        `seconds` None means no limit. The errors are those of the class; InvalidArgument for values that are no JSON.
        """
        if self._process is None or self._process.stdin is None:
            raise WorkerFailed("it has ended", "Call prepare() to start a new one.")
        try:
            line = json.dumps(request).encode() + b"\n"
        except TypeError as error:
            raise InvalidArgument("factory arguments", request.get("arguments"), "values that JSON can hold") from error
        kills = oom_kills()
        what = self._doing if request["do"] == "start" else f"{request['do']} of {self._doing}"
        try:
            with contextlib.suppress(BrokenPipeError):  # detected below
                self._process.stdin.write(line)
                self._process.stdin.flush()
            answer = self._read_line(seconds, what)
        except TimeoutError:
            is_suspended = _is_suspended(self._process.pid)
            self._end()
            if is_suspended:  # by another process, so the size is not to blame
                raise WorkerDied(f"it was suspended at {self._doing}", self._remedy) from None
            raise TimedOut(what, seconds or 0.0) from None
        except BaseException:  # such as Ctrl-C: the answer would be taken for that of the next request
            self._end()
            raise
        if answer is None:
            raise self._death(kills)
        reply = json.loads(answer)
        if "error" in reply:
            raise replies.rebuild_error(reply["error"], self._doing, self._remedy)
        return reply["ok"]

    def _read_line(self, seconds: float | None, what: str) -> bytes | None:
        """
        Read one line within `seconds`, else raise TimeoutError; return None if the worker has ended.

        Seconds in which this process was suspended do not count. `what` names the call in a warning after a long wait.
        """
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
            passed = time.monotonic() - before
            suspended = max(0.0, passed - 2 * _POLL_SECONDS)  # a wait this much longer than its limit
            self.suspended_seconds += suspended
            waited += passed - suspended
            if is_there:
                if not (chunk := os.read(pipe, 65536)):
                    return None
                line += chunk
            elif _has_ended(self._process):  # a child of the worker may hold the pipe open
                return None
            elif left <= 0:
                raise TimeoutError
            if waited >= WARN_SECONDS and what != self._warned:
                self._warn(what, seconds)
        return line

    def _warn(self, what: str, seconds: float | None) -> None:
        self._warned = what
        until = "" if seconds is None else f", {seconds:.0f} s at most"
        is_suspended = self._process is not None and _is_suspended(self._process.pid)
        state = " It is suspended: continue it with SIGCONT." if is_suspended else ""
        _log.warning("waiting for %s in the measuring process%s.%s", what, until, state)

    def _death(self, kills_before: int | None) -> CubatchError:
        """
        Return the error for a dead worker: OutOfMemory if it ended for lack of memory, else WorkerDied.

        `kills_before` is the result of `oom_kills()` before the request; None: unknown, and a SIGKILL counts as such.
        """
        code, tail = self._end(grace_seconds=5.0)
        if code == -signal.SIGKILL:
            kills = oom_kills()
            if kills is None or kills_before is None or kills > kills_before:
                return OutOfMemory(f"the kernel killed the measuring process at {self._doing}")
            reason = f"SIGKILL ended it at {self._doing}, and the kernel counted no out-of-memory kill"
        elif code is not None and code > 0 and _OPENBLAS_FULL in tail:
            return OutOfMemory(f"OpenBLAS ended the measuring process for lack of memory at {self._doing}")
        elif code is None:
            reason = f"it closed its pipe at {self._doing} without ending"
        elif code < 0:
            reason = f"signal {-code} ({signal.strsignal(-code)}) ended it at {self._doing}"
        else:
            reason = f"it ended with exit status {code} at {self._doing}"
        return WorkerDied(f"{reason}; its last output: {tail}" if tail else reason, self._remedy)

    def _end(self, grace_seconds: float = 0.0) -> tuple[int | None, str]:
        """End the worker with its children; return its exit code (None unless it ended by itself) and last output."""
        code, tail = None, ""
        if (process := self._process) is not None:
            deadline = time.monotonic() + grace_seconds
            while not (ended := _has_ended(process)) and time.monotonic() < deadline:
                time.sleep(0.01)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its number is not reused before it is waited for
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in a driver
                process.wait(timeout=CLOSE_SECONDS)
            code = process.returncode if ended else None
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()
            self._process = None  # last: after a second Ctrl-C, close() still ends the worker
        if self._stderr is not None:
            size = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
            tail = self._stderr.read().decode(errors="replace").strip()
            self._stderr.close()
            self._stderr = None
        return code, tail


class _RemoteClock:
    """The worker's clock for steps, and this process's clock for budgets, without the seconds of its suspension."""

    def __init__(self, runner: RemoteRunner) -> None:
        self._runner = runner

    def now(self) -> float:
        """Return the seconds of a monotonic clock without those of suspensions, for budgets and deadlines."""
        return time.monotonic() - self._runner.suspended_seconds

    def time(self, step: Callable[[], object], repeats: int) -> Reading:  # noqa: ARG002 - the worker has the step
        """Run the worker's step `repeats` times back to back; return the mean seconds of a step and the GPU's state."""
        return self._runner.time(repeats)

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds, in which the device cools."""
        time.sleep(seconds)

    def free_bytes(self) -> int | None:
        """Return the free bytes of the worker's device; None if unknown."""
        return self._runner.free_bytes()


def oom_kills() -> int | None:
    """
    Return the number of processes that the kernel killed for memory, in this cgroup or else on this machine.

    Both versions of cgroups and /proc/vmstat have a line "oom_kill 3"; the kernel counts before it kills.

    Returns:
        int: The number; None if it cannot be read.
    """
    files = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if not controllers:
                files.append(f"/sys/fs/cgroup{place}/memory.events")
            elif "memory" in controllers.split(","):
                files.append(f"/sys/fs/cgroup/memory{place}/memory.oom_control")
    # In a container the folder of the cgroup is often mounted at the root.
    files += ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat"]
    for file in files:
        with contextlib.suppress(OSError):
            for line in Path(file).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def own_environment() -> dict[str, str]:
    """Return this process's environment variables, with a PYTHONPATH from which any folder imports this cubatch."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(_split_path(sys.path)[0])}


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has ended, without reaping it, so that its process group still exists."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # if SIGCHLD is ignored, the kernel has reaped it
        return True


def _is_suspended(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger, by proc(5)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in {"T", "t"}
    return False


def _split_path(entries: Sequence[str]) -> tuple[list[str], list[str]]:
    """
    Return two parts of this process's `sys.path`: entries that the worker imports from, and those for the factory.

    The folder of the script and the current folder may hold a `numpy.py` or another `cubatch/`.  They come last in the
    worker, except for the folder of this cubatch.
    """
    home = Path(cubatch.__file__).resolve().parents[1]
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    by_chance = {Path(main).resolve().parent} if main else set()
    try:
        by_chance.add(Path.cwd().resolve())
    except FileNotFoundError:  # the current folder was removed
        entries = [entry for entry in entries if Path(entry).is_absolute()]
    ahead: list[str] = []
    behind: list[str] = []
    for entry in entries:
        place = Path(entry).resolve()
        is_behind = place != home and (place in by_chance or os.pathsep in entry)
        (behind if is_behind else ahead).append(str(Path(entry).absolute()))
    return [*ahead, str(home)], behind

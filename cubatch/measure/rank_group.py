"""
Start the rank processes of a data parallel run and send them requests: see `cubatch.rank`.

If one rank ends, all are ended: the others would wait for its gradients.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, Self

from cubatch.errors import CubatchError, MissingDependency, OutOfMemory, WorkerDied, WorkerFailed, install_command
from cubatch.hardware.device_list import cpu_shares
from cubatch.hardware.facts import Device
from cubatch.measure import replies
from cubatch.measure.remote import CLOSE_SECONDS, identify, oom_kills, own_environment

START_SECONDS = 120.0
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0  # for the other ranks to answer once one has failed: they may be waiting for its sums
_TAIL_BYTES = 4000
_REMEDY = "Leave out devices= to use a single device."


class RankGroup:
    """
    The processes of all ranks, one for each device; a context manager.

    Args:
        devices: Device of each rank, as `resolve_devices` returns them: all CPUs or all GPUs.

    Attributes:
        names: Address of each device in the process of its rank, such as "cpu" or "cuda:1".
        address: Path of the socket of this process, which is in the command lines of the ranks.

    Raises:
        MissingDependency: If MPI or NCCL is missing.
        WorkerFailed: If the ranks cannot be started for another reason.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self.names = [device.address for device in devices]
        self._resources = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._stderr: IO[bytes] = self._resources.enter_context(os.fdopen(os.memfd_create("cubatch-ranks"), "rb"))
        try:
            self._start()
            identifier = None if self._is_on_cpu else self.do("identifier", ranks=[0])[0]
            self.do("meet", each=[(name, identifier) for name in self.names])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_on_cpu(self) -> bool:
        return self._devices[0].kind == "cpu"

    def do(
        self,
        method: str,  # a method of `cubatch.rank`
        *arguments: Any,
        # arguments of each rank, which replace `arguments`; None: all ranks get `arguments`
        each: Sequence[tuple[Any, ...]] | None = None,
        ranks: Sequence[int] | None = None,  # the ranks; None: all
        progress: Callable[[Any], object] | None = None,  # called with values that ranks send before they return
    ) -> list[Any]:
        """
        Call a method on several ranks at the same time.

        Returns:
            list[Any]: The result of each rank, in the order of `ranks`.

        Raises:
            WorkerFailed: If a rank has ended, or raised an error that is not a CubatchError.
            OutOfMemory: If a rank ran out of memory, or the kernel killed it for memory.
            CubatchError: The error of a rank, with a note that names the rank.
        """
        waiting = list(range(len(self._connections))) if ranks is None else list(ranks)
        if not self.is_open:
            raise WorkerFailed(f"the ranks had ended before {method}", _REMEDY)
        kills = oom_kills()
        for rank in waiting:
            with contextlib.suppress(ConnectionError):  # detected below
                self._connections[rank].send((method, arguments if each is None else each[rank]))
        answers: dict[int, Any] = {}
        errors: dict[int, Any] = {}
        deadline = math.inf
        while missing := [rank for rank in waiting if rank not in answers and rank not in errors]:
            for rank, (kind, value) in self._receive(missing, deadline, method, kills):
                if kind == "ok":
                    answers[rank] = value
                elif kind == "error":
                    errors[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                elif progress is not None:
                    progress(value)
            if time.monotonic() >= deadline:
                self.close()  # the others wait for the sums of the failed rank
                break
        if errors:
            rank = next((rank for rank, facts in errors.items() if facts["out_of_memory"]), min(errors))
            error = replies.rebuild_error(errors[rank], method, _REMEDY)
            error.add_note(f"It was rank {rank} of {len(self._devices)}, on {self._devices[rank]}.")
            raise error
        return [answers[rank] for rank in waiting]

    def _receive(
        self, ranks: Sequence[int], deadline: float, method: str, kills: int | None
    ) -> list[tuple[int, tuple[str, Any]]]:
        """
        Wait until a rank sends a message, or for the deadline; return (rank, message) of each that has sent one.

        If a rank died, it raises WorkerDied, or OutOfMemory if the system killed it for memory. The error names
        `method`; `kills` is an earlier result of `oom_kills` (None: unknown).
        """
        seconds = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        numbers = {id(self._connections[rank]): rank for rank in ranks}
        messages: list[tuple[int, tuple[str, Any]]] = []
        for ready in wait([self._connections[rank] for rank in ranks], seconds):
            rank = numbers[id(ready)]
            try:
                messages.append((rank, self._connections[rank].recv()))
            except (EOFError, OSError):
                raise self._death(rank, method, kills) from None
        return messages

    @property
    def is_open(self) -> bool:
        """Whether the ranks are running."""
        return bool(self._connections)

    def close(self) -> None:
        """End the processes of all ranks."""
        for connection in self._connections:
            connection.close()  # each rank ends with its connection
        self._connections = []
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # mpiexec ends after its ranks
                process.wait(timeout=CLOSE_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in a driver
                process.wait(timeout=CLOSE_SECONDS)
        self._processes = []
        self._resources.close()

    def _start(self) -> None:
        # Only the user can enter the folder.  It is removed once all ranks are connected, so that a kill leaves none.
        with tempfile.TemporaryDirectory(prefix="cubatch-") as folder, socket.socket(socket.AF_UNIX) as listener:
            self.address = str(Path(folder) / "ranks")
            try:
                listener.bind(self.address)
            except OSError as error:  # 107 characters at most
                remedy = "Let TMPDIR name a folder with a shorter path."
                raise WorkerFailed(f"cannot create a socket at {self.address}: {error}", remedy) from error
            listener.listen(len(self._devices))
            listener.settimeout(_POLL_SECONDS)
            for command in self._commands():
                try:
                    process = subprocess.Popen(  # noqa: S603 - this cubatch
                        command, stdin=subprocess.DEVNULL, stdout=self._writable(), stderr=self._writable(),
                        env=own_environment(), process_group=0,
                    )  # fmt: skip
                except OSError as error:
                    raise WorkerFailed(f"{command[0]} cannot be started: {error.strerror}", _REMEDY) from error
                self._processes.append(process)
            try:
                self._accept(listener)
            except (EOFError, OSError) as error:  # the other end of a connection is closed
                raise self._early_end() from error

    def _commands(self) -> list[list[str]]:
        python = [sys.executable, "-P", "-m", "cubatch.rank", self.address]
        size = len(self._devices)
        if not self._is_on_cpu:
            return [[*python, str(rank), str(size)] for rank in range(size)]
        local = Path(sys.executable).with_name("mpiexec")  # of the MPI that mpi4py uses here
        mpiexec = str(local) if local.exists() else shutil.which("mpiexec")
        if mpiexec is None:
            raise MissingDependency("MPI (mpiexec)", "devices= on a CPU", "mpi")
        return [[mpiexec, "-n", str(size), *python]]

    def _writable(self) -> int:
        return self._stderr.fileno()

    def _accept(self, listener: socket.socket) -> None:
        """
        Wait until all ranks are connected, and send each the numbers of the CPUs that it may use.

        Raises WorkerFailed if a rank ends early, starts late or runs another cubatch, or if MPI counts other ranks.
        """
        deadline = time.monotonic() + START_SECONDS
        connected: dict[int, Connection] = {}
        size = len(self._devices)
        while len(connected) < size:
            if any(process.poll() is not None for process in self._processes):
                raise self._early_end()
            if time.monotonic() > deadline:
                raise WorkerFailed(f"only {len(connected)} of {size} ranks started within {START_SECONDS:g} s", _REMEDY)
            try:
                line, _ = listener.accept()
            except TimeoutError:
                continue
            line.settimeout(None)
            connection = Connection(line.detach())
            self._connections.append(connection)
            hello = connection.recv()
            rank, counted = hello.pop("rank"), hello.pop("size")
            if counted != size:
                remedy = f"mpiexec and mpi4py must belong to the same MPI. {install_command('mpi')}"
                raise WorkerFailed(f"the ranks do not find each other: MPI counts {counted} of {size}", remedy)
            if hello != identify():
                raise WorkerFailed(f"rank {rank} would run cubatch {hello}, not cubatch {identify()}", _REMEDY)
            connected[rank] = connection
        self._connections = [connected[rank] for rank in range(size)]
        shares: list[list[int]] = cpu_shares(size) if self._is_on_cpu else [[]] * size
        for connection, cpus in zip(self._connections, shares, strict=True):
            connection.send(cpus)

    def _early_end(self) -> WorkerFailed:
        return WorkerFailed(f"its ranks ended at their start; their last output: {self._last_output()}", _REMEDY)

    def _death(self, rank: int, method: str, kills_before: int | None) -> CubatchError:
        tail, kills = self._last_output(), oom_kills()
        self.close()
        if kills_before is not None and kills is not None and kills > kills_before:
            return OutOfMemory(f"the kernel killed rank {rank} for memory at {method}")
        return WorkerDied(f"rank {rank} ended at {method}; the last output of all: {tail or 'none'}", _REMEDY)

    def _last_output(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _TAIL_BYTES))
        return self._stderr.read().decode(errors="replace").strip()

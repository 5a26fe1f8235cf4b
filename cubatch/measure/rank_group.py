"""
The ranks of a data parallel run as they are seen from the process that started them: see `cubatch.rank`.

Whatever ends one of them ends all, for those that it leaves would wait for its sums.
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
from cubatch.hardware.facts import Device
from cubatch.hardware.several import cpu_shares
from cubatch.measure import replies
from cubatch.measure.remote import CLOSE_SECONDS, identify, oom_kills, own_environment

START_SECONDS = 120.0
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0  # for the others to answer once one has failed, who may be waiting for its sums
_TAIL_BYTES = 4000
_REMEDY = "Without devices= one device does it alone."


class RankGroup:
    """
    Processes that work together, one for each device; a context manager.

    Args:
        devices: Of each rank, as `several` gives them.

    Attributes:
        names: What each rank calls its device.
        address: Where they find this process, which is in their command lines.

    Raises:
        MissingDependency: If they cannot be started for want of MPI or NCCL.
        WorkerFailed: If they cannot be started otherwise.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self.names = [one.address for one in devices]
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
        deed: str,
        *arguments: Any,
        each: Sequence[tuple[Any, ...]] | None = None,
        ranks: Sequence[int] | None = None,
        told: Callable[[Any], object] | None = None,
    ) -> list[Any]:
        """
        Have ranks do something together.

        Args:
            deed: A method of `cubatch.rank`'s.
            arguments: Its arguments.
            each: What each rank is given in their place.
            ranks: Which of them do it; None: all.
            told: Is called with what they say meanwhile.

        Returns:
            list[Any]: What it gave on each, in their order.

        Raises:
            OutOfMemory: If one of them ran out of memory.
            WorkerDied: If one of them ended, and so all did.
            CubatchError: What one of them raised.
        """
        asked = list(range(len(self._connections))) if ranks is None else list(ranks)
        if not self.is_open:
            raise WorkerFailed(f"its ranks had ended before {deed}", _REMEDY)
        kills = oom_kills()
        for rank in asked:
            with contextlib.suppress(ConnectionError):  # its end is seen below
                self._connections[rank].send((deed, arguments if each is None else each[rank]))
        answers: dict[int, Any] = {}
        errors: dict[int, Any] = {}
        deadline = math.inf
        while missing := [rank for rank in asked if rank not in answers and rank not in errors]:
            for rank, (kind, value) in self._heard(missing, deadline, deed, kills):
                if kind == "ok":
                    answers[rank] = value
                elif kind == "error":
                    errors[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                elif told is not None:
                    told(value)
            if time.monotonic() >= deadline:
                self.close()  # the others wait for the sums of one that failed
                break
        if errors:
            rank = next((rank for rank, facts in errors.items() if facts["out_of_memory"]), min(errors))
            error = replies.rebuilt(errors[rank], deed, _REMEDY)
            error.add_note(f"It was rank {rank} of {len(self._devices)}, on {self._devices[rank]}.")
            raise error
        return [answers[rank] for rank in asked]

    def _heard(
        self, ranks: Sequence[int], deadline: float, deed: str, kills: int | None
    ) -> list[tuple[int, tuple[str, Any]]]:
        """Wait for words of some ranks, and give those that came; none when the deadline has."""
        seconds = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        numbers = {id(self._connections[rank]): rank for rank in ranks}
        heard: list[tuple[int, tuple[str, Any]]] = []
        for ready in wait([self._connections[rank] for rank in ranks], seconds):
            rank = numbers[id(ready)]
            try:
                heard.append((rank, self._connections[rank].recv()))
            except (EOFError, OSError):
                raise self._death(rank, deed, kills) from None
        return heard

    @property
    def is_open(self) -> bool:
        """Whether the ranks are there."""
        return bool(self._connections)

    def close(self) -> None:
        """End all ranks, whatever they are doing."""
        for connection in self._connections:
            connection.close()  # at whose end each of them ends
        self._connections = []
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # mpiexec ends after its ranks
                process.wait(timeout=CLOSE_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver: better left than waited for
                process.wait(timeout=CLOSE_SECONDS)
        self._processes = []
        self._resources.close()

    # --- the start -----------------------------------------------------------------------------

    def _start(self) -> None:
        # The folder is its owner's alone, and goes once all have come: whoever is killed later leaves none.
        with tempfile.TemporaryDirectory(prefix="cubatch-") as folder, socket.socket(socket.AF_UNIX) as listener:
            self.address = str(Path(folder) / "ranks")
            try:
                listener.bind(self.address)
            except OSError as error:  # 107 characters at most
                remedy = "Let TMPDIR name a folder with a shorter path."
                raise WorkerFailed(f"no socket can be made at {self.address}: {error}", remedy) from error
            listener.listen(len(self._devices))
            listener.settimeout(_POLL_SECONDS)
            for command in self._commands():
                try:
                    process = subprocess.Popen(  # noqa: S603 - this very cubatch
                        command, stdin=subprocess.DEVNULL, stdout=self._writable(), stderr=self._writable(),
                        env=own_environment(), start_new_session=True,
                    )  # fmt: skip
                except OSError as error:
                    raise WorkerFailed(f"{command[0]} cannot be started: {error.strerror}", _REMEDY) from error
                self._processes.append(process)
            try:
                self._accept(listener)
            except (EOFError, OSError) as error:  # of a connection whose other end is gone
                raise self._early_end() from error

    def _commands(self) -> list[list[str]]:
        python = [sys.executable, "-P", "-m", "cubatch.rank", self.address]
        size = len(self._devices)
        if not self._is_on_cpu:
            return [[*python, str(rank), str(size)] for rank in range(size)]
        beside = Path(sys.executable).with_name("mpiexec")  # of the MPI that mpi4py finds here, too
        mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
        if mpiexec is None:
            raise MissingDependency("MPI (mpiexec)", "devices= on a CPU", "mpi")
        return [[mpiexec, "-n", str(size), *python]]

    def _writable(self) -> int:
        return self._stderr.fileno()

    def _accept(self, listener: socket.socket) -> None:
        """Wait until all ranks have come, and give each its CPUs."""
        deadline = time.monotonic() + START_SECONDS
        came: dict[int, Connection] = {}
        size = len(self._devices)
        while len(came) < size:
            if any(process.poll() is not None for process in self._processes):
                raise self._early_end()
            if time.monotonic() > deadline:
                raise WorkerFailed(f"only {len(came)} of {size} ranks started within {START_SECONDS:g} s", _REMEDY)
            try:
                line, _ = listener.accept()
            except TimeoutError:
                continue
            line.settimeout(None)
            connection = Connection(line.detach())
            self._connections.append(connection)
            hello = connection.recv()
            rank, found = hello.pop("rank"), hello.pop("size")
            if found != size:
                remedy = f"mpiexec and mpi4py must belong to the same MPI. {install_command('mpi')}"
                raise WorkerFailed(f"its ranks do not find each other: MPI counts {found} of {size}", remedy)
            if hello != identify():
                raise WorkerFailed(f"it would run cubatch {hello}, not cubatch {identify()}", _REMEDY)
            came[rank] = connection
        self._connections = [came[rank] for rank in range(size)]
        shares: list[list[int]] = cpu_shares(size) if self._is_on_cpu else [[]] * size
        for connection, cpus in zip(self._connections, shares, strict=True):
            connection.send(cpus)

    def _early_end(self) -> WorkerFailed:
        return WorkerFailed(f"its ranks ended at their start; their last words: {self._last_words()}", _REMEDY)

    # --- the end -------------------------------------------------------------------------------

    def _death(self, rank: int, deed: str, kills_before: int | None) -> CubatchError:
        """Return why a rank is gone; the others are ended."""
        tail, kills = self._last_words(), oom_kills()
        self.close()
        if kills_before is not None and kills is not None and kills > kills_before:
            return OutOfMemory(f"the kernel killed rank {rank} for memory at {deed}")
        return WorkerDied(f"rank {rank} ended at {deed}; the last words of all: {tail or 'none'}", _REMEDY)

    def _last_words(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _TAIL_BYTES))
        return self._stderr.read().decode(errors="replace").strip()

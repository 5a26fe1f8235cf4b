"""
Sums over all ranks of a data parallel run: by MPI for host arrays, by NCCL on GPUs.

A sum begins as soon as its array is complete, and is awaited where it is needed. Ranks compute in the meantime
(Li et al., 2020, arXiv:2006.15704). All ranks begin the same sums in the same order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from cubatch.engine import backend
from cubatch.errors import MissingDependency, WorkerFailed
from cubatch.hardware import gpu_library

_NAP_SECONDS = 1e-4
_TEST_MPI = (
    "Leave out devices= to use a single device, or test MPI with: mpiexec -n 2 python -m mpi4py.bench helloworld"
)
_MOST_SPANS = 4096


@attrs.frozen
class Span:
    """The begin and end of one sum over ranks in seconds, and the bytes that were summed."""

    begin: float  # begin, end: seconds on the host's monotonic clock; on a GPU since the begin of the first span
    end: float
    bytes: int  # size of the array that was summed


@attrs.frozen
class Exchanged:
    """The seconds of the sums over ranks since the last call of `Exchange.exchanged`."""

    spans: tuple[Span, ...]  # begin and end of the latest sums in seconds, in order
    exposed_seconds: float  # seconds for which computing waited for sums

    @property
    def seconds(self) -> float:
        """Total duration of the sums in seconds."""
        return sum(span.end - span.begin for span in self.spans)


class Exchange(Protocol):
    """Sums arrays over all ranks, in place."""

    rank: int  # the number of this rank, from 0
    size: int  # the number of ranks
    bucket_bytes: int  # least bytes for which a sum is worth its overhead
    xp: Any  # the array module

    def begin(self, array: Any) -> None:
        """
        Begin to replace a contiguous array by its sum over all ranks, once all work enqueued before is done.

        Only work enqueued after `finish` may use the array.
        """

    def finish(self) -> None:
        """Make all later work wait for the sums that were begun."""

    def exchanged(self) -> Exchanged:
        """Wait for the sums since the last call, and return their begins and ends in seconds."""

    def close(self) -> None:
        """Release the resources."""


def totals(exchange: Exchange, numbers: Sequence[float]) -> list[float]:
    """Return each number's sum over all ranks, in one exchange; every rank must call this."""
    array = exchange.xp.asarray(np.array(numbers, np.float64))
    exchange.begin(array)
    exchange.finish()
    return [float(number) for number in backend.to_host(array)]


class MpiExchange:
    """
    Sums host arrays over all ranks by MPI, in a thread.

    MPI moves data only during calls, and waiting in a call keeps a core busy. So the thread polls, and sleeps in
    between as long as there is something left to compute on that core.

    Raises:
        MissingDependency: If mpi4py or an MPI library is missing.
    """

    bucket_bytes = 1 << 20
    xp: Any = np

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # the second: no MPI library
            raise MissingDependency("mpi4py", "devices= on a CPU", "mpi") from error
        self._communicator: Any = MPI.COMM_WORLD.Dup()
        self._in_place = MPI.IN_PLACE
        self.rank, self.size = self._communicator.rank, self._communicator.size
        self._arrays: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done = threading.Semaphore(0)
        self._begun = 0
        self._is_awaited = False
        self._error: BaseException | None = None
        self._spans: deque[Span] = deque(maxlen=_MOST_SPANS)
        self._exposed = 0.0
        threading.Thread(target=self._serve, name="cubatch-exchange", daemon=True).start()

    def begin(self, array: Any) -> None:
        """Queue an array for the thread, which replaces it by its sum over all ranks."""
        self._begun += 1
        self._arrays.put(array)

    def finish(self) -> None:
        """Wait for all sums that were begun; raise WorkerFailed if one failed."""
        if not self._begun:
            return
        begun = time.perf_counter()
        self._is_awaited = True
        for _ in range(self._begun):
            self._done.acquire()
        self._begun, self._is_awaited = 0, False
        self._exposed += time.perf_counter() - begun
        if self._error is not None:
            raise WorkerFailed(f"MPI could not sum gradients: {self._error}", _TEST_MPI) from self._error

    def exchanged(self) -> Exchanged:
        """Wait for the sums since the last call, and return their begins and ends in seconds."""
        self.finish()
        exchanged = Exchanged(tuple(self._spans), self._exposed)
        self._spans.clear()
        self._exposed = 0.0
        return exchanged

    def close(self) -> None:
        """End the thread that sums arrays."""
        self._arrays.put(None)

    def _serve(self) -> None:
        while (array := self._arrays.get()) is not None:
            begun = time.perf_counter()
            try:
                request = self._communicator.Iallreduce(self._in_place, array)
                while not request.Test():
                    time.sleep(0.0 if self._is_awaited else _NAP_SECONDS)
            except Exception as error:  # noqa: BLE001 - raised where it is awaited
                self._error = error
            self._spans.append(Span(begun, time.perf_counter(), array.nbytes))
            self._done.release()


class NcclExchange:
    """
    Sums GPU arrays over all ranks by NCCL, on a separate stream.

    Args:
        identifier: Identifier of the run, from `nccl_identifier` on rank 0.
        rank: The number of this rank.
        size: The number of ranks.
        index: Number of this rank's GPU in CuPy.

    Raises:
        MissingDependency: If CuPy is not installed, or comes without NCCL.
    """

    bucket_bytes = 25 << 20  # default of PyTorch's DistributedDataParallel, from measurements (arXiv:2006.15704)

    def __init__(self, identifier: Any, rank: int, size: int, index: int) -> None:
        self.xp, self._nccl = gpu_library.cupy(), _nccl()
        self.xp.cuda.Device(index).use()
        self.rank, self.size = rank, size
        self._communicator = self._nccl.NcclCommunicator(size, identifier, rank)
        self._stream = self.xp.cuda.Stream(non_blocking=True)
        # bfloat16 is stored in arrays of uint16.
        names = {"f2": "NCCL_FLOAT16", "u2": "NCCL_BFLOAT16", "f4": "NCCL_FLOAT32", "f8": "NCCL_FLOAT64"}
        self._types = {kind: getattr(self._nccl, name) for kind, name in names.items()}
        self._first: Any = None
        self._events: deque[tuple[Any, Any, int]] = deque(maxlen=_MOST_SPANS)
        self._waits: deque[tuple[Any, Any]] = deque(maxlen=_MOST_SPANS)

    def begin(self, array: Any) -> None:
        """Enqueue an array's sum over all ranks on the separate stream, after all work of the current stream."""
        event = self.xp.cuda.Event
        self._stream.wait_event(self.xp.cuda.get_current_stream().record(event()))
        begun = self._stream.record(event())
        self._communicator.allReduce(
            array.data.ptr, array.data.ptr, array.size, self._types[array.dtype.str[1:]], self._nccl.NCCL_SUM,
            self._stream.ptr,
        )  # fmt: skip
        self._first = self._first or begun
        self._events.append((begun, self._stream.record(event()), array.nbytes))

    def finish(self) -> None:
        """Make the current stream wait for all sums that were begun."""
        if not self._events:
            return
        current = self.xp.cuda.get_current_stream()
        before = current.record(self.xp.cuda.Event())
        current.wait_event(self._events[-1][1])
        self._waits.append((before, current.record(self.xp.cuda.Event())))

    def exchanged(self) -> Exchanged:
        """Wait for the device, and return the begins and ends of the sums since the last call in seconds."""
        self.xp.cuda.get_current_stream().synchronize()
        self._stream.synchronize()
        begun = self._first
        spans = tuple(Span(self._seconds(begun, a), self._seconds(begun, b), n) for a, b, n in self._events)
        exchanged = Exchanged(spans, sum(self._seconds(a, b) for a, b in self._waits))
        self._events.clear()
        self._waits.clear()
        self._first = None
        return exchanged

    def close(self) -> None:
        """Destroy the NCCL communicator."""
        self._communicator.destroy()

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(self.xp.cuda.get_elapsed_time(begin, end)) / 1e3


def nccl_identifier() -> Any:
    """Return a new identifier of a run for NCCL; one rank creates it and sends it to the others."""
    return _nccl().get_unique_id()


def _nccl() -> Any:
    gpu_library.cupy()
    from cupy.cuda import nccl

    if not nccl.available:
        raise MissingDependency("NCCL", "devices= on GPUs", "nccl")
    return nccl

"""
What ranks of a data parallel run sum over all of them: by MPI where arrays are the host's, by NCCL on GPUs.

A sum is begun as soon as what is summed is made, and awaited where it is needed, so that ranks go on computing while
it is under way (Li et al., 2020, arXiv:2006.15704).  All ranks begin the same sums in the same order.
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
_KEPT_SPANS = 4096


@attrs.frozen
class Span:
    """
    One sum while it was under way.

    Attributes:
        begin, end: Seconds on the host's monotone clock; on a GPU since the first that is told of.
        bytes: Of what was summed.
    """

    begin: float
    end: float
    bytes: int


@attrs.frozen
class Exchanged:
    """
    What sums took since they were last asked for.

    Attributes:
        spans: Each of them, in order.
        exposed_seconds: How long the computing waited for them.
    """

    spans: tuple[Span, ...]
    exposed_seconds: float

    @property
    def seconds(self) -> float:
        """How long sums were under way."""
        return sum(span.end - span.begin for span in self.spans)


class Exchange(Protocol):
    """
    Sums over ranks, in place.

    Attributes:
        rank: The number of this one, from 0.
        size: How many there are.
        bucket_bytes: Of how much a sum is worth its start.
        xp: The array module of what it sums.
    """

    rank: int
    size: int
    bucket_bytes: int
    xp: Any

    def begin(self, array: Any) -> None:
        """Begin to replace a contiguous array by its sum over all ranks, once all that is enqueued before is done."""
        ...

    def finish(self) -> None:
        """Have what comes now wait for all sums that were begun."""
        ...

    def exchanged(self) -> Exchanged:
        """Say what sums took since this was last asked; waits for them."""
        ...

    def close(self) -> None:
        """Give back what sums need."""
        ...


def totals(exchange: Exchange, numbers: Sequence[float]) -> list[float]:
    """
    Sum numbers over all ranks, at once.

    Args:
        exchange: Of this rank.
        numbers: Its own.
    """
    array = exchange.xp.asarray(np.array(numbers, np.float64))
    exchange.begin(array)
    exchange.finish()
    return [float(number) for number in backend.to_host(array)]


class MpiExchange:
    """
    Sums of host arrays by MPI, in a thread of their own.

    MPI moves data only while it is called, and waiting in it keeps a core busy.  So the thread asks, and naps between
    where there is still something to compute on that core.

    Attributes:
        rank, size, bucket_bytes, xp: As of `Exchange`.

    Raises:
        MissingDependency: If mpi4py or an MPI library is not there.
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
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done = threading.Semaphore(0)
        self._begun = 0
        self._is_awaited = False
        self._error: BaseException | None = None
        self._spans: deque[Span] = deque(maxlen=_KEPT_SPANS)
        self._exposed = 0.0
        threading.Thread(target=self._serve, name="cubatch-exchange", daemon=True).start()

    def begin(self, array: Any) -> None:
        """Hand an array to the thread."""
        self._begun += 1
        self._asked.put(array)

    def finish(self) -> None:
        """
        Wait for all that was begun.

        Raises:
            WorkerFailed: If MPI could not sum.
        """
        if not self._begun:
            return
        begun = time.perf_counter()
        self._is_awaited = True
        for _ in range(self._begun):
            self._done.acquire()
        self._begun, self._is_awaited = 0, False
        self._exposed += time.perf_counter() - begun
        if self._error is not None:
            raise WorkerFailed(f"MPI could not sum gradients: {self._error}") from self._error

    def exchanged(self) -> Exchanged:
        """Say what sums took since this was last asked."""
        self.finish()
        found = Exchanged(tuple(self._spans), self._exposed)
        self._spans.clear()
        self._exposed = 0.0
        return found

    def close(self) -> None:
        """End the thread."""
        self._asked.put(None)

    def _serve(self) -> None:
        while (array := self._asked.get()) is not None:
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
    Sums of GPU arrays by NCCL, on a stream of their own.

    Args:
        identifier: What rank 0 was given by `nccl_identifier`.
        rank: The number of this one.
        size: How many there are.
        index: Of its GPU, as CuPy numbers them.

    Attributes:
        rank, size, bucket_bytes, xp: As of `Exchange`.

    Raises:
        MissingDependency: If CuPy comes without NCCL.
    """

    bucket_bytes = (
        25 << 20
    )  # the default of PyTorch's DistributedDataParallel, chosen by measurement (arXiv:2006.15704)

    def __init__(self, identifier: Any, rank: int, size: int, index: int) -> None:
        self.xp, self._nccl = gpu_library.cupy(), _nccl()
        self.xp.cuda.Device(index).use()
        self.rank, self.size = rank, size
        self._communicator = self._nccl.NcclCommunicator(size, identifier, rank)
        self._stream = self.xp.cuda.Stream(non_blocking=True)
        # bfloat16 lies in arrays of uint16, which nobody adds up as such.
        names = {"f2": "NCCL_FLOAT16", "u2": "NCCL_BFLOAT16", "f4": "NCCL_FLOAT32", "f8": "NCCL_FLOAT64"}
        self._types = {kind: getattr(self._nccl, name) for kind, name in names.items()}
        self._first: Any = None
        self._events: deque[tuple[Any, Any, int]] = deque(maxlen=_KEPT_SPANS)
        self._waits: deque[tuple[Any, Any]] = deque(maxlen=_KEPT_SPANS)

    def begin(self, array: Any) -> None:
        """Enqueue a sum behind what the current stream holds, on the other stream."""
        self._stream.wait_event(self.xp.cuda.get_current_stream().record(self._event()))
        begun = self._stream.record(self._event())
        self._communicator.allReduce(
            array.data.ptr, array.data.ptr, array.size, self._types[array.dtype.str[1:]], self._nccl.NCCL_SUM,
            self._stream.ptr,
        )  # fmt: skip
        self._first = self._first or begun
        self._events.append((begun, self._stream.record(self._event()), array.nbytes))

    def finish(self) -> None:
        """Have the current stream wait for the other."""
        if not self._events:
            return
        current = self.xp.cuda.get_current_stream()
        before = current.record(self._event())
        current.wait_event(self._events[-1][1])
        self._waits.append((before, current.record(self._event())))

    def exchanged(self) -> Exchanged:
        """Say what sums took since this was last asked; waits for the device."""
        self.xp.cuda.get_current_stream().synchronize()
        self._stream.synchronize()
        since = [
            (self._milliseconds(self._first, a), self._milliseconds(self._first, b), n) for a, b, n in self._events
        ]
        exposed = sum(self._milliseconds(a, b) for a, b in self._waits) / 1e3
        self._events.clear()
        self._waits.clear()
        self._first = None
        return Exchanged(tuple(Span(a / 1e3, b / 1e3, n) for a, b, n in since), exposed)

    def close(self) -> None:
        """End the communicator."""
        self._communicator.destroy()

    def _event(self) -> Any:
        return self.xp.cuda.Event()

    def _milliseconds(self, begin: Any, end: Any) -> float:
        return float(self.xp.cuda.get_elapsed_time(begin, end))


def nccl_identifier() -> Any:
    """
    Make what ranks find each other by; one of them does, and tells the others.

    Raises:
        MissingDependency: If CuPy comes without NCCL.
    """
    return _nccl().get_unique_id()


def _nccl() -> Any:
    gpu_library.cupy()
    from cupy.cuda import nccl

    if not nccl.available:
        raise MissingDependency("NCCL", "devices= on GPUs", "nccl")
    return nccl

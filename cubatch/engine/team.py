"""
Threads that compute one batch together: each member takes a shard of the samples.

In a step of the engine every member runs the same code on its own samples. They meet only for the statistics of batch
norm and the sum of gradients. Waking a sleeping thread takes tens of microseconds, as long as a small layer. So all
members run a whole step at once, not layer by layer. BLAS is limited to one thread for each member in that time.
"""

from __future__ import annotations

import contextlib
import select
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

from threadpoolctl import threadpool_limits

from cubatch.engine.interrupts import Interrupts


class Team:
    """
    A fixed number of threads, the caller's included, that run a function together.

    While a team of several is open, BLAS uses one thread per call in the whole process. A limit that is set once costs
    nothing; set around each call it would cost more than a small layer.

    Args:
        size: Members, at least 1.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = _Barrier(size)
        self._seen: Callable[[int, Callable[[], object]], object] | None = None
        self._slots: tuple[list[Any], list[Any]] = ([None] * size, [None] * size)
        self._sums = [0] * size
        self._members: list[_Member] = []
        if size > 1:
            _BLAS.hold()
            self._end = weakref.finalize(self, _end, self._members)  # also of a team that is not closed
            self._end.atexit = False
        try:
            for rank in range(1, size):
                self._members.append(_Member(rank, self._barrier))
        except RuntimeError:  # no more threads
            self.close()
            raise

    def run(self, work: Callable[[int], object]) -> None:
        """
        Call work(rank) on every member, rank 0 in the caller's thread, and wait for all.

        An exception in any member is raised here once all have ended; when several fail, the lowest rank's.
        """
        if self.size == 1:
            work(0)
            return
        with Interrupts():  # one between two locks would leave a member waiting forever
            self._run_together(work)

    def _run_together(self, work: Callable[[int], object]) -> None:
        for member in self._members:
            member.start(work)
        errors = [_attempt(work, 0, self._barrier)]
        errors += [member.wait() for member in self._members]
        if self._barrier.broken:
            self._barrier.reset()
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error

    def barrier(self, rank: int) -> None:
        """Wait, during `run`, until every member has called this; raise BrokenBarrierError if one fails instead."""
        if self.size == 1:
            return
        if self._seen is None:
            self._barrier.wait()
        else:
            self._seen(rank, self._barrier.wait)

    @contextlib.contextmanager
    def seen_waiting(self, seen: Callable[[int, Callable[[], object]], object]) -> Iterator[None]:
        """Replace each wait of a member inside the context by a call of `seen` with its rank and its wait function."""
        self._seen = seen
        try:
            yield
        finally:
            self._seen = None

    def sum(self, rank: int, array: Any) -> None:
        """
        Replace every member's array by the sum of all, during `run`.

        Every member adds in order of rank, so all get the same bits. The arrays of all members have one shape.
        """
        if self.size == 1:
            return
        # Two slots alternate: before a member writes one again, it has met all others, who had read it by then.
        slots = self._slots[self._sums[rank] % 2]
        self._sums[rank] += 1
        slots[rank] = array.copy()
        self.barrier(rank)
        array[...] = slots[0]
        for other in slots[1:]:
            array += other

    def shard(self, n: int, rank: int) -> slice:
        """Return the range of a member's samples in a batch of n; sizes differ by at most 1."""
        share, extra = divmod(n, self.size)
        start = rank * share + min(rank, extra)
        return slice(start, start + share + (rank < extra))

    def close(self) -> None:
        """End the threads and release BLAS's limit; a closed team cannot run again."""
        if self.size > 1:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(members: list[_Member]) -> None:
    try:
        for member in members:
            member.end()
    finally:
        members.clear()
        _BLAS.let_go()


class _Blas:
    """Limits BLAS to one thread for each call while any team of several members is open."""

    def __init__(self) -> None:
        self._lock, self._teams = threading.RLock(), 0  # a team may be collected in here
        self._limits: Any = None

    def hold(self) -> None:
        with self._lock:
            if not self._teams:
                self._limits = threadpool_limits(1, user_api="blas")
            self._teams += 1

    def let_go(self) -> None:
        with self._lock:
            self._teams -= 1
            if not self._teams:
                self._limits.restore_original_limits()


_BLAS = _Blas()


class _Barrier:
    """
    A meeting point of the members that is faster than `threading.Barrier`, whose sleepers wake slowly.

    A waiting member releases the interpreter repeatedly, by `select` of nothing. `time.sleep(0)` would sleep for 50 us,
    the resolution of the kernel's timers. After SPINS calls it sleeps, since a missing member may need its core.
    """

    SPINS, NAP_SECONDS = 200, 5e-5

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._arrived = self._meetings = 0
        self.broken = False

    def wait(self) -> None:
        """Wait until every member has come; raise BrokenBarrierError if one has failed instead."""
        with self._lock:
            meeting = self._meetings
            self._arrived += 1
            if self._arrived == self._size:
                self._arrived = 0
                self._meetings += 1
        spins = 0
        while self._meetings == meeting and not self.broken:
            select.select((), (), (), 0 if spins < self.SPINS else self.NAP_SECONDS)
            spins += 1
        if self._meetings == meeting:
            raise threading.BrokenBarrierError

    def abort(self) -> None:
        self.broken = True

    def reset(self) -> None:
        """Allow waiting again after a failure; no member may be waiting."""
        self._arrived, self.broken = 0, False


class _Member:
    """A thread that waits for work; two locks hand work over and back, the fastest signal in Python."""

    def __init__(self, rank: int, barrier: _Barrier) -> None:
        self._rank, self._barrier = rank, barrier
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._work: Callable[[int], object] | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._serve, name=f"cubatch-team-{rank}", daemon=True).start()

    def start(self, work: Callable[[int], object]) -> None:
        self._work = work
        self._go.release()

    def wait(self) -> BaseException | None:
        self._done.acquire()
        error, self._error, self._work = self._error, None, None
        return error

    def end(self) -> None:
        self._work = None
        self._go.release()

    def _serve(self) -> None:
        while True:
            self._go.acquire()
            if self._work is None:
                return
            self._error = _attempt(self._work, self._rank, self._barrier)
            self._done.release()


def _attempt(work: Callable[[int], object], rank: int, barrier: _Barrier) -> BaseException | None:
    try:
        work(rank)
    except BaseException as error:  # noqa: BLE001 - raised by the caller; the others must not wait forever
        barrier.abort()
        return error
    return None

"""Ranks that are threads of the test: their sums are taken in order of rank, by nobody's library."""

from __future__ import annotations

import threading

import numpy as np

from cubatch.engine.exchange import Exchanged


class ThreadExchange:
    """One rank's end of sums that threads of this process take together."""

    xp = np

    def __init__(self, group, rank, bucket_bytes):
        self._group, self.rank, self.size, self.bucket_bytes = group, rank, group.size, bucket_bytes
        self._begun = []
        self.sums = 0

    def begin(self, array):
        """Note what is to be summed."""
        assert array.flags.c_contiguous
        self._begun.append(array)
        self.sums += 1

    def finish(self):
        """Sum all that was begun, in the order in which every rank began it."""
        self._group.sum(self.rank, self._begun)
        self._begun = []

    def exchanged(self):
        """Nothing is timed."""
        return Exchanged((), 0.0)

    def close(self):
        """Nothing is held."""


class Group:
    """So many ranks; `together` runs a function on each, in a thread of its own."""

    def __init__(self, size, bucket_bytes=64):
        self.size, self._barrier = size, threading.Barrier(size, timeout=60)
        self._arrays = [[]] * size
        self.exchanges = [ThreadExchange(self, rank, bucket_bytes) for rank in range(size)]

    def sum(self, rank, arrays):
        """Replace the arrays of all ranks by their sums."""
        self._arrays[rank] = arrays
        self._barrier.wait()
        totals = [sum(parts[1:], parts[0].copy()) for parts in zip(*self._arrays, strict=True)]
        self._barrier.wait()
        for array, total in zip(arrays, totals, strict=True):
            array[...] = total
        self._barrier.wait()

    def together(self, work):
        """Give what work(exchange) returned on each rank; raise what it raised on the first that did."""
        results, errors = [None] * self.size, [None] * self.size

        def run(rank):
            try:
                results[rank] = work(self.exchanges[rank])
            except BaseException as error:  # noqa: BLE001 - raised by whoever asked
                errors[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return results

"""
What steps take of memory: what a walk without data says, corrected by what smaller sizes really took.

The walk knows nothing of a library's scratch memory, nor of what an allocator keeps of freed blocks, which together are
up to four times the tensors of a step on the CPU.  Both grow about as the tensors do, so that what grows with the batch
is taken for as many times the walk's as at the largest sizes that were measured, on average, the nearest first.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Iterable

from cubatch.checks import MAX_BATCH_SIZE
from cubatch.frameworks.torch_memory import Peaks

_UNMEASURED = 16.0
"""How many times the walk's a step may take of what grows with the batch, where none was measured."""

_DOUBT = 0.5
"""
Share of what is extrapolated that may come on top of it, and of what does not grow: from some size on a library may
choose an algorithm that has the weights in another layout.  Of ten architectures, in training and inference on the CPU,
steps of up to 2.25 times the measured size took up to 22 % more than was said, of 1.5 times up to 12 %.
"""

_NEAR = 0.5
"""Sizes of so much of the largest below tell too: one reading alone may be off by its whole scatter."""

_NEARER = 16
"""
By which power of its size each of them counts: heaps take more in steps, as for `densenet121` from 489 samples to 513.
Of the sizes that `bench_module_memory` kept of 24 modules and modes, four times, 364 of 403 near the limit would have
been within 10 % so, 358 by the sixth power, and 341 where all counted the same.
"""


class MemoryPlan:
    """
    Bytes of a step by batch size, better known with each size that is measured.

    Args:
        walked: What a walk without data says.
        grain: Bytes that a measurement does not tell from code, stacks and the like, which grow with nothing.  A size
            counts as if it took so much more, exactly as walked: little tells little of the rest.
        scatter: Share by which one size may take more than its neighbours say: freed blocks are not always found again.

    Attributes:
        measured: Bytes by batch size, as learned.
        said: What was said of each size just before it was measured.
        earlier: What was measured before steps came to take less: all that is known until one was measured anew.

    Example:
        >>> plan = MemoryPlan(Peaks({2: 120 * 2**20, 4: 140 * 2**20}), grain=0, scatter=0.08)
        >>> plan.at(100) // 2**20
        1100
        >>> plan.learn(50, 1100 * 2**20)       # 600 MiB were walked, of which 500 grow with the batch
        >>> plan.at(50) // 2**20, plan.at(100) // 2**20, plan.most(100) // 2**20
        (1100, 2100, 2793)
    """

    def __init__(self, walked: Peaks, grain: int, scatter: float) -> None:
        self._walked, self._grain, self._scatter = walked, grain, scatter
        self._fixed = min(max(0, walked.at(0)), walked.at(1))
        self.measured: dict[int, int] = {}
        self.said: dict[int, int] = {}
        self.earlier: dict[int, int] = {}

    def walked(self, batch_size: int) -> int:
        """Say what a step takes by the walk alone."""
        return self._walked.at(batch_size)

    def learn(self, batch_size: int, num_bytes: int) -> None:
        """Correct it by what a size took; the most that it took counts."""
        if batch_size not in self.said:
            self.said[batch_size] = self.at(batch_size)
        walked = self._walked.at(batch_size)
        if walked - self._grain < num_bytes < walked:
            num_bytes = walked
        self.measured[batch_size] = max(num_bytes, self.measured.get(batch_size, 0))

    def restart(self, scatter: float) -> None:
        """Learn anew, since steps take no more from now on than so far, and scatter otherwise."""
        self.earlier, self.measured, self._scatter = self.measured, {}, scatter

    def at(self, batch_size: int) -> int:
        """Say what a step takes, as far as is known."""
        known, below = self._known, self._nearest(batch_size)
        walked = self._walked.at(batch_size)
        if below is None:
            return walked
        if batch_size in known:
            return known[batch_size]
        times = self._times(below)
        return self._scaled(walked, statistics.fmean(times.values(), weights=[n**_NEARER for n in times]), times)

    def most(self, batch_size: int) -> int:
        """Say what a step takes at most: the further from what was measured, the more."""
        known, below = self._known, self._nearest(batch_size)
        if below is None:
            return round(self._fixed + (self._walked.at(batch_size) - self._fixed) * _UNMEASURED)
        taken, growth = known[below], max(1, self._walked.at(below) - self._fixed)
        # What the meter cannot tell may all be of what grows: a size that is small beside it says little.
        times = min(_UNMEASURED, (self._growing(below, taken) - self._fixed + self._grain) / growth)
        further = self._walked.at(batch_size) - self._walked.at(below)
        likely = max(self.at(batch_size), taken + round(further * times))
        unseen = max(0, likely - taken) + self._fixed * max(0.0, 1 - below / batch_size)
        doubt = round(_DOUBT * unseen)
        if batch_size in self.measured:
            return likely + doubt
        near = self._times(below)  # of which one that took far more says what another may take
        worst = self._scaled(self._walked.at(batch_size), max(near.values()), near)
        return max(likely + doubt + round(self._scatter * likely), worst)

    def largest(self, num_bytes: int, of: Callable[[int], int] | None = None) -> int:
        """Give the largest batch size that takes no more, by `at` or another function of its sizes; 0 if none does."""
        found = bisect.bisect_right(range(1, MAX_BATCH_SIZE + 1), num_bytes, key=of or self.at)
        # A size that was measured is known better than those around it, so that these may be thought to take more.
        return max([found, *(n for n, taken in self.measured.items() if taken <= num_bytes)])

    def _times(self, below: int) -> dict[int, float]:
        """Give how many times the walk's the sizes just below took of what grows with the batch."""
        known, start = self._known, self._fixed - self._grain
        return {
            n: max(0, self._growing(n, known[n]) - start) / max(1, self._walked.at(n) - start)
            for n in known
            if _NEAR * below <= n <= below
        }

    def _scaled(self, walked: int, times: float, near: Iterable[int]) -> int:
        """Give the bytes of a step, if what grows takes so many times the walk's, and the rest as much as it did."""
        known, start = self._known, self._fixed - self._grain
        return round(start + (walked - start) * times) + max(known[n] - self._growing(n, known[n]) for n in near)

    def _growing(self, batch_size: int, taken: int) -> int:
        """Give what of the bytes of a size is to grow with it: a difference within the grain does not."""
        walked = self._walked.at(batch_size)
        return walked if abs(taken - walked) < self._grain else taken

    def _nearest(self, batch_size: int) -> int | None:
        """Give the largest size measured that is no larger, else the smallest measured."""
        known = self._known
        return max((n for n in known if n <= batch_size), default=min(known)) if known else None

    @property
    def _known(self) -> dict[int, int]:
        return self.measured or self.earlier

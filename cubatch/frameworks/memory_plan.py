"""
Memory of a step: the bytes of a trace without data, corrected by the measured bytes of smaller batches.

The trace knows neither the scratch memory of libraries nor freed blocks that an allocator keeps. On the CPU these are
up to four times the tensors of a step. Both grow about as the tensors do. The traced bytes that grow with the batch are
therefore multiplied by measured / traced bytes of the nearest measured sizes.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Iterable

from cubatch.checks import MAX_BATCH_SIZE
from cubatch.frameworks.torch_memory import Peaks

_UNMEASURED = 16.0
"""Largest ratio of real to traced bytes, of the part that grows with the batch, before any size was measured."""

DOUBT = 0.5
"""
Share by which real bytes may exceed the extrapolated ones, and those that do not grow with the batch.  For large sizes
a library may choose an algorithm that has the weights in another layout.  Ten architectures were measured on the CPU.
At up to 2.25 times the measured size steps took up to 22 % more than predicted, at 1.5 times up to 12 %.
"""

_NEAR = 0.5
"""Sizes from this share of the nearest smaller one on count too: a single measurement may be off by its scatter."""

_NEARER = 16
"""
Each of them is weighted by this power of its size: heaps grow in steps, as for `densenet121` from 489 samples to 513.
Measured by `bench_module_memory` on 24 modules and modes, four times: 364 of 403 sizes near the limit were predicted
within 10 %. With the sixth power there were 358, and 341 with equal weights.
"""

_RESOLVED = 4
"""Grains of the meter from which on bytes are extrapolated: they are then at most a quarter off."""


class MemoryPlan:
    """
    Predicted bytes of a step by batch size; each measured size improves the prediction.

    Args:
        walked: Traced bytes of a step by batch size, or a guess that is replaced once two sizes were measured.
        grain: Resolution of a measurement in bytes: code and stacks of this size do not grow with the batch.
        scatter: Share by which the bytes that grow with the batch may exceed the prediction by chance: freed blocks are
            not always reused.
        doubt: Share of the extrapolated bytes by which a step may exceed the prediction.
        is_traced: Whether `walked` comes from a trace; without one, sizes below all measured ones are unknown. The
            line through the smallest and the largest measured size then replaces it.

    Attributes:
        measured: Measured bytes by batch size.
        predicted: Predicted bytes of each measured size, just before its first measurement; None where unknown.
        earlier: Bytes measured before the heap was compacted; used until a size is measured again.
        multiple: The largest number of which all traced batch sizes are multiples: a step may take no others.
    """

    def __init__(
        self, walked: Peaks, grain: int, scatter: float, *, doubt: float = DOUBT, is_traced: bool = True
    ) -> None:  # fmt: skip
        self._grain, self._scatter, self._doubt, self._is_traced = grain, scatter, doubt, is_traced
        self._expect(walked)
        self.multiple = math.gcd(*walked.known)
        self.measured: dict[int, int] = {}
        self.predicted: dict[int, int | None] = {}
        self.earlier: dict[int, int] = {}

    def learn(self, batch_size: int, num_bytes: int) -> None:
        """
        Add the measured peak bytes of a batch size; of several measurements the largest counts.

        A measurement less than `grain` below the traced bytes counts as the traced bytes.
        """
        if batch_size not in self.predicted:
            self.predicted[batch_size] = self.known_at(batch_size)
        walked = self._walked.at(batch_size)
        if walked - self._grain < num_bytes < walked:
            num_bytes = walked
        self.measured[batch_size] = max(num_bytes, self.measured.get(batch_size, 0))
        if not self._is_traced and len(self.measured) > 1:
            small, large = min(self.measured), max(self.measured)
            low, high = self.measured[small], self.measured[large]
            self._expect(Peaks({small: low, large: max(high, low + self._grain)}))

    def _expect(self, walked: Peaks) -> None:
        self._walked, self._fixed = walked, min(max(0, walked.at(0)), walked.at(1))

    @property
    def is_rough(self) -> bool:
        """Whether all measured sizes took so little memory that the grain of the meter distorts its growth."""
        return bool(self._known) and max(self._known.values()) - self._fixed < _RESOLVED * self._grain

    def restart(self, scatter: float) -> None:
        """Move the measurements to `earlier`, since steps take less memory from now on, with another `scatter`."""
        self.earlier, self.measured, self._scatter = self.measured, {}, scatter

    def at(self, batch_size: int) -> int:
        """Return the expected peak bytes of a step: measured ones if the size ran, else traced ones times a ratio."""
        known, below = self._known, self._nearest(batch_size)
        walked = self._walked.at(batch_size)
        if below is None:
            return walked
        if batch_size in known:
            return known[batch_size]
        times = self._times(below)
        scaled = self._scaled(walked, statistics.fmean(times.values(), weights=[n**_NEARER for n in times]), times)
        likely = min(scaled, max(walked, self._by_growth(batch_size, below, math.inf)))
        return max(likely, min(self._fixed, known[below]))

    def known_at(self, batch_size: int) -> int | None:
        """Return the expected peak bytes of a step; None below all measured sizes if there is no trace."""
        is_known = self._is_traced or batch_size >= min(self._known, default=batch_size + 1)
        return self.at(batch_size) if is_known else None

    def most(self, batch_size: int) -> int:
        """Return an upper bound of the peak bytes of a step; it is wider the further the size is from measured ones."""
        known, below = self._known, self._nearest(batch_size)
        if below is None:
            return round(self._fixed + (self._walked.at(batch_size) - self._fixed) * _UNMEASURED)
        taken, expected = known[below], self.at(batch_size)
        likely = max(expected, self._by_growth(batch_size, below, _UNMEASURED))
        unseen = max(0, likely - taken) + self._fixed * max(0.0, 1 - below / batch_size)
        doubt = round(self._doubt * unseen)
        if batch_size in self.measured:
            return likely + doubt
        near = self._times(below)  # the largest ratio among them may apply to this size
        worst = self._scaled(self._walked.at(batch_size), max(near.values()), near)
        return max(likely + max(doubt, round(self._scatter * max(0, expected - self._fixed))), worst)

    def _by_growth(self, batch_size: int, below: int, most: float) -> int:
        """
        Return the bytes of a step if memory grows from the measured size `below` as fast as measurements allow.

        Growth is at most `most` times the traced growth, and at most that between a smaller measured size and `below`.
        The latter is uncertain by the meter's resolution and scatter, so that two close sizes hardly limit it.
        """
        known, walked = self._known, self._walked
        taken = self._growing(below, known[below])
        times = [most, (taken - self._fixed + self._grain) / max(1, walked.at(below) - self._fixed)]
        for n in known:
            if (growth := walked.at(below) - walked.at(n)) > 0:
                noise = self._grain + self._scatter * max(0, known[n] - self._fixed)
                times.append((known[below] - known[n] + noise) / growth)
        further = walked.at(batch_size) - walked.at(below)
        return known[below] + round(further * max(0.0, min(times)))

    def largest(self, num_bytes: int, of: Callable[[int], int] | None = None) -> int:
        """
        Return the largest batch size whose expected bytes are at most `num_bytes`; 0 if there is none.

        The function `of` gives the bytes of a size, such as the upper bound `most`; None: the expected bytes, `at`. A
        measured size also counts if its measured bytes are at most `num_bytes`.
        """
        largest = bisect.bisect_right(range(1, MAX_BATCH_SIZE + 1), num_bytes, key=of or self.at)
        # A size that was measured is known better than those around it, so that these may be thought to take more.
        return max([largest, *(n for n, taken in self.measured.items() if taken <= num_bytes)])

    def _times(self, below: int) -> dict[int, float]:
        """Return measured / traced bytes that grow with the batch, by measured size from half of `below` to `below`."""
        known, start = self._known, self._fixed - self._grain
        return {
            n: max(0, self._growing(n, known[n]) - start) / max(1, self._walked.at(n) - start)
            for n in known
            if _NEAR * below <= n <= below
        }

    def _scaled(self, walked: int, times: float, near: Iterable[int]) -> int:
        """
        Return the peak bytes of a step whose part that grows with the batch is `times` the traced one.

        `walked` are its traced bytes.  `times` comes from the measured sizes `near`, whose largest remainder below the
        grain of the allocator is added.
        """
        known, start = self._known, self._fixed - self._grain
        return round(start + (walked - start) * times) + max(known[n] - self._growing(n, known[n]) for n in near)

    def _growing(self, batch_size: int, taken: int) -> int:
        """Return `taken`, the measured bytes of a size, or its traced bytes if these differ by less than the grain."""
        walked = self._walked.at(batch_size)
        return walked if abs(taken - walked) < self._grain else taken

    def _nearest(self, batch_size: int) -> int | None:
        """Return the largest measured size up to `batch_size`, else the smallest measured one; None without any."""
        known = self._known
        return max((n for n in known if n <= batch_size), default=min(known)) if known else None

    @property
    def _known(self) -> dict[int, int]:
        return self.measured or self.earlier

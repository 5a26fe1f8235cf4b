"""
Numbers that change from step to step, in the device's memory: a launch that reads them there is the same in every step.

So launches are prepared once, and a CUDA graph of them (`step_graphs`) can be replayed.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class StepNumbers:
    """
    Number of the pass, number of the optimizer step, and learning rate, in memory that kernels read.

    Passes and steps differ once gradients of several batches were added up.

    Args:
        xp: The array module that owns the memory.

    Attributes:
        passes: int32 array of one element: the number of the pass over a batch, from 1; draws the masks of dropout.
        updates: int32 array of one element: the number of the optimizer step, from 1.
        rate: float32 array of one element: the learning rate of that step.

    Example:
        >>> numbers = StepNumbers(np)
        >>> numbers.write(12, 3, 0.5)
        >>> numbers.passes.tolist(), numbers.updates.tolist(), numbers.rate.tolist()
        ([12], [3], [0.5])
    """

    def __init__(self, xp: Any) -> None:
        words = xp.zeros(3, dtype=np.int32)
        self.passes, self.updates, self.rate = words[:1], words[1:2], words[2:].view(np.float32)
        self._both = words[:2]
        self._written = 0.0

    def write(self, passes: int, updates: int, rate: float) -> None:
        """
        Write the number of forward passes, that of updates and the learning rate, before a step that reads them.

        CuPy fills an array by a launch with the value as an argument. So steps in the queue keep their values, and the
        host does not wait.
        """
        if passes == updates:  # the usual case: one launch
            self._both.fill(passes)
        else:
            self.passes.fill(passes)
            self.updates.fill(updates)
        if rate != self._written:
            self.rate.fill(rate)
            self._written = rate

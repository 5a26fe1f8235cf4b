"""
What changes from step to step, in the device's memory: a launch that reads it there is the same in every step.

So launches are prepared once, and a CUDA graph of them (`step_graphs`) can be replayed as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class StepNumbers:
    """
    The step's number and learning rate, where kernels read them.

    Args:
        xp: The array module that owns the memory.

    Attributes:
        number: int32 array of one: which step it is, from 1.
        rate: float32 array of one: its learning rate.

    Example:
        >>> numbers = StepNumbers(np)
        >>> numbers.write(3, 0.5)
        >>> numbers.number.tolist(), numbers.rate.tolist()
        ([3], [0.5])
    """

    def __init__(self, xp: Any) -> None:
        words = xp.zeros(2, dtype=np.int32)
        self.number, self.rate = words[:1], words[1:].view(np.float32)
        self._written = 0.0

    def write(self, number: int, rate: float) -> None:
        """
        Set both, before the step is enqueued.

        CuPy fills by a launch that takes the value as an argument: steps that are still to run keep theirs, and the
        host waits for nothing.
        """
        self.number.fill(number)
        if rate != self._written:
            self.rate.fill(rate)
            self._written = rate

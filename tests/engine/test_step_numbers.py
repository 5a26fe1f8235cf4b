"""What changes from step to step in memory: written before each step, without a wait."""

from __future__ import annotations

import numpy as np

from cubatch.engine.step_numbers import StepNumbers


def test_every_step_finds_its_numbers_and_rate():
    """Passes and updates together, apart and together again; rates as float32 rounds them, also an earlier one."""
    numbers = StepNumbers(np)
    passes, updates, rate = numbers.passes, numbers.updates, numbers.rate
    for first, second, lr in [(1, 1, 0.1), (2, 2, 0.1), (3, 2, 0.0), (4, 2, 0.3), (4, 3, 0.1), (4, 4, 0.1)]:
        numbers.write(first, second, lr)
        assert (passes.dtype, updates.dtype, rate.dtype) == (np.int32, np.int32, np.float32)
        assert (passes.tolist(), updates.tolist(), rate.tolist()) == ([first], [second], [float(np.float32(lr))])

"""What changes from step to step in memory: written before each step, without a wait."""

from __future__ import annotations

import numpy as np

from cubatch.engine.step_numbers import StepNumbers


def test_every_step_finds_its_number_and_rate():
    """Rates as float32 rounds them, also where they come back to an earlier one."""
    numbers = StepNumbers(np)
    number, rate = numbers.number, numbers.rate
    for step, lr in enumerate([0.1, 0.1, 0.0, 0.3, 0.1], start=1):
        numbers.write(step, lr)
        assert (number.dtype, rate.dtype) == (np.int32, np.float32)
        assert (number.tolist(), rate.tolist()) == ([step], [float(np.float32(lr))])

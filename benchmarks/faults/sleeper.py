"""What a worker process runs in trials: steps that sleep, on the machine's own clock."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from cubatch.measure.runner import Reading

OVERHEAD_SECONDS, SECONDS_PER_SAMPLE = 4e-3, 1e-4


def seconds(batch_size: int) -> float:
    """Return the true seconds of a step."""
    return OVERHEAD_SECONDS + SECONDS_PER_SAMPLE * batch_size


class Sleeper:
    """
    A runner that sleeps, and now and then has no memory.

    Args:
        draw: Draws when.
        share: Of the steps.
        faults: The file in which that is written down.
    """

    peak_bytes = peak_device_bytes = None

    def __init__(self, draw: random.Random, share: float, faults: Path) -> None:
        self.clock, self._draw, self._share, self._faults, self._seconds = self, draw, share, faults, 0.0

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Rest."""
        time.sleep(seconds)

    def time(self, step: Callable[[], None], repeats: int) -> Reading:
        """Time a number of steps."""
        before = time.monotonic()
        for _ in range(repeats):
            step()
        return Reading(seconds=(time.monotonic() - before) / repeats)

    def prepare(self, batch_size: int) -> None:
        """Set the seconds of a step."""
        self._seconds = seconds(batch_size)

    def step(self) -> None:
        """Sleep."""
        if self._draw.random() < self._share:
            with self._faults.open("a") as file:
                file.write("out of memory\n")
            raise MemoryError("there was enough a moment ago")
        time.sleep(self._seconds)

    def release(self) -> None:
        """Release nothing."""

    def close(self) -> None:
        """End."""


def make(folder: str, seed: int, share: float) -> Sleeper:
    """Make one, after writing down which process it is in."""
    pids = Path(folder) / "workers"
    with pids.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return Sleeper(random.Random(f"{seed}/{pids.stat().st_size}"), share, Path(folder) / "faults")

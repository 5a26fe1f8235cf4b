"""
The search rules of other batch-size finders, reimplemented from their published behavior.

Each rival gets a Runner, the memory facts of its device and the user's maximum, and returns the batch size that its
user would get.  The rule is reproduced with its defects.  Three things are free for all of them.  Out of memory is
always recognized, although none of them knows CuPy's error.  A trial costs only its steps.  Model and optimizer are
restored for free.

    rival               objective   measures
    lightning_power     largest     whether three steps run
    lightning_binsearch largest     whether three steps run
    accelerate          largest     whether a step runs
    ludwig              fastest     median of five steps, host clock
    dorado              fastest     the shorter of two steps, device clock
    ultralytics         memory      peak bytes of small batches, a straight line through them
    heuristic_finder    none        nothing

Those that measure throughput at many sizes are in `search.timed_rivals`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import attrs
import numpy as np

from cubatch.measure.goal import Goal
from cubatch.measure.runner import Runner

GIB = 2**30


@attrs.frozen(kw_only=True)
class Task:
    """
    The request to a finder.

    Attributes:
        max_batch_size: The user's maximum.
        total_bytes: Memory of the device.
        fixed_bytes: What is taken before the first sample: weights, context.
        bytes_per_sample: Bytes of a sample by the finder's own table; only dorado has one.
        parameters: Trainable parameters of the network.
        cores: Cores of the host.
        goal: The objective; the finders of this module know throughput at most.
    """

    max_batch_size: int
    total_bytes: int
    fixed_bytes: int
    bytes_per_sample: float
    parameters: int = 1_000_000
    cores: int = 8
    goal: Goal = attrs.field(factory=Goal)


Rival = Callable[[Runner, Task], int | None]


def lightning_power(runner: Runner, task: Task, *, init_val: int = 2, max_trials: int = 25) -> int:
    """
    PyTorch Lightning's default: double from 2 until it does not fit, then halve once.

    The maximum ends the loop only after the doubling and before the run.  So the result may be a size that never ran,
    up to twice the maximum.
    """
    size = init_val
    for _ in range(max_trials):
        if not _runs(runner, size, steps=3):
            return max(1, size // 2)
        size *= 2
        if size >= task.max_batch_size:
            return size
    return size


def lightning_binsearch(
    runner: Runner, task: Task, *, init_val: int = 2, max_trials: int = 25, margin: float = 0.05
) -> int:
    """PyTorch Lightning's bisection: double until it does not fit, bisect, and take a margin off the result."""
    low, high, size = 1, 0, min(init_val, task.max_batch_size)
    for _ in range(max_trials):
        if _runs(runner, size, steps=3):
            low = size
            if size >= task.max_batch_size:
                break
        else:
            high = size
        if high and high - low <= 1:
            break
        size = (low + high) // 2 if high else min(2 * low, task.max_batch_size)
    return max(1, int(low * (1.0 - margin)))


def accelerate(runner: Runner, task: Task, *, starting_batch_size: int = 128) -> int | None:
    """Hugging Face accelerate: start high, a tenth less after each failure; None if no size runs."""
    size = min(starting_batch_size, task.max_batch_size)
    while size > 0:
        if _runs(runner, size, steps=1):
            return size
        size = int(size * 0.9)
    return None


def accelerate_2048(runner: Runner, task: Task) -> int | None:
    """Run accelerate's rule from 2048, as a user does who expects a large batch; None if no size runs."""
    return accelerate(runner, task, starting_batch_size=2048)


def ludwig(runner: Runner, task: Task) -> int | None:
    """
    Ludwig's BatchSizeEvaluator: double from 1 while the throughput rises, stop at the first drop.

    The median of five steps by the host clock, without warm-up. Return None if no size runs.
    """
    best, best_throughput, size = None, 0.0, 1
    while size <= task.max_batch_size:
        try:
            runner.prepare(size)
            seconds = [_host_seconds(runner) for _ in range(5)]
        except MemoryError:
            runner.release()
            break
        throughput = size / statistics.median(seconds)
        if throughput < best_throughput:
            break
        best, best_throughput, size = size, throughput, 2 * size
    return best


def dorado(runner: Runner, task: Task, *, granularity: int = 32, most: int = 10240) -> int | None:
    """
    Oxford Nanopore's dorado `-b 0`: every multiple of 32 that should fit, the shorter of two steps.

    A table of bytes per sample decides what fits, with 1 GiB left free.  Out of memory below that limit ends the search
    without a result: None.
    """
    room = (task.total_bytes - task.fixed_bytes - GIB) / task.bytes_per_sample
    largest = min(int(room), task.max_batch_size, most) // granularity * granularity
    best, best_seconds = None, float("inf")
    for size in range(granularity, max(granularity, largest) + 1, granularity):
        try:
            runner.prepare(size)
            seconds = min(runner.clock.time(runner.step, 1).seconds for _ in range(2)) / size
        except MemoryError:
            runner.release()
            return None
        if seconds < best_seconds:
            best, best_seconds = size, seconds
    return best


def ultralytics(runner: Runner, task: Task, *, fraction: float = 0.6, default: int = 16) -> int:
    """
    Ultralytics AutoBatch: a line through the memory of small batches, solved for 60 % of the free memory.

    The target is rounded to whole GiB, reserved memory counts twice, an answer outside 1 to 1024
    becomes 16, and the answer is never run.
    """
    sizes = [1, 2, 4, 8, 16, 32, 64] if task.total_bytes >= 16 * GIB else [1, 2, 4, 8, 16]
    points: list[tuple[int, float]] = []
    failed: int | None = None
    for size in sizes:
        if _runs(runner, size, steps=1) and runner.peak_bytes is not None:
            points.append((size, runner.peak_bytes / GIB))
        elif failed is None:
            failed = size
    if len(points) < 2:
        return default
    slope, intercept = np.polyfit([size for size, _ in points], [gib for _, gib in points], deg=1)
    free_gib = (task.total_bytes - 2 * task.fixed_bytes) / GIB
    size = int((round(free_gib * fraction) - intercept) / slope)
    if failed is not None and size >= failed:
        size = max((done for done, _ in points if done < failed), default=default)
    return size if 1 <= size <= 1024 else default


def heuristic_finder(runner: Runner, task: Task) -> int:  # noqa: ARG001 - it never looks at the device
    """
    Return 64, 32, 16, 8 or 1 from parameter count, core count and memory in use, as found in answers on the web.

    The thresholds are chosen here, as such functions have them: each of them steps one size down.
    """
    ladder = (64, 32, 16, 8, 1)
    in_use = task.fixed_bytes / task.total_bytes
    steps_down = (task.parameters > 10**7) + (task.parameters > 10**8) + (task.cores < 4) + (in_use > 0.75)
    return ladder[steps_down]


RIVALS: dict[str, Rival] = {
    "lightning power": lightning_power,
    "lightning binsearch": lightning_binsearch,
    "accelerate 128": accelerate,
    "accelerate 2048": accelerate_2048,
    "ludwig": ludwig,
    "dorado -b 0": dorado,
    "ultralytics": ultralytics,
    "heuristic-finder": heuristic_finder,
}


def _runs(runner: Runner, size: int, *, steps: int) -> bool:
    try:
        runner.prepare(size)
        for _ in range(steps):
            runner.step()
    except MemoryError:
        runner.release()
        return False
    return True


def _host_seconds(runner: Runner) -> float:
    began = runner.clock.now()
    runner.step()
    return runner.clock.now() - began

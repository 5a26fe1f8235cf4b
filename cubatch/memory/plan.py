"""
The memory plan of a step: each buffer of the schedule at an offset in one arena.

The engine allocates the arena once and runs the plan as it is.  Parameters, their gradients and the optimizer state are
allocated separately, for all steps.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.kernels.experimental import runnable
from cubatch.memory import workspace
from cubatch.memory.schedule import schedule
from cubatch.memory.schedule_records import FLOAT32_BYTES, LOSS_SCALE_BYTES, Buffer, Op, Schedule
from cubatch.network.graph import INPUT, Spec, cached
from cubatch.units import format_bytes
from cubatch.workload import Workload

Sizes = NDArray[Any]
"""Bytes of several buffers: int64, or Python's integers if their sum may be larger."""

ALIGNMENT = 256
# Optimizer state, in copies of the parameters.
STATE_COPIES = {"sgd": 0, "momentum": 1, "adam": 2}

MAX_COPIES = 64  # buffer sets of a small single layer
_INT64 = 2**63
_CORE_FLOPS, _CORE_BYTES = 60e9, 8e9  # per second, of a core with AVX-512; measured cores differ by a factor of two
_WORTH_A_TEAM = 2.1e-4  # seconds of a mean operation from which a team was faster: five networks in both modes


@attrs.frozen(kw_only=True)
class Plan:
    """The offset and size of each buffer of a step at one batch size, and the bytes outside its arenas."""

    schedule: Schedule  # the operations and buffers
    batch_size: int  # samples per step
    dtype: str  # storage of activations and parameters
    library: str  # "im2col" or "cubatch"; decides the scratch memory
    members: int  # CPU threads that each run a shard of the batch through the whole step; 1 on a GPU
    shard: int  # samples of the largest shard
    copies: int  # buffer sets that a small single layer rotates over, so that its input is not in the cache
    sizes: tuple[int, ...]  # bytes of each buffer of one shard
    offsets: tuple[int, ...]  # offset of each buffer in its shard's arena
    arena_bytes: int  # size of one shard's arena: activations, their gradients and workspace, which share memory
    weight_bytes: int  # parameters and running statistics
    gradient_bytes: int  # gradients of the parameters, and their sum if those of several batches are added up
    optimizer_bytes: int  # the optimizer state; with 16-bit parameters also the master weights and the loss scale

    @property
    def fixed_bytes(self) -> int:
        """Bytes of parameters, their gradients and the optimizer state: all memory of the plan outside its arenas."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def buffer_bytes(self) -> Sizes:
        """Bytes of each buffer of one shard, as an array."""
        return np.array(self.sizes, dtype=_integer(self.sizes, len(self.sizes)))

    @property
    def total(self) -> int:
        """Peak memory of the step in bytes."""
        return self.fixed_bytes + self.members * self.copies * self.arena_bytes

    @property
    def largest_tensor(self) -> str:
        """
        The largest activation or activation gradient as text: its layer, shape, and the batch axis.

        The text also names the parameters if they and their gradients and state need more.

        Example:
            >>> from cubatch.workload import Workload
            >>> work = Workload.of("mnist-cnn", "v100-sxm2-16gb", mode="training", dtype="float32")
            >>> plan(work, 256).largest_tensor
            'conv1.y (256, 28, 28, 32) of layer conv1, axis 0 is the batch, 24.50 MiB'
        """
        tensors = [n for n, buffer in enumerate(self.schedule.buffers) if buffer.part != "workspace"]
        number = max(tensors, key=self.sizes.__getitem__)
        buffer, size = self.schedule.buffers[number], self.members * self.sizes[number]
        more = f", and {format_bytes(self.fixed_bytes)} of parameters, their gradients and state"
        of = f" of layer {buffer.node}" if buffer.node != INPUT else ""
        shape = (self.batch_size, *buffer.shape) if buffer.batched else buffer.shape
        axis = ", axis 0 is the batch" if buffer.batched else ""
        return f"{buffer.name} {shape}{of}{axis}, {format_bytes(size)}{more if self.fixed_bytes > size else ''}"


@cached
def schedule_of(
    spec: Spec,
    mode: str,
    recompute: bool,  # noqa: FBT001 - a cache key
    library: str,
    experimental: frozenset[str] = frozenset(),
) -> Schedule:
    """Return the operations and buffers of one step of a spec; cached, since plans of many batch sizes share them."""
    return schedule(spec, mode, recompute=recompute, library=library, experimental=experimental)


def schedule_for(work: Workload) -> Schedule:
    """Return the schedule of a workload; it uses the experimental kernels of the workload that the device can run."""
    names = runnable(work.experimental, work.dtype, work.device)
    return schedule_of(work.spec, work.mode, work.recompute, work.library, names)


def plan(work: Workload, batch_size: int) -> Plan:
    """
    Return the memory plan of one step: no two buffers that are alive at the same time overlap.

    The largest buffers are placed first, each at the lowest offset that is free during its lifetime.  This is greedy by
    size: Pisarchyk and Lee, 2020, arXiv:2001.03288.
    """
    program = schedule_for(work)
    members, shard = shards(program, batch_size, work.device)
    sizes = buffer_sizes(program, shard, work.dtype, work.device, work.library).tolist()
    offsets, arena = _place(sizes, program.lifetimes.tolist())
    return Plan(
        schedule=program,
        batch_size=batch_size,
        dtype=work.dtype,
        library=work.library,
        members=members,
        shard=shard,
        copies=_copies(program, members * arena, work.device),
        sizes=tuple(sizes),
        offsets=tuple(offsets),
        arena_bytes=arena,
        **fixed_bytes(program, work, members),
    )


def shards(program: Schedule, batch_size: int, device: Device) -> tuple[int, int]:
    """
    Return the number of threads that divide a batch, and the samples of the largest share; (1, batch_size) on a GPU.

    Threads share the interpreter and wait for each other if operations are short.  Then a single thread of the
    engine, whose products BLAS divides among the CPUs, is up to three times as fast.
    """
    threads = device.threads or 1
    if device.kind != "cpu" or batch_size * _operation_seconds(program) < _WORTH_A_TEAM:
        return 1, batch_size
    members = min(threads, batch_size)
    return members, -(-batch_size // members)


def _operation_seconds(program: Schedule) -> float:
    """Return roughly the seconds of a mean operation per sample on a thread; 0 without operations."""
    if not program.ops:
        return 0.0
    seconds = program.flops / _CORE_FLOPS + FLOAT32_BYTES * program.moved / _CORE_BYTES
    return seconds / len(program.ops)


def _copies(program: Schedule, working_set: int, device: Device) -> int:
    """Return the number of buffer sets of `working_set` bytes that fill the L2 twice; 1 for more than one layer."""
    if not program.single or not device.l2_bytes or not working_set:
        return 1
    return max(1, min(MAX_COPIES, -(-2 * device.l2_bytes // working_set)))


def fixed_bytes(program: Schedule, work: Workload, members: int) -> dict[str, int]:
    """
    Return the bytes of weights, gradients and optimizer state: "weight_bytes", "gradient_bytes", "optimizer_bytes".

    `members` is the number of CPU threads, each of which has gradients of its own.
    """
    itemsize = BYTES_PER_ELEMENT[work.dtype]
    wide = max(FLOAT32_BYTES, itemsize)
    parameters = program.network.parameters
    training = program.mode == "training"
    # The optimizer updates parameters of half precision in float32: the master weights.
    copies = STATE_COPIES[work.optimizer] + (itemsize < FLOAT32_BYTES)
    return {
        "weight_bytes": _align(parameters * itemsize) + _align(program.state_elements * wide),
        "gradient_bytes": members * _align(parameters * itemsize)  # each member sums its own
        + _align(parameters * wide * work.accumulate)
        if training
        else 0,
        "optimizer_bytes": _align(wide * parameters * copies) + _align(LOSS_SCALE_BYTES.get(work.dtype, 0))
        if training
        else 0,
    }


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def buffer_sizes(program: Schedule, batch_size: int, dtype: str, device: Device, library: str) -> Sizes:
    """Return the bytes of each buffer of a schedule for `batch_size` samples: a thread's share, or a GPU's batch."""
    itemsize = BYTES_PER_ELEMENT[dtype]
    wide = max(FLOAT32_BYTES, itemsize)
    widths = {0: itemsize, FLOAT32_BYTES: wide}
    representatives, groups = program.size_groups

    def num_bytes(each: Buffer | Op) -> int:
        if isinstance(each, Buffer):
            samples = batch_size if each.batched else 1
            return each.elements * widths.get(each.itemsize, each.itemsize) * samples
        if library == "cubatch":
            return workspace.kernel_workspace_bytes(each, program, batch_size, dtype, device)
        return workspace.im2col_workspace_bytes(each, program, batch_size, wide, device)

    sizes = [_align(num_bytes(each)) for each in representatives]
    return np.array(sizes, dtype=_integer(sizes, len(groups)))[groups]


def _integer(sizes: Sequence[int], count: int) -> Any:
    """Return the NumPy type for sums of `count` such sizes: int64, or object (Python's integers) if too large."""
    return np.int64 if max(sizes, default=0) * count < _INT64 else object


def _place(sizes: Sequence[int], spans: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """
    Return the offset of each buffer and the size of the arena, in bytes.

    `spans` has the first and last operation of each buffer. The largest buffers come first, each in the lowest gap
    between buffers that are alive at the same time.
    """
    offsets = [0] * len(sizes)
    placed: list[tuple[int, int, int, int]] = []  # start, end, first and last operation, in the order of offsets
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        size, (first, last), offset = sizes[number], spans[number], 0
        if not size:
            continue
        for start, end, begin, finish in placed:
            if begin <= last and finish >= first:
                if start - offset >= size:
                    break
                if end > offset:  # noqa: PLR1730 - `max` takes twice as long, in the innermost loop
                    offset = end
        bisect.insort(placed, (offset, offset + size, first, last))
        offsets[number] = offset
    return offsets, max((end for _, end, *_ in placed), default=0)


def bytes_alive(sizes: Sizes, program: Schedule) -> Sizes:
    """Return the bytes of the buffers alive during each operation; no placement needs less than their maximum."""
    change = np.zeros(max(len(program.ops), 1) + 1, dtype=sizes.dtype)  # a flatten on its own has no operations
    np.add.at(change, program.lifetimes[:, 0], sizes)
    np.subtract.at(change, program.lifetimes[:, 1] + 1, sizes)
    return np.cumsum(change[:-1])

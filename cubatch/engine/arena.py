"""The memory that a memory plan describes: one allocated block, with each buffer a view at its planned offset."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from cubatch.engine import backend
from cubatch.engine.storage import element_type, sum_type
from cubatch.errors import CubatchError, InvalidArgument, OutOfMemory
from cubatch.hardware import memory_limit as hardware_memory
from cubatch.memory import fit
from cubatch.memory.plan import Plan
from cubatch.network.graph import as_network
from cubatch.workload import Workload


class Arena:
    """
    The memory of one shard of the batch, with all buffers of a step.

    Args:
        plan: The memory plan, with the size and offset of each buffer in bytes.
        samples: Samples of this shard, at most `plan.shard`.
        xp: The array module that allocates the memory: NumPy or CuPy.
    """

    def __init__(self, plan: Plan, samples: int, xp: Any) -> None:
        self._plan, self.samples = plan, samples
        self._block = xp.empty(plan.arena_bytes, dtype=np.uint8)

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return int(self._block.nbytes)

    def fill(self, values: Any) -> None:
        """Fill the memory with repetitions of `values`, a 1-D array; the last repetition may be cut."""
        target = self._block[: len(self._block) // values.nbytes * values.nbytes].view(values.dtype)
        target.reshape(-1, len(values))[...] = values
        rest = self._block[target.nbytes :]
        rest[...] = values.view(np.uint8)[: len(rest)]

    def __getitem__(self, number: int) -> Any:
        """Return a view of the plan's buffer `number`: (samples, *shape) if it grows with the batch, else its shape."""
        buffer = self._plan.schedule.buffers[number]
        shape = (self.samples, *buffer.shape) if buffer.batched else buffer.shape
        dtype = self._plan.dtype
        kind = {0: element_type(dtype, self._plan.library), 1: np.uint8, 4: sum_type(dtype)}[buffer.itemsize]
        if buffer.name == "labels":
            kind = np.int32
        return backend.view(self._block, shape, kind, offset=self._plan.offsets[number])

    def workspace(self, number: int) -> Any:
        """Return the plan's buffer `number`, an operation's scratch memory, as a 1-D view of bytes."""
        offset = self._plan.offsets[number]
        return self._block[offset : offset + self._plan.sizes[number]]


def check_room(work: Workload, plan: Plan, held_bytes: int, xp: Any) -> None:
    """
    Raise OutOfMemory if a plan needs more than the free memory, before any of it is allocated.

    The system hands out addresses of main memory that it does not have, and ends processes that write to them. Drivers
    that let device memory spill into the host's (WDDM, WSL 2) do the same: steps then take many times as long without
    an error. `held_bytes` of the plan are allocated already. If the free memory is unknown, nothing is raised.
    """
    free_bytes = None
    if hasattr(xp, "cuda"):
        free_bytes, _ = xp.cuda.runtime.memGetInfo()
    elif work.device.kind == "cpu":
        with contextlib.suppress(InvalidArgument):  # it cannot be read
            free_bytes = hardware_memory.memory_limit(work.device).free_bytes
    if free_bytes is not None and plan.total - held_bytes > free_bytes:
        raise out_of_memory(work, plan, held_bytes)


def out_of_memory(work: Workload, plan: Plan, held_bytes: int) -> OutOfMemory:
    """
    Return the error for a plan that does not fit, with its bytes, the free bytes, the batch size that fits, remedies.

    `held_bytes` are bytes of the plan that are allocated already; those that it needs for every batch size count as
    free.
    """
    free = fits = None
    others = ""
    with contextlib.suppress(CubatchError):  # what is free cannot be read, or nothing fits
        limit = hardware_memory.memory_limit(work.device, held=min(held_bytes, plan.fixed_bytes))
        free = limit.free_bytes
        others = f"; {limit.others[0].lower()}{limit.others[1:-1]}" if limit.others else ""
        fits = fit.largest(work, limit.bytes)
    return OutOfMemory(
        f"{work.mode} of {as_network(work.spec).name} at batch size {plan.batch_size}",
        plan.total,
        free,
        f"{plan.largest_tensor}{others}",
        fits,
        _remedy(work, fits),
    )


def _remedy(work: Workload, fits: int | None) -> str:
    """
    Return a sentence with the options, not in use yet, that reduce the memory of a step.

    `fits` is the largest batch size that fits, 0 if none does; None if unknown.
    """
    ways = [
        f"take batches of {fits}" if fits else "",
        "add up the gradients of smaller batches (target_batch_size)" if fits and work.mode == "training" else "",
        "compute activations again (recompute=True)" if work.mode == "training" and not work.recompute else "",
        "store them in 16 bits (dtype)" if work.device.kind == "cuda" and work.dtype in {"float32", "tf32"} else "",
        "free memory that other processes hold",
    ]
    text = ", ".join(filter(None, ways[:-1]))
    return f"{text[:1].upper()}{text[1:]}, or {ways[-1]}." if text else f"{ways[-1].capitalize()}."

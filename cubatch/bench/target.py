"""Where cases run: the device, who launches, whose arrays, which clock; and the arrays of a case."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import attrs
import numpy as np

from cubatch.bench.cases import Case
from cubatch.engine import backend, functional
from cubatch.engine import storage as elements
from cubatch.engine.native.context import Launcher
from cubatch.hardware import gpu_library
from cubatch.hardware.facts import Device
from cubatch.kernels.variant import Kernel
from cubatch.measure.runner import Clock

COLD = 2.0
"""Buffers rotate over so many times the L2, so that a use finds nothing of the one before (CUTLASS's guideline)."""

MAX_SETS = 128
_MAP_NORESERVE = 0x4000  # <linux/mman.h>; Python 3.11's mmap has no name for it
_SCALING = (2.0, 0.5, 3.0, 1.0)  # state of `engine.loss_scale` in the middle of a training: one step was skipped

Arrays = dict[str, Any]


@attrs.frozen
class Target:
    """
    Where cases run.

    Attributes:
        device: Its SMs and architecture decide grids and variants.
        launcher: Runs kernels.
        module: Whose arrays the launcher takes.
        clock: Takes the time of what is launched.
        trying: Entered with a variant's main kernel around its first launch in a case; may refuse it with an error.
        synchronize: Waits for all that was launched; raises what it did to the GPU.
        free_pools: Gives back what the array libraries keep of memory that is free.
    """

    device: Device
    launcher: Launcher
    module: ModuleType
    clock: Clock
    trying: Callable[[Kernel], AbstractContextManager[object]] = contextlib.nullcontext
    synchronize: Callable[[], object] = lambda: None
    free_pools: Callable[[], object] = lambda: None


def on_gpu(device: Device) -> Target:
    """
    Get ready to run on a GPU of this machine.

    Raises:
        MissingDependency: If CuPy is not installed.
        DeviceNotAvailable: If there is no driver.
    """
    from cubatch.kernels.launch import CudaLauncher
    from cubatch.measure.clocks import cupy_kernel_clock

    module = backend.module("cuda")
    module.cuda.Device(device.index).use()
    launcher = CudaLauncher(device)

    def synchronize() -> None:
        with gpu_library.translating("waiting for the GPU"):
            module.cuda.get_current_stream().synchronize()

    def free_pools() -> None:
        module.get_default_memory_pool().free_all_blocks()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    clock = cupy_kernel_clock(device.uuid)
    return Target(device, launcher, module, clock, synchronize=synchronize, free_pools=free_pools)


def storage(dtype: str) -> str:
    """Return NumPy's type for the elements of an array: bfloat16, which it does not know, is kept as its bits."""
    return {"bfloat16": "uint16", "tf32": "float32"}.get(dtype, dtype)


def fill(module: ModuleType, case: Case, seed: int) -> Arrays:
    """Make the arrays of a case and fill them with random data: the first of `filled`."""
    return next(filled(module, case, seed))


def filled(module: ModuleType, case: Case, seed: int) -> Iterator[Arrays]:
    """
    Make sets of the arrays of a case, all different, and fill them with random data.

    A GPU runs zeros at clocks that real data never sees, and what swaps equal operands goes unnoticed.

    Args:
        module: NumPy or CuPy.
        case: What is called.
        seed: Of the data.
    """
    random = backend.random_generator(module.empty(0), seed)  # one for all: making one takes a GPU long
    while True:
        yield _drawn(module, case, random)


def _drawn(module: ModuleType, case: Case, random: Any) -> Arrays:
    arrays: Arrays = {}
    for name, operand in case.operands.items():
        dtype = np.dtype(storage(case.dtype_of(name)))
        drawn = random.random(size=operand.shape, dtype=np.float32)
        if operand.kind == "scaling":
            drawn[...] = module.asarray(_SCALING, dtype=np.float32)
        elif operand.kind == "counts":
            drawn *= operand.below
        elif operand.kind == "positive":
            drawn += 0.5
        else:
            drawn *= 2 * operand.reach
            drawn -= operand.reach
            if operand.kind == "rectified":
                module.clip(drawn, 0, 6, out=drawn)
            if operand.padded:
                drawn[..., -operand.padded :] = 0
        if case.dtype_of(name) == "bfloat16":
            module.right_shift(drawn.view(np.uint32), 16, out=drawn.view(np.uint32))
        arrays[name] = drawn
        if dtype != np.float32:
            arrays[name] = module.empty(operand.shape, dtype=dtype)
            module.copyto(arrays[name], drawn.view(np.uint32) if dtype == np.uint16 else drawn, casting="unsafe")
    if case.prepare:
        _prepare(case, arrays)
    return arrays


def _prepare(case: Case, arrays: Arrays) -> None:
    """Have the forward pass save what a backward pass then finds, by the array library's own calls in float32."""
    saved = {name: elements.decoded(arrays[name]) for name in case.lists["saved"]}
    given = [elements.decoded(arrays[name]) for name in case.arguments if isinstance(name, str) and name != "dy"]
    getattr(functional, case.prepare)(*given, keep=list(saved.values()), **case.options)
    for name, values in saved.items():
        arrays[name][...] = elements.encoded(values, arrays[name].dtype)


def count_sets(case: Case, l2_bytes: int | None) -> int:
    """
    Count the sets of buffers that a case rotates over.

    Example:
        >>> from cubatch.bench.cases import gemm
        >>> count_sets(gemm(1024, 1024, 1024), 50 * 2**20)
        9
    """
    if not l2_bytes:
        return 1
    return min(MAX_SETS, math.ceil(COLD * l2_bytes / case.num_bytes) if case.num_bytes < COLD * l2_bytes else 1)


def reserve(case: Case) -> Arrays:
    """
    Return arrays that have addresses and no memory, for calls that are not launched.

    Reading one would take memory; the operations on kernels read none.
    """
    arrays: Arrays = {}
    for name, operand in case.operands.items():
        dtype = np.dtype(storage(case.dtype_of(name)))
        size = max(1, math.prod(operand.shape) * dtype.itemsize)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        arrays[name] = (
            np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8, size).view(dtype).reshape(operand.shape)
        )
    return arrays

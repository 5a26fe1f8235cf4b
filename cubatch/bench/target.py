"""Where cases run, and the arrays of a case."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, TypeVar

import attrs
import numpy as np

from cubatch.bench.calls import Case
from cubatch.engine import backend, functional, storage as elements
from cubatch.engine.native.context import Launcher
from cubatch.errors import DeviceFailed, is_out_of_memory
from cubatch.hardware import gpu_library
from cubatch.hardware.facts import Device
from cubatch.kernels.variant import Kernel
from cubatch.measure.runner import Clock
from cubatch.network.layers import BatchNorm2d, LayerNorm

COLD = 2.0
"""Buffers rotate over this many times the L2, as CUTLASS's guideline for measuring has it."""

MAX_SETS = 128
_MAP_NORESERVE = 0x4000  # <linux/mman.h>; Python 3.11's mmap has no name for it
_SCALING = (2.0, 0.5, 3.0, 1.0)  # state of `engine.loss_scale` during a training that has skipped one step

Arrays = dict[str, Any]
T = TypeVar("T")


@attrs.frozen
class Target:
    """The device on which cases run, with its launcher, array module and clock."""

    device: Device  # its SMs and architecture decide grids and variants
    launcher: Launcher  # runs kernels
    module: ModuleType  # array module whose arrays the launcher takes
    clock: Clock  # times what is launched
    # entered with the main kernel of a variant around its first launch in a case; may refuse it by an error
    trying: Callable[[Kernel], AbstractContextManager[object]] = contextlib.nullcontext
    synchronize: Callable[[], object] = lambda: None  # waits for all launches; raises the error of one that failed
    free_pools: Callable[[], object] = lambda: None  # frees the unused memory that the array libraries keep

    def attempt(self, work: Callable[[], T]) -> T | str:
        """
        Call `work`, which uses a rival's library and may fail; if memory ran out, free unused memory and retry once.

        Neither PyTorch nor CuPy can make the other free its memory.

        Returns:
            T | str: The result of `work`, or the error's type and first line as text.
        """
        self.synchronize()  # an error of a cubatch kernel is not an error of the rival
        for is_last in (False, True):
            try:
                result = work()
                self.synchronize()
            except Exception as error:  # noqa: BLE001 - libraries raise errors of any type
                reason = failure(error)
                if is_last or not is_out_of_memory(error):
                    break
                self.free_pools()
            else:
                return result
        self.synchronize()
        return reason


def failure(error: Exception) -> str:
    """Return the type and first line of an error of a rival; raise the error again if it is a fatal DeviceFailed."""
    if isinstance(error, DeviceFailed) and error.is_fatal:
        raise error
    return f"{type(error).__name__}: {error}".splitlines()[0]


def on_gpu(device: Device) -> Target:
    """Return the target that runs cases on a GPU of this machine."""
    from cubatch.kernels.launch import CudaLauncher
    from cubatch.measure.clocks import cupy_kernel_clock

    module = gpu_library.cupy()
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
    """Return NumPy's name of the type that stores a dtype: "uint16" for the bits of bfloat16, "float32" for tf32."""
    return {"bfloat16": "uint16", "tf32": "float32"}.get(dtype, dtype)


def filled(module: ModuleType, case: Case, seed: int) -> Iterator[Arrays]:
    """
    Yield sets of the arrays of a case without end, all different and filled with random data.

    A GPU runs zeros at clocks that real data never reaches, and a kernel that swaps equal operands looks right.
    """
    random = backend.random_generator(module.empty(0), seed)  # one for all: a GPU takes long to make one
    while True:
        yield _drawn(module, case, random)


def fill(module: ModuleType, case: Case, seed: int) -> Arrays:
    """Return one set of the arrays of a case, by name, as arrays of `module` filled with random data of a seed."""
    return next(filled(module, case, seed))


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
    _save(case, arrays, random)
    return arrays


def _save(case: Case, arrays: Arrays, random: Any) -> None:
    """Compute the forward pass in float32, and overwrite the arrays that the backward pass reads with its results."""
    given = {name: elements.decoded(array) for name, array in arrays.items() if name not in case.results}
    saved: dict[str, Any] = {}
    if case.operation == "attention_backward":
        saved = {name: given[name] for name in case.arrays["saved"] if name}
        functional.attention(given["x"], given["w_in"], given["w_out"], keep=[*saved.values()], **case.options)
    elif isinstance(case.layer, BatchNorm2d) and case.operation == "batch_norm_backward":
        saved = {"mean": given["mean"], "inv_std": given["inv_std"]}
        functional.batch_norm_train(given["x"], given["gamma"], 0 * given["gamma"], eps=case.layer.eps, **saved)
    elif isinstance(case.layer, LayerNorm) and case.operation == "layer_norm_backward":
        saved = {"statistics": given["statistics"]}
        functional.layer_norm(given["x"], given["gamma"], 0 * given["gamma"], eps=case.layer.eps, **saved)
    elif case.operation == "max_pool2d_backward":
        saved, options = {"argmax": given["argmax"]}, dict(case.options)
        x = random.random(size=options.pop("x_shape"), dtype=np.float32)
        functional.max_pool2d(x, **saved, **options)
    for name, values in saved.items():
        arrays[name][...] = elements.encoded(values, arrays[name].dtype)


def count_sets(case: Case, l2_bytes: int | None) -> int:
    """
    Return the number of sets of arrays that timed steps must use in turn so that none is still in the L2.

    It is at least 1 and at most MAX_SETS; 1 if the size of the L2 is unknown (None).

    Example:
        >>> from cubatch.bench.cases import gemm
        >>> count_sets(gemm(1024, 1024, 1024), 50 * 2**20)
        9
    """
    if not l2_bytes:
        return 1
    return min(MAX_SETS, math.ceil(COLD * l2_bytes / case.num_bytes) if case.num_bytes < COLD * l2_bytes else 1)


def reserve(case: Case) -> Arrays:
    """Return the arrays of a case with addresses but no memory, for calls that are not launched."""
    arrays: Arrays = {}
    for name, operand in case.operands.items():
        dtype = np.dtype(storage(case.dtype_of(name)))
        size = max(1, math.prod(operand.shape) * dtype.itemsize)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        memory = mmap.mmap(-1, size, flags=flags)
        arrays[name] = np.frombuffer(memory, np.uint8, size).view(dtype).reshape(operand.shape)
    return arrays

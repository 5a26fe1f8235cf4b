"""
Launches of kernels on a GPU: cubins loaded into CuPy's context, launches prepared once and repeated.

CuPy loads the module and owns context and stream.  A launch calls the driver directly with prepared arguments: at small
batches the time of Python between two launches is as long as the kernels.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import attrs
import numpy as np

from cubatch.errors import DeviceFailed, InvalidArgument, OutOfMemory
from cubatch.hardware import architectures, driver, gpu_library
from cubatch.hardware.facts import Device
from cubatch.hardware.waves import carveout_percent
from cubatch.kernels import tensor_map
from cubatch.kernels.resources import Needs
from cubatch.kernels.tensor_map import TensorMap
from cubatch.kernels.toolchain import compile as compiler
from cubatch.kernels.toolchain.cubins import Resources
from cubatch.kernels.variant import Kernel

_SUCCESS, _NO_MEMORY = 0, 2

# Kernels wait themselves for the launch before (cb_dependent_launch of kernels/common/device.cuh), so they may be
# launched early. Drivers from this version on capture that in graphs.
_DEPENDENT_DRIVER = (12, 3)
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID of cuda.h, as the two structures are


class _Attribute(ctypes.Structure):
    """The driver's structure CUlaunchAttribute, with a value that is an int."""

    _fields_ = [("id", ctypes.c_uint64), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    """The driver's structure CUlaunchConfig: grid, block, shared memory, stream and attributes of a launch."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("num_attributes", ctypes.c_uint),
    ]  # fmt: skip


_EARLY = ctypes.pointer(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 1))
_LASTING_FAMILIES = ("attention", "depthwise")  # and kernels with a tile; blocks of others are short


@attrs.frozen
class _Function:
    """A loaded kernel: the driver's handle, and the number of its blocks that an SM holds."""

    handle: int
    blocks_per_sm: int


class CudaLauncher:
    """
    Launches kernels on the current stream of one GPU; compiles and loads each on its first use.

    Args:
        device: The GPU, which must be CuPy's current device.
        overlaps: Whether a launch may begin while the one before ends, if GPU, driver and kernel support it.

    Attributes:
        module: The array module of its arrays: CuPy.
        overlaps: Whether launches overlap: it was requested, and GPU and driver support it.

    Raises:
        MissingDependency: If CuPy is not installed; UnsupportedVersion if its version is not supported.
        InvalidArgument: If the device's compute capability is unknown, or not in cubatch's table of architectures.
    """

    def __init__(self, device: Device, *, overlaps: bool = True) -> None:
        if device.compute_capability is None:
            raise InvalidArgument("device", str(device), "a GPU of known compute capability")
        self.module: ModuleType = gpu_library.cupy("launching kernels on a GPU")
        self.device, self._arch = device, str(device.arch)
        self._capability = device.compute_capability
        self._limits = architectures.of(device.compute_capability)
        self._driver = driver.load()
        self.overlaps = (
            overlaps
            and "griddepcontrol" in self._limits.instructions
            and driver.version(self._driver) >= _DEPENDENT_DRIVER
        )
        self._functions: dict[Kernel, _Function] = {}
        self._modules: dict[str, Any] = {}

    def compile(self, kernels: Iterable[Kernel]) -> None:
        """Compile kernels on all cores, so that none is compiled during a timing."""
        units = {(kernel.source, kernel.defines): kernel for kernel in kernels}
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for _ in pool.map(lambda kernel: compiler.compile_unit(kernel, self._arch), units.values()):
                pass

    def bind(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[object]) -> Callable[[], None]:
        """
        Prepare a launch; return a function that enqueues it on the stream that is current when it is called.

        CuPy arrays and None are passed as pointers, NumPy scalars and tensor maps by value. InvalidArgument is raised
        for too much shared memory and arrays not on the GPU, DeviceFailed for a tensor map that the driver rejects. The
        function raises DeviceFailed or OutOfMemory if the driver rejects the launch.
        """
        function = self._function(kernel)
        values = [self._value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        start, current_stream = self._starter(kernel, function, grid, pointers), self.module.cuda.get_current_stream
        owners = (arguments, values)  # keeps the arrays and values alive that the pointers point to

        def launch(_: object = owners) -> None:
            status = start(current_stream().ptr)
            if status != _SUCCESS:
                raise _failure(kernel, grid, status)

        return launch

    def _starter(
        self, kernel: Kernel, function: _Function, grid: tuple[int, int, int], pointers: Any
    ) -> Callable[[int], Any]:
        """Return a function that enqueues a launch on a given stream and returns the driver's status."""
        handle, block = ctypes.c_void_p(function.handle), (kernel.threads, 1, 1)
        blocks = math.prod(grid)
        if not (self.overlaps and may_come_early(kernel, function.blocks_per_sm, blocks, self.device)):
            call, shape = self._driver.cuLaunchKernel, (*grid, *block, kernel.dynamic_shared_bytes)
            return lambda stream: call(handle, *shape, ctypes.c_void_p(stream), pointers, None)
        call_extended = self._driver.cuLaunchKernelEx
        # One configuration per stream, never changed: threads share a launch, and the driver reads it without the GIL.
        # The lookup adds no measurable time to a launch; building a configuration for each launch adds 1.5 us.
        configs: dict[int, Any] = {}

        def start(stream: int) -> Any:
            reference = configs.get(stream)
            if reference is None:
                config = _Config(grid, block, kernel.dynamic_shared_bytes, stream, _EARLY, 1)
                reference = configs[stream] = ctypes.byref(config)
            return call_extended(reference, handle, pointers, None)

        return start

    def _value(self, argument: object) -> Any:
        """Return an argument as the driver reads it: a pointer, or the bytes of a NumPy scalar or tensor map."""
        if argument is None:
            return ctypes.c_void_p(None)
        if isinstance(argument, TensorMap):
            data = tensor_map.encode(argument, _address(argument.array), self._driver)
        elif isinstance(argument, np.generic):
            data = argument.tobytes()
        else:
            return ctypes.c_void_p(_address(argument))
        return ctypes.create_string_buffer(data, len(data))

    def _function(self, kernel: Kernel) -> _Function:
        if kernel not in self._functions:
            self._functions[kernel] = self._load(kernel)
        return self._functions[kernel]

    def _load(self, kernel: Kernel) -> _Function:
        compiled = compiler.compile_kernel(kernel, self._arch)
        resources = compiled.resources[kernel.entry]
        needed = resources.shared_bytes + kernel.dynamic_shared_bytes
        limit = self._limits.shared_bytes_per_block
        if needed > limit:
            raise InvalidArgument(
                kernel.name, f"{needed} bytes of shared memory", f"at most {limit} bytes a block on {self.device}"
            )
        path = str(compiled.path)
        if path not in self._modules:
            self._modules[path] = self.module.RawModule(path=path)
        function = self._modules[path].get_function(kernel.entry)
        blocks_per_sm = set_shared_memory(function, kernel, resources, self._capability)
        return _Function(int(function.kernel.ptr), blocks_per_sm)


def may_come_early(kernel: Kernel, blocks_per_sm: int, blocks: int, device: Device) -> bool:
    """
    Return whether a kernel's blocks may start while blocks of the launch before still run.

    The first SMs that are free would take more than their share of early blocks, while a free GPU distributes blocks
    evenly.  This does no harm if an SM holds one block, if all SMs are full, or if blocks end at once.  132 blocks, two
    per SM, took 1.49 times as long on the 132 SMs of an H200.

    Example:
        >>> from cubatch.kernels.variant import find
        >>> tiled = find("gemm_nt", "float32", tile="128x128x8", vector=4)
        >>> [may_come_early(tiled, 2, blocks, Device(name="H200", num_sms=132)) for blocks in (132, 264)]
        [False, True]
    """
    lasts = kernel.tile is not None or kernel.family in _LASTING_FAMILIES
    return not lasts or blocks_per_sm == 1 or blocks >= blocks_per_sm * (device.num_sms or 1)


def set_shared_memory(function: Any, kernel: Kernel, resources: Resources, compute_capability: tuple[int, int]) -> int:
    """
    Set how much shared memory the blocks of CuPy's function may use, and an SM reserves for them.

    Return the number of the kernel's blocks that an SM holds.
    """
    needed = resources.shared_bytes + kernel.dynamic_shared_bytes
    if needed > architectures.every().shared_bytes_without_opting_in:
        function.max_dynamic_shared_size_bytes = kernel.dynamic_shared_bytes
    resident = Needs(kernel.threads, resources.registers, needed).on(compute_capability).blocks_per_sm
    if needed:  # otherwise all of it may be L1 cache
        function.preferred_shared_memory_carveout = carveout_percent(
            compute_capability=compute_capability, blocks_per_sm=resident, shared_bytes_per_block=needed
        )
    return resident


def _address(array: Any) -> int:
    if isinstance(array, np.ndarray):
        raise InvalidArgument("array", f"a NumPy array of shape {array.shape}", "a CuPy array in the GPU's memory")
    return int(array.data.ptr)


def _failure(kernel: Kernel, grid: tuple[int, int, int], status: int) -> Exception:
    what = f"launching {kernel.name} with {grid} blocks of {kernel.threads} threads"
    if status == _NO_MEMORY:
        return OutOfMemory(what, None, None)
    return DeviceFailed.by_driver(what, status, gpu_library.late(status))

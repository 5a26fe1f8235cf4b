"""
The GPUs that CUDA shows to this process, from the CUDA driver and without creating a context.

The process that plans a run must not hold a context. A context takes hundreds of megabytes of the GPU, and a crash in
it would end the user's process. The functions cuInit and cuDevice* create none. They apply CUDA's numbering, MIG slices
and CUDA_VISIBLE_DEVICES.

The CUDA runtime (CuPy) may create the primary context, and NVML counts boards that CUDA does not show. Neither CuPy nor
a toolkit is needed. After cuInit, processes that are forked (not started) from this one cannot use CUDA.
"""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

import attrs

from cubatch.errors import DeviceFailed, DeviceNotAvailable

_LIBRARY = "libcuda.so.1"

# CUresult and CUdevice_attribute, from cuda.h.
_SUCCESS = 0
_STUB_LIBRARY = 34
_NO_DEVICE = 100
_CLOCK_KHZ, _NUM_SMS, _INTEGRATED, _MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS, _L2_BYTES = 13, 16, 18, 36, 37, 38
_MAJOR, _MINOR = 75, 76
_TRANSFERS_PER_CLOCK = 2

_REMEDY = 'Pass device="cpu" to run without it; plans and predictions take the name of any GPU.'


@attrs.frozen(kw_only=True)
class VisibleGpu:
    """A GPU, or a MIG slice, that CUDA shows to this process."""

    index: int  # CUDA's number of it: "cuda:1" is 1
    name: str  # the driver's name; that of a MIG slice ends in " MIG 3g.40gb"
    uuid: str  # "GPU-..." or, for a slice, "MIG-...", as NVML and CUDA_VISIBLE_DEVICES take it
    mig: str | None  # the slice's profile, "3g.40gb"; None for a whole GPU
    compute_capability: tuple[int, int]  # (major, minor)
    num_sms: int  # num_sms, memory_bytes: SMs and memory of the GPU or slice
    memory_bytes: int
    l2_bytes: int | None  # L2 cache; None where the driver reports 0 or an error
    clock_hz: float | None  # highest SM clock; None where the driver reports 0 or an error
    # twice the memory clock times the width of the bus; None where the driver reports 0 or an error
    bytes_per_second: float | None = None
    integrated: bool = False  # whether its memory is the host's


def visible_gpus() -> tuple[VisibleGpu, ...]:
    """
    Return the GPUs that CUDA shows to this process, in CUDA's order.

    Raises:
        DeviceNotAvailable: If there is no CUDA driver, or it shows no GPU.
        DeviceFailed: If the driver reports an error other than these.
    """
    cuda = load()
    status = cuda.cuInit(0)
    if status == _STUB_LIBRARY:
        remedy = f"If the driver is installed, remove the toolkit's folder of stubs from LD_LIBRARY_PATH. {_REMEDY}"
        raise DeviceNotAvailable("cuda", f"{_LIBRARY} is the toolkit's stub, not a driver", remedy)
    if status == _NO_DEVICE:
        raise DeviceNotAvailable("cuda", "the CUDA driver shows no GPU to this process", _REMEDY)
    _check(status, "cuInit")
    count = ctypes.c_int()
    _check(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    if not count.value:
        raise DeviceNotAvailable("cuda", "the CUDA driver shows no GPU to this process", _REMEDY)
    return tuple(_describe(cuda, index) for index in range(count.value))


def load() -> Any:
    """Load and return the driver's library; raise DeviceNotAvailable if it is not installed."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise DeviceNotAvailable("cuda", f"the CUDA driver ({_LIBRARY}) is not installed", _REMEDY) from error


def version(cuda: Any) -> tuple[int, int]:
    """Return the newest CUDA version that the driver loaded by `load` supports, as (major, minor)."""
    number = ctypes.c_int()
    _check(cuda.cuDriverGetVersion(ctypes.byref(number)), "cuDriverGetVersion")
    return number.value // 1000, number.value % 1000 // 10


def _describe(cuda: Any, index: int) -> VisibleGpu:
    handle = ctypes.c_int()
    _check(cuda.cuDeviceGet(ctypes.byref(handle), index), "cuDeviceGet")
    text = ctypes.create_string_buffer(256)
    _check(cuda.cuDeviceGetName(text, len(text), handle), "cuDeviceGetName")
    size = ctypes.c_size_t()
    _check(cuda.cuDeviceTotalMem_v2(ctypes.byref(size), handle), "cuDeviceTotalMem")
    octets = (ctypes.c_ubyte * 16)()
    # Version 2, from CUDA 11.4 on, returns a MIG slice's own uuid; before it, slices have their GPU's.
    get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    _check(get_uuid(ctypes.byref(octets), handle), "cuDeviceGetUuid")

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _check(cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle), "cuDeviceGetAttribute")
        return value.value

    def attribute_or_0(number: int) -> int:
        """Return an attribute of the device; 0, the driver's sign for an unknown value, if the query fails."""
        value = ctypes.c_int()
        status = cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        return value.value if status == _SUCCESS else 0

    name = text.value.decode()
    mig = name.partition(" MIG ")[2] or None
    bus_bits = attribute_or_0(_MEMORY_BUS_BITS)
    return VisibleGpu(
        index=index,
        name=name,
        uuid=f"{'MIG' if mig else 'GPU'}-{uuid.UUID(bytes=bytes(octets))}",
        mig=mig,
        compute_capability=(attribute(_MAJOR), attribute(_MINOR)),
        num_sms=attribute(_NUM_SMS),
        memory_bytes=size.value,
        l2_bytes=attribute_or_0(_L2_BYTES) or None,
        clock_hz=attribute_or_0(_CLOCK_KHZ) * 1000.0 or None,
        bytes_per_second=bus_bits / 8 * _TRANSFERS_PER_CLOCK * 1000.0 * attribute_or_0(_MEMORY_CLOCK_KHZ) or None,
        integrated=bool(attribute_or_0(_INTEGRATED)),
    )


def _check(status: int, operation: str) -> None:
    if status != _SUCCESS:
        raise DeviceFailed.by_driver(operation, status, f"See nvidia-smi. {_REMEDY}")

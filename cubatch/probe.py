"""
The devices of this machine, and the one resolver of every `device=` argument.

A live Device holds what the driver or the kernel says of this machine.  Peak rates, which
neither tells, come from the catalogue where the board is in it without doubt, and never replace
a live fact.  Nothing here makes a CUDA context.
"""

from __future__ import annotations

import os
import re

import attrs

from cubatch import catalogue, cuda_driver, host, monitor
from cubatch.cuda_driver import VisibleGpu
from cubatch.errors import DeviceNotAvailable, InvalidArgument, UnknownName, UnsupportedDtype
from cubatch.hardware import DTYPES, SM_LIMITS, Device
from cubatch.units import format_bytes, parse_bytes

_CPU_SHARE = 0.8
"""Of the main memory that could be taken; the rest is left to the system and to NumPy's own temporaries."""

_CONTEXT_BYTES_PER_THREAD = 2048
"""
What a CUDA context takes for every thread that can be resident on the GPU, chiefly its local memory.
Contexts measured by others: 107 MiB (34 SMs of 1536 threads), 256 (82), 426 (142), 555 (188); the rule
gives 102, 246, 426, 564 (llama.cpp pull request 23604, InvokeAI issue 9413, unsloth-zoo pull request 1053).
"""

_LIBRARY_BYTES = 128 * 2**20
"""Code and workspaces that CuPy and cuBLAS load with the first products: 32 MiB of it cuBLAS's workspace on Hopper."""

_ASSUMED_CAPABILITY = (9, 0)
_ASSUMED_SMS = 132
"""A GPU whose size is not known is taken for a large one: it loses some memory, and does not run out of it."""

_TENSOR_CORES_SINCE = (7, 0)
_TENSOR_CORES_UNSURE = (7, 5)
_TF32_SINCE = (8, 0)

_CUDA_NAME = re.compile(r"cuda(?::([0-9]+))?")


@attrs.frozen
class MemoryLimit:
    """
    How much memory a run may take, and why.

    Attributes:
        bytes: The limit, at least 0.
        free_bytes: What was free when it was asked; what a percentage is a percentage of.
        note: How the limit came about, as a sentence for a person.
        is_lowered: Whether less than what was asked for is there.
    """

    bytes: int
    free_bytes: int
    note: str
    is_lowered: bool = False

    def told(self) -> tuple[str, ...]:
        """Say that less than was asked for is there, if so."""
        return (f"Memory is limited to {format_bytes(self.bytes)}: {self.note}.",) if self.is_lowered else ()


def devices() -> list[Device]:
    """
    List the devices of this machine: the GPUs that CUDA shows to this process, then the CPU.

    Raises:
        DeviceFailed: If there is a GPU driver and it does not work.

    Example:
        >>> devices()[-1].kind
        'cpu'
    """
    try:
        return [*_gpus(), _cpu()]
    except DeviceNotAvailable:
        return [_cpu()]


def device(name: str | None = None) -> Device:
    """
    Get a device of this machine, or the facts of one that is not here.

    Args:
        name: None: the first GPU, else the CPU. "cpu", "cuda" (the first GPU), "cuda:1": a live device.
            Anything else: a name or alias of the catalogue, "v100-sxm2-16gb"; not live.

    Returns:
        Device: Its facts; unknown ones are None.

    Raises:
        DeviceNotAvailable: If a live device was named that is not here.
        InvalidArgument: If several devices of the catalogue go by the name.
        UnknownName: If none does.
        DeviceFailed: If there is a GPU driver and it does not work.

    Example:
        >>> device("titan-x-pascal").num_sms
        28
    """
    if name is None:
        return devices()[0]
    if not isinstance(name, str):
        raise InvalidArgument("device", name, "a name, such as 'cpu', 'cuda:0' or 'v100-sxm2-16gb', or None")
    spelled = name.strip().lower()
    if spelled == "cpu":
        return _cpu()
    live = _CUDA_NAME.fullmatch(spelled)
    if live is None:
        return catalogue.find(name)
    gpus = _gpus()
    index = int(live[1] or 0)
    if index >= len(gpus):
        raise DeviceNotAvailable(name, f"this process sees {_count(gpus)}, counted from cuda:0{_mask()}")
    return gpus[index]


def resolve(device: Device | str | None, *, live: bool = True) -> Device:
    """
    Turn any `device=` argument into a Device.

    Args:
        device: None, a name as for `device()`, or a Device.
        live: Whether it must be in this machine, because something is to be measured on it. A name of
            the catalogue, or a Device from it, then stands for the first GPU here that is of that kind.

    Returns:
        Device: With `live` set if that was demanded.

    Raises:
        DeviceNotAvailable: If it must be here and is not.
        InvalidArgument: If it is neither of these, or the name is that of several devices.
        UnknownName: If no device goes by the name.
        DeviceFailed: If there is a GPU driver and it does not work.

    Example:
        >>> resolve("cpu").live
        True
    """
    found = device if isinstance(device, Device) else _named(device)
    return _present(found) if live else found


def check_dtype(device: Device, dtype: str) -> None:
    """
    Refuse a dtype that the device cannot compute with.

    float16 and bfloat16 run on every GPU: where it has no Tensor Cores for them, storage is 16 bits wide
    and arithmetic float32. tf32 is a mode of Tensor Cores that exists from sm_80 on.

    Args:
        device: What it is to run on.
        dtype: One of "float32", "tf32", "float16", "bfloat16".

    Raises:
        UnknownName: If there is no such dtype.
        UnsupportedDtype: If the device does not have it (also an InvalidArgument).

    Example:
        >>> check_dtype(device("v100-sxm2-16gb"), "bfloat16")
    """
    if not isinstance(dtype, str):
        raise InvalidArgument("dtype", dtype, "one of " + ", ".join(DTYPES))
    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, DTYPES)
    supported = supported_dtypes(device)
    if dtype not in supported:
        raise UnsupportedDtype(dtype, str(device), supported, _dtype_remedy(device))


def supported_dtypes(device: Device) -> tuple[str, ...]:
    """
    List the dtypes that a device takes.

    Example:
        >>> supported_dtypes(device("t4"))
        ('float32', 'float16', 'bfloat16')
    """
    if device.kind == "cpu":
        return ("float32",)
    has_tf32 = device.compute_capability is not None and device.compute_capability >= _TF32_SINCE
    return tuple(dtype for dtype in DTYPES if dtype != "tf32" or has_tf32)


def memory_limit(device: Device, requested: int | str | None = None) -> MemoryLimit:
    """
    Say how much memory a run on a device may take.

    It is the smaller of what was asked for and what is there to take. On a GPU in this machine: what NVML
    says is free, less what the CUDA context and libraries will take. On a GPU that is not here: its capacity
    less the same. On the CPU: 0.8 x the smaller of available memory and the room of the cgroup.

    Args:
        device: What it is to run on.
        requested: None, bytes, "8GiB", or "80%" of the free memory.

    Returns:
        MemoryLimit: The limit, what was free, and a sentence that says how the limit came about.

    Raises:
        InvalidArgument: If `requested` is no size, or the memory of the device is not known.

    Example:
        >>> memory_limit(device("titan-x-pascal"), "8GiB").bytes
        8589934592
    """
    free, usable, note = _cpu_room() if device.kind == "cpu" else _gpu_room(device)
    if requested is None:
        return MemoryLimit(usable, free, note)
    try:
        wanted = parse_bytes(requested, free_bytes=free)
    except (ValueError, OverflowError) as error:
        allowed = "a positive size: bytes, '8GiB' or '80%'"
        raise InvalidArgument("memory_limit", requested, allowed) from error
    if wanted <= usable:
        return MemoryLimit(wanted, free, f"memory_limit={requested!r}")
    return MemoryLimit(usable, free, f"{note}, which is less than memory_limit={requested!r}", is_lowered=True)


def _named(name: str | None) -> Device:
    """Call `device()` where an argument has its name."""
    return device(name)


def _present(wanted: Device) -> Device:
    if wanted.kind == "cpu":
        return wanted if wanted.live else _cpu()
    remedy = "cubatch predict, candidates and memory work for a GPU that is not here."
    try:
        gpus = _gpus()
    except DeviceNotAvailable as error:
        raise DeviceNotAvailable(wanted.slug or wanted.name, error.reason, remedy) from error
    for gpu in gpus:
        if gpu.uuid == wanted.uuid if wanted.live else gpu.slug and gpu.slug == wanted.slug:
            return gpu
    here = ", ".join(map(str, gpus))
    raise DeviceNotAvailable(wanted.slug or wanted.name, f"it is not among the GPUs here ({here}){_mask()}", remedy)


def _gpus() -> list[Device]:
    return [_gpu(found) for found in cuda_driver.visible_gpus()]


def _gpu(found: VisibleGpu) -> Device:
    facts = _catalogued(found)
    whole = facts if facts is not None and not found.mig else None
    return Device(
        name=found.name,
        kind="cuda",
        slug=whole.slug if whole else "",
        architecture=facts.architecture if facts else "",
        compute_capability=found.compute_capability,
        num_sms=found.num_sms,
        # A slice has no published rates, and what it gets of the DRAM's and the clock's is not its share of SMs.
        peak_flops_per_second=whole.peak_flops_per_second if whole else {},
        peak_bytes_per_second=whole.peak_bytes_per_second if whole else None,
        memory_bytes=found.memory_bytes,
        l2_bytes=found.l2_bytes,
        clock_hz=found.clock_hz,
        tensor_cores=facts.tensor_cores if facts else _tensor_cores(found.compute_capability),
        power_limit_watts=_power_limit(found.uuid),
        uuid=found.uuid,
        mig=found.mig,
        index=found.index,
        live=True,
        source=f"the CUDA driver; rates: {whole.source}" if whole else "the CUDA driver",
    )


def _catalogued(found: VisibleGpu) -> Device | None:
    """Find the board in the catalogue; None if there is any doubt that it is this one."""
    try:
        facts = catalogue.find(found.name.partition(" MIG ")[0])
    except InvalidArgument:
        return None
    same_chip = facts.compute_capability == found.compute_capability
    same_size = facts.num_sms in {None, found.num_sms} or found.mig is not None
    return facts if same_chip and same_size else None


def _tensor_cores(compute_capability: tuple[int, int]) -> bool | None:
    # sm_75 is the one architecture of both kinds: GTX 16xx boards have none.
    return None if compute_capability == _TENSOR_CORES_UNSURE else compute_capability >= _TENSOR_CORES_SINCE


def _power_limit(uuid: str) -> float | None:
    try:
        return monitor.Monitor(uuid).snapshot().power_limit_watts
    except DeviceNotAvailable:
        return None


def _cpu() -> Device:
    caches = host.cpu_caches()
    return Device(
        name=host.cpu_name(),
        kind="cpu",
        threads=host.cpu_threads(),
        caches=caches,
        l2_bytes=caches.get("L2"),
        memory_bytes=host.total_memory_bytes(),
        live=True,
        source="/proc and /sys",
    )


def _cpu_room() -> tuple[int, int, str]:
    available, room = host.available_memory_bytes(), host.cgroup_room_bytes()
    known = [size for size in (available, room) if size is not None]
    if not known:
        raise InvalidArgument("device", "cpu", "one whose free memory can be read from /proc or the cgroup")
    free = min(known)
    what = "room in the cgroup" if free == room else "memory available"
    return free, int(_CPU_SHARE * free), f"{_CPU_SHARE} of the {format_bytes(free)} of {what}"


def _gpu_room(device: Device) -> tuple[int, int, str]:
    free = _free_bytes(device) if device.live else None
    what = "free on the GPU"
    if free is None:
        free = device.memory_bytes
        what = "of the GPU's memory (what is free of it is not known)" if device.live else "of an empty GPU"
    if free is None:
        raise InvalidArgument("device", device.name, "one whose memory is known", "Its catalogue entry has no size.")
    reserve = _context_bytes(device)
    note = f"{format_bytes(free)} {what} less {format_bytes(reserve)} for the CUDA context and libraries"
    return free, max(0, free - reserve), note


def _free_bytes(device: Device) -> int | None:
    try:
        return monitor.Monitor(device.uuid).snapshot().free_bytes if device.uuid else None
    except DeviceNotAvailable:
        return None


def _context_bytes(device: Device) -> int:
    """Estimate what the CUDA context and libraries of one process take from a GPU's memory."""
    limits = SM_LIMITS.get(device.compute_capability or _ASSUMED_CAPABILITY, SM_LIMITS[_ASSUMED_CAPABILITY])
    threads = (device.num_sms or _ASSUMED_SMS) * limits.threads_per_sm
    return threads * _CONTEXT_BYTES_PER_THREAD + _LIBRARY_BYTES


def _dtype_remedy(device: Device) -> str:
    if device.kind == "cpu":
        return 'Use dtype="float32", or name the GPU that it is for as device.'
    return 'tf32 needs compute capability 8.0 or higher; use dtype="float32" or "float16".'


def _count(gpus: list[Device]) -> str:
    return f"{len(gpus)} GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"


def _mask() -> str:
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if mask is None else f" with CUDA_VISIBLE_DEVICES={mask}"

"""How much memory a run may use: what the user said, or what is free on the device."""

from __future__ import annotations

import attrs

from cubatch.errors import DeviceNotAvailable, InvalidArgument
from cubatch.hardware import architectures, device_file, host, nvml
from cubatch.hardware.facts import Device
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
        >>> from cubatch.hardware.probe import device
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
        catalogued = "Its catalogue entry has no size." if device.slug else ""
        remedy = device_file.lacks(device, ["memory_bytes"]) or catalogued
        raise InvalidArgument("device", device.name, "one whose memory is known", remedy)
    reserve = _context_bytes(device)
    note = f"{format_bytes(free)} {what} less {format_bytes(reserve)} for the CUDA context and libraries"
    return free, max(0, free - reserve), note


def _free_bytes(device: Device) -> int | None:
    try:
        return nvml.Monitor(device.uuid).snapshot().free_bytes if device.uuid else None
    except DeviceNotAvailable:
        return None


def _context_bytes(device: Device) -> int:
    """Estimate what the CUDA context and libraries of one process take from a GPU's memory."""
    known = architectures.known()
    limits = known.get(device.compute_capability or _ASSUMED_CAPABILITY, known[_ASSUMED_CAPABILITY])
    threads = (device.num_sms or _ASSUMED_SMS) * limits.threads_per_sm
    return threads * _CONTEXT_BYTES_PER_THREAD + _LIBRARY_BYTES

"""How much memory a run may use: the user's limit, or the available memory of the device."""

from __future__ import annotations

import os

import attrs

from cubatch.errors import DeviceFailed, DeviceNotAvailable, InvalidArgument
from cubatch.hardware import context_overhead, device_file, host, nvml
from cubatch.hardware.facts import Device
from cubatch.units import format_bytes, parse_bytes

_CPU_SHARE = 0.8  # of available main memory; the rest is left to the system and to NumPy's temporary arrays

_WORTH_NAMING = 0.05  # share of a GPU's memory from which other processes are named; the driver holds less for itself


@attrs.frozen
class MemoryLimit:
    """The bytes of memory that a run may use, and the origin of this limit."""

    bytes: int  # the limit, at least 0
    free_bytes: int  # free memory when the limit was computed; percentages refer to it
    note: str  # where the limit comes from, as a phrase
    is_lowered: bool = False  # whether the limit is below the requested one
    overhead_bytes: int = 0  # memory reserved for the CUDA context and libraries
    others: str = ""  # other processes that hold much of the device, as a sentence; empty if there are none


def memory_limit(device: Device, requested: int | str | None = None, *, held: int = 0) -> MemoryLimit:
    """
    Return the memory that a run on a device may use: the smaller of the requested and the available memory.

    - GPU in this machine: free memory by NVML, less the overhead of the CUDA context and libraries. If NVML reports
      nothing and the GPU shares the CPU's memory: 0.8 x available main memory, less the same overhead.
    - Absent GPU, or one for which NVML reports nothing: its capacity less the overhead.
    - CPU: 0.8 x the smaller of the available memory and what the cgroup still allows.

    Args:
        requested: None (no request), bytes, "8GiB", or "80%" of free and held memory.
        held: Bytes that this process already holds for the run; they count as free.

    Raises:
        InvalidArgument: If the requested size is no positive size, or the memory of the device is unknown.
    """
    limit = _cpu_limit(held) if device.kind == "cpu" else _gpu_limit(device, held)
    if requested is None:
        return limit
    try:
        requested_bytes = parse_bytes(requested, free_bytes=limit.free_bytes)
    except (ValueError, OverflowError) as error:
        allowed = "a positive size: bytes, '8GiB' or '80%'"
        raise InvalidArgument("memory_limit", requested, allowed) from error
    if requested_bytes <= limit.bytes:
        return attrs.evolve(limit, bytes=requested_bytes, note=f"memory_limit={requested!r}")
    return attrs.evolve(limit, note=f"{limit.note}, which is less than memory_limit={requested!r}", is_lowered=True)


def _cpu_limit(held: int) -> MemoryLimit:
    bounds = (
        (host.cgroup_left_bytes(), "what the cgroup leaves"),
        (host.available_memory_bytes(), "memory available"),
    )
    known = [(size, name) for size, name in bounds if size is not None]
    if not known:
        allowed = "a device whose free memory can be read: mount /proc, where /proc/meminfo has MemAvailable"
        raise InvalidArgument("device", "cpu", allowed)
    free, name = min(known, key=lambda bound: bound[0])
    note = f"{_CPU_SHARE} of the {format_bytes(free)} of {name}{_and_held(held)}"
    return MemoryLimit(int(_CPU_SHARE * free) + held, free + held, note)


def _gpu_limit(device: Device, held: int) -> MemoryLimit:
    free, others = _read(device.uuid, held) if device.live and device.uuid else (None, "")
    name, shared = "free on the GPU", host.available_memory_bytes() if device.integrated else None
    if free is None and shared is not None:
        free, name = int(_CPU_SHARE * shared), f"({_CPU_SHARE} of what is available of memory shared with the CPU)"
    if free is None:
        free, held = device.memory_bytes, 0  # the capacity includes what this process holds
        name = "of the GPU's memory (what is free of it is not known)" if device.live else "of an empty GPU"
    if free is None:
        catalogued = "Its catalogue entry has no size." if device.slug else ""
        remedy = device_file.lacks(device, ["memory_bytes"]) or catalogued
        raise InvalidArgument("device", device.name, "a device whose memory is known", remedy)
    overhead = context_overhead.overhead_bytes(device)
    note = f"{format_bytes(free)} {name} less {format_bytes(overhead)} for the CUDA context and libraries"
    limit = max(0, free - overhead) + held
    return MemoryLimit(limit, free + held, note + _and_held(held), others=others, overhead_bytes=overhead)


def _and_held(held: int) -> str:
    return f", and {format_bytes(held)} that are held already" if held else ""


def _read(uuid: str, held: int) -> tuple[int | None, str]:
    """
    Return a GPU's free bytes, and a sentence on other processes if they hold at least 5 % of its memory.

    The bytes are None if NVML reports none, and the sentence is empty if others hold little. `held` are the bytes that
    this process is known to hold.
    """
    try:
        monitor = nvml.Monitor(uuid)
    except (DeviceNotAvailable, DeviceFailed):
        return None, ""
    memory, processes = monitor.memory(), monitor.processes()
    own = [process.used_bytes or 0 for process in processes if process.pid == os.getpid()]
    others_bytes = (memory.used_bytes or 0) - max(held, sum(own))
    if not memory.total_bytes or others_bytes < _WORTH_NAMING * memory.total_bytes:
        return memory.free_bytes, ""
    holders = nvml.name_processes([process for process in processes if process.pid != os.getpid()])
    names = f": {holders}." if holders else ", and NVML does not say which."
    # In a container NVML may list no process, or the process numbers of the host.
    may_be_own = not own and (held or not holders)
    subject = "Processes, this one perhaps among them, hold" if may_be_own else "Other processes hold"
    amounts = f"{format_bytes(others_bytes)} of the GPU's {format_bytes(memory.total_bytes)}"
    return memory.free_bytes, f"{subject} {amounts}{names}"

"""How much memory a run may use: what the user said, or what is free on the device."""

from __future__ import annotations

import os

import attrs

from cubatch.errors import DeviceFailed, DeviceNotAvailable, InvalidArgument
from cubatch.hardware import device_file, host, nvml, reserve
from cubatch.hardware.facts import Device
from cubatch.hardware.nvml_records import named
from cubatch.units import format_bytes, parse_bytes

_CPU_SHARE = 0.8
"""Of the main memory that could be taken; the rest is left to the system and to NumPy's own temporaries."""

_ADDRESS_BYTES_PER_THREAD = 104 * 2**20
"""
What a thread that walks a shard maps beside its shard: a stack (8 MiB), an arena of the C library's (64 MiB of which
little is used) and a buffer of OpenBLAS's (32 MiB).  It counts where `ulimit -v` bounds what is mapped.
"""

_WORTH_NAMING = 0.05
"""Share of a GPU's memory that other processes must hold to be named; the driver holds less for itself."""


@attrs.frozen
class MemoryLimit:
    """
    How much memory a run may take, and why.

    Attributes:
        bytes: The limit, at least 0.
        free_bytes: What was free when it was asked; what a percentage is a percentage of.
        note: How the limit came about, as a sentence for a person.
        is_lowered: Whether less than what was asked for is there.
        reserve_bytes: What was kept back for the CUDA context and libraries.
        others: Who else holds much of the device, as a sentence; empty if nobody does.
    """

    bytes: int
    free_bytes: int
    note: str
    is_lowered: bool = False
    reserve_bytes: int = 0
    others: str = ""

    def told(self) -> tuple[str, ...]:
        """Say that less than was asked for is there, and who else holds much of it, if so."""
        lowered = f"Memory is limited to {format_bytes(self.bytes)}: {self.note}." if self.is_lowered else ""
        return tuple(sentence for sentence in (lowered, self.others) if sentence)


def memory_limit(device: Device, requested: int | str | None = None, *, held: int = 0) -> MemoryLimit:
    """
    Return how much memory a run on a device may take.

    It is the smaller of what was asked for and what is there to take. On a GPU in this machine: what NVML
    says is free, less what the CUDA context and libraries will take; where it says nothing of one that shares
    the CPU's memory, 0.8 x what is available of that less the same. On a GPU that is not here: its capacity
    less the same. On the CPU: 0.8 x the smallest of available memory, the room of the cgroup, and what
    `ulimit -v` and `-d` leave.

    Args:
        device: What it is to run on.
        requested: None, bytes, "8GiB", or "80%" of the free memory and what is held.
        held: Bytes of the device that this process holds and the run counts as its own: they are as good as free.

    Returns:
        MemoryLimit: The limit, what was free, and a sentence that says how the limit came about.

    Raises:
        InvalidArgument: If `requested` is no size, or the memory of the device is not known.

    Example:
        >>> from cubatch.hardware.probe import device
        >>> memory_limit(device("titan-x-pascal"), "8GiB").bytes
        8589934592
    """
    room = _cpu_room(held) if device.kind == "cpu" else _gpu_room(device, held)
    if requested is None:
        return room
    try:
        wanted = parse_bytes(requested, free_bytes=room.free_bytes)
    except (ValueError, OverflowError) as error:
        allowed = "a positive size: bytes, '8GiB' or '80%'"
        raise InvalidArgument("memory_limit", requested, allowed) from error
    if wanted <= room.bytes:
        return attrs.evolve(room, bytes=wanted, note=f"memory_limit={requested!r}")
    return attrs.evolve(room, note=f"{room.note}, which is less than memory_limit={requested!r}", is_lowered=True)


def _cpu_room(held: int) -> MemoryLimit:
    mapped = host.address_space_room_bytes()
    rooms = (
        (host.cgroup_room_bytes(), "room in the cgroup"),
        (mapped and max(0, mapped - host.cpu_threads() * _ADDRESS_BYTES_PER_THREAD), "what ulimit -v or -d leaves"),
        (host.available_memory_bytes(), "memory available"),
    )
    known = [(size, what) for size, what in rooms if size is not None]
    if not known:
        raise InvalidArgument("device", "cpu", "one whose free memory can be read from /proc or the cgroup")
    free, what = min(known, key=lambda room: room[0])
    note = f"{_CPU_SHARE} of the {format_bytes(free)} of {what}{_and_held(held)}"
    return MemoryLimit(int(_CPU_SHARE * free) + held, free + held, note)


def _gpu_room(device: Device, held: int) -> MemoryLimit:
    free, others = _read(device.uuid, held) if device.live and device.uuid else (None, "")
    what, shared = "free on the GPU", host.available_memory_bytes() if device.integrated else None
    if free is None and shared is not None:
        free, what = int(_CPU_SHARE * shared), f"({_CPU_SHARE} of what is available of memory shared with the CPU)"
    if free is None:
        free, held = device.memory_bytes, 0  # all of it, whoever holds it
        what = "of the GPU's memory (what is free of it is not known)" if device.live else "of an empty GPU"
    if free is None:
        catalogued = "Its catalogue entry has no size." if device.slug else ""
        remedy = device_file.lacks(device, ["memory_bytes"]) or catalogued
        raise InvalidArgument("device", device.name, "one whose memory is known", remedy)
    kept_back = reserve.reserve_bytes(device)
    note = f"{format_bytes(free)} {what} less {format_bytes(kept_back)} for the CUDA context and libraries"
    room = max(0, free - kept_back) + held
    return MemoryLimit(room, free + held, note + _and_held(held), others=others, reserve_bytes=kept_back)


def _and_held(held: int) -> str:
    return f", and {format_bytes(held)} that are held already" if held else ""


def _read(uuid: str, held: int) -> tuple[int | None, str]:
    """Read what is free on a GPU, and who holds much of it beside this process; None where NVML does not tell."""
    try:
        monitor = nvml.Monitor(uuid)
    except (DeviceNotAvailable, DeviceFailed):
        return None, ""
    seen, processes = monitor.memory(), monitor.processes()
    own = [process.used_bytes or 0 for process in processes if process.pid == os.getpid()]
    theirs = (seen.used_bytes or 0) - max(held, sum(own))
    if not seen.total_bytes or theirs < _WORTH_NAMING * seen.total_bytes:
        return seen.free_bytes, ""
    holders = named([process for process in processes if process.pid != os.getpid()])
    who = f": {holders}." if holders else ", and NVML does not say which."
    # In a container NVML may list nobody, or the host's numbers.
    is_perhaps_own = not own and (held or not holders)
    processes_hold = "Processes, this one perhaps among them, hold" if is_perhaps_own else "Other processes hold"
    return (
        seen.free_bytes,
        f"{processes_hold} {format_bytes(theirs)} of the GPU's {format_bytes(seen.total_bytes)}{who}",
    )

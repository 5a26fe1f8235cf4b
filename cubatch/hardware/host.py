"""
The CPU and main memory of this machine, as /proc, /sys and the cgroups of this process tell it.

Every function takes the directory under which /proc and /sys are found, so that a test can bring
its own.  What is not told is None.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import attrs

from cubatch.units import parse_bytes

ROOT = Path("/")

_UNLIMITED_BYTES = 2**62
"""cgroup v1 writes "no limit" as the largest multiple of a page that a signed 64-bit number holds."""


@attrs.frozen
class _Files:
    """Names of a controller's files in one version of the cgroup interface."""

    limits: tuple[str, ...]
    usage: str
    idle_cache: str = ""


_MEMORY_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
# Above "high" nothing is killed: whoever wants more waits until the kernel has found it elsewhere.
_MEMORY_V2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


def cpu_name(root: Path = ROOT) -> str:
    """Give the CPU's name as the kernel reports it, or its instruction set where it reports none (ARM)."""
    named = re.search(r"^model name\s*:\s*(\S.*)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return named[1].strip() if named else f"{platform.machine()} CPU"


def cpu_threads(root: Path = ROOT) -> int:
    """
    Count the threads that can really run at a time: affinity mask and cgroup quota applied.

    The quota is rounded down, since a thread more than it pays for stands still part of every period.
    """
    allowed = len(os.sched_getaffinity(0))
    quotas = [quota for group, version in _groups(root, "cpu") if (quota := _quota(group, version)) is not None]
    return max(1, min(allowed, int(min(quotas)))) if quotas else allowed


def cpu_periods(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """
    Count the periods of each CPU quota so far, and those in which it was used up and all threads stood still.

    Returns:
        dict[str, tuple[int, int]]: By the folder of the cgroup, its own and those above it; those without a quota, or
        that do not count, are left out.
    """
    found = {}
    for group, version in _groups(root, "cpu"):
        text = _text(group / "cpu.stat")
        counts = [re.search(rf"^nr_{name} ([0-9]+)$", text, re.MULTILINE) for name in ("periods", "throttled")]
        if _quota(group, version) is not None and counts[0] and counts[1]:
            found[str(group)] = (int(counts[0][1]), int(counts[1][1]))
    return found


def cpu_caches(root: Path = ROOT) -> dict[str, int]:
    """Give the sizes in bytes of the data caches that the first CPU uses: {"L1d": ..., "L2": ..., "L3": ...}."""
    caches = {}
    for entry in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_text(entry / name).strip() for name in ("level", "type", "size"))
        if size and kind in {"Data", "Unified"}:
            caches[f"L{level}d" if kind == "Data" else f"L{level}"] = parse_bytes(size)
    return caches


def total_memory_bytes(root: Path = ROOT) -> int | None:
    """Read the size of main memory: MemTotal of /proc/meminfo."""
    return _kilobytes(root / "proc/meminfo", "MemTotal")


def available_memory_bytes(root: Path = ROOT) -> int | None:
    """Read how much main memory could be taken without swapping: MemAvailable of /proc/meminfo."""
    return _kilobytes(root / "proc/meminfo", "MemAvailable")


def cgroup_room_bytes(root: Path = ROOT) -> int | None:
    """
    Read how much more memory the cgroups of this process let it take before something is killed or held up.

    Every group from the process's own up to the top may set a limit; the tightest counts.  Room is
    limit - current + inactive page cache, which the kernel gives up before it kills.  Versions 1
    and 2 of the interface are read, also where both are mounted.

    Returns:
        int | None: Bytes, at least 0; None where no group sets a limit.
    """
    rooms = [room for group, version in _groups(root, "memory") if (room := _room(group, version)) is not None]
    return max(0, min(rooms)) if rooms else None


def address_space_room_bytes(root: Path = ROOT) -> int | None:
    """
    Read how much more memory this process may map, by `ulimit -v` and `ulimit -d`: whichever leaves less.

    Both count what is mapped and not what is used: thread stacks, the C library's arenas and the buffers that BLAS
    keeps for every thread take of it before a step does.

    Returns:
        int | None: Bytes, at least 0; None where neither limit is set.
    """
    limits = _text(root / "proc/self/limits")
    rooms = []
    for name, used in (("Max address space", "VmSize"), ("Max data size", "VmData")):
        limit = re.search(rf"^{name} +([0-9]+) ", limits, re.MULTILINE)
        if limit is not None and (taken := process_bytes(used, root)) is not None:
            rooms.append(int(limit[1]) - taken)
    return max(0, min(rooms)) if rooms else None


def process_bytes(name: str, root: Path = ROOT) -> int | None:
    """
    Read a size of this process: "VmRSS", what is resident, "VmHWM", the most of that so far, "VmSize", what is mapped.

    Example:
        >>> process_bytes("VmRSS") > 2**20, process_bytes("no such size")
        (True, None)
    """
    return _kilobytes(root / "proc/self/status", name)


def _kilobytes(path: Path, wanted: str) -> int | None:
    found = re.search(rf"^{wanted}:\s*([0-9]+) kB$", _text(path), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Walk from the process's own group to the top: directory and version of the interface."""
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            # A controller lives in one version only: in the other, its files are not there.
            tops = [(mounted, 2), (mounted / "unified", 2)]
        elif controller in controllers.split(","):
            tops = [(mounted / controllers, 1), (mounted / controller, 1)]
        else:
            continue
        for top, version in tops:
            # Inside a container the path may be the host's, of which only the top is mounted here.
            group = top / path.lstrip("/")
            while group != top:
                yield group, version
                group = group.parent
            yield top, version


def _room(group: Path, version: int) -> int | None:
    files = _MEMORY_V1 if version == 1 else _MEMORY_V2
    written, usage = [_text(group / name).strip() for name in files.limits], _text(group / files.usage).strip()
    limits = [int(text) for text in written if text.isdigit() and int(text) < _UNLIMITED_BYTES]
    if not limits or not usage.isdigit():
        return None
    idle = re.search(rf"^{files.idle_cache} ([0-9]+)$", _text(group / "memory.stat"), re.MULTILINE)
    return min(limits) - int(usage) + (int(idle[1]) if idle else 0)


def _quota(group: Path, version: int) -> float | None:
    """Give the CPUs' worth of time per period that a group may use; None without a limit."""
    if version == 1:
        numbers = [_text(group / "cpu.cfs_quota_us").strip(), _text(group / "cpu.cfs_period_us").strip()]
    else:
        numbers = _text(group / "cpu.max").split()
    # Version 1 writes "no limit" as -1, version 2 as "max".
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):  # noqa: PLR2004 - quota and period
        return None
    return int(numbers[0]) / int(numbers[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

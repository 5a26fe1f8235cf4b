"""
The CPU and main memory of this machine, from /proc, /sys and the cgroups of this process.

Every function takes the folder that contains /proc and /sys, so that a test can bring its own. Unknown values are None.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from cubatch.units import parse_bytes

ROOT = Path("/")

_UNLIMITED_BYTES = 2**62  # cgroup v1 writes "no limit" as the largest multiple of a page in a signed 64-bit number

# By version of the cgroup interface: the files with the limits of memory and its usage, and the key of the idle cache.
# Above "high" no process is killed: a process that needs more waits until the kernel has reclaimed it elsewhere.
_MEMORY = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}


def cpu_name(root: Path = ROOT) -> str:
    """Return the CPU's name as the kernel reports it, or the name of its instruction set if it reports none (ARM)."""
    named = re.search(r"^model name\s*:\s*(\S.*)$", read_text(root / "proc/cpuinfo"), re.MULTILINE)
    return named[1].strip() if named else f"{platform.machine()} CPU"


def cpu_threads(root: Path = ROOT) -> int:
    """
    Return the number of threads that can run at a time by the affinity mask and the CPU quota of the cgroup.

    The quota is rounded down, since a thread beyond the quota is stopped for a part of every period.
    """
    allowed = len(os.sched_getaffinity(0))
    quotas = [quota for group, version in _groups(root, "cpu") if (quota := _quota(group, version)) is not None]
    return max(1, min(allowed, int(min(quotas)))) if quotas else allowed


def cpu_caches(root: Path = ROOT) -> dict[str, int]:
    """Return the sizes in bytes of the data caches of the first CPU: {"L1d": ..., "L2": ..., "L3": ...}."""
    caches = {}
    for entry in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (read_text(entry / name).strip() for name in ("level", "type", "size"))
        if size and kind in {"Data", "Unified"}:
            caches[f"L{level}d" if kind == "Data" else f"L{level}"] = parse_bytes(size)
    return caches


def total_memory_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes of main memory, MemTotal of /proc/meminfo; None if unknown."""
    return _kilobytes(root / "proc/meminfo", "MemTotal")


def available_memory_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes of main memory available without swapping, MemAvailable of /proc/meminfo; None if unknown."""
    return _kilobytes(root / "proc/meminfo", "MemAvailable")


def cgroup_left_bytes(root: Path = ROOT) -> int | None:
    """
    Return how many more bytes of memory the cgroups of this process allow; None where no group sets a limit.

    Every group from the process's own up to the top may set a limit, and the tightest counts. The rest is limit -
    current + inactive page cache, which the kernel gives up before it kills. Versions 1 and 2 of the interface are
    read, also where both are mounted.
    """
    left = [rest for group, version in _groups(root, "memory") if (rest := _left(group, version)) is not None]
    return max(0, min(left)) if left else None


def process_bytes(name: str, root: Path = ROOT) -> int | None:
    """
    Return the bytes of a kind of memory of this process; None for an unknown kind.

    The kind is a name in /proc/self/status: "VmRSS" (resident), "VmHWM" (peak resident), "VmSize" (mapped), or others.

    Example:
        >>> process_bytes("VmRSS") > 2**20, process_bytes("no such size")
        (True, None)
    """
    return _kilobytes(root / "proc/self/status", name)


def _kilobytes(path: Path, name: str) -> int | None:
    line = re.search(rf"^{name}:\s*([0-9]+) kB$", read_text(path), re.MULTILINE)
    return int(line[1]) * 1024 if line else None


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield (folder, interface version) of each cgroup of a controller, from the process's own to the top."""
    mounted = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
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


def _left(group: Path, version: int) -> int | None:
    names, usage_name, idle_cache = _MEMORY[version]
    written, usage = [read_text(group / name).strip() for name in names], read_text(group / usage_name).strip()
    limits = [int(text) for text in written if text.isdigit() and int(text) < _UNLIMITED_BYTES]
    if not limits or not usage.isdigit():
        return None
    idle = re.search(rf"^{idle_cache} ([0-9]+)$", read_text(group / "memory.stat"), re.MULTILINE)
    return min(limits) - int(usage) + (int(idle[1]) if idle else 0)


def _quota(group: Path, version: int) -> float | None:
    if version == 1:
        numbers = [read_text(group / "cpu.cfs_quota_us").strip(), read_text(group / "cpu.cfs_period_us").strip()]
    else:
        numbers = read_text(group / "cpu.max").split()
    # Version 1 writes "no limit" as -1, version 2 as "max".
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):  # noqa: PLR2004 - quota and period
        return None
    return int(numbers[0]) / int(numbers[1])


def read_text(path: Path) -> str:
    """Return the content of a text file; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

"""
CPU time that other processes and the hypervisor took while something was measured, from /proc/stat.

A step that shares its CPUs slows down by more than its share, since the threads of a product wait for the slowest.
All CPUs of the machine count, including those that this process may not use. The time of this process includes its
threads, the children that it has waited for, and a running worker.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import attrs

from cubatch.hardware.host import ROOT, read_text

MIN_SECONDS = 0.5
"""CPU time is counted in ticks of 10 ms, on some machines by sampling: a shorter wall time gives no usable figure."""

# Columns of a line "cpu ..." in proc(5); the time of guests is part of user and nice.
_COLUMNS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_NOT_BUSY = ("idle", "iowait", "steal")
# Fields of /proc/PID/stat after the name: utime, stime and those of the children that were waited for.
_PROCESS_TIMES = slice(11, 15)


@attrs.frozen(kw_only=True)
class Snapshot:
    """CPU time in seconds of all CPUs since boot, and of this process, up to a moment."""

    when: float  # the moment, in seconds of a monotone clock
    num_cpus: int  # CPUs that are online
    total_seconds: float  # time of all CPUs
    busy_seconds: float  # time of all CPUs in any process
    steal_seconds: float  # time in which a CPU had work and the hypervisor ran another machine
    own_seconds: float  # time of this process, of the children that it has waited for, and of the worker


@attrs.frozen(kw_only=True)
class CpuLoad:
    """CPU time that other processes and the hypervisor took between two snapshots."""

    others: float  # CPUs that other processes kept busy on average: their CPU seconds per second
    steal: float  # share of the time of all CPUs that the hypervisor took, in [0, 1]
    num_cpus: int  # CPUs that are online


def snapshot(worker_pid: int | None = None, *, root: Path = ROOT) -> Snapshot | None:
    """
    Return the CPU times in seconds up to now; None without a readable /proc/stat.

    The time of a running worker process counts as own time; None: there is no worker. `root` contains /proc.
    """
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    ticks = os.sysconf("SC_CLK_TCK")
    if worker_pid is not None:
        own += process_seconds(read_text(root / f"proc/{worker_pid}/stat"), ticks)
    return read_stat(read_text(root / "proc/stat"), ticks, when=time.monotonic(), own_seconds=own)


def between(before: Snapshot | None, after: Snapshot | None) -> CpuLoad | None:
    """Return the load between two snapshots; None if a snapshot is None, or less than MIN_SECONDS lies between them."""
    if before is None or after is None:
        return None
    wall, total = after.when - before.when, after.total_seconds - before.total_seconds
    if wall < MIN_SECONDS or total <= 0:  # /proc/stat of some containers does not change
        return None
    others = after.busy_seconds - before.busy_seconds - (after.own_seconds - before.own_seconds)
    steal = (after.steal_seconds - before.steal_seconds) / total
    return CpuLoad(
        others=min(max(others / wall, 0.0), float(after.num_cpus)),
        steal=min(max(steal, 0.0), 1.0),
        num_cpus=after.num_cpus,
    )


def read_stat(text: str, ticks: int, *, when: float, own_seconds: float) -> Snapshot | None:
    """
    Return the CPU seconds in a text of /proc/stat, which counts `ticks` per second; None if a column is missing.

    `when` is the time of reading it, and `own_seconds` the CPU seconds of this process then.
    """
    line = re.search(r"^cpu +([0-9 ]+)$", text, re.MULTILINE)
    counts = [int(count) / ticks for count in line[1].split()] if line else []
    if len(counts) < len(_COLUMNS):
        return None
    seconds = dict(zip(_COLUMNS, counts, strict=False))
    total = sum(seconds.values())
    return Snapshot(
        when=when,
        num_cpus=max(1, len(re.findall(r"^cpu[0-9]+ ", text, re.MULTILINE))),
        total_seconds=total,
        busy_seconds=total - sum(seconds[name] for name in _NOT_BUSY),
        steal_seconds=seconds["steal"],
        own_seconds=own_seconds,
    )


def process_seconds(text: str, ticks: int) -> float:
    """
    Return the CPU seconds of a process, its threads, and the children that it has waited for.

    `text` is the content of /proc/PID/stat, which counts `ticks` per second; 0.0 for an empty text.

    Example:
        >>> process_seconds("7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 150 50 20 10 20 0 9 0 0", 100)
        2.3
        >>> process_seconds("", 100)
        0.0
    """
    times = text.rpartition(")")[2].split()[_PROCESS_TIMES]  # the name may hold brackets and spaces
    return sum(int(count) for count in times) / ticks

"""
What other processes took of the CPUs while something was measured, by /proc/stat.

A step that shares its CPUs is slower by more than its share, since the threads of a product wait for the
slowest of them.  The kernel counts the CPU time of everybody; what is not ours is others'.  Ours is the
time of this process with all its threads, of the children that it has waited for, and of a worker that
still runs, which is not among those.

All CPUs of the machine count, whichever of them this process or its cgroup may use.  Where /proc does not
tell, nothing is said.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import attrs

from cubatch.units import format_whole_percent

ROOT = Path("/")

MIN_SECONDS = 0.5
"""CPU time is counted in ticks of 10 ms, on some machines by sampling: less wall time than this tells nothing."""

OTHERS_WORTH_SAYING = 0.2
STEAL_WORTH_SAYING = 0.02

_ROUNDED_AWAY = 0.1  # a process that kept 1.02 CPUs busy leaves the second of two to us
# Of a line "cpu ..." in proc(5); guests are in user and nice already.
_COLUMNS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_NOT_BUSY = ("idle", "iowait", "steal")
# Of /proc/PID/stat, behind the name: utime, stime and those of the children that were waited for.
_PROCESS_TIMES = slice(11, 15)


@attrs.frozen(kw_only=True)
class Snapshot:
    """
    CPU seconds up to a moment.

    Attributes:
        when: The moment, in seconds of a clock that only goes forward.
        num_cpus: CPUs that are online.
        total_seconds: Of all CPUs, whatever they did.
        busy_seconds: Of all CPUs, doing anybody's work.
        steal_seconds: When a CPU had work and the hypervisor gave it to another machine.
        own_seconds: This process, the children it has waited for, and the worker.
    """

    when: float
    num_cpus: int
    total_seconds: float
    busy_seconds: float
    steal_seconds: float
    own_seconds: float


@attrs.frozen(kw_only=True)
class Load:
    """
    What was taken between two snapshots.

    Attributes:
        others: CPUs that other processes kept busy, on average: their CPU seconds per second.
        steal: Share of the time of all CPUs that the hypervisor took, in [0, 1].
        num_cpus: CPUs that are online.
    """

    others: float
    steal: float
    num_cpus: int

    def sentence(self, threads: int) -> str | None:
        """
        Say what was taken and what to do about it; None where it is too little to matter.

        Args:
            threads: How many the measured step used.  Where fewer would have had CPUs of their own, that is a way out:
                by the affinity mask, by which every library counts its threads; each has variables of its own.

        Example:
            >>> Load(others=1.02, steal=0.0, num_cpus=4).sentence(threads=1)
            'Other processes kept 1.0 of 4 CPUs busy while it was measured: end them and measure again.'
            >>> Load(others=0.1, steal=0.0, num_cpus=4).sentence(threads=4)
        """
        stolen = f"hypervisor took {format_whole_percent(self.steal)} of the CPU time (steal)"
        is_stolen = self.steal >= STEAL_WORTH_SAYING
        if self.others < OTHERS_WORTH_SAYING:
            remedy = "measure again when the other machines of this host are quiet, or on CPUs of your own"
            return f"The {stolen}: {remedy}." if is_stolen else None
        cpus = f"{self.num_cpus} CPU{'s' if self.num_cpus > 1 else ''}"
        taken = f"Other processes kept {self.others:.1f} of {cpus} busy while it was measured"
        left = max(1, int(self.num_cpus - self.others + _ROUNDED_AWAY))
        names = ",".join(map(str, sorted(os.sched_getaffinity(0))[:left]))
        few = f"{left} CPU{'s' if left > 1 else ''} (put taskset --cpu-list {names} before the whole command)"
        fewer = f", or leave it {few}," if left < threads else ""
        return f"{taken}{f', and the {stolen}' if is_stolen else ''}: end them{fewer} and measure again."


def snapshot(worker_pid: int | None = None, *, root: Path = ROOT) -> Snapshot | None:
    """
    Read what the CPUs have done so far.

    Args:
        worker_pid: A child of this process that measures for it and has not been waited for; one that has
            ended meanwhile counts nothing here, and with the children once it was waited for.
        root: The directory under which /proc is found.

    Returns:
        Snapshot: None where there is no /proc/stat.
    """
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    ticks = os.sysconf("SC_CLK_TCK")
    if worker_pid is not None:
        own += process_seconds(_text(root / f"proc/{worker_pid}/stat"), ticks)
    return read_stat(_text(root / "proc/stat"), ticks, when=time.monotonic(), own_seconds=own)


def between(before: Snapshot | None, after: Snapshot | None) -> Load | None:
    """
    Give what was taken between two snapshots; None where it cannot be told, or they are too close.

    Example:
        >>> before = Snapshot(when=0, num_cpus=2, total_seconds=0, busy_seconds=0, steal_seconds=0, own_seconds=0)
        >>> after = Snapshot(when=10, num_cpus=2, total_seconds=20, busy_seconds=15, steal_seconds=1, own_seconds=5)
        >>> between(before, after)
        Load(others=1.0, steal=0.05, num_cpus=2)
    """
    if before is None or after is None:
        return None
    wall, total = after.when - before.when, after.total_seconds - before.total_seconds
    if wall < MIN_SECONDS or total <= 0:  # there are containers whose /proc/stat stands still
        return None
    others = after.busy_seconds - before.busy_seconds - (after.own_seconds - before.own_seconds)
    steal = (after.steal_seconds - before.steal_seconds) / total
    return Load(
        others=min(max(others / wall, 0.0), float(after.num_cpus)),
        steal=min(max(steal, 0.0), 1.0),
        num_cpus=after.num_cpus,
    )


def read_stat(text: str, ticks: int, *, when: float, own_seconds: float) -> Snapshot | None:
    """
    Read the text of /proc/stat.

    Args:
        text: Its content.
        ticks: Ticks per second, in which it counts.
        when, own_seconds: For the snapshot.

    Returns:
        Snapshot: None if the text does not tell.
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
    Read the CPU seconds of a process, with its threads and the children it has waited for, from /proc/PID/stat.

    Example:
        >>> process_seconds("7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 150 50 20 10 20 0 9 0 0", 100)
        2.3
        >>> process_seconds("", 100)
        0.0
    """
    times = text.rpartition(")")[2].split()[_PROCESS_TIMES]  # the name is anything, also with brackets and spaces
    return sum(int(ticked) for ticked in times) / ticks


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""

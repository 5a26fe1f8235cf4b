"""CPU, memory and cgroups read from a made-up /proc and /sys."""

from __future__ import annotations

import pytest

from cubatch.hardware import host

GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Give an empty machine with eight CPUs; `machine("path", text)` writes one of its files."""
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(8)))

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write.root = tmp_path
    return write


def version_2(machine, path, *, limit, usage, inactive=0):
    """Write a group of version 2 of the interface."""
    group = f"sys/fs/cgroup/{path}".rstrip("/")
    machine(f"{group}/memory.max", f"{limit}\n")
    machine(f"{group}/memory.current", f"{usage}\n")
    machine(f"{group}/memory.stat", f"anon 1\ninactive_file {inactive}\nactive_file 7\n")


def version_1(machine, path, *, limit, usage, inactive=0):
    """Write a group of version 1 of the interface."""
    group = f"sys/fs/cgroup/memory/{path}".rstrip("/")
    machine(f"{group}/memory.limit_in_bytes", f"{limit}\n")
    machine(f"{group}/memory.usage_in_bytes", f"{usage}\n")
    machine(f"{group}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}\n")


def test_memory_is_what_meminfo_says(machine):
    """Kilobytes of meminfo are KiB; MemAvailable is taken, not MemFree."""
    machine("proc/meminfo", "MemTotal:       16 kB\nMemFree:         2 kB\nMemAvailable:    8 kB\n")

    assert host.total_memory_bytes(machine.root) == 16 * 1024
    assert host.available_memory_bytes(machine.root) == 8 * 1024


def test_what_is_not_told_is_none(machine):
    """Without /proc and /sys nothing is guessed, and the threads are those of the affinity mask."""
    assert host.total_memory_bytes(machine.root) is None
    assert host.available_memory_bytes(machine.root) is None
    assert host.cgroup_left_bytes(machine.root) is None
    assert host.cpu_caches(machine.root) == {}
    assert host.cpu_name(machine.root).endswith(" CPU")
    assert host.cpu_threads(machine.root) == 8


def test_room_counts_idle_page_cache_as_free(machine):
    """The kernel drops inactive file pages before it kills, so they are room."""
    machine("proc/self/cgroup", "0::/job\n")
    version_2(machine, "job", limit=8 * GIB, usage=6 * GIB, inactive=GIB)

    assert host.cgroup_left_bytes(machine.root) == 3 * GIB


def test_the_tightest_group_up_to_the_top_counts(machine):
    """A parent's limit binds the child, whatever the child's own says, also where a group between them has none."""
    machine("proc/self/cgroup", "0::/pod/box/job\n")
    version_2(machine, "pod/box/job", limit=8 * GIB, usage=1 * GIB)
    version_2(machine, "pod/box", limit="max", usage=3 * GIB)
    version_2(machine, "pod", limit=4 * GIB, usage=3 * GIB)

    assert host.cgroup_left_bytes(machine.root) == GIB


def test_version_1_is_read_from_its_own_mount(machine):
    """Old systems: other file names, a mount per controller, the totals over children."""
    machine("proc/self/cgroup", "9:name=systemd:/x\n4:memory:/job\n0::/\n")
    version_1(machine, "job", limit=4 * GIB, usage=3 * GIB, inactive=GIB // 2)
    version_1(machine, "", limit=9223372036854771712, usage=20 * GIB)

    assert host.cgroup_left_bytes(machine.root) == GIB + GIB // 2


def test_a_container_that_sees_only_its_own_top_reads_it(machine):
    """Version 1 in a container shows the host's path, of which nothing is mounted: the limit lies at the top."""
    machine("proc/self/cgroup", "4:memory:/docker/0123456789abcdef\n")
    version_1(machine, "", limit=2 * GIB, usage=GIB)

    assert host.cgroup_left_bytes(machine.root) == GIB


def test_a_hybrid_mount_of_version_2_is_found(machine):
    """Where version 1 has the top, version 2 lies under `unified`."""
    machine("proc/self/cgroup", "1:cpu:/\n0::/job\n")
    version_2(machine, "unified/job", limit=2 * GIB, usage=GIB)

    assert host.cgroup_left_bytes(machine.root) == GIB


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_no_limit_is_no_room(machine, limit):
    """Both spellings of "no limit" give None, not a huge number."""
    machine("proc/self/cgroup", "4:memory:/\n0::/\n")
    version_2(machine, "", limit="max", usage=GIB)
    version_1(machine, "", limit=limit, usage=GIB)

    assert host.cgroup_left_bytes(machine.root) is None


def test_a_group_over_its_limit_has_no_room(machine):
    """Room is never negative."""
    machine("proc/self/cgroup", "0::/\n")
    version_2(machine, "", limit=GIB, usage=2 * GIB)

    assert host.cgroup_left_bytes(machine.root) == 0


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("200000 100000", 2), ("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_threads_are_those_that_the_quota_pays_for(machine, quota, threads):
    """Two CPUs' worth of time run two threads, though eight may be scheduled; at least one runs."""
    machine("proc/self/cgroup", "0::/job\n")
    machine("sys/fs/cgroup/job/cpu.max", f"{quota}\n")

    assert host.cpu_threads(machine.root) == threads


@pytest.mark.parametrize(("quota", "threads"), [("300000", 3), ("-1", 8)])
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_the_quota_of_version_1_counts_too(machine, mount, quota, threads):
    """The controllers may be mounted together or one by one; -1 is no limit."""
    machine("proc/self/cgroup", "3:cpu,cpuacct:/job\n")
    machine(f"sys/fs/cgroup/{mount}/job/cpu.cfs_quota_us", f"{quota}\n")
    machine(f"sys/fs/cgroup/{mount}/job/cpu.cfs_period_us", "100000\n")

    assert host.cpu_threads(machine.root) == threads


def test_caches_are_those_for_data(machine):
    """The instruction cache is left out, the first level says that it is for data."""
    caches = [(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "1024K"), (3, "Unified", "32M")]
    for index, (level, kind, size) in enumerate(caches):
        folder = f"sys/devices/system/cpu/cpu0/cache/index{index}"
        machine(f"{folder}/level", f"{level}\n")
        machine(f"{folder}/type", f"{kind}\n")
        machine(f"{folder}/size", f"{size}\n")

    assert host.cpu_caches(machine.root) == {"L1d": 48 * 1024, "L2": 2**20, "L3": 32 * 2**20}


def test_the_cpu_is_named_as_the_kernel_names_it(machine):
    """The first processor's model, without the padding."""
    machine("proc/cpuinfo", "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor  \n\nmodel name\t: other\n")

    assert host.cpu_name(machine.root) == "AMD EPYC 9654 96-Core Processor"


@pytest.mark.parametrize(
    ("limit", "high", "room"),
    [(10 * GIB, 6 * GIB, 5 * GIB), (4 * GIB, 6 * GIB, 3 * GIB), ("max", 6 * GIB, 5 * GIB), ("max", "max", None)],
)
def test_a_group_that_is_held_up_sooner_than_killed_has_no_more_room(machine, limit, high, room):
    """Above memory.high the kernel reclaims and makes its processes wait: what is timed there says nothing."""
    machine("proc/self/cgroup", "0::/job\n")
    version_2(machine, "job", limit=limit, usage=GIB)
    machine("sys/fs/cgroup/job/memory.high", f"{high}\n")

    assert host.cgroup_left_bytes(machine.root) == room

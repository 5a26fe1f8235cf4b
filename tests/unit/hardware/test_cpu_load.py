"""What others took of the CPUs, told from made-up texts of /proc and from what this process really burns."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time

import attrs
import pytest

from cubatch.hardware import cpu_load
from cubatch.hardware.cpu_load import Snapshot

CPUS = "cpu0 1 1 1 1 1 1 1 1 1 1\ncpu1 1 1 1 1 1 1 1 1 1 1\nintr 5 5\nctxt 77\ncpufreq 3\n"


def stat(*ticks):
    """Give a /proc/stat of two CPUs: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice."""
    return f"cpu  {' '.join(map(str, ticks))}\n{CPUS}"


def taken(*, wall=10.0, own=0.0, **ticks):
    """Give the load after so many more ticks of each kind, of which the process itself took `own` seconds."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
    start = [1000 + 7 * place for place in range(len(names))]
    end = [count + ticks.get(name, 0) for count, name in zip(start, names, strict=True)]
    before = cpu_load.read_stat(stat(*start), 100, when=5.0, own_seconds=3.0)
    after = cpu_load.read_stat(stat(*end), 100, when=5.0 + wall, own_seconds=3.0 + own)
    return cpu_load.between(before, after)


@pytest.mark.parametrize(
    ("ticks", "own", "others"),
    [
        ({"user": 1000, "idle": 1000}, 10.0, 0.0),  # all that was busy was ours
        ({"user": 1500, "idle": 500}, 5.0, 1.0),
        ({"user": 200, "nice": 200, "system": 200, "irq": 200, "softirq": 200, "idle": 1000}, 0.0, 1.0),
        ({"idle": 1000, "iowait": 500, "steal": 500}, 0.0, 0.0),  # nobody's work
        ({"user": 1000, "guest": 1000, "guest_nice": 50, "idle": 1000}, 10.0, 0.0),  # guests are users, counted once
        ({"user": 990, "idle": 1010}, 10.0, 0.0),  # ticks that round against us are nobody's gain
        ({"user": 3000}, 0.0, 2.0),  # no more than there are CPUs
    ],
)
def test_others_are_what_is_busy_and_not_ours(ticks, own, others):
    """Ten seconds on two CPUs are 2000 ticks; what of them is neither idle nor stolen nor ours, per second."""
    assert taken(own=own, **ticks).others == pytest.approx(others)


@pytest.mark.parametrize(
    ("ticks", "steal"), [({"user": 900, "idle": 1000, "steal": 100}, 0.05), ({"user": 2000}, 0.0), ({"steal": 9}, 1.0)]
)
def test_steal_is_a_share_of_all_cpu_time(ticks, steal):
    """As top and vmstat give it."""
    assert taken(own=9.0, **ticks).steal == pytest.approx(steal)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cpu\n",
        "cpu  1 2 3 4\n",  # before Linux 2.6
        "cpu  one two three four five six seven eight\n",
        CPUS,
    ],
)
def test_where_proc_does_not_tell_nothing_is_said(text):
    """No /proc, an empty one, one of another system: None, all the way."""
    assert cpu_load.read_stat(text, 100, when=0.0, own_seconds=0.0) is None
    here = cpu_load.read_stat(stat(*range(10)), 100, when=9.0, own_seconds=0.0)
    assert (cpu_load.between(None, here), cpu_load.between(here, None)) == (None, None)


def test_a_place_without_proc_has_no_snapshot(tmp_path):
    """Nothing raises, with or without a worker."""
    assert cpu_load.snapshot(root=tmp_path) is None
    assert cpu_load.snapshot(os.getpid(), root=tmp_path) is None


def test_too_short_a_time_or_a_stat_that_stands_still_tells_nothing():
    """Ticks of 10 ms would be a load of their own; gVisor's /proc/stat holds zeros."""
    assert taken(wall=0.4, user=80) is None
    assert taken(wall=10.0) is None
    assert taken(wall=0.6, user=60) is not None


def test_the_cpus_are_those_of_the_machine():
    """One line each; other lines that begin with cpu are none."""
    assert cpu_load.read_stat(stat(*range(10)), 100, when=0.0, own_seconds=0.0).num_cpus == 2


def test_ticks_are_those_of_the_machine():
    """USER_HZ is 100 nearly everywhere, and is asked for all the same."""
    fast = cpu_load.read_stat(stat(*range(10)), 1000, when=0.0, own_seconds=0.0)
    slow = cpu_load.read_stat(stat(*range(10)), 100, when=0.0, own_seconds=0.0)
    assert slow.busy_seconds == pytest.approx(10 * fast.busy_seconds)


# --- this process and its worker, for real -------------------------------------------------------------------

needs_proc = pytest.mark.skipif(cpu_load.snapshot() is None, reason="no /proc/stat here")
BURN = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\nsys.stdin.read()"


@needs_proc
def test_all_threads_of_this_process_are_ours():
    """Time of threads that run at once, and of those that have ended, is in the process's own."""

    def burn():
        while time.thread_time() < 0.3:
            hashlib.sha256(bytes(1 << 20))  # without the interpreter's lock

    before = cpu_load.snapshot()
    threads = [threading.Thread(target=burn) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.55 <= cpu_load.snapshot().own_seconds - before.own_seconds <= 1.5


@needs_proc
def test_a_worker_is_ours_while_it_runs_and_once_it_was_waited_for():
    """A child is among the times of children only after it was waited for; before, its own file tells."""
    before = cpu_load.snapshot()
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        worker.stdout.readline()
        assert cpu_load.snapshot().own_seconds - before.own_seconds < 0.25
        running = cpu_load.snapshot(worker.pid)
        assert running.own_seconds - before.own_seconds >= 0.28  # ticks
        worker.stdin.close()
        deadline = time.monotonic() + 30
        while os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert cpu_load.snapshot(worker.pid).own_seconds >= running.own_seconds  # ended, not waited for
        worker.wait()
        waited = cpu_load.snapshot(worker.pid)
    assert waited.own_seconds >= running.own_seconds - 0.02
    assert waited.own_seconds - running.own_seconds < 0.3  # counted once


@needs_proc
def test_what_this_process_burns_is_nobody_elses():
    """On a machine that does nothing else it would be 0; here it is at most what the machine had beside us."""
    before = cpu_load.snapshot()
    while time.monotonic() < before.when + 0.7:
        hashlib.sha256(bytes(1 << 20))
    after = cpu_load.snapshot()
    found = cpu_load.between(before, after)
    blamed = cpu_load.between(before, attrs.evolve(after, own_seconds=before.own_seconds))
    assert isinstance(before, Snapshot)
    assert 0.0 <= found.others <= blamed.others <= found.num_cpus

"""Ranks are processes that may die: who started them gets an error it can use, and none of them stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cubatch
from cubatch.engine.exchange import MpiExchange
from cubatch.errors import InvalidArgument, MissingDependency, OutOfMemory, WorkerDied, WorkerFailed
from cubatch.hardware.device_list import resolve_devices
from cubatch.measure import rank_group, remote
from cubatch.measure.rank_group import RankGroup
from cubatch.measure.ranks_runner import RanksRunner
from cubatch.network import models
from tests.unit.processes import wait_until

pytest.importorskip("mpi4py", reason="ranks on a CPU need mpi4py")

ROOT = Path(cubatch.__file__).parents[1]
ARGUMENTS = {
    "spec": models.build("mlp").to_mapping(), "mode": "training", "dtype": "float32", "optimizer": "sgd",
    "library": "im2col", "recompute": False, "seed": 0,
}  # fmt: skip


def group(size=2):
    """Ranks that have a model of their own."""
    ranks = RankGroup(resolve_devices(["cpu"] * size))
    ranks.do("build", each=[(name, ARGUMENTS) for name in ranks.names])
    return ranks


@pytest.fixture(scope="module")
def two():
    """Two ranks for tests that leave them as they are: MPI takes a second to start them."""
    with group() as ranks:
        yield ranks


def ranks_running():
    """Process ids of all ranks on this machine, by the socket's path that is theirs."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if b"cubatch.rank" in words and words[0].endswith((b"python", b"python3")) and state not in "ZX":
                found[int(folder.name)] = words[-2].decode()
    return found


def of(ranks):
    """The process ids of one group."""
    return [pid for pid, address in ranks_running().items() if address == ranks.address]


def test_ranks_do_together_what_they_are_told():
    """Two ranks prepare and step; each gives a reading; closed, none of them is left."""
    with group() as ranks:
        ranks.do("prepare", 4)
        readings = ranks.do("time", 3)
        assert len(readings) == 2
        assert all(reading.seconds > 0 for reading in readings)
        pids = of(ranks)
        assert len(pids) == 2
    wait_until(lambda: not set(pids) & set(ranks_running()))


def test_ranks_have_cpus_of_their_own(two):
    """Each rank's process may use its share of this one's CPUs, and no other's."""
    usable = os.sched_getaffinity(0)
    shares = [os.sched_getaffinity(pid) for pid in of(two)]
    if len(usable) > 1:
        assert not shares[0] & shares[1]
    assert all(share <= usable for share in shares)


def test_memory_that_one_rank_lacks_is_lacking_for_all(two):
    """A size that does not fit on rank 1 is out of memory, by its name; afterwards all ranks go on."""
    with pytest.raises(OutOfMemory) as caught:
        two.do("prepare", each=[(8,), (10**8,)])
    assert any("rank 1 of 2" in note for note in caught.value.__notes__)
    two.do("release")
    two.do("prepare", 8)
    assert len(two.do("time", 1)) == 2


def test_an_error_of_one_rank_ends_the_wait_of_the_others(monkeypatch):
    """Rank 0 steps, rank 1 refuses to: its error is raised, and rank 0, which waits for a sum, is ended."""
    monkeypatch.setattr(rank_group, "_GRACE_SECONDS", 0.5)
    with group() as ranks:
        ranks.do("prepare", 4)
        with pytest.raises(WorkerFailed, match="TypeError"):
            ranks.do("time", each=[(1,), ("once",)])
        assert not ranks.is_open
        wait_until(lambda: not of(ranks))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_all(rank, monkeypatch):
    """SIGKILL of either rank in the middle of steps: WorkerDied, and no rank is left."""
    monkeypatch.setattr(remote, "oom_kills", lambda: None)
    with group() as ranks:
        ranks.do("prepare", 4)
        pids = sorted(of(ranks))
        monkeypatch.setattr(rank_group, "wait", killing(rank_group.wait, pids[rank]))
        with pytest.raises((WorkerDied, OutOfMemory)):
            ranks.do("time", 10**7)
        assert not ranks.is_open
        wait_until(lambda: not of(ranks))


def killing(wait, pid):
    """Kill a process before the first wait."""

    def kill_and_wait(*arguments):
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
        return wait(*arguments)

    return kill_and_wait


def test_ranks_that_are_gone_are_started_anew():
    """After a death the next size has new ranks."""
    runner = RanksRunner(["cpu", "cpu"], ARGUMENTS)
    try:
        runner.prepare(4)
        runner._group.close()
        runner.prepare(8)
        assert runner.clock.time(runner.step, 1).seconds > 0
        assert runner.peak_bytes > 0
        assert runner.clock.free_bytes() > 0
    finally:
        runner.close()
    assert runner.peak_bytes is None


OWNER = """
import json, sys, time
from tests.unit.measure.test_rank_group import group, of
ranks = group()
print(json.dumps(of(ranks)), flush=True)
ranks.do("prepare", 4)
ranks.do("time", 10**9)
"""


def test_ranks_end_after_a_process_that_is_killed():
    """SIGKILL of whoever started them, while they step: both ranks end by themselves."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=environment, cwd=ROOT) as owner:
        pids = json.loads(owner.stdout.readline())
        assert len(pids) == 2
        owner.kill()
    wait_until(lambda: not set(pids) & set(ranks_running()))


def test_without_mpiexec_the_extra_is_named(monkeypatch, tmp_path):
    """Neither beside Python nor on PATH: what to install is said."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match=r"\.\[mpi\]"):
        RankGroup(resolve_devices(["cpu", "cpu"]))


def test_ranks_that_end_at_their_start_say_why(monkeypatch, tmp_path):
    """An mpiexec that fails: its output is in the error."""
    broken = tmp_path / "mpiexec"
    broken.write_text("#!/bin/sh\necho no slots left >&2\nexit 3\n")
    broken.chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(WorkerFailed, match="no slots left"):
        RankGroup(resolve_devices(["cpu", "cpu"]))


def test_a_failure_of_mpi_names_the_next_step(monkeypatch):
    """The text of MPI alone names no remedy."""

    def fail(*_):
        raise RuntimeError("MPI_ERR_OTHER: known error not in list")

    world = SimpleNamespace(Dup=lambda: SimpleNamespace(rank=0, size=2, Iallreduce=fail))
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=world, IN_PLACE=None)))
    sums = MpiExchange()
    sums.begin(np.ones(3))
    with pytest.raises(WorkerFailed, match=r"MPI_ERR_OTHER.*list\. Leave out devices= .* mpiexec -n 2 python"):
        sums.finish()
    sums.close()


COMES = """
import socket, sys
from multiprocessing.connection import Connection
from cubatch.measure.remote import identify
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
print("no library", file=sys.stderr, flush=True)
"""
IS_HEARD = """
line.shutdown(socket.SHUT_RD)
Connection(line.detach()).send({"rank": 0, "size": 1, **identify()})
"""


@pytest.mark.parametrize("code", [COMES, COMES + IS_HEARD])
def test_a_rank_that_is_gone_once_it_has_come_says_why(monkeypatch, code):
    """It connects, and ends before it is heard, or before it is answered: its output is in the error."""
    monkeypatch.setattr(RankGroup, "_commands", lambda group: [[sys.executable, "-P", "-c", code, group.address]])
    with pytest.raises(WorkerFailed, match=r"ended at their start; .*no library"):
        RankGroup(resolve_devices(["cpu", "cpu"])[:1])


def test_no_folder_is_left_whoever_is_killed(two):
    """Its socket is of no use once all ranks have come."""
    assert not Path(two.address).parent.exists()


@pytest.mark.parametrize("devices", [0, True, "two", ["cpu"], {"cpu": 2}, 10**6, ["cpu", "v100-sxm2-16gb"]])
def test_devices_that_make_no_sense_are_refused(devices):
    """By name, whatever is wrong with them."""
    with pytest.raises((InvalidArgument, cubatch.DeviceNotAvailable)):
        resolve_devices(devices, None)


def test_sums_are_under_way_while_the_backward_pass_goes_on():
    """
    The trace of two ranks: of each step the first sum is begun before the last backward operation begins.

    All of the gradient is summed once; in some of five steps a sum is under way before the backward pass has ended.
    """
    mpiexec = Path(sys.executable).with_name("mpiexec")
    command = [str(mpiexec) if mpiexec.exists() else "mpiexec", "-n", "2", sys.executable, "-m"]
    done = subprocess.run(
        [*command, "tests.unit.measure.overlap_job"], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    steps = json.loads(done.stdout.splitlines()[0])
    network = models.build("mnist-cnn")
    assert len(steps) == 5
    for step in steps:
        assert sum(size for _, _, size in step["sums"]) == 4 * network.parameters
        assert len(step["sums"]) > 1
    backward = [[one for one in step["operations"] if one[0] == "backward"] for step in steps]
    assert any(step["sums"][0][0] < those[-1][1] for step, those in zip(steps, backward, strict=True))

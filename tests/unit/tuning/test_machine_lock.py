"""Threads of a process measure one after the other, processes know of each other."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import pytest

from cubatch.hardware import cpu_load, probe
from cubatch.tuning import machine_lock
from cubatch.tuning.tune import autotune_callable

CPU = probe.device("cpu")

BESIDE = """
import sys, attrs
from pathlib import Path
from cubatch.hardware import probe
from cubatch.tuning import machine_lock
machine_lock.folder = lambda: Path(sys.argv[1])
device = attrs.evolve(probe.device("cpu"), uuid=sys.argv[2] or None)
with machine_lock.exclusive(device):
    print("marked", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def other_process(uuid=""):
    """Run a process that measures, as far as marks go, until the block ends."""
    command = [sys.executable, "-c", BESIDE, str(machine_lock.folder()), uuid]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_who_waits_is_told_and_gets_its_turn():
    """A second thread is warned, and measures once the first is done."""
    order, holds, done = [], threading.Event(), threading.Event()

    def first():
        with machine_lock.exclusive(CPU):
            holds.set()
            done.wait()
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    holds.wait()
    with pytest.warns(UserWarning, match="another thread is measuring"):
        threading.Timer(0.01, done.set).start()
        with machine_lock.exclusive(CPU):
            order.append("second")
    thread.join()
    assert order == ["first", "second"]


@pytest.mark.filterwarnings("ignore:another thread is measuring")
def test_no_two_threads_step_at_once():
    """Of three that tune together, each has steps, and none begins while another's lasts."""
    inside, together, steps = threading.Lock(), [], []

    def make_step(batch_size):
        def step():
            together.append(not inside.acquire(blocking=False))
            steps.append(threading.get_ident())
            sum(range(1000 * batch_size))
            if not together[-1]:
                inside.release()

        return step

    threads = [
        threading.Thread(target=autotune_callable, args=(make_step,), kwargs={"max_batch_size": 4, "budget": 0.3})
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(steps)) == len(threads)
    assert not any(together)


def test_a_process_that_measures_beside_is_noticed_and_gone_when_it_ends():
    """Both ends of a measurement look around; the mark of a process that was killed is no mark."""
    with other_process() as other:
        with pytest.warns(UserWarning, match="Another cubatch process measured"), machine_lock.exclusive(CPU) as met:
            assert len(met) == 1
        other.kill()
    with machine_lock.exclusive(CPU) as met:
        assert met == []
    assert met == []


def test_a_process_that_begins_meanwhile_is_noticed_at_the_end():
    """And not told a second time of those that were there from the start."""
    with contextlib.ExitStack() as stack, machine_lock.exclusive(CPU) as met:
        assert met == []
        stack.enter_context(other_process())
    assert len(met) == 1


@pytest.mark.usefixtures("others_load")
def test_both_are_told_whoever_came_meanwhile_and_however_it_ends():
    """What others take of the CPUs does not hide that another cubatch was there, nor does an error either."""
    told = []

    def measure(stack):
        with machine_lock.exclusive(CPU) as met:
            told.append(met)
            stack.enter_context(other_process())
            raise KeyError

    with contextlib.ExitStack() as stack, pytest.raises(KeyError):
        measure(stack)
    assert [sentence.partition(" ")[0] for sentence in told[0]] == ["Another", "Other"]


BURN = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\nsys.stdin.read()"


@pytest.mark.skipif(cpu_load.snapshot() is None, reason="no /proc/stat here")
def test_what_a_worker_computed_before_is_not_taken_for_what_it_computes_meanwhile(monkeypatch):
    """It took 0.3 s of CPU time before the turn and ends within it, doing nothing: next to nothing there is ours."""
    looked = []
    monkeypatch.setattr(cpu_load, "between", lambda *ends: looked.append(ends))
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        worker.stdout.readline()
        with machine_lock.exclusive(CPU, worker.pid):
            worker.kill()
            worker.wait()
    ((before, after),) = looked
    assert after.own_seconds - before.own_seconds < 0.2


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Nothing else runs here, whatever this machine does."""
    monkeypatch.setattr(cpu_load, "between", lambda *_: cpu_load.CpuLoad(others=0.0, steal=0.0, num_cpus=2))


@pytest.fixture
def others_load(monkeypatch):
    monkeypatch.setattr(cpu_load, "between", lambda *_: cpu_load.CpuLoad(others=1.9, steal=0.0, num_cpus=2))


def test_devices_are_marked_apart():
    """Who measures on a GPU does not disturb who measures on another."""
    one, two = (attrs.evolve(CPU, kind="cuda", uuid=f"GPU-{n}") for n in (1, 2))
    with other_process(uuid=one.uuid), machine_lock.exclusive(two) as met:
        assert met == []
    assert met == []


def test_tuning_within_tuning_meets_nobody():
    """It is the same measurement."""
    with machine_lock.exclusive(CPU) as outer, machine_lock.exclusive(CPU) as inner:
        pass
    assert (outer, inner) == ([], [])


def test_where_nothing_can_be_marked_it_is_measured(monkeypatch):
    """A read-only home is no reason not to measure."""
    monkeypatch.setattr(machine_lock, "folder", lambda: Path("/proc/nothing/here"))
    with machine_lock.exclusive(CPU) as met:
        assert met == []


def test_the_result_says_that_it_was_not_alone():
    """Among its reasons, where a person looks."""
    with other_process(), pytest.warns(UserWarning, match="Another cubatch"):
        result = autotune_callable(lambda _: lambda: None, max_batch_size=2, budget=0.2, device="cpu")
    assert any("Another cubatch process measured" in reason for reason in result.reasons)

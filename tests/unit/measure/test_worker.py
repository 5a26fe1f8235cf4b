"""The worker may die in any way; the process that started it gets an error it can use, and nothing else."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import cubatch
from cubatch import worker
from cubatch.errors import (
    CubatchError,
    DeviceNotAvailable,
    InvalidArgument,
    OutOfMemory,
    TimedOut,
    WorkerDied,
    WorkerFailed,
)
from cubatch.measure import remote
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate
from cubatch.measure.remote import RemoteRunner
from cubatch.measure.runner import FactoryRef
from cubatch.search import loop
from tests.unit.processes import is_running, wait_until

ROOT = Path(cubatch.__file__).parents[1]


def fake(habits=None, at="prepare", path=""):
    return FactoryRef("tests.unit.worker_fakes:make", {"habits": habits or {}, "at": at, "path": str(path)})


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def children():
    return set(Path("/proc/thread-self/children").read_text().split())


# --- what a runner promises ----------------------------------------------------------------------------------


def test_readings_cross_the_pipe_unchanged(start):
    """A reading taken in the worker arrives with every bit: its mean, its clock, and what was not read as None."""
    runner = start(fake())
    runner.prepare(3)
    reading = runner.clock.time(runner.step, 5)
    assert reading.seconds == (0.1 + 0.2) * 3
    assert reading.sm_clock_mhz == 5.0  # the fake counts its steps
    assert (reading.joules, reading.power_watts) == (None, None)
    assert (reading.temperature_celsius, reading.used_bytes) == (61.0, 2**53 + 1)
    runner.step()
    assert runner.clock.time(runner.step, 1).sm_clock_mhz == 7.0
    assert (runner.peak_bytes, runner.peak_device_bytes) == (30, 70)
    assert runner.clock.free_bytes() == 2**53 + 3
    runner.release()
    assert runner.peak_bytes == 0


def test_the_worker_is_a_process_group_of_its_own_that_the_kernel_takes_first(start, tmp_path, monkeypatch):
    """
    Ctrl-C of the terminal does not reach it, out-of-memory does; the factory sees the user's PYTHONPATH.

    It stays in the user's session, since Linux shares the CPU between sessions.
    """
    for pythonpath in (None, "/the/users/own"):
        monkeypatch.delenv("PYTHONPATH", raising=False)
        if pythonpath is not None:
            monkeypatch.setenv("PYTHONPATH", pythonpath)
        runner = start(FactoryRef("tests.unit.worker_fakes:report", {"path": str(tmp_path / "facts")}))
        facts = json.loads((tmp_path / "facts").read_text())
        assert facts["pid"] == facts["group"] == runner.worker_pid
        assert facts["session"] == os.getsid(0)
        assert facts["parent"] == os.getpid()
        assert facts["oom_score_adj"] == 1000
        assert facts["pythonpath"] == pythonpath
        assert facts["safe_path"]


def test_close_closes_the_runner_and_leaves_nothing(tmp_path):
    """The real runner is closed; process, pipes and files are gone; a second close does nothing."""
    files, before = open_files(), children()
    runner = RemoteRunner(fake(path=tmp_path / "said"))
    pid = runner.worker_pid
    runner.close()
    runner.close()
    assert (tmp_path / "said").read_text() == "closed"
    assert (open_files(), children()) == (files, before)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.case("allow-growth")
@pytest.mark.parametrize(
    ("habit", "at"),
    [("kill", "step"), ("crash", "prepare"), ("exit", "step"), ("hang", "prepare"), ("hang", "step"),
     ("mistake", "step")],
)  # fmt: skip
def test_no_way_to_die_leaks_a_process_a_zombie_or_a_pipe(habit, at, monkeypatch):
    """However the worker ends, the next prepare has a fresh one, and after close nothing is left."""
    files, before = open_files(), children()
    runner = RemoteRunner(fake({"2": habit}, at), prepare_seconds=2.0 if at == "prepare" and habit == "hang" else 60.0)
    runner.step_seconds = 1.0
    runner.prepare(1)
    with pytest.raises(CubatchError):
        (runner.prepare(2), runner.step())
    if habit != "mistake":
        assert (runner.worker_pid, runner.peak_bytes) == (None, None)
        assert (open_files(), children()) == (files, before)
    runner.release()
    runner.prepare(1)
    assert runner.clock.time(runner.step, 1).seconds == 0.1 + 0.2
    runner.close()
    assert (open_files(), children()) == (files, before)


# --- what errors become --------------------------------------------------------------------------------------


def test_our_errors_arrive_as_themselves(start):
    """An error of cubatch keeps class and facts; the worker's traceback comes along as a note."""
    runner = start(fake({"2": "out of memory"}))
    with pytest.raises(OutOfMemory) as caught:
        runner.prepare(2)
    assert caught.value.args == ("conv1", 300, 200, "conv1.y (8, 4, 4, 2)", 7, "")
    assert caught.value.needed_bytes == 300
    assert "worker_fakes.py" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("habit", "kind", "words"),
    [
        ("memory error", OutOfMemory, "MemoryError: numpy could not"),
        ("own child", OutOfMemory, "SilentCubatchError: out of memory: conv2"),  # no class that can be made again
        ("mistake", WorkerFailed, "ZeroDivisionError: in the step"),
        ("crash", WorkerDied, f"signal {int(signal.SIGSEGV)}"),
        ("exit", WorkerDied, "exit status 3"),
    ],
)
def test_foreign_errors_and_deaths_say_what_happened(start, habit, kind, words):
    """Each becomes the error that it means here, told at which batch size."""
    runner = start(fake({"16": habit}))
    with pytest.raises(kind) as caught:
        runner.prepare(16)
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert "batch size 16" in str(caught.value)


def test_how_steps_are_launched_crosses_the_pipe_and_errors_name_the_graph(start):
    """Asked for with the memory; a runner that does not say has None, and its errors name no graph."""
    runner = start(FactoryRef("tests.unit.worker_fakes:make_graphs"))
    runner.prepare(16)
    assert runner.peak_bytes == 160
    assert runner.launch == {"launches": 7, "graph": True, "refusal": None}
    with pytest.raises(WorkerFailed, match="in the step It happened in a step's graph of 7 launches"):
        runner.step()
    plain = start(fake({"16": "mistake"}, at="step"))
    plain.prepare(16)
    assert (plain.peak_bytes, plain.launch) == (160, None)
    with pytest.raises(WorkerFailed) as caught:
        plain.step()
    assert "graph" not in str(caught.value)


def test_the_last_words_of_a_worker_are_in_the_error(start):
    """What it wrote to standard error before it died says more than its exit status."""
    with pytest.raises(WorkerFailed, match="the driver said no"):
        start(fake({"1": "exit"})).prepare(1)


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        ([4, 5], OutOfMemory),  # the kernel counted a kill meanwhile
        ([4, 4], WorkerDied),  # somebody else sent the signal
        ([None, None], OutOfMemory),  # not readable: memory is by far the likeliest reason
    ],
)
def test_sigkill_is_out_of_memory_unless_the_kernel_denies_it(start, monkeypatch, counts, kind):
    """The kernel's count of out-of-memory kills before and after tells its own kills from others."""
    runner = start(fake({"8": "kill"}))
    runner.prepare(1)
    counted = iter(counts)
    monkeypatch.setattr(remote, "oom_kills", lambda: next(counted))
    with pytest.raises(kind) as caught:
        runner.prepare(8)
    assert type(caught.value) is kind
    assert "batch size 8" in str(caught.value)


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a/b\n", {"/sys/fs/cgroup/a/b/memory.events": "max 9\noom 8\noom_kill 3\noom_group_kill 1\n"}, 3),
        ("0::/a/b\n", {"/sys/fs/cgroup/memory.events": "oom_kill 2\n", "/proc/vmstat": "oom_kill 7\n"}, 2),
        (
            "4:cpu,memory:/x\n0::/\n",
            {"/sys/fs/cgroup/memory/x/memory.oom_control": "oom_kill_disable 0\noom_kill 5\n"},
            5,
        ),
        ("0::/\n", {"/proc/vmstat": "pgfault 1\noom_kill 6\n"}, 6),
        ("0::/\n", {}, None),
    ],
    ids=["version 2", "version 2 in a container", "version 1", "the machine", "nowhere"],
)
def test_oom_kills_reads_the_nearest_counter(monkeypatch, cgroup, files, expected):
    """Lines as the kernel documents them: admin-guide/cgroup-v2, memory.events; cgroup-v1, oom_control; vmstat."""
    known = {"/proc/self/cgroup": cgroup, **files}

    def read_text(self):
        if str(self) not in known:
            raise FileNotFoundError(2, "No such file", str(self))
        return known[str(self)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert remote.oom_kills() == expected


def test_a_factory_that_fails_says_so_at_once():
    """An error of the factory is no candidate's fault, so it comes from the start, and no worker stays."""
    before = children()
    with pytest.raises(DeviceNotAvailable, match="no driver"):
        RemoteRunner(FactoryRef("tests.unit.worker_fakes:refuse"))
    with pytest.raises(WorkerFailed, match=r"no_such_module.*isolate=False \(--no-isolate\)"):
        RemoteRunner(FactoryRef("no_such_module:make"))
    with pytest.raises(InvalidArgument, match="JSON"):
        RemoteRunner(FactoryRef("tests.unit.worker_fakes:make", {"habits": object()}))
    assert children() == before


def test_a_deadline_kills_whatever_hangs(start, tmp_path):
    """A step that does not come back within `step_seconds` is a timeout, and the worker's children go with it."""
    runner = start(fake({"1": "grandchild", "2": "hang"}, "step", tmp_path / "pid"))
    runner.prepare(1)
    runner.step()
    grandchild = int((tmp_path / "pid").read_text())
    assert is_running(grandchild)
    runner.step_seconds = 0.2
    runner.prepare(2)
    with pytest.raises(TimedOut) as caught:
        runner.step()
    assert caught.value.seconds == 0.2
    assert "batch size 2" in str(caught.value)
    wait_until(lambda: not is_running(grandchild))


def test_ctrl_c_in_the_middle_of_a_request_ends_the_worker_at_once(start, monkeypatch):
    """Its answer is still to come, so nothing more could be asked of it."""
    runner = start(fake())
    pid = runner.worker_pid

    def interrupt(self, seconds, what):
        raise KeyboardInterrupt

    monkeypatch.setattr(RemoteRunner, "_read_line", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.prepare(1)
    assert runner.worker_pid is None
    assert not is_running(pid)


def test_a_child_that_holds_the_pipes_does_not_hide_the_death(start, tmp_path):
    """Pipes that never close are no reason to wait: the worker's own end is what counts."""
    runner = start(fake({"1": "forked"}, path=tmp_path / "pid"))
    with pytest.raises(WorkerFailed, match=f"signal {int(signal.SIGSEGV)}"):
        runner.prepare(1)
    wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


def test_what_libraries_print_and_read_stays_out_of_the_protocol(start):
    """Python's print and C's write go to standard error, and standard input is empty for everybody else."""
    runner = start(fake({"1": "chatter"}))
    runner.prepare(1)
    assert runner.clock.time(runner.step, 1).seconds == 0.1 + 0.2


# --- what happens to it when the user's process ends ---------------------------------------------------------


def run_script(script, tmp_path, *, cwd=None, flags=(), environment=None):
    """Start a script of its own, as a user would; its folder is `tmp_path / "scripts"`."""
    file = tmp_path / "scripts" / "script.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(textwrap.dedent(script))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.Popen(
        [sys.executable, *flags, str(file)],
        cwd=cwd or tmp_path,
        env={**clean, "PYTHONPATH": str(ROOT), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(script, tmp_path, **more):
    """Run a script to its end and return the words that it printed."""
    with run_script(script, tmp_path, **more) as parent:
        out, err = parent.communicate(timeout=60)
    assert parent.returncode == 0, err
    return out.split()


HANGING = """
    from cubatch.measure.remote import RemoteRunner
    from cubatch.measure.runner import FactoryRef
    runner = RemoteRunner(FactoryRef("tests.unit.worker_fakes:make", {"habits": {"1": "hang"}, "at": "step"}))
    print(runner.worker_pid, flush=True)
    runner.prepare(1)
    try:
        runner.step()
    finally:
        runner.close()
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_worker_does_not_outlive_its_parent(tmp_path, ending):
    """Killed or interrupted in the middle of a step, the user's process takes the worker with it."""
    with run_script(HANGING, tmp_path) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.send_signal(ending)
        parent.communicate(timeout=30)
        wait_until(lambda: not is_running(pid))


def test_a_suspended_worker_does_not_outlive_its_parent_either(tmp_path):
    """It can do nothing at all, so the kernel ends it with whoever started it."""
    with run_script(HANGING, tmp_path) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
        parent.communicate(timeout=30)
        wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize("flags", [(), ("-P",)], ids=["", "-P"])
def test_it_starts_from_any_script_and_any_folder(tmp_path, flags):
    """
    The script is not imported again, so it needs no guard; and neither the folder of the shell nor, under
    `-P`, that of the script lends the worker its `numpy.py` or its `cubatch/`.
    """
    (tmp_path / "scripts").mkdir()
    places = [tmp_path, tmp_path / "scripts"] if flags else [tmp_path]
    for place in places:
        (place / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
        (place / "cubatch").mkdir()
        (place / "cubatch" / "__init__.py").write_text("raise SystemExit('the wrong cubatch')")
    script = """
        import numpy
        import cubatch
        from cubatch.measure.remote import RemoteRunner
        from cubatch.measure.runner import FactoryRef
        runner = RemoteRunner(FactoryRef("tests.unit.worker_fakes:report", {"path": "facts"}))
        runner.close()
        print(cubatch.__file__, numpy.__file__, sep="\\n")
    """
    out = output_of(script, tmp_path, flags=flags)
    facts = json.loads((tmp_path / "facts").read_text())
    assert out == [facts["cubatch"], facts["numpy"]]


@pytest.mark.parametrize("where", ["script's folder", "shell's folder"])
def test_a_folder_that_came_ahead_later_changes_nothing(tmp_path, where):
    """What the script put in front of sys.path after its imports is not what the worker imports."""
    folder = tmp_path / ("scripts" if where == "script's folder" else "shell")
    folder.mkdir()
    script = f"""
        import sys
        import cubatch, numpy
        from cubatch.measure.remote import RemoteRunner
        from cubatch.measure.runner import FactoryRef
        from pathlib import Path
        folder = Path({str(folder)!r})
        sys.path[:] = [entry for entry in sys.path if entry != str(folder)]
        sys.path.insert(0, {'""' if where == "shell's folder" else "str(folder)"})
        (folder / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
        (folder / "cubatch.py").write_text("raise SystemExit('the wrong cubatch')")
        RemoteRunner(FactoryRef("tests.unit.worker_fakes:report", {{"path": {str(tmp_path / "facts")!r}}})).close()
        print(cubatch.__file__, numpy.__file__, sep="\\n")
    """
    out = output_of(script, tmp_path, cwd=folder)
    facts = json.loads((tmp_path / "facts").read_text())
    assert out == [facts["cubatch"], facts["numpy"]]


def test_a_worker_starts_where_the_folder_is_gone(tmp_path):
    """A notebook whose folder was removed, or a temporary one: what was imported from it is no matter here."""
    script = """
        import os, sys, tempfile
        from cubatch.measure.remote import RemoteRunner
        from cubatch.measure.runner import FactoryRef
        sys.path.insert(0, "")
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
        runner = RemoteRunner(FactoryRef("tests.unit.worker_fakes:make"))
        runner.prepare(4)
        print(runner.peak_bytes)
        runner.close()
    """
    assert output_of(script, tmp_path) == ["40"]


def test_a_worker_ends_after_its_parent_whatever_that_one_forked(tmp_path):
    """A child of the user's process, such as a loader of data, has inherited the pipes and lives on."""
    forked = "import os, time; child = os.fork(); child or time.sleep(600); print(child, flush=True);"
    script = HANGING.replace("print(runner.worker_pid, flush=True)", f"{forked} print(runner.worker_pid, flush=True)")
    with run_script(script, tmp_path) as parent:
        child, pid = (int(parent.stdout.readline()) for _ in range(2))
        try:
            parent.kill()
            wait_until(lambda: not is_running(pid))
            assert is_running(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_factory_in_the_folder_of_the_script_is_found(tmp_path):
    """That folder comes last in the worker, but it is there."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "my_factory.py").write_text("from tests.unit.worker_fakes import make")
    script = """
        from cubatch.measure.remote import RemoteRunner
        from cubatch.measure.runner import FactoryRef
        runner = RemoteRunner(FactoryRef("my_factory:make"))
        runner.prepare(4)
        print(runner.peak_bytes)
        runner.close()
    """
    assert output_of(script, tmp_path) == ["40"]


def test_another_cubatch_is_refused(monkeypatch):
    """A worker that found another version, or the same one elsewhere, does not measure."""
    before = children()
    for difference in ({"version": "0.0.1"}, {"file": "/elsewhere/cubatch/__init__.py"}):
        mine = worker.identify()
        monkeypatch.setattr(remote, "identify", lambda: {**mine, **difference})  # noqa: B023 - used in this round
        with pytest.raises(WorkerFailed, match=next(iter(difference.values()))):
            RemoteRunner(fake())
    assert children() == before


# --- measuring -----------------------------------------------------------------------------------------------


def test_measure_goes_on_after_each_way_to_fail(monkeypatch):
    """The walk of the profiler with the worker dying under it: every candidate ends with its own status."""
    monkeypatch.setattr(remote, "oom_kills", lambda: None)
    habits = {"2": "kill", "4": "crash", "8": "memory error"}
    before = children()
    measured = loop.Search(
        factory=functools.partial(RemoteRunner, fake(habits)),
        ladder=[Candidate(n) for n in (1, 2, 4, 8, 16)],
        goal=Goal(),
        budget=120.0,
        seed=0,
    ).run()
    statuses = {outcome.batch_size: outcome.status for outcome in measured.outcomes}
    assert statuses == {1: "ok", 2: "out_of_memory", 4: "error", 8: "out_of_memory", 16: "ok"}
    assert {timing.seconds for timing in measured.timings} == {0.1 + 0.2, (0.1 + 0.2) * 16}
    assert {timing.peak_bytes for timing in measured.timings} == {10, 160}
    assert children() == before

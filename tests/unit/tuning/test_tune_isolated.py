"""`autotune` with a worker: when there is one, scripts that start it, and workers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from cubatch.measure import remote
from cubatch.measure.network_runner import NetworkRunner
from cubatch.tuning.step_memory import footprint
from cubatch.tuning.subjects import network_subject
from tests.unit.tuning.small_runs import CHECKOUT, statuses, tune

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize(("limit", "isolated"), [(5, False), (3, True)])
def test_isolation_is_decided_by_the_largest_plan(monkeypatch, virtual, limit, isolated):
    """ "auto" on the CPU: a worker where some candidate plans more than a quarter of the limit."""
    asked = []

    def in_worker(factory, **_):
        asked.append(factory)
        return factory()

    monkeypatch.setattr(network_subject, "RemoteRunner", in_worker)
    total = footprint("mlp", batch_size=32, device="cpu", mode="inference").total
    tune(isolate="auto", memory_limit=limit * total)
    assert bool(asked) == isolated


def test_any_script_in_any_folder_can_isolate(tmp_path):
    """A folder with a `cubatch/` and a `numpy.py` of its own, a script without a guard: the answer comes."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    (tmp_path / "cubatch").mkdir()
    (tmp_path / "cubatch" / "__init__.py").write_text("raise SystemExit('the wrong cubatch')")
    script = tmp_path / "scripts" / "script.py"
    script.write_text(
        textwrap.dedent("""
        import cubatch as cb

        result = cb.autotune("mlp", device="cpu", batch_sizes=[4, 8], budget=5.0, isolate=True, store=False)
        print(sorted(m.batch_size for m in result.measurements))
        """)
    )
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, env=CHECKOUT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[4, 8]\n"  # once: the worker did not run the script again


@pytest.mark.case("allow-growth")
def test_a_worker_that_is_killed_is_out_of_memory_and_tuning_goes_on(monkeypatch):
    """The kernel takes the worker in the middle of a size: that size is out_of_memory, the others are measured."""
    monkeypatch.setattr(remote, "oom_kills", lambda: None)  # a kill by the kernel looks like this one
    prepare = remote.RemoteRunner.prepare

    def prepare_or_die(self, batch_size):
        if batch_size == 8:
            os.kill(self.worker_pid, signal.SIGKILL)
        prepare(self, batch_size)

    monkeypatch.setattr(remote.RemoteRunner, "prepare", prepare_or_die)
    result = tune(batch_sizes=[4, 8, 32], isolate=True)
    assert statuses(result)[8] == "out_of_memory"
    assert {statuses(result)[4], statuses(result)[32]} <= {"ok", "dropped"}
    assert result.measurements[1].timings_seconds == ()
    assert result.measurements[2].peak_bytes == pytest.approx(result.measurements[2].predicted_peak_bytes, abs=1024)


def test_memory_that_runs_out_here_is_an_outcome_too(monkeypatch, virtual):
    """Without a worker: what NumPy cannot allocate ends that size, its memory is released, and tuning goes on."""
    prepare = NetworkRunner.prepare
    released = []
    release = NetworkRunner.release

    def prepare_or_fail(self, batch_size):
        prepare(self, batch_size)
        if batch_size == 8:
            raise MemoryError("Unable to allocate 9.1 PiB")

    def count(self):
        released.append(self)
        release(self)

    monkeypatch.setattr(NetworkRunner, "prepare", prepare_or_fail)
    monkeypatch.setattr(NetworkRunner, "release", count)
    result = tune(batch_sizes=[4, 8, 32])
    assert statuses(result)[8] == "out_of_memory"
    assert released

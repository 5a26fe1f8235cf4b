"""The campaign of faults in small: nothing is lost, and a loss would be seen."""

from __future__ import annotations

import json

import attrs
import pytest

from benchmarks import bench_faults
from benchmarks.faults import devices
from benchmarks.faults.judging import Trial
from cubatch.tuning.store import Run
from tests.thorough import THOROUGH


@pytest.mark.parametrize("kind", devices.KINDS)
@pytest.mark.parametrize("seed", range(100 if THOROUGH else 1))
def test_nothing_is_lost_on_a_device_that_misbehaves(kind, seed):
    """Every reading that was kept is there once, the answer is the rule's, and deadlines hold."""
    trial = devices.try_once(kind, seed)
    assert trial.is_good, trial


def test_a_store_that_forgets_is_found_out(monkeypatch):
    """One that drops a reading, or keeps another figure."""
    keep = Run.timing
    for change in (lambda timing: None, lambda timing: attrs.evolve(timing, seconds=2 * timing.seconds)):

        def forget(self, timing, change=change):
            changed = change(timing) if timing.round == 1 else timing
            if changed is not None:
                keep(self, changed)

        monkeypatch.setattr(Run, "timing", forget)
        trial = devices.try_once("killed and begun again", 1)
        assert trial.lost
        assert not trial.is_good


@pytest.mark.parametrize("name", ["lost", "twice", "no_answer", "wrong", "late"])
def test_each_thing_that_must_not_be_is_not_good(name, monkeypatch, tmp_path, capsys):
    """One of them is enough for the exit status, and the file says which trial it was."""
    bad = Trial(kind="steps that hang", faults=1, sessions=1, timings=3, **{name: 1})
    monkeypatch.setattr(bench_faults, "try_one", lambda seed, asked: bad)
    file = tmp_path / "faults.json"
    assert bench_faults.main(["--devices", "2", "--kinds", "steps that hang", "--json", str(file)]) == 1
    assert "2 not good" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["bad"]) == 2


def test_what_a_trial_raises_is_no_answer(monkeypatch):
    """A traceback would be the worst of all: it is counted, not the end of the campaign."""

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(devices, "try_once", fail)
    trial = bench_faults.try_one(0, (next(iter(devices.KINDS)), 0))
    assert (trial.no_answer, trial.what) == (True, "ZeroDivisionError()")

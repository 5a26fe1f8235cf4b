"""The whole walk on the CPU: what is asked, measured, kept and answered, and what survives a kill."""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import attrs
import numpy as np
import pytest

import cubatch
from cubatch import errors
from cubatch.hardware import host, load, probe
from cubatch.hardware import room as hardware_room
from cubatch.kernels import ranking
from cubatch.kernels.problem import problem_of
from cubatch.measure import clocks, kernel_choice, network_runner, remote
from cubatch.measure.callable_runner import CallableRunner
from cubatch.measure.conditions import kernels_sha256
from cubatch.measure.network_runner import NetworkRunner
from cubatch.measure.records import Candidate, Outcome, Timing
from cubatch.measure.runner import Reading
from cubatch.memory.fit import max_batch_size
from cubatch.memory.parts import footprint
from cubatch.network import models
from cubatch.network.layers import Conv2d, Linear
from cubatch.network.passes import Pass
from cubatch.tuning import ladder, story
from cubatch.tuning import tune as tuner
from cubatch.tuning.ladder import Ladder
from cubatch.tuning.results import TuningResult
from cubatch.tuning.tune import autotune, autotune_callable
from cubatch.units import format_bytes
from tests.building import workload
from tests.unit.launch_fakes import FakeDevice

CHECKOUT = {**os.environ, "PYTHONPATH": str(Path(cubatch.__file__).parents[1])}  # for scripts: the one under test
GO = Conv2d(h=19, w=19, c=128, k=128, r=3, s=3, pad=1)
CONV = Conv2d(h=6, w=6, c=3, k=4, r=3, s=3, pad=1)
tune = functools.partial(autotune, "mlp", device="cpu", batch_sizes=[4, 32], budget=30.0, store=False, isolate=False)


@pytest.fixture
def no_runner(monkeypatch):
    """From now on nothing can be measured: a runner is an error."""

    def forbid():
        def refuse(**_):
            raise AssertionError("a runner was made")

        monkeypatch.setattr(network_runner, "network_runner", refuse)

    return forbid


@pytest.fixture
def counted(monkeypatch):
    """Batch sizes that were prepared, in order."""
    prepared = []
    prepare = NetworkRunner.prepare

    def count(self, batch_size):
        prepared.append(batch_size)
        prepare(self, batch_size)

    monkeypatch.setattr(NetworkRunner, "prepare", count)
    return prepared


class VirtualClock(clocks.HostClock):
    """Time that only measuring moves on: a step of n samples takes 1 ms and 10 us a sample, whatever the machine."""

    passed = 0.0
    batch_size = 0

    def now(self):
        return VirtualClock.passed

    def sleep(self, seconds):
        VirtualClock.passed += seconds

    def time(self, step, repeats):
        step()
        seconds = 1e-3 + 1e-5 * VirtualClock.batch_size
        VirtualClock.passed += repeats * seconds
        return Reading(seconds=seconds)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Nobody else is busy here, whatever runs beside the tests."""
    monkeypatch.setattr(load, "snapshot", lambda: None)


@pytest.fixture
def virtual(monkeypatch):
    """Runners of this process are told their time by a VirtualClock; the steps are really done, once each."""

    def noting(prepare):
        def note(self, batch_size):
            VirtualClock.batch_size = batch_size
            prepare(self, batch_size)

        return note

    monkeypatch.setattr(clocks, "HostClock", VirtualClock)
    for runner in (NetworkRunner, CallableRunner):
        monkeypatch.setattr(runner, "prepare", noting(runner.prepare))


def statuses(result):
    return {m.batch_size: m.status for m in result.measurements}


# --- an answer -----------------------------------------------------------------------------------------------


def test_what_a_step_should_take_stands_beside_what_it_took(monkeypatch, tmp_path):
    """The model's seconds of each candidate, also in a result that is answered from the store."""
    expected = {4: 0.5, 32: 2.0}
    monkeypatch.setattr(ladder, "step_seconds", lambda _, sizes: [expected[n] for n in sizes])
    for _ in range(2):
        result = tune(store=tmp_path / "store.sqlite3")
        assert {m.batch_size: m.predicted_seconds for m in result.measurements} == expected


@pytest.mark.case("watch")
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("spec", ["mlp", CONV], ids=["network", "layer"])
def test_an_answer_follows_from_its_measurements(spec, mode):
    """The contract's rule, applied to the medians in the result, gives the result's answer; JSON gives it back."""
    result = autotune(spec, device="cpu", mode=mode, batch_sizes=[1, 8, 64], budget=30.0, store=False, tolerance=0.05)
    assert [m.batch_size for m in result.measurements] == [1, 8, 64]
    assert (result.mode, result.dtype, result.library, result.objective) == (mode, "float32", "im2col", "throughput")
    rate = {m.batch_size: m.samples_per_second for m in result.measurements if m.status == "ok"}
    assert result.fastest_batch_size == max(rate, key=rate.get)
    assert result.batch_size == min(n for n, value in rate.items() if value >= 0.95 * max(rate.values()))
    for m in result.measurements:
        assert m.reasons == ("asked for",)
        assert m.status in {"ok", "dropped"}
        assert m.latency_seconds == pytest.approx(float(np.median(m.timings_seconds)))
        assert m.predicted_peak_bytes == footprint(spec, batch_size=m.batch_size, mode=mode, device="cpu").total
        assert m.peak_bytes == pytest.approx(m.predicted_peak_bytes, abs=1024)
    again = TuningResult.from_json(result.to_json())
    assert again.to_mapping() == result.to_mapping()
    assert result.device["kind"] == "cpu"
    assert 0 < result.seconds_spent < 60


@pytest.mark.case("titan-x-test-batch")
@pytest.mark.case("generalisation-gap")
def test_the_smallest_size_within_tolerance_is_the_answer(virtual):
    """1 ms and 10 us a sample: 50 000, 86 486 and 97 561 samples/s at 100, 640, 4000; within 12 % is the middle one."""
    rates = {n: n / (1e-3 + 1e-5 * n) for n in (100, 640, 4000)}
    for tolerance, answer in ((0.01, 4000), (0.12, 640), (0.5, 100)):
        result = tune(batch_sizes=rates, tolerance=tolerance, budget=20.0)
        assert (result.batch_size, result.fastest_batch_size) == (answer, 4000)
        for m in result.measurements:
            assert m.samples_per_second == pytest.approx(rates[m.batch_size])
            assert m.flops_per_second == pytest.approx(m.samples_per_second * models.build("mlp").flops())


def test_candidates_come_from_the_plan_and_the_largest_ignores_max_batch_size(virtual):
    """Without a list: powers of two, 1.5 times them, and the maximum; `largest_batch_size` is the plan's alone."""
    limit = footprint("mlp", batch_size=1000, device="cpu", mode="inference").total
    result = tune(batch_sizes=None, max_batch_size=10, memory_limit=limit)
    assert [m.batch_size for m in result.measurements] == [1, 2, 3, 4, 6, 8, 10]
    assert result.measurements[-1].reasons == ("max_batch_size",)
    assert result.largest_batch_size == max_batch_size("mlp", limit, device="cpu", mode="inference")
    assert result.largest_batch_size >= 1000 > result.largest_measured == 10
    assert result.limits == {"max_batch_size": 10, "memory_bytes": limit, "latency_seconds": None}


@pytest.mark.case("allow-growth")
def test_a_memory_limit_as_text_bounds_the_candidates(virtual, monkeypatch):
    """4 MiB, or the same as a share of what is free: sizes planned above it are listed and never tried."""
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 2**30)
    monkeypatch.setattr(host, "cgroup_room_bytes", lambda: 2**23)
    for limit in ("4MiB", "50%"):
        result = tune(batch_sizes=[16, 10_000], memory_limit=limit)
        assert statuses(result) == {16: "ok", 10_000: "over_limit"}
        assert result.measurements[1].timings_seconds == ()
        assert result.measurements[1].predicted_peak_bytes > 2**22
        assert (result.batch_size, result.decided_by) == (16, "batch_sizes")  # it holds nothing near the limit
        assert result.limits["memory_bytes"] == 2**22
        assert result.largest_batch_size == max_batch_size("mlp", 2**22, device="cpu", mode="inference")


def test_a_limit_above_what_is_free_is_lowered_and_said(virtual, monkeypatch):
    """Nothing is silently replaced: the result names the limit that held, and what was asked for."""
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 2**23)
    monkeypatch.setattr(host, "cgroup_room_bytes", lambda: None)
    (said,) = [reason for reason in tune(batch_sizes=[16], memory_limit="1GiB").reasons if "1GiB" in reason]
    assert said.startswith(
        f"Memory is limited to {format_bytes(hardware_room.memory_limit(probe.device('cpu')).bytes)}: "
    )
    assert not any("Memory is limited" in reason for reason in tune(batch_sizes=[16], memory_limit="1MiB").reasons)


def test_a_latency_limit_rules_out_slow_sizes_with_their_timings(virtual):
    """A step of 11 ms where 10 are allowed: over_limit, with its timings kept."""
    result = tune(batch_sizes=[1, 1000], latency_limit=0.01, budget=60.0)
    assert statuses(result) == {1: "ok", 1000: "over_limit"}
    large = result.measurements[1]
    assert set(large.timings_seconds) == {1e-3 + 1e-5 * 1000}
    assert "latency limit" in large.stop_reason
    assert (result.batch_size, result.decided_by) == (1, "batch_sizes")  # nothing near the limit was asked for


def test_latency_asks_for_the_largest_size_that_is_still_as_quick(virtual):
    """1.01, 1.05 and 2 ms with a tolerance of 5 %: one sample is quickest, five are quick enough, a hundred are not."""
    result = tune(batch_sizes=[1, 5, 100], objective="latency", tolerance=0.05)
    assert (result.objective, result.fastest_batch_size, result.batch_size) == ("latency", 1, 5)


def test_a_limit_of_latency_that_nothing_keeps_is_an_error(virtual):
    """No candidate is left to answer from: the error says how they ended."""
    with pytest.raises(errors.NothingMeasured, match="latency_limit"):
        tune(batch_sizes=[256], latency_limit=1e-9)


def test_a_budget_too_small_for_all_says_so(virtual):
    """A step that would take 50 times as long is `not_run`, with the reason; nothing is guessed."""
    result = tune(batch_sizes=[100, 10_000], budget=0.2)
    assert statuses(result) == {100: "ok", 10_000: "not_run"}
    assert "budget" in result.measurements[1].stop_reason
    assert result.decided_by == "budget"


def test_progress_tells_every_timing(virtual):
    """Every timing of the result was told as it was taken, by size and round."""
    events = []
    result = tune(progress=events.append)
    told = [event.batch_size for event in events if event.kind == "timing"]
    taken = [m.batch_size for m in result.measurements for _ in m.timings_seconds]
    assert sorted(told) == sorted(taken)
    assert events[-1].kind == "end"
    assert {event.batch_size for event in events if event.kind == "outcome"} == {4, 32}


# --- bad input -----------------------------------------------------------------------------------------------

NAN = math.nan


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        *[({"batch_sizes": value}, errors.InvalidArgument, "batch_sizes") for value in (
            [], [0], [-1], [1.5], [NAN], ["8"], [10**12], [True], [None], "32", 32, [[1]],
        )],
        *[({"max_batch_size": value}, errors.InvalidArgument, "max_batch_size") for value in (0, 2.5, NAN, "8", True)],
        *[({"memory_limit": value}, errors.InvalidArgument, "memory_limit") for value in (0, -1, NAN, "8 lots", "0%")],
        *[({"latency_limit": value}, errors.InvalidArgument, "latency_limit") for value in (0, -1.0, NAN, "1", True)],
        *[({"tolerance": value}, errors.InvalidArgument, "tolerance") for value in (-0.1, 1, NAN, "1%", None, True)],
        *[({"budget": value}, errors.InvalidArgument, "budget") for value in (0, -1, NAN, math.inf, "60", None, True)],
        *[({"seed": value}, errors.InvalidArgument, "seed") for value in (-1, 0.5, "0", None, True)],
        *[({"isolate": value}, errors.InvalidArgument, "isolate") for value in ("yes", None, 2, [])],
        *[({"recompute": value}, errors.InvalidArgument, "recompute") for value in ("yes", 1, None)],
        *[({"store": value}, errors.InvalidArgument, "store") for value in (None, 3, [])],
        *[({"objective": value}, errors.InvalidArgument, "objective") for value in ("speed", None)],
        *[({"mode": value}, errors.InvalidArgument, "mode") for value in ("train", None)],
        *[({"optimizer": value}, errors.InvalidArgument, "optimizer") for value in ("adamw", None)],
        *[({"dtype": value}, errors.InvalidArgument, "dtype") for value in ("float16", "tf32", "float33", None)],
        *[({"library": value}, errors.InvalidArgument, "library") for value in ("cubatch", "cudnn", None)],
        *[({"device": value}, errors.InvalidArgument, "device") for value in ("tpu", "titan x", 3)],
        ({"progress": "bar"}, errors.InvalidArgument, "progress"),
        ({"batch_sizes": [8, 64], "max_batch_size": 32}, errors.InvalidArgument, "batch_sizes"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments_are_refused_by_name(options, error, field, no_runner, tmp_path):
    """Each is an error of ours with field and value, before a runner is made or anything is kept."""
    no_runner()
    kept = tmp_path / "store.sqlite3"
    with pytest.raises(error) as caught:
        tune(**{"store": kept} | options)
    assert isinstance(caught.value, errors.CubatchError)
    assert caught.value.field == field
    assert not kept.exists()


def test_our_kernels_on_a_cpu_are_refused():
    """library="cubatch" means a GPU; the error names what there is instead."""
    with pytest.raises(errors.InvalidArgument, match="im2col") as caught:
        tune(library="cubatch")
    assert (caught.value.field, caught.value.value) == ("library", "cubatch")


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("resnet5", errors.InvalidArgument),
        ("no-such-file.toml", errors.CubatchError),
        ({"layers": []}, errors.InvalidSpec),
        ({"input_shape": [4, 4, 3], "layers": [{"type": "conv2d", "k": 4, "r": 9, "s": 9}]}, errors.InvalidSpec),
        (None, errors.CubatchError),
        ("deit-tiny", errors.UnsupportedLayer),
    ],
)
def test_specs_that_cannot_be_run_are_refused(spec, error, no_runner):
    """A typo, a missing file, no layers, a filter too large, nothing, or a layer without code."""
    no_runner()
    with pytest.raises(error):
        autotune(spec, device="cpu", batch_sizes=[1], budget=0.5, store=False, isolate=False)


def test_what_the_machine_does_not_have_is_refused(no_runner):
    """A catalogued GPU that is not here, energy without a reading, a limit below one sample."""
    no_runner()
    with pytest.raises(errors.DeviceNotAvailable):
        tune(device="titan-x-maxwell")
    with pytest.raises(errors.EnergyNotAvailable):
        tune(objective="energy")
    with pytest.raises(errors.DoesNotFit) as caught:
        tune(memory_limit=1000)
    assert caught.value.available_bytes == 1000
    assert isinstance(caught.value, MemoryError)


# --- the store -----------------------------------------------------------------------------------------------


def test_a_rerun_answers_from_the_store(tmp_path, no_runner):
    """Zero new measurements, not even a runner; the same timings, answer and seconds."""
    kept = tmp_path / "kept.sqlite3"
    first = tune(store=kept)
    no_runner()
    second = tune(store=str(kept))
    drop = {"created", "device"}
    before, after = ({k: v for k, v in result.to_mapping().items() if k not in drop} for result in (first, second))
    *reasons, said = after.pop("reasons")
    assert reasons == before.pop("reasons")
    assert "from the store" in said
    assert after == before


@pytest.mark.parametrize(
    "other",
    [
        {"mode": "training"}, {"batch_sizes": [4]}, {"seed": 1}, {"tolerance": 0.02}, {"objective": "latency"},
        {"memory_limit": "64MiB"}, {"recompute": True}, {"optimizer": "adam"}, {"latency_limit": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_another_question_is_another_run(tmp_path, other, virtual, counted):
    """Every argument that shapes the answer is part of the identity, so its run is measured for itself."""
    quick = functools.partial(tune, batch_sizes=[4, 8], store=tmp_path / "kept")
    quick()
    before = len(counted)
    quick()
    assert len(counted) == before
    quick(**other)
    assert len(counted) > before


def test_refresh_starts_over_and_false_keeps_nothing(tmp_path, monkeypatch, counted):
    """ "refresh" measures anew in place of what was kept, in the store of the user's cache."""
    monkeypatch.setattr(tuner.sqlite_file, "default_path", lambda: tmp_path / "cache" / "store.sqlite3")
    quick = functools.partial(tune, batch_sizes=[4])
    quick()
    assert not (tmp_path / "cache").exists()
    first = quick(store=True)
    done = len(counted)
    assert quick(store=True).measurements == first.measurements
    assert len(counted) == done
    fresh = quick(store="refresh")
    assert len(counted) > done
    assert fresh.measurements[0].timings_seconds != first.measurements[0].timings_seconds
    assert quick(store=True).measurements == fresh.measurements
    (run,) = tuner.store.list_runs(tmp_path / "cache" / "store.sqlite3")
    assert run.state == "finished"


def test_a_changed_condition_is_refused_by_name(tmp_path, monkeypatch, virtual, counted):
    """Another NumPy, another number of threads: measured anew, and the result says which field differs."""
    quick = functools.partial(tune, batch_sizes=[4], store=tmp_path / "kept")
    quick()
    before, real = len(counted), tuner.conditions
    with monkeypatch.context() as changed:
        changed.setattr(tuner, "conditions", lambda device: real(device) | {"numpy": "1.0", "threads": 99})
        result = quick()
    assert len(counted) > before
    (note,) = [reason for reason in result.reasons if "refused" in reason]
    assert "numpy was" in note
    assert "is 1.0" in note
    assert "threads was" in note
    after = len(counted)
    assert not [reason for reason in quick().reasons if "refused" in reason]
    assert len(counted) == after


def test_a_rerun_with_less_memory_refuses_only_what_no_longer_fits(tmp_path, monkeypatch, virtual):
    """The ladder is that of the first run; sizes planned above today's limit are refused, the others go on."""
    options = {"store": tmp_path / "kept", "memory_limit": "1GiB"}
    stop = types.SimpleNamespace(after=1)

    def interrupt(event):
        if event.kind == "timing":
            stop.after -= 1
            if not stop.after:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(batch_sizes=[4, 2000], progress=interrupt, **options)
    room = footprint("mlp", batch_size=500, device="cpu", mode="inference").total
    monkeypatch.setattr(host, "available_memory_bytes", lambda: int(room / 0.8))
    monkeypatch.setattr(host, "cgroup_room_bytes", lambda: None)
    result = tune(batch_sizes=[4, 2000], **options)
    assert statuses(result) == {4: "ok", 2000: "over_limit"}
    today = hardware_room.memory_limit(probe.device("cpu"), "1GiB").bytes
    largest = max_batch_size("mlp", today, device="cpu", mode="inference")
    assert (result.limits["memory_bytes"], result.largest_batch_size) == (today, largest)


# --- interrupted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interruption_keeps_the_timings_and_carries_what_there_is(tmp_path, stop, counted):
    """Ctrl-C comes out as it was, `partial` holds every timing so far, and a rerun fills in only the rest."""
    kept, events = tmp_path / "kept", []

    def interrupt(event):
        events.append(event)
        if sum(event.kind == "timing" for event in events) == 3:
            raise stop

    with pytest.raises(stop) as caught:
        tune(store=kept, progress=interrupt)
    partial = caught.value.partial
    assert isinstance(partial, TuningResult)
    assert set(statuses(partial).values()) == {"interrupted"}
    assert partial.batch_size is None
    taken = {m.batch_size: m.timings_seconds for m in partial.measurements}
    assert sum(map(len, taken.values())) == 3
    json.loads(partial.to_json())
    before, more = rows(kept), []
    assert {n: tuple(before[key][0] for key in sorted(before) if key[0] == n) for n in (4, 32)} == taken
    result = tune(store=kept, progress=more.append)
    after, new = rows(kept), {(event.batch_size, event.round) for event in more if event.kind == "timing"}
    assert after.items() >= before.items()
    assert new == after.keys() - before.keys()
    for m in result.measurements:
        assert len(m.timings_seconds) + m.disturbed == [size for size, _ in after].count(m.batch_size)
    assert set(statuses(result).values()) <= {"ok", "dropped"}
    assert result.seconds_spent > partial.seconds_spent


KILLED = """
    import sys
    import cubatch as cb

    cb.autotune("mlp", device="cpu", mode="training", batch_sizes=range(30, 36), budget=60.0, seed=1, tolerance=0.001,
                isolate=False, store=sys.argv[1])
"""


def rows(path):
    """Read every timing that is kept, as the file has it."""
    if not path.exists():
        return {}
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            found = {
                row[:2]: row[2:] for row in database.execute("SELECT batch_size, round, seconds, repeats FROM timings")
            }
    except sqlite3.OperationalError:  # the file has just been made, its tables have not
        return {}
    finally:
        if "database" in locals():
            database.close()
    return found


def test_three_kills_lose_and_repeat_nothing(tmp_path):
    """
    SIGKILL at three random moments, then a rerun: no stored timing is measured again, and no candidate is missing.

    The moments are numbers of kept timings, drawn from a seed, so that the test does not depend on the machine's speed;
    each of the sizes asked for is measured once before any is measured again.
    """
    script, kept = tmp_path / "script.py", tmp_path / "kept.sqlite3"
    script.write_text(textwrap.dedent(KILLED))
    draw, before = random.Random(20), {}
    for _ in range(3):
        enough = len(before) + draw.randint(1, 6)
        process = subprocess.Popen([sys.executable, str(script), str(kept)], start_new_session=True, env=CHECKOUT)
        try:
            deadline = time.monotonic() + 60
            while len(rows(kept)) < enough and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.002)
        finally:
            process.kill()
            process.wait()
        now = rows(kept)
        assert len(now) >= enough, "the process ended by itself"
        assert now.items() >= before.items()
        before = now
    told = []
    result = autotune(
        "mlp", device="cpu", mode="training", batch_sizes=range(30, 36), budget=60.0, seed=1, tolerance=0.001,
        isolate=False, store=kept, progress=told.append,
    )  # fmt: skip
    after = rows(kept)
    assert after.items() >= before.items()
    new = [(event.batch_size, event.round) for event in told if event.kind == "timing"]
    assert len(new) == len(set(new))
    assert not before.keys() & set(new)
    assert after.keys() == before.keys() | set(new)
    assert [m.batch_size for m in result.measurements] == list(range(30, 36))
    for m in result.measurements:
        assert m.status in {"ok", "dropped"}
        taken = [value[0] for (size, _), value in sorted(after.items()) if size == m.batch_size]
        assert set(m.timings_seconds) <= set(taken)
        assert len(m.timings_seconds) + m.disturbed + m.throttled == len(taken)
    assert not [reason for reason in result.reasons if "refused" in reason]


# --- isolated ------------------------------------------------------------------------------------------------


def test_a_worker_measures_and_the_answer_is_of_the_same_form():
    """isolate=True: another process took the timings, with the same plan, and the result looks no different."""
    result = tune(isolate=True)
    assert set(statuses(result).values()) <= {"ok", "dropped"}
    assert result.measurements[1].peak_bytes == pytest.approx(result.measurements[1].predicted_peak_bytes, abs=1024)


@pytest.mark.parametrize(("limit", "isolated"), [(5, False), (3, True)])
def test_isolation_is_decided_by_the_largest_plan(monkeypatch, virtual, limit, isolated):
    """ "auto" on the CPU: a worker where some candidate plans more than a quarter of the limit."""
    asked = []

    def in_worker(factory):
        asked.append(factory)
        return factory()

    monkeypatch.setattr(tuner, "RemoteRunner", in_worker)
    total = footprint("mlp", batch_size=32, device="cpu", mode="inference").total
    tune(isolate="auto", memory_limit=limit * total)
    assert bool(asked) == isolated


@pytest.mark.parametrize("guard", ["", 'if __name__ == "__main__":'], ids=["no guard", "guard"])
def test_any_script_in_any_folder_can_isolate(tmp_path, guard):
    """A folder with a `cubatch/` and a `numpy.py` of its own, a script without a guard: the answer comes."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    (tmp_path / "cubatch").mkdir()
    (tmp_path / "cubatch" / "__init__.py").write_text("raise SystemExit('the wrong cubatch')")
    script = tmp_path / "scripts" / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import cubatch as cb

        {guard or "if True:"}
            result = cb.autotune("mlp", device="cpu", batch_sizes=[4, 8], budget=30.0, isolate=True, store=False)
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


# --- callables -----------------------------------------------------------------------------------------------


def matmul(n):
    """A NumPy step whose time grows with n."""
    x, w = np.ones((n, 64)), np.ones((64, 64))
    return lambda: x @ w


call = functools.partial(
    autotune_callable, matmul, max_batch_size=64, device="cpu", batch_sizes=[1, 8, 64], budget=30.0
)


def test_a_numpy_callable_is_tuned(virtual):
    """The same result as of a network; what only a plan could know is None, and the clock is said."""
    result = call()
    assert [m.batch_size for m in result.measurements] == [1, 8, 64]
    assert {m.batch_size: m.latency_seconds for m in result.measurements} == {1: 1.01e-3, 8: 1.08e-3, 64: 1.64e-3}
    assert (result.batch_size, result.decided_by) == (64, "batch_sizes")
    assert (result.largest_batch_size, result.spec, result.largest_measured) == (None, None, 64)
    assert {m.predicted_peak_bytes for m in result.measurements} == {None}
    assert any("host's clock" in reason for reason in result.reasons)
    assert TuningResult.from_json(result.to_json()).to_mapping() == result.to_mapping()


def test_without_a_list_a_callable_gets_the_plain_ladder(virtual):
    """Powers of two, 1.5 times them, and the maximum."""
    result = call(batch_sizes=None, max_batch_size=5)
    assert [m.batch_size for m in result.measurements] == [1, 2, 3, 4, 5]
    assert (result.batch_size, result.decided_by) == (5, "max_batch_size")


def test_a_callable_that_runs_out_of_memory_at_some_size(virtual):
    """MemoryError, by type, at 40 and above: those are out_of_memory, the others answer, and the list decided."""

    def make_step(n):
        if n >= 40:
            raise MemoryError
        return matmul(n)

    result = autotune_callable(make_step, max_batch_size=64, device="cpu", batch_sizes=[1, 8, 48, 64], budget=30.0)
    assert statuses(result)[48] == statuses(result)[64] == "out_of_memory"
    assert (result.largest_measured, result.batch_size, result.decided_by) == (8, 8, "batch_sizes")
    with pytest.raises(errors.NothingMeasured, match="memory"):
        autotune_callable(make_step, max_batch_size=64, device="cpu", batch_sizes=[48, 64], budget=1.0)


def test_a_mistake_in_a_callable_is_an_error_not_an_out_of_memory(virtual):
    """An error whose text speaks of memory is judged by its type; the reason names it."""

    def make_step(n):
        def step():
            if n == 8:
                raise RuntimeError("CUDA out of memory, it says")

        return step

    result = autotune_callable(make_step, max_batch_size=8, device="cpu", batch_sizes=[1, 8], budget=30.0)
    assert statuses(result)[8] == "error"
    assert "RuntimeError" in result.measurements[1].stop_reason


def test_only_one_step_lives_at_a_time(virtual):
    """The memory of a size is let go of before the next is made, and after the last."""
    alive = []

    class Step:
        def __init__(self, n):
            alive.append(n)
            assert len(alive) == 1
            self.n = n

        def __call__(self):
            sum(range(self.n))

        def __del__(self):
            alive.remove(self.n)

    autotune_callable(Step, max_batch_size=64, device="cpu", batch_sizes=[1, 8, 64], budget=30.0)
    gc.collect()
    assert alive == []


def test_pytorch_on_the_cpu_is_tuned(virtual):
    """A training step of PyTorch, as in the docstring but on the CPU: steps are taken, the host tells their time."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def make_step(n):
        x, y = torch.randn(n, 16), torch.randint(4, (n,))

        def step():
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        return step

    weights = model.weight.detach().clone()
    result = autotune_callable(make_step, max_batch_size=256, device="cpu", batch_sizes=[1, 256], budget=30.0)
    assert result.batch_size == 256
    assert not torch.equal(model.weight, weights)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_callable_hands_out_what_there_is(virtual, stop):
    """Nothing is stored, but what was measured is on the exception."""

    def make_step(n):
        def step():
            steps.append(n)
            if steps.count(8) > 5:
                raise stop

        return step

    steps = []
    with pytest.raises(stop) as caught:
        autotune_callable(make_step, max_batch_size=8, device="cpu", batch_sizes=[1, 8], budget=30.0)
    partial = caught.value.partial
    counts = {m.batch_size: len(m.timings_seconds) for m in partial.measurements}
    assert 0 < counts[8] <= 5
    assert counts[1] > 0
    assert set(statuses(partial).values()) == {"interrupted"}


def test_a_memory_limit_that_nobody_watches_is_said():
    """On the CPU neither CuPy nor PyTorch tells what a step holds."""

    def asked(**limit):
        result = autotune_callable(lambda _: lambda: None, max_batch_size=1, device="cpu", budget=1.0, **limit)
        return ["not watched" in reason for reason in result.reasons].count(True)

    assert (asked(memory_limit="1KiB"), asked()) == (1, 0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_batch_size": None}, "max_batch_size"),
        ({"max_batch_size": 1.5}, "max_batch_size"),
        ({"batch_sizes": [128]}, "batch_sizes"),
        ({"batch_sizes": []}, "batch_sizes"),
        ({"batch_sizes": "8"}, "batch_sizes"),
        ({"batch_sizes": [NAN]}, "batch_sizes"),
        ({"memory_limit": "much"}, "memory_limit"),
        ({"latency_limit": -1}, "latency_limit"),
        ({"objective": "speed"}, "objective"),
        ({"tolerance": 2}, "tolerance"),
        ({"tolerance": "small"}, "tolerance"),
        ({"budget": 0}, "budget"),
        ({"seed": -1}, "seed"),
        ({"device": "tpu"}, "device"),
        ({"progress": 1}, "progress"),
    ],
    ids=str,
)
def test_bad_arguments_of_a_callable_are_refused_by_name(options, field, monkeypatch):
    """As for a network, before the callable is asked for anything."""
    monkeypatch.setattr(CallableRunner, "prepare", None)
    with pytest.raises(errors.InvalidArgument) as caught:
        call(**options)
    assert caught.value.field == field


def test_what_cannot_be_called_is_refused():
    """A step instead of make_step is the likeliest mistake: make_step must be callable."""
    with pytest.raises(errors.InvalidArgument, match="make_step"):
        autotune_callable(3, max_batch_size=8)


def test_energy_of_a_callable_on_the_cpu_is_an_error():
    """No reading of energy, no answer."""
    with pytest.raises(errors.EnergyNotAvailable):
        call(objective="energy", batch_sizes=[1])


# --- dtypes --------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is said to be here, on which every size takes 1 ms; what workers were asked for is kept."""
    asked = []

    def here(slug):
        found = attrs.evolve(probe.device(slug), live=True, uuid=f"GPU-{slug}")
        monkeypatch.setattr(tuner.probe, "resolve", lambda *_, **__: found)

    local = tuner.walk.measure

    def measure(factory, steps, *, keep, **options):
        if not isinstance(factory, functools.partial):  # in this process, as on a CPU
            return local(factory, steps, keep=keep, **options)
        asked.append(factory.args[0].arguments)
        for step in steps:
            keep.timing(Timing(batch_size=step.batch_size, round=0, seconds=1e-3))
            keep.outcome(Outcome(step.batch_size, "ok"))
        return keep.measured

    monkeypatch.setattr(tuner.walk, "measure", measure)
    here.asked = asked
    return here


@pytest.mark.parametrize(
    ("slug", "dtype", "says"),
    [
        ("v100-sxm2-16gb", "float32", False),
        ("v100-sxm2-16gb", "float16", False),
        ("v100-sxm2-16gb", "bfloat16", True),
        ("titan-x-pascal", "float16", True),
        ("a100-sxm4-80gb", "bfloat16", False),
        ("a100-sxm4-80gb", "tf32", False),
    ],
)
def test_a_gpu_takes_every_dtype_and_the_result_says_where_arithmetic_is_float32(gpu, slug, dtype, says):
    """It reaches the worker, the plan and the result; a sentence tells where 16 bits are storage only."""
    gpu(slug)
    result = autotune("mnist-cnn", dtype=dtype, mode="training", batch_sizes=[8, 64], store=False)
    (arguments,) = gpu.asked
    assert (arguments["dtype"], arguments["library"]) == (dtype, "cubatch")
    assert (result.dtype, result.library, result.batch_size) == (dtype, "cubatch", 64)
    planned = footprint("mnist-cnn", batch_size=64, mode="training", dtype=dtype, device=slug).total
    assert result.measurements[1].predicted_peak_bytes == planned
    assert any("arithmetic is float32" in reason and dtype in reason for reason in result.reasons) == says


@pytest.mark.parametrize(
    ("slug", "options"),
    [
        ("v100-sxm2-16gb", {"dtype": "tf32"}),
        ("a100-sxm4-80gb", {"dtype": "float16", "library": "im2col"}),
        ("a100-sxm4-80gb", {"dtype": "tf32", "library": "im2col"}),
    ],
)
def test_a_dtype_that_gpu_or_library_has_not_is_refused_with_what_they_have(gpu, slug, options):
    """tf32 is there from sm_80 on; cuBLAS and what is around it are in float32."""
    gpu(slug)
    with pytest.raises(errors.UnsupportedDtype) as caught:
        autotune("mlp", batch_sizes=[8], store=False, **options)
    assert caught.value.field == "dtype"
    assert "float32" in caught.value.supported
    assert options["dtype"] not in caught.value.supported
    assert caught.value.remedy
    assert not gpu.asked


def test_a_timing_holds_for_its_dtype_alone(gpu, tmp_path):
    """The same question is answered from the store; in another dtype it is another question."""
    gpu("a100-sxm4-80gb")
    tune_on = functools.partial(autotune, "mlp", batch_sizes=[8], store=tmp_path / "store.sqlite3")
    for dtype in ("float16", "bfloat16", "float16", "tf32", "float32", "tf32"):
        result = tune_on(dtype=dtype)
        assert result.dtype == dtype
    assert [arguments["dtype"] for arguments in gpu.asked] == ["float16", "bfloat16", "tf32", "float32"]


# --- kernels that won ----------------------------------------------------------------------------------------


def winners_of(path, slug):
    """What `select` keeps of a GPU, as a worker opens it."""
    return kernel_choice.Winners(path, gpu=probe.device(slug).name, sources="abc")


def test_refresh_forgets_once_which_kernels_won_on_this_gpu(gpu, tmp_path, monkeypatch):
    """Before the first worker and not before the second one; another GPU, and a run that goes on, keep theirs."""
    kept, seen = tmp_path / "store-kernels.sqlite3", []
    monkeypatch.setattr(tuner.sqlite_file, "default_path", lambda: tmp_path / "store.sqlite3")
    gpu("v100-sxm2-16gb")
    measure = tuner.walk.measure

    def restarting(factory, steps, **options):
        assert factory.args[0].arguments["winners"] == str(kept)
        for _ in range(2):  # the first worker dies after it has timed
            found = winners_of(kept, "v100-sxm2-16gb")
            seen.append(found.get("product"))
            found.put("product", "timed", {"timed": 1e-3})
        return measure(factory, steps, **options)

    monkeypatch.setattr(tuner.walk, "measure", restarting)
    for slug in ("v100-sxm2-16gb", "t4"):
        winners_of(kept, slug).put("product", "before", {"before": 2e-3})
    for store, mode in ((True, "inference"), ("refresh", "inference"), (True, "training"), (False, "inference")):
        if store is False:
            monkeypatch.setattr(tuner.walk, "measure", measure)
        autotune("mlp", mode=mode, batch_sizes=[8], store=store)
    assert seen == ["before", "timed", None, "timed", "timed", "timed"]
    assert gpu.asked[-1]["winners"] is None
    assert winners_of(kept, "t4").get("product") == "before"


def test_each_measurement_says_what_its_passes_put_on_the_sms(gpu, tmp_path):
    """
    At 8 boards of 19 x 19, 2888 rows; a filter of 128 columns. The variant that won in this run is what runs.

    Occupancy and fill are the means of the rows by predicted time, by hand; JSON and a rerun give the same rows.
    """
    gpu("v100-sxm2-16gb")
    quick = functools.partial(autotune, GO, mode="training", batch_sizes=[8, 64], store=tmp_path / "store.sqlite3")
    result = quick()
    for m in result.measurements:
        assert [row["pass"] for row in m.layers] == ["fprop", "dgrad", "wgrad"]
        whole = math.fsum(row["predicted_seconds"] for row in m.layers)
        assert whole == pytest.approx(m.predicted_seconds)
        for name in ("occupancy", "fill"):
            mean = math.fsum(row["predicted_seconds"] * row[name] for row in m.layers) / whole
            assert getattr(m, name) == pytest.approx(mean)
            assert 0 < mean <= 1
    first = result.measurements[0].layers[0]
    rows, columns = map(int, re.search(r"_(\d+)x(\d+)x", first["kernel"]).groups())
    assert first["blocks"] == first["slices"] * -(-2888 // rows) * -(-128 // columns)
    assert TuningResult.from_json(result.to_json()) == result
    assert quick().measurements == result.measurements


def test_the_kernel_of_a_row_is_the_one_that_won(gpu, tmp_path, monkeypatch):
    """What a worker timed in this very run decides; the ranking's first where nothing was timed."""
    gpu("v100-sxm2-16gb")
    path, found, measure = tmp_path / "store.sqlite3", probe.device("v100-sxm2-16gb"), tuner.walk.measure
    problem = problem_of(GO, Pass.FPROP, 64, "float32")
    first, second = ranking.ranked(problem, found)[:2]

    def choosing(factory, steps, **options):
        if (winners := factory.args[0].arguments["winners"]) is not None:
            kept = kernel_choice.Winners(Path(winners), gpu=found.name, sources=kernels_sha256())
            device = FakeDevice({second.name: 1e-3})
            kernel_choice.TimedChoice(device.clock, kept, seconds=60.0)(problem, found, device.prepare)
        return measure(factory, steps, **options)

    monkeypatch.setattr(tuner.walk, "measure", choosing)
    for store, kernel in ((path, second), (False, first)):
        (m,) = autotune(GO, batch_sizes=[64], store=store).measurements
        (row,) = m.layers
        assert row["kernel"] == kernel.name


def test_where_nothing_is_known_of_blocks_there_are_no_rows(gpu):
    """A CPU has no SMs, and of the vendor's kernels nothing is known: unknown is None."""
    gpu("v100-sxm2-16gb")
    results = [autotune(GO, batch_sizes=[8], store=False, library="im2col")]
    gpu("cpu")
    results.append(tune(batch_sizes=[4]))
    for result in results:
        (m,) = result.measurements
        assert (m.layers, m.occupancy, m.fill) == ((), None, None)


def test_a_file_of_winners_that_cannot_be_used_is_said_and_the_run_goes_on(gpu, tmp_path, monkeypatch):
    """A folder in its place costs the forgetting, not the answer."""
    monkeypatch.setattr(tuner.sqlite_file, "default_path", lambda: tmp_path / "store.sqlite3")
    (tmp_path / "store-kernels.sqlite3").mkdir()
    gpu("v100-sxm2-16gb")
    result = autotune("mlp", batch_sizes=[8], store="refresh")
    assert result.batch_size == 8
    assert any("could not be forgotten" in reason and "store-kernels" in reason for reason in result.reasons)


# --- cold or warm --------------------------------------------------------------------------------------------


def test_the_result_says_whether_the_cache_was_cold():
    """A small layer on a device with a known L2 rotates over buffers until it is cold; a network runs as it runs."""
    gpu = probe.resolve("v100-sxm2-16gb", live=False)
    eight = Ladder((Candidate(8),), None, None)
    large = Conv2d(h=56, w=56, c=64, k=64, r=3, s=3, pad=1)
    assert story._l2(workload(large, gpu), eight) == "cold"
    assert story._l2(workload(Linear(c=64, k=64), gpu), eight) == "warm"  # 64 sets of so small buffers are no L2
    assert story._l2(workload(models.build("mlp"), gpu), eight) == "warm"
    unknown = attrs.evolve(probe.device("cpu"), l2_bytes=None)
    assert story._l2(workload(large, unknown), eight) == "warm"

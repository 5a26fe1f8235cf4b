"""What `autotune` keeps: reruns, refusals of what was kept, interruptions and kills."""

from __future__ import annotations

import errno
import functools
import json
import types

import pytest

from cubatch.hardware import cpu_load, host, memory_limit as hardware_memory, probe
from cubatch.tuning import session, store
from cubatch.tuning.results import TuningResult
from cubatch.tuning.step_memory import footprint, max_batch_size
from tests.unit.tuning.small_runs import rows, statuses, tune

pytestmark = pytest.mark.usefixtures("quiet")

BUSY = cpu_load.CpuLoad(others=1.9, steal=0.0, num_cpus=2)
SENTENCE = "Other processes kept 1.9 of 2 CPUs busy"
KEPT = "While the cached timings were taken: "


@pytest.fixture
def others(monkeypatch):
    """Say what others take of the CPUs while something is measured, or watched for a moment."""
    found = types.SimpleNamespace(load=BUSY)
    monkeypatch.setattr(cpu_load, "between", lambda *_: found.load)
    return found


def kept_with(sentence):
    return f'{KEPT}"{sentence}"'


def about_others(result):
    return [reason for reason in result.reasons[1:] if "busy" in reason]


def test_an_answer_from_the_store_says_that_its_timings_were_disturbed(tmp_path, virtual, others):
    """However quiet it is when it is given; both follow the recommendation, since all else rests on them."""
    result = tune(store=tmp_path / "kept")
    lead, first, *_ = result.reasons
    assert "on a busy machine" in lead
    assert first.startswith(SENTENCE)
    assert result.disturbed
    others.load = None
    result = tune(store=tmp_path / "kept")
    _, answered, second, *rest = result.reasons
    assert result.disturbed
    assert answered.startswith("Answered from the store")
    assert second == kept_with(first)
    assert not any("busy" in reason for reason in rest)


def test_a_partial_result_says_who_was_busy(tmp_path, virtual, others):
    """Ctrl-C is what one does when a machine is slow."""

    def interrupt(event):
        if event.kind == "timing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        tune(store=tmp_path / "kept", progress=interrupt)
    (said,) = about_others(stopped.value.partial)
    assert said.startswith(SENTENCE)


def test_a_run_that_goes_on_says_what_disturbed_the_cached_timings(tmp_path, virtual, others):
    """The notes name the interference of both calls, and how to measure again."""
    kept = tmp_path / "kept"

    def interrupt(event):
        if event.kind == "timing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(store=kept, progress=interrupt)
    went_on, old, new = tune(store=kept).reasons[1:4]
    assert old == kept_with(new)
    (run,) = store.list_runs(kept)
    assert f"cubatch store clear {run.id} --store {kept}" in went_on


# --- the store -----------------------------------------------------------------------------------------------


def test_a_rerun_answers_from_the_store(tmp_path, virtual, no_runner, monkeypatch):
    """Zero new measurements, not even a runner; the same timings, answer, seconds and date, years later too."""
    kept = tmp_path / "kept.sqlite3"
    first = tune(store=kept)
    no_runner()
    monkeypatch.setattr(store, "_now", lambda: "2040-01-01T00:00:00Z")
    second = tune(store=str(kept))
    before, after = ({k: v for k, v in result.to_mapping().items() if k != "device"} for result in (first, second))
    lead, said, *reasons = after.pop("reasons")
    assert [lead, *reasons] == before.pop("reasons")
    assert "from the store" in said
    assert after == before


def test_another_question_is_another_run(tmp_path, virtual, counted):
    """Every argument that shapes the answer is part of the identity, so its run is measured for itself."""
    quick = functools.partial(tune, batch_sizes=[4, 8], store=tmp_path / "kept")
    quick()
    before = len(counted)
    quick()
    assert len(counted) == before
    for other in (
        {"mode": "training"}, {"batch_sizes": [4]}, {"seed": 1}, {"tolerance": 0.02}, {"objective": "latency"},
        {"memory_limit": "64MiB"}, {"recompute": True}, {"mode": "training", "optimizer": "adam"},
        {"latency_limit": 1.0},
    ):  # fmt: skip
        before = len(counted)
        quick(**other)
        assert len(counted) > before, other


def test_refresh_starts_over_and_false_keeps_nothing(tmp_path, monkeypatch, virtual, counted):
    """ "refresh" measures anew in place of what was kept, in the store of the user's cache."""
    monkeypatch.setattr(store.sqlite_file, "default_path", lambda: tmp_path / "cache" / "store.sqlite3")
    quick = functools.partial(tune, batch_sizes=[4])
    quick()
    assert not (tmp_path / "cache").exists()
    first = quick(store=True)
    done = len(counted)
    again = quick(store=True)
    assert again.measurements == first.measurements
    assert "--fresh (store='refresh') measures again" in again.reasons[1], "which no other store takes"
    assert len(counted) == done
    fresh = quick(store="refresh")
    assert len(counted) > done
    assert quick(store=True).measurements == fresh.measurements
    (run,) = store.list_runs(tmp_path / "cache" / "store.sqlite3")
    assert run.state == "finished"


def test_a_changed_condition_is_refused_by_name(tmp_path, monkeypatch, virtual, counted):
    """Another NumPy, another number of threads: measured anew, and the result says which field differs."""
    quick = functools.partial(tune, batch_sizes=[4], store=tmp_path / "kept")
    quick()
    before, real = len(counted), session.conditions
    with monkeypatch.context() as changed:
        changed.setattr(session, "conditions", lambda device: real(device) | {"numpy": "1.0", "threads": 99})
        result = quick()
    assert len(counted) > before
    (note,) = [reason for reason in result.reasons if "do not apply" in reason]
    assert "numpy was" in note
    assert "is 1.0" in note
    assert "threads was" in note
    after = len(counted)
    assert not [reason for reason in quick().reasons if "do not apply" in reason]
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
    monkeypatch.setattr(host, "cgroup_left_bytes", lambda: None)
    result = tune(batch_sizes=[4, 2000], **options)
    assert statuses(result) == {4: "ok", 2000: "over_limit"}
    today = hardware_memory.memory_limit(probe.device("cpu"), "1GiB").bytes
    largest = max_batch_size("mlp", memory=today, device="cpu", mode="inference")
    assert (result.limits["memory_bytes"], result.largest_batch_size) == (today, largest)


# --- interrupted ---------------------------------------------------------------------------------------------


def test_a_finished_run_is_told_as_it_was_measured_however_little_memory_is_free_now(tmp_path, monkeypatch, virtual):
    """Its sizes ran in the memory of then: a limit of now beside them would be below the answer."""
    options = {"store": tmp_path / "kept", "batch_sizes": None, "max_batch_size": 96, "tolerance": 0.0}
    first = tune(**options)
    room = footprint("mlp", batch_size=50, device="cpu", mode="inference").total
    monkeypatch.setattr(host, "available_memory_bytes", lambda: int(room / 0.8))
    monkeypatch.setattr(host, "cgroup_left_bytes", lambda: None)
    again = tune(**options)
    assert (again.batch_size, again.decided_by) == (first.batch_size, first.decided_by) == (96, "max_batch_size")
    assert (again.limits, again.largest_batch_size) == (first.limits, first.largest_batch_size)
    assert again.measurements == first.measurements


@pytest.mark.parametrize("stop", [KeyboardInterrupt, GeneratorExit, ZeroDivisionError])
def test_an_interruption_keeps_the_timings_and_carries_what_there_is(tmp_path, stop, virtual, counted):
    """Ctrl-C, a cancelled task or an error of `progress` is raised as it was, and a rerun measures only the rest."""
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
    assert caught.value.is_kept
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
        assert len(m.timings_seconds) == [size for size, _ in after].count(m.batch_size)
    assert set(statuses(result).values()) <= {"ok", "dropped"}
    assert result.seconds_spent > partial.seconds_spent


def test_an_interruption_says_where_nothing_is_kept(tmp_path, virtual, monkeypatch):
    """A store that cannot be written keeps nothing, whatever was asked for."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    def interrupt(event):
        if event.kind == "timing":
            raise KeyboardInterrupt

    monkeypatch.setattr(store.sqlite_file, "connect", refuse)
    with pytest.warns(UserWarning, match="not cached: the store"), pytest.raises(KeyboardInterrupt) as caught:
        tune(store=tmp_path / "kept", progress=interrupt)
    assert not caught.value.is_kept


def test_a_comparison_that_the_budget_cut_short_goes_on(tmp_path, virtual):
    """With a larger budget each size gets the visits that it lacks, also one that is far behind."""
    kept = tmp_path / "store.sqlite3"
    short = tune(batch_sizes=[1, 64], sweeps=5, budget=0.05, store=kept)
    before = rows(kept)
    whole = tune(batch_sizes=[1, 64], sweeps=5, budget=60.0, store=kept)
    after = rows(kept)
    assert len({(size, number // 16) for size, number in before}) < 10
    assert {key: after[key] for key in before} == before
    assert sorted(size for size, _ in {(size, number // 16) for size, number in after}) == 5 * [1] + 5 * [64]
    assert statuses(whole) == {1: "ok", 64: "ok"}
    assert len(short.measurements) == 2


@pytest.mark.parametrize("begun", ["with all memory", "in little"])
def test_sizes_that_were_refused_for_memory_are_measured_once_it_is_back(tmp_path, monkeypatch, virtual, begun):
    """A rerun in little memory refused one; with all of it back a finished run measures it, and says one limit."""
    options = {"store": tmp_path / "kept", "batch_sizes": [4, 2000]}

    def interrupt(event):
        if event.kind == "timing":
            raise KeyboardInterrupt

    if begun == "with all memory":
        with pytest.raises(KeyboardInterrupt):
            tune(progress=interrupt, **options)
    with monkeypatch.context() as short:
        room = footprint("mlp", batch_size=500, device="cpu", mode="inference").total
        short.setattr(host, "available_memory_bytes", lambda: int(room / 0.8))
        short.setattr(host, "cgroup_left_bytes", lambda: None)
        refused, again = tune(**options), tune(**options)
        assert statuses(refused) == statuses(again) == {4: "ok", 2000: "over_limit"}
        assert again.largest_batch_size == refused.largest_batch_size < 2000
    before = rows(options["store"])
    result = tune(**options)
    assert set(statuses(result).values()) <= {"ok", "dropped"}
    assert rows(options["store"]).items() > before.items()
    assert result.limits["memory_bytes"] > room
    assert result.largest_batch_size >= 2000

"""Fleets in virtual time: the caller's own code, a real store, and workers that say what real ones say."""

from __future__ import annotations

import json

import attrs
import pytest

import cubatch as cb
from benchmarks import bench_fleet
from benchmarks.fleet import streams
from benchmarks.fleet.costs import Costs, Line
from benchmarks.fleet.simulated import SimulatedClient, Worker, standing_in
from cubatch.errors import WorkerFailed
from cubatch.hardware import catalogue
from cubatch.network import models
from cubatch.tuning import store

NAMES = ("t4", "a40", "titan-v")
FREE = dict.fromkeys(("scheduler", "client"), Line(0.0, 0.0))
COSTS = Costs(
    describe=dict.fromkeys(("scheduler", "client"), Line(1e-3, 1e-4)), poll=FREE, submit=FREE, event=FREE, idle=FREE,
    describe_seconds=1.0, files=Line(14.0, 3.0), memory=Line(7e7, 1e5),
)  # fmt: skip


@pytest.fixture(scope="module")
def kinds():
    """What three GPUs of the catalogue say while `lenet5` is tuned on them."""
    spec = json.loads(json.dumps(models.resolve("lenet5").to_mapping()))
    return [streams.record(spec, catalogue.find(name), {"budget": 10.0}) for name in NAMES]


def tuned(workers, path, **options):
    """Ask a fleet; gives the result and the client."""
    client = SimulatedClient(workers, COSTS, longest=600.0)
    with standing_in(client):
        return cb.autotune_fleet("lenet5", client, store=path, budget=10.0, **options), client


def said(stream):
    """The timings of a stream."""
    return [timing for _, text in stream.messages for timing in json.loads(text)["timings"]]


def kept(path):
    """The timings of a store, by device."""
    return {
        run.identity["device"]: [timing.seconds for timing in store.show(path, run.id)[1].timings]
        for run in store.list_runs(path)
    }


def of(kinds, comes=0.0, goes=float("inf"), prefix="a"):
    """A worker of each kind."""
    return {f"{prefix}{place}": Worker(kind, comes, goes) for place, kind in enumerate(kinds)}


def test_each_kind_answers_and_all_that_was_said_is_kept(kinds, tmp_path):
    """As its own stream ends, and in the caller's store row by row."""
    path = tmp_path / "store.sqlite3"
    result, client = tuned(of(kinds) | of(kinds, prefix="b"), path)
    answers = {device.name: device.batch_size for device in result.devices}
    assert answers == {k.device.name: json.loads(k.reply["result"])["batch_size"] for k in kinds}
    assert all(len(device.workers) == 2 for device in result.devices)
    assert kept(path) == {kind.device.name: [t["seconds"] for t in said(kind)] for kind in kinds}
    assert client.now >= max(kind.seconds for kind in kinds)


def test_who_has_come_is_asked_once_and_nobody_twice(kinds, tmp_path):
    """Ten that come while others measure cost ten questions, however many were there."""
    there, late = of(kinds), of(kinds * 3, comes=2.0, prefix="late")
    _, client = tuned(there | late, tmp_path / "store.sqlite3")
    assert client.described == len(there) + len(late)


def test_a_worker_that_goes_is_followed_by_another_without_a_timing_lost_or_taken_again(kinds, tmp_path):
    """The next of its kind goes on behind the last row that came."""
    path = tmp_path / "store.sqlite3"
    moment = 1.0 + min(kind.messages[len(kind.messages) // 2][0] for kind in kinds)  # a second is asking them
    workers = of(kinds, goes=moment) | of(kinds, prefix="b")
    told = []
    result, client = tuned(workers, path, progress=lambda name, sentence: told.append(sentence))
    assert all(device.result is not None for device in result.devices)
    gone = sum("is gone" in sentence for sentence in told)
    assert gone >= 1
    assert client.messages <= sum(len(kind.messages) for kind in kinds) + 5 * gone  # outcomes are said again
    assert kept(path) == {kind.device.name: [t["seconds"] for t in said(kind)] for kind in kinds}


def test_a_queue_is_waited_for_and_who_comes_later_measures_too(kinds, tmp_path):
    """Nobody is there, then one kind, then the others while it measures: all answer, as if they had been there."""
    path, told = tmp_path / "store.sqlite3", []
    first, *others = kinds
    workers = {"first": Worker(first, comes=20.0)} | of(others, comes=22.0)
    result, _ = tuned(workers, path, progress=lambda name, sentence: told.append((name, sentence)))
    assert all(device.result is not None for device in result.devices)
    assert kept(path) == {kind.device.name: [t["seconds"] for t in said(kind)] for kind in kinds}
    assert told[0] == ("cluster", "waiting for its first worker, 60 s at most")


def test_a_cluster_where_nobody_comes_is_refused(kinds, tmp_path):
    """After a minute, with what to do."""
    with pytest.raises(WorkerFailed, match=r"no worker.*wait_for_workers"):
        tuned(of(kinds, comes=61.0), tmp_path / "store.sqlite3")


def test_kinds_of_one_name_are_told_apart_when_they_come(kinds, tmp_path):
    """Two GPUs of a model with unequal power limits, one of them later: two lines, two names."""
    first = attrs.evolve(kinds[0], device=attrs.evolve(kinds[0].device, power_limit_watts=150.0))
    slow = attrs.evolve(kinds[0], device=attrs.evolve(kinds[0].device, power_limit_watts=70.0))
    workers = {"a": Worker(first), "b": Worker(slow, comes=2.0)}
    result, _ = tuned(workers, tmp_path / "store.sqlite3")
    names = [device.name for device in result.devices]
    assert len(set(names)) == 2
    assert any("70 W" in name for name in names)


def test_a_kind_whose_workers_are_all_gone_is_named(kinds, tmp_path):
    """Its timings stay, the others answer."""
    path = tmp_path / "store.sqlite3"
    first, *others = kinds
    moment = 1.0 + first.messages[len(first.messages) // 2][0]
    result, _ = tuned({"only": Worker(first, goes=moment)} | of(others), path)
    errors = {device.name: device.error for device in result.devices}
    assert "only is gone" in errors.pop(first.device.name)
    assert set(errors.values()) == {""}
    assert 0 < len(kept(path)[first.device.name]) < len(said(first))


def test_time_is_the_schedulers_as_it_was_measured(kinds, tmp_path):
    """A fleet that costs ten seconds more to ask answers ten seconds later, to a tick."""
    dear = {name: Line(10.0, 0.0) if name == "scheduler" else line for name, line in COSTS.describe.items()}
    ends = []
    for describe in (COSTS.describe, dear):
        client = SimulatedClient(of(kinds), attrs.evolve(COSTS, describe=describe))
        with standing_in(client):
            cb.autotune_fleet("lenet5", client, store=False, budget=10.0)
        ends.append(client.now)
    assert ends[1] - ends[0] == pytest.approx(10.0 - COSTS.describe["scheduler"](len(kinds)), abs=0.2)


def test_lines_go_through_what_was_measured():
    """Costs of 2 ms and 0.5 ms a worker are found again, and noise round nought makes nothing fall."""
    rows = [
        {
            "workers": n,
            **{call: {"scheduler": 2e-3 + 5e-4 * n, "client": 1e-3 - 1e-6 * n}
               for call in ("describe", "poll", "submit", "event", "idle")},
            "describe_seconds": 0.5, "files": 14 + 3 * n, "memory": 7e7 + 1e5 * n,
        }
        for n in (1, 2, 4, 8)
    ]  # fmt: skip
    costs = Costs.of(rows)
    assert costs.poll["scheduler"](1000) == pytest.approx(0.502)
    assert costs.poll["client"].each == 0.0
    assert costs.poll["client"](1000) == pytest.approx(1e-3 - 3.75e-6)
    assert costs.files(100) == pytest.approx(314)


def test_what_is_used_up_first_comes_first():
    """1024 files less 14 at three a worker are 336 workers."""
    rows = bench_fleet.limits(COSTS)
    assert rows[0]["workers"] == 336
    assert [row["workers"] for row in rows if row["workers"] is None] == [None, None]
    assert rows[-1]["workers"] is None


def test_a_fleet_that_changes_has_the_same_number_at_any_time():
    """Each place has one worker at a time, the next coming when the last goes."""
    workers = bench_fleet.fleet(10, ["x", "y"], 60.0)
    for moment in (0.0, 17.0, 300.0):
        assert sum(one.comes <= moment < one.goes for one in workers.values()) == 10

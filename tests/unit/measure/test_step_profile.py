"""The profile of a step, with a made-up clock and on this CPU."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

import cubatch as cb
from cubatch.engine import backend
from cubatch.engine.network import Model
from cubatch.engine.team import Team
from cubatch.errors import InvalidArgument
from cubatch.hardware import probe
from cubatch.measure import step_profile, tracing
from cubatch.measure.profile_records import CAUSES
from cubatch.memory.schedule_records import Op
from cubatch.network import models

LAYER = SimpleNamespace(name="conv", layer=None)
FREE = step_profile._Small(dict.fromkeys(("products", "copies", "elementwise"), 0.0), 0.0, 0.0)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, monkeypatch):
        self.passed = 0.0
        monkeypatch.setattr(tracing.time, "perf_counter", lambda: self.passed)

    def call(self, name, seconds):
        """Give a function of that name that takes so long."""

        def work(*_):
            self.passed += seconds

        work.__name__ = name
        return work, ()


def op(kind, **more):
    return Op(kind=kind, node=LAYER, reads={}, writes={}, **more)


def test_each_call_counts_for_what_it_does_and_its_pass(monkeypatch):
    """Names in the recording say which calls of a gradient are the filter's; between calls is overhead."""
    clock = Clock(monkeypatch)
    forward = backend.Replay([clock.call("copyto", 1.0), clock.call("matmul", 4.0), clock.call("add", 0.5)])
    backward = backend.Replay([
        (tracing.Named("conv2d_wgrad"), ()), clock.call("matmul", 3.0),
        (tracing.Named("conv2d_dgrad"), ()), clock.call("matmul", 2.0),
    ])  # fmt: skip
    trace = tracing.HostTrace(1)
    trace.run(0, 0, forward)
    trace.run(0, 1, backward)
    trace.operations[0][0] = (0, 0.0, 5.75)  # a quarter of a second beside its calls

    times = step_profile._host_times(trace, list(trace.calls(0.0)), [op("forward"), op("backward")], FREE)

    assert times[0, "fprop"] == {"products": 4.0, "copies": 1.0, "elementwise": 0.5, "overhead": 0.25, "waiting": 0.0}
    assert times[1, "wgrad"]["products"] == 3.0
    assert times[1, "dgrad"]["products"] == 2.0


def test_what_a_call_on_one_element_takes_is_overhead(monkeypatch):
    """Of each call, but no more than it took; tracing it is nobody's time."""
    clock = Clock(monkeypatch)
    trace = tracing.HostTrace(1)
    trace.run(0, 0, backend.Replay([clock.call("add", 5.0), clock.call("add", 2.0), clock.call("matmul", 9.0)]))
    small = step_profile._Small({"products": 4.0, "copies": 0.0, "elementwise": 3.0}, 1.0, 0.0)

    times = step_profile._host_times(trace, list(trace.calls(0.0)), [op("forward")], small)

    assert times[0, "fprop"]["overhead"] == (3 - 1) + (2 - 1) + (4 - 1)
    assert times[0, "fprop"]["elementwise"] == 5 - 3
    assert times[0, "fprop"]["products"] == 9 - 4


def test_waits_are_of_nobodys_work_and_means_are_over_the_threads(monkeypatch):
    """A wait inside of a call is taken off it; who is done first waits for the last to be done."""
    clock, trace = Clock(monkeypatch), tracing.HostTrace(2)
    meet, _ = clock.call("meet", 6.0)

    def update():
        clock.passed += 1.0
        trace.wait(0, meet)
        clock.passed += 2.0

    trace.run(0, 0, update)
    trace.run(1, 0, backend.Replay([clock.call("add", 1.0)]))

    times = step_profile._host_times(trace, list(trace.calls(0.0)), [op("update")], FREE)

    assert times[0, "update"]["waiting"] == 6.0 / 2
    assert times[0, "update"]["elementwise"] == (3.0 + 1.0) / 2
    assert times[0, "update"]["overhead"] == 0.0
    assert times[None, "meeting"]["waiting"] == (10.0 - 9.0) / 2


def test_a_team_tells_who_waits_and_is_as_before_afterwards():
    """Each member's barrier is seen with its rank, and only while somebody looks."""
    seen = []
    with Team(2) as team:
        with team.seen_waiting(lambda rank, meet: (seen.append(rank), meet())):
            team.run(team.barrier)
        team.run(team.barrier)
    assert sorted(seen) == [0, 1]


def test_a_traced_step_computes_what_a_step_does():
    """The same bits after three steps of training, with threads that meet in a batch norm."""
    spec = cb.Network(
        input_shape=(8, 8, 3),
        layers=[cb.Conv2d(k=8, r=3, s=3, pad=1), cb.BatchNorm2d(), cb.ReLU(), cb.Flatten(), cb.Linear(k=4)],
    )
    found = []
    for traced in (False, True):
        with Model(spec, device=probe.device("cpu"), mode="training") as model:
            model.prepare(512)
            model.load_random()
            members = model.plan.members
            for _ in range(3):
                model.step(tracing.HostTrace(members) if traced else None)
            found.append(np.concatenate([p.ravel() for of in model.parameters.values() for p in of.values()]))
    np.testing.assert_array_equal(*found)


def test_recordings_are_whole_where_each_call_is_asked_for():
    """Longer ones are not kept otherwise: what repeats is then the function itself."""
    total = np.zeros(1)

    def many():
        for _ in range(backend.MOST_RECORDED_CALLS + 1):
            backend.of(total).add(total, 1, out=total)

    assert not isinstance(backend.prepare(many), backend.Replay)
    with backend.whole_recordings():
        assert len(backend.prepare(many)) == backend.MOST_RECORDED_CALLS + 1
    assert not isinstance(backend.prepare(many), backend.Replay)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_parts_come_to_the_whole(mode):
    """Seconds of causes are those of rows, and shares of all rows are one; every operation is somebody's row."""
    found = cb.profile("mnist-cnn", 32, device="cpu", mode=mode, budget=0.05)
    assert found.steps >= 3
    for row in found.rows:
        assert math.isclose(sum(row.causes.values()), row.seconds, rel_tol=1e-9, abs_tol=1e-15)
        assert tuple(row.causes) == CAUSES
    assert math.isclose(sum(row.share for row in found.rows), 1.0, rel_tol=1e-9)
    assert math.isclose(sum(found.causes.values()), found.traced_seconds, rel_tol=1e-9)
    layers = {row.layer for row in found.rows} | {name for row in found.rows for name in row.then}
    idle = {"flatten"} | ({"dropout"} if mode == "inference" else set())
    kinds = {node.name: node.layer.type for node in models.build("mnist-cnn").nodes}
    ended_by_product = {name for name, kind in kinds.items() if kind == "relu"}  # in the cache, see Op.relu
    assert {name for name, kind in kinds.items() if kind not in idle} - ended_by_product <= layers


@pytest.mark.parametrize(
    ("field", "value"), [("seed", -1), ("seed", "0"), ("budget", 0), ("budget", True), ("batch_size", 1.5)]
)
def test_arguments_of_a_profile_are_checked(field, value):
    """Each is rejected by its name before anything runs."""
    with pytest.raises(InvalidArgument) as caught:
        cb.profile("mlp", **{"batch_size": 2, "device": "cpu", field: value})
    assert caught.value.field == field

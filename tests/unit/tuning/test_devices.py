"""`devices=`: several ranks train and tune as one; on the CPU, by MPI."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

import cubatch as cb
from cubatch.engine import train as engine
from cubatch.errors import TimedOut
from cubatch.hardware import probe
from cubatch.hardware.device_list import resolve_devices
from cubatch.measure import ranks_runner
from cubatch.measure.rank_group import RankGroup
from cubatch.network import models
from cubatch.network.weight_files import load_weights
from cubatch.tuning.exchange_cost import DataParallel
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.subjects import network_subject
from cubatch.tuning.subjects.network_subject import NetworkSubject
from tests.building import workload
from tests.checks import UNIT_ROUNDOFF, assert_within
from tests.unit.cli.conftest import in_process
from tests.unit.tuned import about, tuned

pytest.importorskip("mpi4py", reason="ranks on a CPU need mpi4py")

SAMPLE = Path(cb.__file__).parents[1] / "tests" / "data" / "mnist-sample"
TWO = ["cpu", "cpu"]
SMALL = cb.Network(
    input_shape=(28, 28, 1),
    layers=[cb.MaxPool2d(r=4, s=4), cb.Flatten(), cb.BatchNorm2d(), cb.Dropout(p=0.2), cb.Linear(name="scores", k=10)],
    name="small",
)
train = functools.partial(cb.train, data=SAMPLE, epochs=1, learning_rate=0.02)


# --- training ------------------------------------------------------------------------------------------------


@functools.cache
def losses(dtype, ranks=1, cuts=1):
    """Losses of one epoch of mnist-cnn in steps of 80 samples."""
    network, seen = models.build("mnist-cnn"), []
    size = 80 // ranks // cuts
    options = {
        "data": SAMPLE, "batch_size": size, "target_batch_size": size * cuts, "dtype": dtype, "epochs": 1,
        "learning_rate": 0.02,
    }  # fmt: skip

    def told(what):
        if isinstance(what, engine.Step):
            seen.append(what.loss)

    if ranks == 1:
        engine.train(network, device=probe.device("cpu"), stepped=told, **options)
    else:
        with RankGroup(resolve_devices(["cpu"] * ranks)) as group:
            group.do("train", each=[(name, network, options) for name in group.names], progress=told)
    return np.array(seen)


@pytest.mark.parametrize(("ranks", "cuts"), [(2, 1), (2, 2), pytest.param(4, 1, marks=pytest.mark.thorough)])
def test_ranks_train_to_the_losses_of_one(ranks, cuts):
    """
    Ten steps of mnist-cnn by 2 and 4 ranks of MPI follow those of one, in float64.

    Only the order of sums differs, over at most 80 samples of 784 places. What rounding comes to in float32, with what
    ten steps make of it, one rank shows: its error E. In float64 that is E u64 / u32, for sums in another order up to
    sqrt(80 x 784) times that, and both sides err.
    """
    want = losses("float64")
    rough = np.abs(losses("float32") - want).max()
    growth = 2 * math.sqrt(80 * 784) * UNIT_ROUNDOFF["float64"] / UNIT_ROUNDOFF["float32"]
    assert len(want) == 10
    assert_within(losses("float64", ranks, cuts), want, growth * rough, label=f"{ranks} ranks")


def test_the_batch_of_two_devices_is_twice_that_of_one(tmp_path):
    """
    What a run says of itself: devices, the batch of one and of all; every epoch has been told.

    Its checkpoint is of its devices: with others it is refused by name.
    """
    epochs, steps, kept = [], [], tmp_path / "kept.npz"
    ask = functools.partial(train, SMALL, epochs=2, checkpoint=kept)
    run = ask(batch_size=40, devices=TWO, progress=epochs.append, stepped=steps.append)
    assert (run.devices, run.batch_size, run.target_batch_size) == (2, 40, 80)
    assert list(run.epochs) == epochs
    assert len(steps) == 2 * 800 // 80
    assert run.epochs[-1].loss < run.epochs[0].loss
    with pytest.raises(cb.InvalidArgument, match=r"^batch_size must be 40"):
        ask(batch_size=80, device="cpu")
    with pytest.raises(cb.InvalidArgument, match=r"^shares must be \[40, 40\], as .* was begun with, got \[80\]"):
        ask(batch_size=40, target_batch_size=80, device="cpu")


def test_devices_that_are_not_alike_have_shares_and_go_on_with_them(tmp_path):
    """
    60 and 20 samples of a step of 80: the losses of one rank, but for the order of sums (as above).

    Where no batch size is given it is the kept one of each, and the run that ended is given back.
    """
    found, network, kept = [], models.build("mnist-cnn"), tmp_path / "kept.npz"
    ask = functools.partial(train, network, devices=TWO, checkpoint=kept)
    first = ask(batch_size=[60, 20], stepped=lambda step: found.append(step.loss))
    rough = np.abs(losses("float32") - losses("float64")).max()
    assert_within(np.array(found), losses("float32"), 2 * math.sqrt(80 * 784) * rough, label="shares")
    assert ask() == first


def test_a_run_of_two_devices_goes_on_to_the_bit(tmp_path):
    """Ended after the second of four epochs and gone on with: the weights of an undisturbed run, batch norm and all."""
    whole, parts, kept = tmp_path / "whole.npz", tmp_path / "parts.npz", tmp_path / "kept.npz"
    ask = functools.partial(train, SMALL, batch_size=40, devices=TWO, epochs=4, checkpoint=kept)

    def stop(epoch):
        if epoch.number == 2:
            raise KeyboardInterrupt

    train(SMALL, batch_size=40, devices=TWO, epochs=4, save=whole)
    with pytest.raises(KeyboardInterrupt):
        ask(progress=stop)
    run = ask(save=parts)
    assert len(run.epochs) == 4
    one, other = (load_weights(SMALL, path).weights for path in (whole, parts))
    for layer, arrays in one.items():
        for name, array in arrays.items():
            assert np.array_equal(array, other[layer][name]), (layer, name)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"devices": TWO, "batch_size": 401}, "batch_size"),
        ({"devices": TWO, "batch_size": 10, "target_batch_size": 41}, "target_batch_size"),
        ({"devices": TWO, "device": "cpu", "batch_size": 10}, "device"),
        ({"devices": "two", "batch_size": 10}, "devices"),
        ({"devices": TWO, "batch_size": [10, 10, 10]}, "batch_size"),
        ({"devices": TWO, "batch_size": [10, 0]}, "batch_size"),
        ({"devices": TWO, "batch_size": [30, 10], "target_batch_size": 80}, "target_batch_size"),
        ({"device": "cpu", "batch_size": [10]}, "batch_size"),
    ],
)
def test_what_two_devices_cannot_share_is_refused(options, field):
    """Before a step is taken, by the argument's name."""
    with pytest.raises(cb.InvalidArgument) as caught:
        train(SMALL, **options)
    assert caught.value.field == field


# --- tuning --------------------------------------------------------------------------------------------------

tune = functools.partial(cb.autotune, SMALL, mode="training", devices=TWO, batch_sizes=[8, 32], budget=20.0)


def test_two_devices_are_tuned_as_one(tmp_path, monkeypatch):
    """
    An answer per device, what sharing costs, and both in the JSON and the reasons.

    Ctrl-C while devices exchange hands out the answer as `partial`.  A rerun goes on from the store, the exchange too,
    and the next needs no rank.
    """
    with monkeypatch.context() as stopped:
        stopped.setattr(network_subject, "_exchange_seconds", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) as stop:
            tune(store=tmp_path / "kept")
    assert stop.value.is_kept
    result = tune(store=tmp_path / "kept")
    assert (result.batch_size, result.measurements) == (stop.value.partial.batch_size, stop.value.partial.measurements)
    found = result.data_parallel
    assert result.batch_size in {8, 32}
    assert found.batch_size == result.batch_size
    assert len(found.devices) == 2
    assert 0 < found.exposed_seconds <= found.step_seconds
    assert found.samples_per_second == pytest.approx(2 * found.batch_size / found.step_seconds)
    assert result.exchange_seconds == found.exchange_seconds > 0
    assert result.scaling_efficiency == pytest.approx(found.alone_seconds / found.step_seconds)
    assert any("2 devices share a step" in reason for reason in result.reasons)
    assert TuningResult.from_json(result.to_json()) == result
    monkeypatch.setattr(ranks_runner, "RankGroup", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr("cubatch.measure.remote.RemoteRunner", lambda *_, **__: pytest.fail("measured"))
    again = tune(store=tmp_path / "kept")
    assert (again.batch_size, again.data_parallel) == (result.batch_size, result.data_parallel)


def shared():
    """Two ranks on the CPU that train a network together."""
    memory = network_subject.memory_limit(resolve_devices(TWO), probe.device("cpu"), None)
    work = workload(SMALL, probe.device("cpu"), mode="training")
    return NetworkSubject(work=work, devices=resolve_devices(TWO), memory=memory, isolate="auto", winners=None)


def test_an_answer_whose_exchange_is_not_known_is_handed_out_all_the_same(monkeypatch):
    """Sixteen steps of 10 s are waited for 640 s, not ten budgets of 60 s; what ends them is a reason of the answer."""
    asked = []

    class Late:
        def __init__(self, made, prepare_seconds):
            asked.append(prepare_seconds)

        def call(self, method, **arguments):
            raise TimedOut(f"{method}()", asked[-1])

        def close(self):
            asked.append("closed")

    monkeypatch.setattr(network_subject, "RemoteRunner", Late)
    result = TuningResult.from_json(json.dumps(about({32: 3.2})))  # samples per second: a step takes 10 s
    found = shared().complete(result, SimpleNamespace(limit=None), Request())
    assert asked == [640.0, "closed"]
    assert (found.batch_size, found.data_parallel) == (32, None)
    assert found.reasons[-1].endswith("is not known: measure_exchange() did not come back within 640 s")


@pytest.mark.parametrize(
    ("spec", "options", "field"),
    [
        (SMALL, {"mode": "inference"}, "mode"),
        ({"type": "linear", "k": 4, "c": 8}, {}, "layer_spec"),
        (SMALL, {"devices": 10**6}, "devices"),
        (SMALL, {"isolate": False}, "isolate"),
        (SMALL, {"devices": TWO, "device": "cpu"}, "device"),
    ],
)
def test_what_devices_cannot_tune_together_is_refused(spec, options, field):
    """Before anything is started, by the argument's name."""
    with pytest.raises(cb.InvalidArgument) as caught:
        cb.autotune(spec, **{"mode": "training", "devices": TWO, "store": False} | options)
    assert caught.value.field == field


def test_each_rank_has_its_share_of_memory():
    """Two ranks on a CPU may take half of what one may; a limit that is lower stays."""
    from cubatch.hardware.memory_limit import memory_limit

    here = probe.device("cpu")
    both = network_subject.memory_limit(resolve_devices(TWO), here, None).bytes
    assert both == pytest.approx(memory_limit(here).bytes / 2, rel=0.1)  # what is free moves meanwhile
    assert network_subject.memory_limit(resolve_devices(TWO), here, "16MiB").bytes == 16 * 2**20


def test_a_result_without_devices_reads_as_before():
    """Files of the same schema that know nothing of devices: None; with broken facts they are refused by name."""
    assert TuningResult.from_json(json.dumps(tuned())).data_parallel is None
    assert TuningResult.from_json(json.dumps(tuned())).scaling_efficiency is None
    with pytest.raises(cb.InvalidData, match="data_parallel"):
        TuningResult.from_json(json.dumps(tuned(data_parallel={"devices": ["cpu", "cpu"]})))


def test_nothing_is_hidden_where_all_is_exposed():
    """A wait that is longer than its sums hides none of them; ranks that exchange nothing have no overlap."""
    cost = DataParallel.of(TWO, 64, {"together": 0.25, "alone": 0.125, "exchange": 0.5, "exposed": 0.125})
    assert (cost.overlap, cost.scaling_efficiency, cost.samples_per_second) == (0.75, 0.5, 512.0)
    taken = {"together": 1.0, "alone": 0.5, "exchange": 0.2, "exposed": 0.3}
    assert DataParallel.of(TWO, 8, taken).overlap == 0.0
    assert DataParallel.of(TWO, 8, taken | {"exchange": 0.0, "exposed": 0.0}).overlap is None


# --- the commands --------------------------------------------------------------------------------------------


def test_the_commands_share_steps_too(monkeypatch, capfd, tmp_path):
    """`train --devices` on two CPUs, as a user types it, and what `tune --devices` needs."""
    run = in_process(monkeypatch, capfd)
    spec = tmp_path / "small.json"
    spec.write_text(json.dumps(SMALL.to_mapping()))
    words = ["--data", SAMPLE, "--batch-size", "40", "--epochs", "1", "--devices", "cpu,cpu"]
    code, out, _ = run("train", spec, *words)
    assert code == 0
    assert "batch 80 on 2 devices" in " ".join(out.split())
    code, _, err = run("tune", spec, "--devices", "cpu,cpu")
    assert code == 2
    assert "--mode" in err

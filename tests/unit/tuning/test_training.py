"""train() from Python: every option of the command, checked as the command's are."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path

import attrs
import pytest

import cubatch as cb
from cubatch.cli import train as command
from cubatch.tuning.results import TuningResult
from tests.unit.tuned import measurement, tuned

SAMPLE = Path(cb.__file__).parents[1] / "tests" / "data" / "mnist-sample"
NETWORK = cb.Network(
    input_shape=(28, 28, 1), layers=[cb.MaxPool2d(r=4, s=4), cb.Flatten(), cb.Linear(name="scores", k=10)], name="small"
)
SHORT = {"data": SAMPLE, "batch_size": 100, "epochs": 1, "device": "cpu"}


def test_the_command_and_the_function_have_the_same_options():
    """With the same defaults; a network is made with its shape and classes, and --json is what is returned."""
    asked = {name: each.default for name, each in inspect.signature(command.train).parameters.items()}
    for name in ("model", "input_shape", "classes", "json"):
        del asked[name]
    asked["learning_rate"] = asked.pop("lr")
    given = {name: each.default for name, each in inspect.signature(cb.train).parameters.items()}
    for name in ("spec", "progress", "stepped"):
        del given[name]
    assert given == asked


@pytest.fixture
def untrained(monkeypatch):
    """Neither trains nor tunes nor fetches."""
    for name in ("engine.train.train", "engine.data.download_mnist", "tuning.training.autotune"):
        monkeypatch.setattr(f"cubatch.{name}", lambda *_, name=name, **__: pytest.fail(name))


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"data": None}, "data"),
        ({"batch_size": 0}, "batch_size"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"device": "v100-sxm2-16gb"}, "device"),
        ({"save": "a.npz", "checkpoint": "./a.npz"}, "save"),
        ({"save": "a.pt"}, "save"),
        ({"checkpoint": "nowhere/a.npz"}, "checkpoint"),
        ({"weights": "a.pt"}, "file"),
        ({"batch_size": "auto", "epochs": 0}, "epochs"),
        ({"batch_size": "auto", "checkpoint_seconds": math.nan}, "checkpoint_seconds"),
        ({"batch_size": "auto", "target_batch_size": 10**6}, "target_batch_size"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_done(options, field):
    """By the argument's name, also where tuning would come first."""
    with pytest.raises(cb.CubatchError) as caught:
        cb.train(NETWORK, **SHORT | options)
    assert getattr(caught.value, "field", "device") == field


@pytest.mark.parametrize("arguments", [{"spec": "no-model"}, {"data": "nowhere"}, {"weights": "nowhere.npz"}])
def test_what_is_not_there_is_refused(arguments):
    """A model, a folder and a file, each as an error of ours."""
    with pytest.raises(cb.CubatchError):
        cb.train(**{"spec": NETWORK} | SHORT | arguments)


def test_it_begins_with_weights_and_leaves_a_file_with_which_another_run_begins(tmp_path, monkeypatch):
    """What is fetched goes into the folder that is read; every epoch and step is told."""
    fetched, epochs, steps = [], [], []
    monkeypatch.setattr("cubatch.engine.data.download_mnist", fetched.append)
    first = cb.train(NETWORK, **SHORT, download=True, save=tmp_path / "w.npz", progress=epochs.append)
    again = cb.train(NETWORK, **SHORT | {"epochs": 2}, weights=tmp_path / "w.npz", patience=1, stepped=steps.append)
    assert fetched == [SAMPLE]
    assert epochs == list(first.epochs)
    assert len(steps) == 8 * len(again.epochs)
    assert again.epochs[0].loss < first.epochs[0].loss


def test_a_run_that_is_printed_is_a_table_of_its_epochs():
    """As the command prints it: a line each, and how it ended."""
    found = cb.train(NETWORK, **SHORT | {"epochs": 2})
    title, *lines = str(found).splitlines()
    assert title == f"{found.model}, float32, batch {found.batch_size}, momentum, learning rate {found.learning_rate:g}"
    assert [line.split()[:2] for line in lines[-2:]] == [[str(e.number), f"{e.loss:.4f}"] for e in found.epochs]
    assert "smaller learning rate" in str(attrs.evolve(found, diverged=True))


def test_auto_takes_the_answer_of_tuning_for_the_same_step(monkeypatch):
    """In training, for that optimiser, dtype and seed, up to the training set."""
    asked = []

    def tune(spec, **options):
        asked.append((spec, options))
        return TuningResult.from_json(json.dumps(tuned(measurements=[measurement(40, 0.01)], batch_size=40)))

    monkeypatch.setattr("cubatch.tuning.training.autotune", tune)
    found = cb.train(NETWORK, **SHORT | {"batch_size": "auto"}, optimizer="adam", seed=7)
    ((spec, options),) = asked
    assert found.batch_size == 40
    assert spec == NETWORK
    assert options.pop("device").kind == "cpu"
    assert options == {
        "mode": "training", "max_batch_size": 800, "dtype": "float32", "optimizer": "adam", "recompute": False,
        "seed": 7,
    }  # fmt: skip

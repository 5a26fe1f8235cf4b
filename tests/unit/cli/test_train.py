"""`cubatch train`: tuned first, or with a size that is given."""

from __future__ import annotations

import json
import types
from pathlib import Path

import attrs
import pytest

import cubatch
import cubatch.engine
import cubatch.tuning
from cubatch.engine import checkpoint
from cubatch.engine.network import Model
from cubatch.engine.training_run import Step
from cubatch.errors import InvalidData
from cubatch.hardware import probe
from cubatch.network import models
from cubatch.network.weight_files import save_weights
from cubatch.tuning.step_memory import footprint
from tests.unit.tuned import tuned

ROOT = Path(cubatch.__file__).parent.parent


@attrs.frozen
class Epoch:
    """An epoch as the engine records it."""

    number: int
    loss: float = 0.1
    test_accuracy: float = 0.98
    seconds: float = 2.0
    samples_per_second: float = 30_000.0


@attrs.frozen
class Trained:
    """A training run as the engine records it, as far as the command reads it."""

    epochs: tuple[Epoch, ...]
    diverged: bool = False
    stopped_early: bool = False


@pytest.fixture
def train(monkeypatch):
    """Put a training of two epochs in the place of the real one; `stop` ends it after the first."""

    def fake(network, *, progress, stepped, epochs, **options):
        fake.network, fake.options, fake.stepped = network, options, stepped
        for number in range(1, epochs + 1):
            progress(Epoch(number))
            if fake.stop:
                raise fake.stop
        return Trained(tuple(Epoch(number) for number in range(1, epochs + 1)))

    fake.stop = None
    monkeypatch.setattr("cubatch.engine.train.train", fake)
    return fake


@pytest.mark.usefixtures("autotune")
def test_train_with_a_number_trains_with_it_and_shows_every_epoch(run, train):
    """No tuning where the size is given."""
    code, out, err = run(
        "train", "mnist-cnn", "--data", "here", "--batch-size", "32", "--epochs", "2", "--device", "cpu", "--lr", "0.1"
    )

    assert (code, err) == (0, "")
    assert train.network.name == "mnist-cnn"
    assert train.options.pop("device").kind == "cpu"
    assert train.options == {
        "data": "here", "batch_size": 32, "learning_rate": 0.1, "optimizer": "momentum", "recompute": False, "seed": 0,
        "context": None, "dtype": "float32", "target_batch_size": None, "schedule": "cosine", "patience": None,
        "save": None, "checkpoint": None, "checkpoint_seconds": 60.0,
    }  # fmt: skip
    assert out.count("98.00 %") == 2


def test_train_auto_tunes_for_training_and_takes_the_answer(run, autotune, train):
    """The answer of the recorded tuning is 64."""
    sample = ROOT / "tests" / "data" / "mnist-sample"
    code, out, err = run("train", "mnist-cnn", "--data", sample, "--epochs", "1", "--optimizer", "adam", "--json", "-")

    assert code == 0
    assert "batch size 64" in err
    assert "The curve is flat from batch 64 on." in err  # why
    assert (autotune.options["mode"], autotune.options["optimizer"]) == ("training", "adam")
    assert autotune.options["max_batch_size"] == 800  # images in the sample
    assert train.options["batch_size"] == 64
    assert json.loads(out)["epochs"][0]["test_accuracy"] == 0.98


@pytest.mark.usefixtures("autotune")
def test_interrupted_training_shows_the_epochs_that_are_done(run, train):
    """Ctrl-C loses the model, not what was learnt about it."""
    train.stop = KeyboardInterrupt()

    code, out, err = run("train", "mnist-cnn", "--data", "here", "--batch-size", "32")

    assert code == 130
    assert out.count("98.00 %") == 1
    assert err.endswith("cubatch: interrupted; nothing is saved; --checkpoint FILE saves a run\n")


@pytest.mark.usefixtures("autotune")
def test_failed_training_shows_the_epochs_that_are_done(run, train, tmp_path):
    """As on a full disk at the end: the epochs are printed and in the JSON, then the error."""
    train.stop = InvalidData("w.npz", "No space left on device")

    code, out, err = run("train", "mnist-cnn", "--data", "here", "--batch-size", "32", "--json", tmp_path / "t.json")

    assert (code, err) == (1, "cubatch: w.npz: No space left on device\n")
    assert out.count("98.00 %") == 1
    assert len(json.loads((tmp_path / "t.json").read_text())["epochs"]) == 1


def test_a_size_without_a_recommendation_is_not_called_recommended(run, autotune, train, monkeypatch):
    """Training goes on with the fastest size, and its first line says that it is no recommendation."""
    undecided = tuned(batch_size=None, fastest_batch_size=128)
    monkeypatch.setattr(autotune, "result", undecided)
    sample = ROOT / "tests" / "data" / "mnist-sample"
    code, _, err = run("train", "mnist-cnn", "--data", sample, "--epochs", "1")

    assert (code, train.options["batch_size"]) == (0, 128)
    assert "batch size 128, without a recommendation" in err


@pytest.mark.usefixtures("autotune")
def test_interrupted_training_says_where_it_is_kept(run, train, tmp_path, monkeypatch):
    """And that the same command goes on."""
    monkeypatch.setattr("cubatch.engine.checkpoint.read", lambda _: None)
    train.stop, kept = KeyboardInterrupt(), tmp_path / "run.safetensors"
    kept.touch()

    code, _, err = run("train", "mnist-cnn", "--data", "here", "--batch-size", "32", "--checkpoint", str(kept))

    assert code == 130
    assert err.endswith(f"cubatch: interrupted; repeat the command to continue from {kept}\n")
    kept.unlink()
    assert run("train", "mnist-cnn", "--data", "here", "--batch-size", "32", "--checkpoint", str(kept))[2].endswith(
        "cubatch: interrupted; nothing was saved yet\n"
    )


def test_a_target_is_cut_by_what_was_measured(run, autotune, train):
    """Of the sizes that divide 384 the recorded tuning is fastest at 128: why is said, and no size above is tried."""
    sample = ROOT / "tests" / "data" / "mnist-sample"
    code, _, err = run("train", "mnist-cnn", "--data", sample, "--epochs", "1", "--target-batch-size", "384")

    assert code == 0
    assert autotune.options["max_batch_size"] == 384
    assert (train.options["batch_size"], train.options["target_batch_size"]) == (128, 384)
    assert "batches of 128, whose gradients are added up until they are of 384 samples" in err
    assert ", 128 takes the least time for all of it: 3 x 42.4 ms, measured." in err


@pytest.mark.usefixtures("autotune")
def test_a_target_leaves_room_for_the_sum_of_the_gradients(run, monkeypatch, train):
    """Where only 32 fit beside it, no larger batch is taken, however fast."""
    asked = {"mode": "training", "optimizer": "momentum", "device": probe.device(), "target_batch_size": 384}
    room = footprint("mnist-cnn", batch_size=32, **asked).total
    assert footprint("mnist-cnn", batch_size=48, **asked).total > room
    monkeypatch.setattr("cubatch.hardware.memory_limit.memory_limit", lambda *_: types.SimpleNamespace(bytes=room))
    sample = ROOT / "tests" / "data" / "mnist-sample"
    assert run("train", "mnist-cnn", "--data", sample, "--epochs", "1", "--target-batch-size", "384")[0] == 0
    assert train.options["batch_size"] == 32


@pytest.mark.usefixtures("autotune")
def test_files_and_the_course_go_to_the_engine(run, train, tmp_path):
    """Weights are read into the network; what is saved, kept and when it ends is handed on."""
    net = models.build("mnist-cnn")
    with Model(net, device=probe.device("cpu")) as drawn:
        save_weights(drawn.trained(), tmp_path / "w.safetensors")
    code, _, err = run(
        "train", "mnist-cnn", "--data", "here", "--batch-size", "32", "--weights", tmp_path / "w.safetensors", "--save",
        tmp_path / "s.npz", "--checkpoint", tmp_path / "c.npz", "--checkpoint-seconds", "5", "--patience", "2",
        "--schedule", "constant", "--epochs", "1",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert train.network.weights.keys() == {"conv1", "conv2", "fc1", "fc2"}
    options = {
        name: train.options[name] for name in ("save", "checkpoint", "checkpoint_seconds", "patience", "schedule")
    }
    assert options == {
        "save": tmp_path / "s.npz", "checkpoint": tmp_path / "c.npz", "checkpoint_seconds": 5.0, "patience": 2,
        "schedule": "constant",
    }  # fmt: skip


def test_a_run_that_is_kept_goes_on_with_its_batch_size_and_is_not_tuned_again(run, monkeypatch, train, tmp_path):
    """Another answer would be refused as another setting; where it goes on is said."""
    monkeypatch.setattr("cubatch.tuning.tune.autotune", lambda *_, **__: pytest.fail("it tuned"))
    epoch = {"number": 1, "loss": 0.5, "test_accuracy": 0.8, "seconds": 2.0, "samples_per_second": 24.0}
    kept = checkpoint.Checkpoint(settings={"batch_size": 48}, conditions={}, epochs=[epoch], losses=[0.5, 0.25])
    checkpoint.write(tmp_path / "c.npz", kept)
    code, _, err = run("train", "mnist-cnn", "--data", "here", "--checkpoint", tmp_path / "c.npz", "--epochs", "1")
    assert code == 0
    assert train.options["batch_size"] == 48
    assert "c.npz ends after epoch 1 and 2 steps, in batches of 48" in err


def test_steps_are_told_where_no_bar_is_drawn(run, train, monkeypatch):
    """A line now and then with epoch, loss and accuracy."""
    lines = []
    monkeypatch.setattr("cubatch.cli.console.progress_lines", lambda **_: lines.append)
    assert run("train", "mnist-cnn", "--data", "here", "--batch-size", "8", "--epochs", "3")[0] == 0
    train.stepped(Step(1, 9, 1, 2.30259, None))
    train.stepped(Step(5, 9, 2, 0.5, 0.9876))
    assert lines == ["epoch 1 of 3, loss 2.3026", "epoch 2 of 3, loss 0.5000, test accuracy 98.76 %"]

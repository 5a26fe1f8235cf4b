"""`cubatch train`: tuned first, or with a size that is given."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import attrs
import pytest

import cubatch
import cubatch.engine
import cubatch.tuning

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


@pytest.fixture
def train(monkeypatch):
    """Put a training of two epochs in the place of the real one; `stop` ends it after the first."""

    def fake(network, *, progress, epochs, **options):
        fake.network, fake.options = network, options
        for number in range(1, epochs + 1):
            progress(Epoch(number))
            if fake.stop:
                raise KeyboardInterrupt
        return Trained(tuple(Epoch(number) for number in range(1, epochs + 1)))

    fake.stop = False
    module = types.ModuleType("cubatch.engine.train")
    module.train, module.Epoch, module.check = fake, Epoch, lambda *_, **__: None
    monkeypatch.setitem(sys.modules, "cubatch.engine.train", module)
    monkeypatch.setattr(cubatch.engine, "train", module, raising=False)
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
        "context": None, "dtype": "float32",
    }  # fmt: skip
    assert out.count("98.00 %") == 2


def test_train_auto_tunes_for_training_and_takes_the_answer(run, autotune, train):
    """The answer of the recorded tuning is 64."""
    sample = ROOT / "tests" / "data" / "mnist-sample"
    code, out, err = run("train", "mnist-cnn", "--data", sample, "--epochs", "1", "--optimizer", "adam", "--json", "-")

    assert code == 0
    assert "batch size 64" in err
    assert (autotune.options["mode"], autotune.options["optimizer"]) == ("training", "adam")
    assert autotune.options["max_batch_size"] == 800  # images in the sample
    assert train.options["batch_size"] == 64
    assert json.loads(out)["epochs"][0]["test_accuracy"] == 0.98


def test_training_on_a_cpu_in_16_bits_is_refused_before_anything_is_done(run, autotune, train):
    """A CPU takes float32 only; the error names the dtype and what would do."""
    code, _, err = run("train", "mnist-cnn", "--data", "here", "--device", "cpu", "--dtype", "bfloat16")

    assert code == 2
    assert "bfloat16" in err
    assert "float32" in err
    assert not hasattr(train, "options")


@pytest.mark.usefixtures("autotune")
def test_interrupted_training_shows_the_epochs_that_are_done(run, train):
    """Ctrl-C loses the model, not what was learnt about it."""
    train.stop = True

    code, out, err = run("train", "mnist-cnn", "--data", "here", "--batch-size", "32")

    assert code == 130
    assert out.count("98.00 %") == 1
    assert "interrupted" in err


def test_train_checks_its_arguments_before_it_tunes(run, monkeypatch, tmp_path):
    """A folder without data, or no epochs, is an error at once, not after a minute of tuning."""
    monkeypatch.setattr("cubatch.tuning.tune.autotune", lambda *_, **__: pytest.fail("it tuned first"))
    sample = ROOT / "tests" / "data" / "mnist-sample"
    for arguments in (["--data", tmp_path], ["--data", sample, "--epochs", "0"], ["--data", sample, "--lr", "-1"]):
        assert run("train", "mnist-cnn", *arguments)[0] == (1 if tmp_path in arguments else 2)

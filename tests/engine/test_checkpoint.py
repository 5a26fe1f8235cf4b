"""Runs that are kept in a file and go on: to the bit, with the same settings only, and after any kill."""

from __future__ import annotations

import functools
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import attrs
import numpy as np
import pytest

import cubatch
from cubatch import array_file
from cubatch.engine import checkpoint, conditions, train as training
from cubatch.engine.train import train
from cubatch.errors import InvalidArgument, InvalidData
from cubatch.hardware import probe
from cubatch.network.graph import Network
from cubatch.network.specfile import load_spec
from cubatch.network.weight_files import load_weights

SAMPLE = Path(__file__).parents[1] / "data" / "mnist-sample"
NET = """
name = "small"
input_shape = [28, 28, 1]
layers = [
  { type = "conv2d", k = 4, r = 3, s = 3, stride = 2, pad = 1, bias = false }, { type = "batch_norm2d" },
  { type = "relu" }, { type = "max_pool2d", r = 2, s = 2 }, { type = "flatten" }, { type = "dropout", p = 0.3 },
  { type = "linear", name = "scores", k = 10 },
]
"""
KILLS = 2  # at random times, which differ from run to run


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """A small network with batch norm and dropout."""
    path = tmp_path_factory.mktemp("net") / "net.toml"
    path.write_text(NET)
    return load_spec(path)


class Killed(BaseException):
    """A run that ends in the middle."""


@pytest.fixture
def run(network):
    """Train for three epochs of eight steps."""
    return functools.partial(
        train, network, data=SAMPLE, batch_size=50, target_batch_size=100, device=probe.device("cpu"), epochs=3
    )


def same(first, second):
    """Whether two files are the same, byte for byte."""
    return first.read_bytes() == second.read_bytes()


def without_times(epochs):
    """Records of epochs but for what a clock said."""
    return [(epoch.number, epoch.loss, epoch.test_accuracy) for epoch in epochs]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_run_that_was_cut_off_ends_as_one_that_was_not(run, tmp_path, optimizer):
    """Cut off after the first step, within each epoch and at its end: weights, losses and accuracies are the same."""
    whole = run(save=tmp_path / "whole.safetensors", optimizer=optimizer)

    def until(last):
        def stepped(step):
            if step.done == last:
                raise Killed

        return stepped

    options = {"checkpoint": tmp_path / "run.safetensors", "checkpoint_seconds": 0, "optimizer": optimizer}
    for last in (2, 4, 9, 17, 18):
        with pytest.raises(Killed):
            run(stepped=until(last), **options)
        kept = checkpoint.read(options["checkpoint"])
        assert 8 * len(kept.epochs) + len(kept.losses) == last - 1  # the last step's is not written
    again = run(save=tmp_path / "again.safetensors", **options)
    assert same(tmp_path / "whole.safetensors", tmp_path / "again.safetensors")
    assert without_times(again.epochs) == without_times(whole.epochs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_in_a_step_is_heard_after_it_and_the_run_kept(run, tmp_path, number, monkeypatch):
    """Within an epoch and in its last step; the run goes on to the bit, and the signal is as it was."""
    options = {"checkpoint": tmp_path / "run.safetensors", "checkpoint_seconds": 3600.0}
    real, done = training._step, []

    def step(*arguments):
        done.append(None)
        if len(done) in (3, 8, 13):
            signal.raise_signal(number)
        return real(*arguments)

    before = signal.signal(number, signal.default_int_handler)
    try:
        whole = run(save=tmp_path / "whole.safetensors")
        monkeypatch.setattr(training, "_step", step)
        for last in (3, 8, 13):
            with pytest.raises(KeyboardInterrupt):
                run(**options)
            kept = checkpoint.read(options["checkpoint"])
            assert 8 * len(kept.epochs) + len(kept.losses) == last
            assert signal.getsignal(number) is signal.default_int_handler
        again = run(save=tmp_path / "again.safetensors", **options)
    finally:
        signal.signal(number, before)
    assert same(tmp_path / "whole.safetensors", tmp_path / "again.safetensors")
    assert without_times(again.epochs) == without_times(whole.epochs)


@pytest.mark.parametrize("options", [{}, {"checkpoint": "run.safetensors"}], ids=["nothing is kept", "a second one"])
def test_a_signal_that_nothing_waits_for_is_heard_at_once(run, tmp_path, monkeypatch, options):
    """Where there is no checkpoint to write, and where somebody insists."""
    monkeypatch.chdir(tmp_path)

    def step(*_):
        for _ in range(1 + len(options)):
            signal.raise_signal(signal.SIGINT)
        pytest.fail("the step went on")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(training, "_step", step)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(**options)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list(tmp_path.iterdir())


def test_a_run_that_ended_is_given_back_as_it_is(run, tmp_path):
    """Every record with its times, and the weights, without another step."""
    options = {"checkpoint": tmp_path / "run.npz", "epochs": 2}
    first = run(save=tmp_path / "a.npz", **options)
    told = []
    second = run(save=tmp_path / "b.npz", progress=told.append, stepped=told.append, **options)
    assert second == first
    assert told == []
    assert same(tmp_path / "a.npz", tmp_path / "b.npz")


def test_within_an_epoch_a_run_is_kept_only_now_and_then(run, tmp_path, monkeypatch):
    """With an hour between two checkpoints there is one for each epoch."""
    written = []
    monkeypatch.setattr(checkpoint, "write", lambda path, kept: written.append((len(kept.epochs), len(kept.losses))))
    run(checkpoint=tmp_path / "run.npz", checkpoint_seconds=3600.0)
    assert written == [(1, 0), (2, 0), (3, 0)]


def test_the_time_of_an_epoch_leaves_its_checkpoints_out(run, tmp_path, monkeypatch):
    """Eight steps of a second, and as many checkpoints of ten, are eight seconds; also where a run goes on."""
    now, seconds, real = [0.0], [], checkpoint.write

    def write(path, kept):
        now[0] += 10.0
        seconds.append(kept.seconds)
        real(path, kept)

    def stepped(step):
        now[0] += 1.0
        if step.done == 13:
            raise Killed

    monkeypatch.setattr(checkpoint, "write", write)
    monkeypatch.setattr(training, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    options = {"checkpoint": tmp_path / "run.npz", "checkpoint_seconds": 0}
    with pytest.raises(Killed):
        run(stepped=stepped, **options)
    assert seconds == [1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4]
    epochs = run(stepped=lambda _: now.append(now.pop() + 1.0), **options).epochs
    assert [(epoch.seconds, epoch.samples_per_second) for epoch in epochs] == [(8.0, 100.0)] * 3


OTHERS = {
    "batch_size": 25, "target_batch_size": 50, "epochs": 4, "learning_rate": 0.01, "schedule": "constant",
    "optimizer": "adam", "seed": 1, "patience": 2, "recompute": True,
}  # fmt: skip


def test_other_settings_are_rejected_by_their_names(run, tmp_path):
    """With both values and a remedy; the file stays as it was."""
    path = tmp_path / "run.safetensors"
    run(checkpoint=path, epochs=1)
    before = path.read_bytes()
    for name, value in OTHERS.items():
        with pytest.raises(InvalidArgument, match=rf"^{name} must be .* as .* was begun with, got .*new run") as caught:
            run(checkpoint=path, **({"epochs": 1} | {name: value}))
        assert (caught.value.field, caught.value.value) == (name, value)
    assert path.read_bytes() == before


def test_a_setting_that_only_the_file_has_is_refused(run, tmp_path):
    """By its name: the run was begun with something that this call would not do; None is nothing."""
    path = tmp_path / "run.safetensors"
    first = run(checkpoint=path, epochs=1)
    kept = checkpoint.read(path)
    checkpoint.write(path, attrs.evolve(kept, settings={**kept.settings, "warmup": None}))
    assert run(checkpoint=path, epochs=1) == first
    checkpoint.write(path, attrs.evolve(kept, settings={**kept.settings, "warmup": 5}))
    with pytest.raises(InvalidArgument, match=r"^warmup must be 5, as .* was begun with, got None"):
        run(checkpoint=path, epochs=1)


def test_another_network_other_weights_and_other_data_are_refused(run, network, tmp_path):
    """A layer that differs under the same name, weights to begin with, and a folder with other images."""
    path = tmp_path / "run.safetensors"
    first = run(checkpoint=path, save=tmp_path / "w.npz", epochs=1)
    assert len(first.epochs) == 1
    layers = [attrs.evolve(layer, p=0.1) if layer.type == "dropout" else layer for layer in network.layers]
    other = Network(input_shape=network.input_shape, layers=layers, name=network.name)
    for changed, name in ((other, "network"), (load_weights(network, tmp_path / "w.npz"), "weights")):
        with pytest.raises(InvalidArgument, match=f"^{name} must be"):
            train(
                changed, data=SAMPLE, batch_size=50, target_batch_size=100, device=probe.device("cpu"), epochs=1,
                checkpoint=path,
            )  # fmt: skip
    for file in SAMPLE.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    labels = next(path for path in tmp_path.iterdir() if path.name.startswith("train-labels"))
    raw = bytearray(gzip.decompress(labels.read_bytes()))
    raw[-1] = (raw[-1] + 1) % 10
    labels.unlink()
    labels.with_name("train-labels-idx1-ubyte").write_bytes(raw)
    with pytest.raises(InvalidArgument, match=r"^data must be"):
        run(checkpoint=path, data=tmp_path, epochs=1)


@pytest.mark.parametrize(
    ("drops", "effect"), [(True, "dropout draws other masks"), (False, "may differ in their last bits")]
)
def test_other_conditions_are_told_and_not_refused(network, tmp_path, drops, effect):
    """With other threads masks are others, without dropout only roundings; either way the run goes on."""
    path, here = tmp_path / "run.safetensors", probe.device("cpu")
    layers = [layer for layer in network.layers if drops or layer.type != "dropout"]
    other = Network(input_shape=network.input_shape, layers=layers)
    run = functools.partial(train, other, data=SAMPLE, batch_size=100, epochs=2)

    def killed(_):
        raise Killed

    whole = run(device=attrs.evolve(here, threads=1))
    with pytest.raises(Killed):
        run(device=attrs.evolve(here, threads=1), checkpoint=path, progress=killed)
    with pytest.warns(checkpoint.OtherConditions, match=rf"{effect}: threads was 1, is 2"):
        again = run(device=attrs.evolve(here, threads=2), checkpoint=path)
    assert (abs(again.epochs[1].loss - whole.epochs[1].loss) < 1e-5) is not drops


def test_other_versions_are_reported_and_not_rejected(run, tmp_path, monkeypatch):
    """All that computes, by name with both versions, also where one is unknown; the run continues."""
    path, facts = tmp_path / "run.npz", conditions.environment(probe.device("cpu"))
    names = {
        "cubatch": "cubatch", "numpy": "NumPy", "blas": "BLAS", "cupy": "CuPy", "nvrtc": "NVRTC", "cublas": "cuBLAS",
        "driver": "driver",
    }  # fmt: skip
    for version in ("1.5", "1.6", None):
        changed = facts | dict.fromkeys(names, version)
        monkeypatch.setattr(conditions, "environment", lambda _, changed=changed: changed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert len(run(checkpoint=path, epochs=1).epochs) == 1
        messages = [str(each.message) for each in caught if each.category is checkpoint.OtherConditions]
        if version == "1.5":
            assert messages == []
            before = path.read_bytes()
        else:
            (message,) = messages
            differing = set(message.partition("last bits: ")[2].split("; "))
            assert differing == {f"{name} was 1.5, is {version or 'unknown'}" for name in names.values()}
        path.write_bytes(before)


def test_on_a_gpu_the_kernels_are_kept_by_their_contents():
    """A source that was edited adds up in another order under the same version; on a CPU they do not count."""
    gpu = attrs.evolve(probe.resolve("v100-sxm2-16gb", live=False), uuid=None)
    assert conditions.arithmetic(gpu)["kernels"] == conditions.kernels_sha256()[:16]
    assert conditions.arithmetic(probe.device("cpu"))["kernels"] is None


def test_what_is_no_checkpoint_is_refused(run, tmp_path):
    """Weights, a later version, a file that was cut short, and a name that no such file has."""
    array_file.write(tmp_path / "w.npz", {"w": np.ones(2)}, {array_file.WEIGHTS: "{}"})
    array_file.write(tmp_path / "later.npz", {"w": np.ones(2)}, {array_file.CHECKPOINT: '{"version": 3}'})
    (tmp_path / "cut.npz").write_bytes((tmp_path / "w.npz").read_bytes()[:50])
    for name in ("w", "later", "cut"):
        with pytest.raises(InvalidData, match=rf"{name}\.npz"):
            run(checkpoint=tmp_path / f"{name}.npz")
    with pytest.raises(InvalidArgument, match="checkpoint must be a file that ends in"):
        run(checkpoint=tmp_path / "run.pt")


def command(folder, *arguments):
    """The command line that trains from files."""
    return [
        sys.executable, "-m", "cubatch", "train", str(folder / "net.toml"), "--data", str(SAMPLE), "--batch-size", "20",
        "--target-batch-size", "40", "--epochs", "8", "--device", "cpu", "--optimizer", "adam", "--lr", "0.003",
        "--checkpoint-seconds", "0", *map(str, arguments),
    ]  # fmt: skip


def kill_at_random(arguments, path, chance):
    """Start the command, kill it a random while after it has written some checkpoints, and say what it died of."""
    environment = os.environ | {"PYTHONPATH": str(Path(cubatch.__file__).parents[1])}
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    try:
        seen, wanted, last = 0, chance.randint(1, 8), _changed(path)
        while seen < wanted and process.poll() is None:
            time.sleep(0.001)
            now = _changed(path)
            seen, last = seen + (now != last), now
        time.sleep(chance.uniform(0, 0.02))
    finally:
        process.kill()
    _, told = process.communicate()
    assert process.returncode == -signal.SIGKILL, told.decode()


def _changed(path):
    return path.stat().st_mtime_ns if path.exists() else 0


def test_a_run_that_is_killed_at_random_ends_with_the_same_weights(tmp_path):
    """By SIGKILL, in a process of its own, which is started again by the same command: equal to the bit."""
    (tmp_path / "net.toml").write_text(NET)
    kept, chance = tmp_path / "run.safetensors", random.Random()
    environment = os.environ | {"PYTHONPATH": str(Path(cubatch.__file__).parents[1])}
    for _ in range(KILLS):
        kill_at_random(command(tmp_path, "--checkpoint", kept), kept, chance)
    assert len(checkpoint.read(kept).epochs) < 8
    for name, more in (("again", ["--checkpoint", kept]), ("whole", [])):
        files = ["--save", tmp_path / f"{name}.safetensors", "--json", tmp_path / f"{name}.json"]
        subprocess.run(command(tmp_path, *more, *files), check=True, capture_output=True, env=environment)
    assert same(tmp_path / "again.safetensors", tmp_path / "whole.safetensors")
    again, whole = (json.loads((tmp_path / f"{name}.json").read_text())["epochs"] for name in ("again", "whole"))
    assert [(e["loss"], e["test_accuracy"]) for e in again] == [(e["loss"], e["test_accuracy"]) for e in whole]

"""Short runs of the studies on this CPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from cubatch.errors import InvalidArgument
from cubatch.hardware import probe
from cubatch.studies import numpy_mnist, run, wave_quantization
from cubatch.studies.study_request import StudyRequest

pytestmark = pytest.mark.usefixtures("quiet")

SAMPLE = Path(__file__).parents[2] / "data" / "mnist-sample"
LINEAR = {"name": "linear", "input_shape": [28, 28, 1], "layers": [{"type": "flatten"}, {"type": "linear", "k": 10}]}


def short(name, folder, spec="mlp", **options):
    """Run a quick study of a small network."""
    request = StudyRequest(spec=spec, model="mlp", folder=Path(folder), device="cpu", quick=True, **options)
    return run.run(name, request, command=f"cubatch study {name} mlp")


@pytest.mark.case("small-batch-floor")
def test_small_batch_floor(tmp_path, virtual):
    """Powers of two up to 16; steps of up to 8 take at most 1.1 times the 1.01 ms of a single sample."""
    payload = short("small-batch-floor", tmp_path, max_batch_size=16)
    assert [m["batch_size"] for m in payload["result"]["measurements"]] == [1, 2, 4, 8, 16]
    assert payload["floor"] == 8


@pytest.mark.case("hyperparameter")
def test_hyperparameter(tmp_path, virtual):
    """The list is in a JSON file, ascending, and each size was measured."""
    payload = short("hyperparameter", tmp_path, max_batch_size=32, budget=3.0)
    written = run.write(payload, tmp_path)
    sizes = json.loads((tmp_path / "batch_sizes.json").read_text())
    assert sizes == sorted(sizes) == [choice["batch_size"] for choice in payload["choices"]]
    assert set(sizes) <= {m["batch_size"] for m in payload["result"]["measurements"]}
    assert tmp_path / "batch_sizes.json" in written


@pytest.mark.case("memory-rules")
def test_memory_rules(tmp_path):
    """The multilayer perceptron has 131 410 parameters: twice its file is 8 bytes each, at any batch size."""
    parameters = 1000 * 100 + 100 + 3 * (100 * 100 + 100) + 100 * 10 + 10
    payload = short("memory-rules", tmp_path)
    assert payload["file_bytes"] == 4 * parameters
    twice = [rule for rule in payload["rules"] if rule["name"] == "2x the file"]
    modes = ("inference", "training")
    assert [(rule["mode"], rule["batch_size"]) for rule in twice] == [(mode, n) for mode in modes for n in (1, 8)]
    assert {rule["bytes"] for rule in twice} == {8 * parameters}
    measured = {(row["mode"], row["batch_size"]): row["measured_bytes"] for row in payload["measured"]}
    for rule in payload["rules"]:
        assert rule["ratio"] == pytest.approx(rule["bytes"] / measured[rule["mode"], rule["batch_size"]])
    assert measured["training", 1] >= 2 * 4 * parameters  # weights and their gradients


@pytest.mark.case("memory-rules")
def test_memory_rules_of_a_network_without_parameters(tmp_path):
    """Twice its file is 0 bytes, which has no place on a logarithmic axis; other modes are not measured."""
    spec = {"name": "relu", "input_shape": [8, 8, 3], "layers": [{"type": "relu"}]}
    payload = short("memory-rules", tmp_path, spec, modes=("inference",))
    assert {rule["ratio"] for rule in payload["rules"] if rule["name"] == "2x the file"} == {0.0}
    assert {row["mode"] for row in payload["measured"]} == {payload["mode"]} == {"inference"}
    assert tmp_path / "index.html" in run.write(payload, tmp_path)


@pytest.mark.case("coulom-rule")
@pytest.mark.skipif((probe.device("cpu").threads or 1) < 2, reason="one thread has no full")
def test_waves(tmp_path, virtual):
    """Each size around two full waves is measured three times, and the page says that a CPU has no SMs."""
    layers = [{"type": "conv2d", "k": 64, "r": 3, "s": 3, "pad": 1}]
    spec = {"name": "board", "input_shape": [19, 19, 64], "layers": layers}
    payload = short("waves", tmp_path, spec, budget=60.0)
    threads = probe.device("cpu").threads
    windows = [wave_quantization.window(full, 3, 10**6) for full in (2 * threads, 4 * threads)]
    assert [row["batch_size"] for row in payload["sizes"]] == sorted({n for sizes in windows for n in sizes})
    assert [top["batch_size"] for top in payload["full_waves"]] == [2 * threads, 4 * threads]
    past = [c for c in payload["comparisons"] if c["rule"] == "past full wave"]
    assert [(c["batch_size"], c["reference"], c["trials"]) for c in past] == [
        (full + 1, full, [3, 3]) for full in (2 * threads, 4 * threads)
    ]
    assert len(payload["question"]) == 2
    assert tmp_path / "figure.svg" in run.write(payload, tmp_path)


@pytest.mark.case("numpy-mnist")
def test_numpy_mnist_without_images(tmp_path):
    """Five epochs are the steps over 60 000 samples; the shares of the causes add up to 1."""
    payload = short("numpy-mnist", tmp_path, budget=0.3)
    for row, profile in zip(payload["epochs"], payload["profiles"], strict=True):
        assert row["seconds"] == pytest.approx(5 * (60_000 // row["batch_size"]) * profile["step_seconds"])
        assert sum(row["shares"].values()) == pytest.approx(1.0)
        assert row["epochs_trained"] == 0


def test_profiles_are_cached_one_by_one(tmp_path, monkeypatch):
    """Profiles before an interruption are not repeated, except with another seed."""
    calls = []
    real = numpy_mnist.step_profile.profile

    def stopping(spec, size, **options):
        calls.append(size)
        if calls == [1, 8]:
            raise KeyboardInterrupt
        return real(spec, size, **options)

    monkeypatch.setattr(numpy_mnist.step_profile, "profile", stopping)
    with pytest.raises(KeyboardInterrupt):
        short("numpy-mnist", tmp_path, budget=0.3)
    short("numpy-mnist", tmp_path, budget=0.3)
    assert calls == [1, 8, 8, 64]
    short("numpy-mnist", tmp_path, budget=0.3, seed=1)
    assert calls[4:] == [1, 8, 64]


@pytest.mark.case("numpy-mnist")
def test_whole_epochs_are_trained_if_the_budget_allows_them(tmp_path, monkeypatch):
    """Five at each size; a second run trains none, nor does a small budget."""
    trained = []
    real = numpy_mnist.engine.train

    def counted(network, **options):
        trained.append(options["batch_size"])
        return real(network, **options)

    monkeypatch.setattr(numpy_mnist.engine, "train", counted)
    payload = short("numpy-mnist", tmp_path, LINEAR, data=SAMPLE, budget=60.0)
    assert sorted(trained) == sorted([1, 8, 64] * 5)
    assert {row["epochs_trained"] for row in payload["epochs"]} == {5}
    assert short("numpy-mnist", tmp_path, LINEAR, data=SAMPLE, budget=60.0)["epochs"] == payload["epochs"]
    (tmp_path / numpy_mnist.CACHE).unlink()
    payload = short("numpy-mnist", tmp_path, LINEAR, data=SAMPLE, budget=1e-6)
    assert {row["epochs_trained"] for row in payload["epochs"]} == {0}
    assert len(trained) == 15


@pytest.mark.case("numpy-mnist")
def test_a_mean_stands_for_epochs_that_were_not_trained(tmp_path, monkeypatch):
    """A budget for two epochs of the largest batch, from steps of 1 s: five times their mean."""
    seconds = {1: 800 * 1.0, 8: 100 * 1.0, 64: 12 * 1.0}

    def profile(_, size, **__):
        mapping = {"batch_size": size, "step_seconds": 1.0, "traced_seconds": 1.0, "causes": {"products": 1.0}}
        return SimpleNamespace(to_mapping=lambda: mapping)

    moments = itertools.count(step=12)
    epochs = lambda size: [SimpleNamespace(seconds=seconds[size])]  # noqa: E731
    monkeypatch.setattr(numpy_mnist.step_profile, "profile", profile)
    monkeypatch.setattr(
        numpy_mnist.engine, "train", lambda _, *, batch_size, **__: SimpleNamespace(epochs=epochs(batch_size))
    )
    monkeypatch.setattr(numpy_mnist, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    monkeypatch.setattr(numpy_mnist, "points", lambda *_: [])
    payload = short("numpy-mnist", tmp_path, LINEAR, data=SAMPLE, budget=35.0)
    assert {row["batch_size"]: row["epochs_trained"] for row in payload["epochs"]} == {1: 0, 8: 0, 64: 2}
    assert {row["batch_size"]: row["seconds"] for row in payload["epochs"]} == {n: 5 * s for n, s in seconds.items()}


def test_disturbed_steps_are_named():
    """One size whose plain steps took ten times as long as its timed calls; the other's agree."""
    causes = {"products": 1e-3, "copies": 0.0, "elementwise": 0.0, "overhead": 0.0, "waiting": 0.0}
    quiet = {"batch_size": 1, "step_seconds": 1.1e-3, "traced_seconds": 1e-3, "causes": causes}
    epochs = [{"batch_size": 1, "epochs_trained": 0}]
    lines = numpy_mnist.points(epochs, [quiet, quiet | {"batch_size": 8, "step_seconds": 1e-2}])
    assert lines[3].startswith("Batch 8:")
    assert len(numpy_mnist.points(epochs, [quiet, quiet | {"batch_size": 8}])) == 3


@pytest.mark.parametrize(("name", "is_named"), [("numpy-mnist", True), ("memory-rules", False)])
def test_a_busy_machine_is_named_if_time_counts(tmp_path, monkeypatch, name, is_named):
    """Other processes used 1.5 CPUs, which changes seconds but not bytes."""
    busy = run.cpu_load.CpuLoad(others=1.5, steal=0.0, num_cpus=2)
    monkeypatch.setattr(run.cpu_load, "between", lambda *_: busy)
    assert any("1.5 of 2 CPUs busy" in line for line in short(name, tmp_path, budget=0.3)["points"]) == is_named


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("waves-of-two", {}, "study"),
        ("numpy-mnist", {"modes": ("inference",)}, "mode"),
        ("powers-of-two", {"data": SAMPLE}, "data"),
    ],
)
def test_options_that_make_no_sense_are_rejected(tmp_path, name, options, field):
    """An unknown study, inference for a question about training, images for a study without training."""
    with pytest.raises(InvalidArgument) as caught:
        short(name, tmp_path, **options)
    assert caught.value.field == field

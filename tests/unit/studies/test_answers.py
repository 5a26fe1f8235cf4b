"""What studies conclude from numbers whose truth is known, and short runs of each on this CPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubatch.errors import InvalidArgument, NothingMeasured
from cubatch.studies import memory_rules, numpy_mnist, run, small_batch_floor
from cubatch.studies.asked import Asked


def short(name, folder, **more):
    """Run a study on the smallest network."""
    asked = Asked(spec="mlp", model="mlp", folder=Path(folder), device="cpu", quick=True, **more)
    return run.run(name, asked, command=f"cubatch study {name} mlp"), asked


@pytest.mark.case("small-batch-floor")
@given(st.floats(1e-5, 1.0), st.floats(1e-9, 1e-2))
def test_the_floor_of_a_line_is_where_a_tenth_is_added(fixed, each):
    """
    Steps of a + b n seconds: no size up to the floor takes over 1.1 of a single one, the next one does.

    n1/2 of such a line is a / b, of all sizes; of those measured it is where half of the best of them is reached.
    """
    seconds = {2**k: fixed + each * 2**k for k in range(14)}
    found = small_batch_floor.floor_of(seconds)
    assert seconds[found["floor"]] <= 1.1 * seconds[1]
    assert found["floor"] == 2**13 or seconds[2 * found["floor"]] > 1.1 * seconds[1]
    best = max(n / taken for n, taken in seconds.items())
    assert found["half"] / seconds[found["half"]] >= best / 2
    assert found["half"] == 1 or (found["half"] / 2) / seconds[found["half"] / 2] < best / 2


def test_one_slow_size_ends_the_floor():
    """What lies beyond a size that takes longer does not count, however short its steps."""
    assert small_batch_floor.floor_of({1: 1.0, 2: 1.0, 4: 1.3, 8: 1.0})["floor"] == 2


@pytest.mark.parametrize(("seconds", "said"), [({1: 1.0, 2: 2.0}, "There is no such batch"), ({1: 1.0}, "Not known"),
                                               ({1: 1.0, 8: 2.0}, "Not known")])  # fmt: skip
def test_two_samples_that_were_not_measured_are_said_nothing_of(seconds, said):
    """A budget that ended after the single sample, or left two out: whether two take longer is not known."""
    assert small_batch_floor._answer(small_batch_floor.floor_of(seconds), seconds).startswith(said)


def test_a_single_sample_that_took_longer_than_more_is_no_floor_to_go_by():
    """Eight samples in a fifth of the time of one: no size is named, and both times are told."""
    seconds = {1: 10e-3, 2: 11.5e-3, 8: 2e-3, 16: 4e-3}
    found = small_batch_floor.floor_of(seconds)
    assert found["floor"] is None
    said = small_batch_floor._answer(found, seconds)
    assert said.startswith("That was not found: a step of a single sample took longer than one of 8, 10.0 ms and 2.00")
    near = {1: 10e-3, 2: 9.5e-3, 4: 12e-3}
    assert small_batch_floor._answer(small_batch_floor.floor_of(near), near).startswith("Below batch 2:")


def test_no_single_sample_is_no_floor():
    """There is nothing to compare with."""
    with pytest.raises(NothingMeasured):
        small_batch_floor.floor_of({2: 1.0})


@pytest.mark.case("small-batch-floor")
def test_a_short_run_finds_a_floor(tmp_path):
    """Powers of two up to 8, each with its visits; the floor is one of them, unless a busy machine spoilt the first."""
    found, _ = short("small-batch-floor", tmp_path, max_batch_size=8)
    assert [m["batch_size"] for m in found["result"]["measurements"]] == [1, 2, 4, 8]
    seconds = {m["batch_size"]: m["latency_seconds"] for m in found["result"]["measurements"]}
    is_spoilt = seconds[1] > 1.1 * min(seconds.values())
    assert (found["floor"] is None) == is_spoilt
    assert is_spoilt or seconds[found["floor"]] <= 1.1 * seconds[1]


@pytest.mark.case("hyperparameter")
def test_a_short_run_lists_sizes_for_a_search(tmp_path):
    """The list as JSON beside the page, ascending, and each size measured."""
    found, asked = short("hyperparameter", tmp_path, max_batch_size=32, budget=3.0)
    written = run.write(found, asked.folder)
    sizes = json.loads((tmp_path / "batch_sizes.json").read_text())
    assert sizes == sorted(sizes) == [choice["batch_size"] for choice in found["choices"]]
    assert set(sizes) <= {m["batch_size"] for m in found["result"]["measurements"]}
    assert tmp_path / "batch_sizes.json" in written


@pytest.mark.case("memory-rules")
def test_a_short_run_compares_rules_with_bytes(tmp_path):
    """
    The multilayer perceptron has 131 410 parameters: twice its file is 8 bytes each, whatever the batch.

    1000 x 100 + 100, three times 100 x 100 + 100, 100 x 10 + 10.
    """
    parameters = 1000 * 100 + 100 + 3 * (100 * 100 + 100) + 100 * 10 + 10
    found, _ = short("memory-rules", tmp_path)
    assert all(row["device_bytes"] is None for row in found["taken"]), "a CPU has no driver that counts"
    assert found["file_bytes"] == 4 * parameters
    twice = [rule for rule in found["rules"] if rule["name"] == "2x the file"]
    assert [(rule["mode"], rule["batch_size"]) for rule in twice] == [
        (mode, n) for mode in ("inference", "training") for n in (1, 8)
    ]
    assert {rule["bytes"] for rule in twice} == {8 * parameters}
    measured = {(t["mode"], t["batch_size"]): t["measured_bytes"] for t in found["taken"]}
    for rule in found["rules"]:
        assert rule["ratio"] == pytest.approx(rule["bytes"] / measured[rule["mode"], rule["batch_size"]])
    assert measured["training", 1] >= 2 * 4 * parameters  # weights and their gradients


@pytest.mark.case("memory-rules")
def test_a_network_without_parameters_has_a_page_too(tmp_path):
    """Its file is of 0 bytes, and so is twice of it: on an axis of factors there is no place for 0."""
    spec = {"name": "relu", "input_shape": [8, 8, 3], "layers": [{"type": "relu"}]}
    asked = Asked(spec=spec, model="relu", folder=tmp_path, device="cpu", quick=True, modes=("inference",))
    found = run.run("memory-rules", asked, command="cubatch study memory-rules relu.toml")
    assert {rule["ratio"] for rule in found["rules"] if rule["name"] == "2x the file"} == {0.0}
    assert tmp_path / "index.html" in run.write(found, tmp_path)


def test_rules_that_nothing_was_measured_beside_say_so():
    """No answer is made up."""
    assert memory_rules._answer([]) == "Not known: nothing was measured."


@pytest.mark.case("numpy-mnist")
def test_a_short_run_has_seconds_by_cause(tmp_path):
    """Without images 5 epochs are as many steps as 60 000 samples make, none smaller; shares make a whole."""
    found, _ = short("numpy-mnist", tmp_path, budget=0.3)
    for one, profile in zip(found["epochs"], found["profiles"], strict=True):
        steps = 5 * (60_000 // one["batch_size"])
        assert one["seconds"] == pytest.approx(steps * profile["step_seconds"])
        assert sum(one["shares"].values()) == pytest.approx(1.0)
        assert one["epochs_trained"] == 0
    assert "No epoch was trained" in found["points"][0]


def test_profiles_are_kept_one_by_one(tmp_path, monkeypatch):
    """What was profiled before a stop is not profiled again; a damaged file is none, nor one of another seed."""
    calls = []
    real = numpy_mnist.step_profile.profile

    def stopping(spec, size, **more):
        calls.append(size)
        if calls == [1, 8]:
            raise KeyboardInterrupt
        return real(spec, size, **more)

    monkeypatch.setattr(numpy_mnist.step_profile, "profile", stopping)
    with pytest.raises(KeyboardInterrupt):
        short("numpy-mnist", tmp_path, budget=0.3)
    first = json.loads((tmp_path / numpy_mnist.KEPT).read_text())["found"]["step 1"]
    found, _ = short("numpy-mnist", tmp_path, budget=0.3)
    assert calls == [1, 8, 8, 64]
    assert found["profiles"][0] == first
    (tmp_path / numpy_mnist.KEPT).write_text("{")
    short("numpy-mnist", tmp_path, budget=0.3)
    assert calls == [1, 8, 8, 64, 1, 8, 64]
    short("numpy-mnist", tmp_path, budget=0.3, seed=1)
    assert calls == [1, 8, 8, 64] + 2 * [1, 8, 64]


def test_steps_that_something_disturbed_are_named():
    """One size whose plain steps took ten times what its calls add up to; the other's agree."""
    causes = {"products": 1e-3, "copies": 0.0, "elementwise": 0.0, "overhead": 0.0, "waiting": 0.0}
    quiet = {"batch_size": 1, "step_seconds": 1.1e-3, "traced_seconds": 1e-3, "causes": causes}
    lines = numpy_mnist.points([quiet, quiet | {"batch_size": 8, "step_seconds": 1e-2}])
    assert [line for line in lines if "something else" in line] == lines[2:]
    assert lines[2].startswith("At batch 8 steps")
    assert not any("something else" in line for line in numpy_mnist.points([quiet, quiet | {"batch_size": 8}]))


def test_epochs_of_inference_are_refused(tmp_path):
    """The question is of training."""
    with pytest.raises(InvalidArgument) as caught:
        short("numpy-mnist", tmp_path, modes=("inference",))
    assert caught.value.field == "mode"


@pytest.mark.parametrize(("name", "is_told"), [("numpy-mnist", True), ("memory-rules", False)])
def test_a_busy_machine_is_named_where_time_counts(tmp_path, monkeypatch, name, is_told):
    """Others kept a CPU and a half busy: said of seconds that were measured now, and not of bytes or kept seconds."""
    busy = run.load.Load(others=1.5, steal=0.0, num_cpus=2)
    monkeypatch.setattr(run.load, "between", lambda *_: busy)
    found, _ = short(name, tmp_path, budget=0.3)
    assert any("1.5 of 2 CPUs busy" in line for line in found["points"]) == is_told
    again, _ = short(name, tmp_path, budget=0.3)
    assert not any("CPUs busy" in line for line in again["points"])


def test_no_such_study_is_refused(tmp_path):
    """With those that there are."""
    with pytest.raises(InvalidArgument, match="powers-of-two"):
        short("waves-of-two", tmp_path)


@pytest.mark.case("memory-rules")
def test_rules_are_compared_in_the_mode_asked_for(tmp_path):
    """Inference only: nothing is measured in training, and the page speaks of what inference needs."""
    found, _ = short("memory-rules", tmp_path, modes=("inference",))
    assert {t["mode"] for t in found["taken"]} == {rule["mode"] for rule in found["rules"]} == {"inference"}
    assert found["mode"] == "inference"
    assert any(line.startswith("At batch 8 inference needs") for line in found["points"])


LINEAR = {
    "name": "linear", "input_shape": [28, 28, 1], "layers": [{"type": "flatten"}, {"type": "linear", "k": 10}]
}  # fmt: skip
SAMPLE = Path(__file__).parents[2] / "data" / "mnist-sample"


def on_mnist(folder, budget):
    """`numpy-mnist` of a linear layer on the 800 images of the sample."""
    asked = Asked(
        spec=LINEAR, model="linear", folder=folder, device="cpu", quick=True, data=SAMPLE, budget=budget
    )  # fmt: skip
    return run.run("numpy-mnist", asked, command="cubatch study numpy-mnist")


@pytest.mark.case("numpy-mnist")
def test_whole_epochs_are_trained_where_the_budget_holds_them(tmp_path, monkeypatch):
    """Five at each size, whose seconds are those of the epochs; a second run trains none, nor a small budget."""
    trained = []
    real = numpy_mnist.engine.train

    def counted(network, **more):
        trained.append(more["batch_size"])
        return real(network, **more)

    monkeypatch.setattr(numpy_mnist.engine, "train", counted)
    found = on_mnist(tmp_path, 60.0)
    assert sorted(trained) == sorted([1, 8, 64] * 5)
    assert {one["epochs_trained"] for one in found["epochs"]} == {5}
    kept = json.loads((tmp_path / numpy_mnist.KEPT).read_text())["found"]
    for one in found["epochs"]:
        seconds = [kept[f"epoch {k} at {one['batch_size']}"]["seconds"] for k in range(5)]
        assert one["seconds"] == pytest.approx(sum(seconds))
    assert found["points"][0] == "Trained on MNIST: 5 epochs at batch 1, 8 and 64."
    assert on_mnist(tmp_path, 60.0)["epochs"] == found["epochs"]
    assert len(trained) == 15
    (tmp_path / numpy_mnist.KEPT).unlink()
    assert {one["epochs_trained"] for one in on_mnist(tmp_path, 1e-6)["epochs"]} == {0}
    assert len(trained) == 15


@pytest.mark.case("numpy-mnist")
def test_a_mean_stands_for_epochs_that_were_not_trained(tmp_path, monkeypatch):
    """
    A budget that holds two epochs of the largest batch, by what its steps take: five times their mean.

    Sizes that were not trained have as many steps as an epoch of these 800 images, so that all have the same length.
    """
    steps = {1: 800 * 1.0, 8: 100 * 1.0, 64: 12 * 1.0}
    causes = {"products": 1.0}

    def profile(_, size, **__):
        return {"batch_size": size, "step_seconds": 1.0, "traced_seconds": 1.0, "causes": causes}

    def train(_, *, batch_size, **__):
        return SimpleNamespace(epochs=[SimpleNamespace(seconds=steps[batch_size])])

    moments = itertools.count(step=12)
    monkeypatch.setattr(numpy_mnist.step_profile, "profile", lambda *a, **k: Mapped(profile(*a, **k)))
    monkeypatch.setattr(numpy_mnist.engine, "train", train)
    monkeypatch.setattr(numpy_mnist, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    monkeypatch.setattr(numpy_mnist, "points", lambda _: [])
    found = on_mnist(tmp_path, 35.0)
    assert {one["batch_size"]: one["epochs_trained"] for one in found["epochs"]} == {1: 0, 8: 0, 64: 2}
    by_size = {one["batch_size"]: one["seconds"] for one in found["epochs"]}
    assert by_size == {1: 5 * steps[1], 8: 5 * steps[8], 64: 5 * 12.0}
    assert "the steps over 800 images" in found["method"][0]


class Mapped(dict):
    """A profile that is its own mapping."""

    def to_mapping(self):
        return dict(self)

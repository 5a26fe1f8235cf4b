"""`generalisation`: learning rates, what is made of accuracies, made-up images, short runs that go on."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import numpy as np
import pytest

from cubatch.engine import data as files
from cubatch.errors import InvalidArgument
from cubatch.network.specfile import from_mapping
from cubatch.studies import generalisation, run
from cubatch.studies.study_request import StudyRequest
from tests.unit.studies import payloads

SAMPLE = Path(__file__).parents[2] / "data" / "mnist-sample"
LINEAR = {
    "name": "linear", "input_shape": [28, 28, 1], "layers": [{"type": "flatten"}, {"type": "linear", "k": 10}]
}  # fmt: skip


def short(folder, *, budget=3600.0, **more):
    """A quick study of a linear layer, which no slow machine cuts short."""
    asked = StudyRequest(
        spec=LINEAR, model="linear", folder=Path(folder), device="cpu", quick=True, budget=budget, **more
    )
    return run.run("generalisation", asked, command="cubatch study generalisation linear.toml")


def findings(folder):
    """The cached findings by name."""
    lines = (folder / generalisation.CACHE).read_text().split("\n")
    return {entry["name"]: entry["finding"] for entry in map(json.loads, filter(None, lines))}


@pytest.fixture
def few_images(monkeypatch):
    """The first 128 images of the sample to train on, and 100 for the accuracy."""
    train, test = (
        attrs.evolve(each, images=each.images[:n], labels=each.labels[:n])
        for each, n in zip(files.load_mnist(SAMPLE), (128, 100), strict=True)
    )
    monkeypatch.setattr(files, "load_mnist", lambda _: (train, test))


@pytest.mark.case("generalisation-gap")
def test_the_scaled_rate_is_in_proportion_to_the_batch():
    """Goyal et al.: k times the batch, k times the rate; the base has the same rate by either policy."""
    for policy in (generalisation.FIXED, generalisation.SCALED):
        assert generalisation.scale_rate(policy, generalisation.BASE, 0.05) == 0.05
    rates = [generalisation.scale_rate(generalisation.SCALED, n, 0.05) for n in (64, 128, 4096)]
    assert rates == pytest.approx([0.05, 0.1, 3.2])


@pytest.mark.case("generalisation-gap")
def test_a_short_run_trains_each_batch_with_each_rate_and_seed(tmp_path):
    """
    Three sizes, two policies, two seeds; the base is trained once for both; accuracy beats guessing twice.

    Progress counts the runs.  Of the sample of MNIST it trains on 800 images: each epoch has 800 // n steps.
    """
    seen = []
    found = short(tmp_path, data=SAMPLE, show=lambda done, total, _: seen.append((done, total)))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == ((0, 10), (10, 10))
    assert found["data"] == str(SAMPLE)
    assert "800 images of MNIST" in found["method"][0]
    assert [(row["policy"], row["batch_size"]) for row in found["rows"]] == [
        (policy, n) for policy in ("fixed", "scaled") for n in (16, 64, 256)
    ]
    assert all([one["seed"] for one in row["runs"]] == [0, 1] for row in found["rows"])
    kept = findings(tmp_path)
    assert len(kept) == (2 * 3 - 1) * 2
    base = {row["policy"]: row for row in found["rows"] if row["batch_size"] == 64}
    assert base["fixed"]["runs"] == base["scaled"]["runs"]
    assert all(row["test_accuracy"] > 0.2 for row in found["rows"])
    assert all(row["updates"] == 2 * (800 // row["batch_size"]) for row in found["rows"])
    assert all(row["sharpness"] > 0 for row in found["rows"])
    assert tmp_path / "figure-2.png" in run.write(found, tmp_path)


@pytest.mark.usefixtures("few_images")
@pytest.mark.parametrize("name", ["generalisation", "numpy-mnist"])
@pytest.mark.parametrize("changed", ["images", "labels"])
def test_findings_on_another_data_set_in_the_same_folder_do_not_count(tmp_path, monkeypatch, name, changed):
    """As Fashion-MNIST instead of MNIST, with as many images: everything is measured again."""
    train, test = files.load_mnist(SAMPLE)
    other = attrs.evolve(train, **{changed: getattr(train, changed)[::-1]})
    request = StudyRequest(
        spec=LINEAR, model="linear", folder=tmp_path, device="cpu", quick=True, data=SAMPLE, budget=1e-6,
        max_batch_size=64,
    )  # fmt: skip
    for images, keys in ((train, 1), (train, 1), (other, 2)):
        monkeypatch.setattr(files, "load_mnist", lambda _, images=images: (images, test))
        run.run(name, request, command=f"cubatch study {name}")
        (path,) = tmp_path.glob("*.jsonl")
        assert len({json.loads(line)["key"] for line in path.read_text().split("\n") if line}) == keys


@pytest.mark.usefixtures("few_images")
def test_a_stopped_study_goes_on(tmp_path, monkeypatch):
    """What a spent budget or Ctrl-C left is not trained again, and is the same; with another seed it is all new."""
    trained = []
    real = generalisation.engine.train

    def stopping(network, **more):
        trained.append((more["batch_size"], more["seed"]))
        if len(trained) == 3:
            raise KeyboardInterrupt
        return real(network, **more)

    monkeypatch.setattr(generalisation.engine, "train", stopping)
    spent = short(tmp_path, data=SAMPLE, max_batch_size=64, budget=1e-3)  # one run is longer
    assert sum(len(row["runs"]) for row in spent["rows"]) == 1
    assert any("5 runs are missing" in line for line in spent["points"])
    with pytest.raises(KeyboardInterrupt):
        short(tmp_path, data=SAMPLE, max_batch_size=64)
    before = findings(tmp_path)
    assert len(before) == 2
    whole = short(tmp_path, data=SAMPLE, max_batch_size=64)
    after = findings(tmp_path)
    assert {name: after[name] for name in before} == before
    assert whole["rows"][0]["runs"][0] == spent["rows"][0]["runs"][0]
    assert len(trained) == 3 + (6 - 2)
    assert sum(len(row["runs"]) for row in whole["rows"]) == 8
    assert not any("missing" in line for line in whole["points"])
    short(tmp_path, data=SAMPLE, max_batch_size=64, seed=5, budget=1e-3)
    assert [seed for _, seed in trained[7:]] == [5]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"quick": False}, "data"),
        ({"modes": ("inference",)}, "mode"),
        ({"max_batch_size": 32}, "max_batch_size"),
        ({"spec": "mlp", "data": SAMPLE}, "input_shape"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(tmp_path, more, field):
    """No images for a long answer, no training, no batch to compare with, images that the network does not take."""
    asked = {"spec": LINEAR, "model": "linear", "folder": tmp_path, "device": "cpu", "quick": True} | more
    with pytest.raises(InvalidArgument) as caught:
        run.run("generalisation", StudyRequest(**asked), command="")
    assert caught.value.field == field


# --- what is made of accuracies -----------------------------------------------------------------------------------


def runs_of(accuracies, loss=0.1):
    """Runs that differ in their accuracy only."""
    return [
        {
            "updates": 10,
            "test_accuracy": one,
            "training_loss": loss,
            "diverged": False,
            "sharpness": None,
            "seconds": 1.0,
        }
        for one in accuracies
    ]


def rows_of(large, *, loss=0.1):
    """Batch 64 with three accuracies, and batch 4096 with these."""
    base = generalisation.summarize("fixed", generalisation.Cell(64, 0.05, 0), runs_of((0.97, 0.975, 0.98), 0.05))
    other = generalisation.summarize("fixed", generalisation.Cell(4096, 0.05, 0), runs_of(large, loss))
    return [row | {"gap": generalisation.gap_to_base(row, [base, other])} for row in (base, other)]


@pytest.mark.parametrize(
    ("large", "says"),
    [
        ((0.93, 0.94, 0.95), "3.50 points less"),
        ((0.985, 0.99, 0.995), "1.50 points more"),
        ((0.97, 0.975, 0.985), "no certain difference"),
        ((0.93, 0.94), "too few seeds"),
        ((0.1, 0.1, 0.11), "does not learn"),
    ],
)
def test_groups_differ_that_do_not_overlap(large, says):
    """Three seeds each: the 90 % interval is that of all differences."""
    assert says in generalisation.answer(rows_of(large))


def test_an_undertrained_batch_is_distinguished_from_one_that_generalizes_worse():
    """By its training loss."""
    assert "undertrained" in " ".join(generalisation.points(rows_of((0.93, 0.94, 0.95), loss=0.4)))
    assert "undertrained" not in " ".join(generalisation.points(rows_of((0.93, 0.94, 0.95), loss=0.01)))


def test_a_diverged_run_is_named():
    """A scaled rate of 3.2 diverged."""
    assert any("batch 4096 with a rate of 3.2" in line for line in payloads.of_generalisation()["points"])


def test_made_up_images_can_be_told_apart_but_not_at_a_glance():
    """
    By the nearest pattern all are right, so that something can be learnt.

    Patterns are uniform in 96 to 160: two differ by 64**2 / 6 squared in the mean, 784 pixels by 5.4e5, which
    is a distance of 730.  Half of it is 5.7 deviations of the noise of 64 along that line.
    """
    asked = StudyRequest(spec=LINEAR, model="linear", folder=Path(), quick=True)
    training, test = generalisation.load_images(asked, from_mapping(LINEAR))
    assert (len(training), len(test)) == (2000, 1000)
    assert training.images.dtype == np.uint8
    means = np.stack([training.images[training.labels == k].mean(axis=0) for k in range(10)])
    far = ((test.images[:, None].astype(float) - means) ** 2).sum(axis=(2, 3, 4))
    assert (far.argmin(axis=1) == test.labels).all()

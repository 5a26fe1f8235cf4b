"""Scores of the model of time, on rows whose errors are known."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from benchmarks.predictor import fitting, score_launches
from benchmarks.score_predictor import errors, score_source
from tests.unit.benchmarks.building import LAYERS, model_of, rows_of

V100, P100, XP = "v100-pcie-16gb", "p100-pcie-16gb", "titan-xp"
TWO = {V100: (1.0, 1.0), P100: (1.0, 1.0)}


def test_errors_are_of_the_published_time():
    """What the harness added is in both: 1 + 3 predicted of 2 + 3 measured is 20 % too little, not 50."""
    rows = rows_of(layers=LAYERS[:1], batches=(4,), factors=TWO)
    rows = attrs.evolve(rows, seconds=np.array([2.0, 4.0]), overhead=np.array([3.0, 0.0]))
    assert errors(rows, np.array([1.0, 5.0])).tolist() == pytest.approx([20.0, 25.0])


@pytest.fixture
def refitted(monkeypatch):
    """Models fitted anew are right but for a tenth too much, without a GPU for a fifth; what was fitted."""
    found = {}

    def cross_validated(rows, *, seed):
        found["shapes"] = rows
        return 1.1 * rows.seconds, 1.3 * rows.seconds

    def gpu_left_out(rows, *, seed):
        found["gpus"] = rows
        return np.where(rows.gpu == V100, np.nan, 1.2 * rows.seconds)

    monkeypatch.setattr(fitting, "cross_validated", cross_validated)
    monkeypatch.setattr(fitting, "gpu_left_out", gpu_left_out)
    return found


def test_rows_that_were_fitted_are_predicted_anew_and_others_by_the_model(refitted):
    """Fitted rows never meet the model that saw them; of held-out rows those of unknown GPUs are apart."""
    rows = rows_of(batches=(4, 8), factors={**TWO, XP: (1.0, 1.0)})
    known = rows.work.n == 4
    # The model itself, which knows two GPUs, has all constants right: on what it is asked it makes no error.
    model = model_of(TWO, sd=0.1, unseen_sd=0.2)
    rows = attrs.evolve(rows, seconds=np.where(known, 1.0, rows.seconds))
    found = score_source(rows, model, known, seed=0)
    assert len(refitted["shapes"]) == len(refitted["gpus"]) == known.sum() == 48
    assert set(refitted["shapes"].work.n) == {4}
    scores = {name: (one["rows"], one["mean"]) for name, one in found.items() if "mean" in one}
    of_model = fitting.predict(model, rows.take(~known))
    assert of_model == pytest.approx(rows.seconds[~known], rel=1e-9)
    assert scores == {
        "neusight, unseen shapes": (48, 10.0),
        "neusight, unseen shapes, arithmetic alone": (48, 30.0),
        "neusight, unseen shapes, roofline": scores["neusight, unseen shapes, roofline"],
        "neusight, unseen GPU": (32, 20.0),
        f"neusight, unseen GPU, {P100}": (16, 20.0),
        f"neusight, unseen GPU, {XP}": (16, 20.0),
        "neusight, unseen GPU, 10 anchors": scores["neusight, unseen GPU, 10 anchors"],
        "neusight, unseen shapes, held out": (32, 0.0),
        "neusight, unseen shapes, held out, roofline": scores["neusight, unseen shapes, held out, roofline"],
        "neusight, unseen GPU, held out": (16, 0.0),
        f"neusight, unseen GPU, held out, {XP}": (16, 0.0),
        "neusight, unseen GPU, held out, 10 anchors": (16, 0.0),
    }
    assert scores["neusight, unseen GPU, 10 anchors"][1] < 20


def timed(name, seconds, *, dtype="float16", side="vendor"):
    """An item of a GPU pass: a linear layer of 32 samples that one entry has timed."""
    layer = {"type": "linear", "c": 256, "k": 256}
    entries = [{"name": name, "side": side, "seconds": seconds}]
    return {
        "status": "ok",
        "result": {"case": {"layer": layer, "batch_size": 32, "pass": "fprop", "dtype": dtype}, "entries": entries},
    }


def test_launches_are_scored_on_the_vendors_kernels_of_tensor_cores():
    """A longer launch moves every prediction by as much; other types, kernels of ours and other stages do not count."""
    others = [timed("a", 1.0, dtype="float32"), timed("b", 1.0, side="ours")]
    result = {"stages": [{"name": "gemm", "items": [timed("cuBLAS", 5e-6), *others]}, {"name": "tune", "items": [{}]}]}
    ((predicted, measured),) = score_launches.ratios(result, "float16")["linear"]
    assert (4e-6 < predicted < 6e-6, measured) == (True, 5e-6)
    score = score_launches.scores([(6e-6, 5e-6)], "float16")
    assert (score["mean_error"], score["bias"]) == (20.0, 20.0)
    assert [score["by_launch"][launch] for launch in ("4", "3", "9")] == [20.0, 0.0, 120.0]
    assert not score_launches.scores([(6e-6, 5e-6)], "float32")["by_launch"]

"""Which model scores which rows."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from benchmarks.predictor import fitting
from benchmarks.score_predictor import score_source
from tests.unit.benchmarks.building import model_of, rows_of

V100, P100, XP = "v100-pcie-16gb", "p100-pcie-16gb", "titan-xp"
TWO = {V100: (1.0, 1.0), P100: (1.0, 1.0)}


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

"""Fitting the model of time, on rows made with constants and factors that are known."""

from __future__ import annotations

import functools
import sys

import attrs
import numpy as np
import pytest

from benchmarks import fit_predictor
from benchmarks.predictor import fitting
from benchmarks.predictor.fitting import START, cross_validated, fit_constants, gpu_left_out
from benchmarks.predictor.published import GEMM, NEUSIGHT, load
from cubatch.estimate.vendor.fitted import Fitted
from tests.unit.benchmarks.building import (
    FACTORS,
    GEMM_ROW,
    LAYERS,
    V100,
    model_of,
    rows_of,
    write,
)


@pytest.fixture
def quick(monkeypatch):
    """Few steps of the search and few trees: enough for rows that the model explains."""
    monkeypatch.setattr(fitting, "fit_constants", functools.partial(fit_constants, evaluations=2))
    few = {"num_iterations": 12, "num_leaves": 6, "learning_rate": 0.3, "min_data_in_leaf": 5, "num_threads": 1}
    monkeypatch.setattr(fitting, "TREES", dict.fromkeys(fitting.TREES, few))


def test_the_factors_of_gpus_and_unusual_constants_are_recovered(monkeypatch):
    """
    96 rows without error give factors back to three per cent, and their times to two.

    With little pull towards the start: what all GPUs have in common is a constant of arithmetic as well as a factor,
    so the factors are planted with a product of one.
    """
    monkeypatch.setattr(fitting, "_WEIGHT", 0.02)
    rows = rows_of(constants=START | {"cost fused": 1.5, "cost 128x128": 1.4, "launch tiles": 12.0})
    model = fit_constants(rows, seed=0, evaluations=10)
    for slug, want in FACTORS.items():
        assert model.scales[slug] == pytest.approx(want, rel=0.03), slug
    assert fitting.analytic(model, rows) == pytest.approx(rows.seconds, rel=0.02)
    assert (model.name, model.transforms, model.trees) == (NEUSIGHT, True, None)


def test_nothing_of_a_held_out_fold_is_used(quick):
    """A thousandfold error planted in one fold changes no prediction of its rows, and those of the other fold."""
    rows = rows_of(batches=(4, 64))
    fold = rows.folds(2)
    assert 0 < fold.sum() < len(fold)
    planted = attrs.evolve(rows, seconds=np.where(fold == 1, 1000 * rows.seconds, rows.seconds))
    for honest, spoilt in zip(
        cross_validated(rows, seed=0, folds=2), cross_validated(planted, seed=0, folds=2), strict=True
    ):
        assert (honest > 0).all()
        assert spoilt[fold == 1].tolist() == honest[fold == 1].tolist()
        assert (spoilt[fold == 0] > honest[fold == 0]).mean() > 0.9


@pytest.fixture
def taught(monkeypatch):
    """A model that is not fitted, and the rows that it would have been fitted to."""
    found = []

    def fit(rows, *, seed):
        found.append(rows)
        return model_of({str(slug): (1.0, 1.0) for slug in np.unique(rows.gpu)})

    monkeypatch.setattr(fitting, "fit", fit)
    return found


def test_siblings_are_left_out_together(taught):
    """Boards of one chip say the same: neither teaches the other; Kepler only teaches."""
    boards = ("titan-xp", "gtx-1080-ti", "titan-x-pascal", V100, "k40")
    rows = rows_of(layers=LAYERS[:2], factors=dict.fromkeys(boards, (1.0, 1.0)))
    left = gpu_left_out(rows, seed=0)
    assert [sorted(set(part.gpu)) for part in taught] == [
        ["k40", V100],
        ["gtx-1080-ti", "k40", "titan-x-pascal", "titan-xp"],
    ]
    assert np.isnan(left[rows.gpu == "k40"]).all()
    assert np.isfinite(left[rows.gpu != "k40"]).all()


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Where files are read from, models and results are written to; what is fitted is known by its sd."""
    found = [tmp_path / name for name in ("csv", "data", "results")]
    for folder in found[:2]:
        folder.mkdir()
    monkeypatch.setattr(fit_predictor, "DATA", found[1])
    monkeypatch.setattr(fit_predictor, "RESULTS", found[2])
    monkeypatch.setattr(fit_predictor, "fitted", lambda rows, seed: model_of(name=rows.name, sd=0.1 + rows.tensor))
    return found


def command(folder, *options):
    """The words of the command line."""
    return ["fit_predictor", "--data", str(folder), *options]


def test_the_command_writes_a_model_for_each_source_that_is_there(folders, monkeypatch, capsys):
    """float32 and Tensor Cores have a file each, stored float16 none; the rows that were used are written down."""
    folder, data, results = folders
    sizes = {"fp32": (16, 32), "fp16_storage (16b in": (48, 64, 80), "fp16_mixed_tensorop (16b in": (16, 32)}
    changes = ({"gpu": "Tesla V100", "precision": kind, "n": n} for kind, batches in sizes.items() for n in batches)
    write(folder / "deepbench_gemm.csv", GEMM_ROW, *changes)
    monkeypatch.setattr(sys, "argv", command(folder))
    fit_predictor.main()
    assert sorted(path.name for path in data.iterdir()) == ["deepbench_gemm.npz", "deepbench_gemm_tensor.npz"]
    assert Fitted.load(data / "deepbench_gemm_tensor.npz").sd == 1.1
    assert fit_predictor.path_of(GEMM) == data / "deepbench_gemm.npz"
    assert fit_predictor.path_of(f"{GEMM} tensor") == data / "deepbench_gemm_tensor.npz"
    single, stored, tensor = load(folder, GEMM)
    with np.load(results / "rows.npz") as file:
        used = file["fitted"]
    assert sorted(used) == sorted([*fit_predictor.fingerprints(single), *fit_predictor.fingerprints(tensor)])
    assert not set(used) & set(fit_predictor.fingerprints(stored))
    assert "deepbench gemm tensor: 2 rows, 1 shapes, 1 GPUs" in capsys.readouterr().out

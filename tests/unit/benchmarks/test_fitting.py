"""Fitting the model of time, on rows made with constants and factors that are known."""

from __future__ import annotations

import functools
import math
import sys

import attrs
import numpy as np
import pytest

from benchmarks import fit_predictor
from benchmarks.predictor import fitting
from benchmarks.predictor.fitting import START, cross_validated, fit_constants, gpu_left_out
from benchmarks.predictor.published import CONV, GEMM, NEUSIGHT, load
from cubatch.estimate.vendor.fitted import Fitted
from tests.unit.benchmarks.building import (
    CONV_ROW,
    FACTORS,
    GEMM_ROW,
    LAYERS,
    ONES,
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


def test_trees_learn_what_the_constants_cannot(quick):
    """Layers of 28 x 28 take a third longer for no reason the arithmetic knows: the trees see it, in range."""
    rows = rows_of(factors=ONES, batches=(4, 16, 64, 256))
    odd = rows.work.h == 28
    slow = attrs.evolve(rows, seconds=np.where(odd, rows.seconds * 1.35, rows.seconds))
    model = fitting.fit_trees(model_of(), slow, seed=0)
    gap = np.log(fitting.predict(model, slow) / slow.seconds)
    plain = np.log(fitting.analytic(model, slow) / slow.seconds)
    assert np.abs(plain[odd]).mean() == pytest.approx(np.log(1.35), rel=1e-9)
    assert np.abs(gap).mean() < 0.3 * np.abs(plain).mean()
    sizes = dict(zip(model.trees.features, zip(model.trees.low, model.trees.high, strict=True), strict=True))
    assert sizes["c"] == pytest.approx((np.log(64), np.log(512)))
    assert sizes["n"] == (-np.inf, np.inf)
    assert not [name for name in sizes if name.startswith("n mod")]  # all batches are powers of two


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


def test_what_is_unknown_of_a_gpu_is_what_leaving_each_out_shows(monkeypatch, taught):
    """GPUs a fifth slower and a tenth faster than the model without them: the root of the mean square."""
    rows = rows_of(factors=ONES)
    rows = attrs.evolve(rows, seconds=rows.seconds * np.exp(np.where(rows.gpu == V100, 0.2, -0.1)))
    monkeypatch.setattr(fitting, "fit_constants", fitting.fit)
    noise = np.random.default_rng(2).normal(0, 0.15, len(rows))
    monkeypatch.setattr(fitting, "cross_validated", lambda rows, **_: (rows.seconds * np.exp(noise), None))
    model = fit_predictor.fitted(rows, 0)
    assert model.unseen_sd == pytest.approx(math.sqrt((0.2**2 + 0.1**2) / 2))
    assert model.sd == pytest.approx(np.quantile(np.abs(noise), 0.9) / 1.6449)


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


def test_sources_that_were_not_asked_for_stay_as_they_are(folders, monkeypatch):
    """No model of theirs is written, but their rows are still known as fitted."""
    folder, data, results = folders
    write(folder / "deepbench_gemm.csv", GEMM_ROW, {})
    write(folder / "deepbench_conv.csv", CONV_ROW, {})
    monkeypatch.setattr(sys, "argv", command(folder, "--only", CONV))
    fit_predictor.main()
    assert [path.name for path in data.iterdir()] == ["deepbench_conv.npz"]
    want = np.concatenate([fit_predictor.fingerprints(load(folder, source)[0]) for source in (CONV, GEMM)])
    with np.load(results / "rows.npz") as file:
        assert sorted(file["fitted"]) == sorted(want)

"""Fitting the model of time, on rows made with constants and factors that are known."""

from __future__ import annotations

import functools

import attrs
import numpy as np
import pytest

from benchmarks.predictor import fitting
from benchmarks.predictor.fitting import cross_validated, fit_constants, gpu_left_out
from tests.unit.benchmarks.building import (
    LAYERS,
    V100,
    model_of,
    rows_of,
)


@pytest.fixture
def quick(monkeypatch):
    """Few steps of the search and few trees: enough for rows that the model explains."""
    monkeypatch.setattr(fitting, "fit_constants", functools.partial(fit_constants, evaluations=2))
    few = {"num_iterations": 12, "num_leaves": 6, "learning_rate": 0.3, "min_data_in_leaf": 5, "num_threads": 1}
    monkeypatch.setattr(fitting, "TREES", dict.fromkeys(fitting.TREES, few))


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

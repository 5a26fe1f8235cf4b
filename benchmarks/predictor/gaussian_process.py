"""
Fitting the Gaussian process of what the constants leave: see `cubatch.estimate.vendor.gaussian_process`.

Errors have further parts that the process does not model.  One belongs to a shape and pass, on all GPUs, on kin or on
one GPU, and is more alike the nearer the batches.  Another belongs to each measurement.  Without them, twenty
measurements of a shape would count as twenty shapes.  Variances and lengths maximize the likelihood (Rasmussen and
Williams, Gaussian Processes for Machine Learning, 2006, 5.4).  Each has a prior around its start, since a few dozen
shapes hardly determine them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.linalg import cho_solve, cholesky
from scipy.optimize import minimize

from benchmarks.predictor.published import Rows
from cubatch.estimate.vendor.algorithms import Array, Places
from cubatch.estimate.vendor.gaussian_process import GaussianProcess, near, table

LENGTH = 2.0
"""Where the search for a length starts, in logarithms of extents."""
SHARED_SD = {"all": 0.15, "kin": 0.1, "gpu": 0.1}
"""Standard deviations of what the process knows, where the search starts."""
_SHAPE = (0.12, 0.05, 0.05)  # of a shape's own error on all GPUs, on kin, on one
_NOISE = 0.08
_BATCHES = 1.5  # logarithm of the batch over which a shape's own error changes
_PRIOR_SD = 0.5  # of the logarithm of a length or standard deviation, around where the search starts
_FAR = np.log(10.0)
_ROUNDS = 40


def fit_gaussian_process(
    columns: dict[str, Array], rows: Rows, places: Places, gaps: Array, shared: Sequence[str]
) -> GaussianProcess:
    """
    Fit a process to the logarithms of measured over predicted time.

    Args:
        columns: `trees.features` of the rows.
        rows: What was measured.
        places: The GPUs of the rows.
        gaps: The logarithms.
        shared: What of SHARED the source has.
    """
    x, alike = table(columns), _alike(rows, places)
    first = np.log([LENGTH] * x.shape[1] + [*SHARED_SD.values(), *_SHAPE, _NOISE])
    on = np.array([name in shared for name in SHARED_SD] + [True] * 4, float)
    within = [(log - _FAR, log + _FAR) for log in first]
    options = {"maxiter": _ROUNDS}
    solution = minimize(
        _improbable, first, ((first, on), x, alike, gaps), "L-BFGS-B", jac=True, bounds=within, options=options
    ).x
    lengths, variances = np.exp(solution[: x.shape[1]]), np.exp(2 * solution[x.shape[1] :]) * on
    covariance, _ = _covariance(x / lengths, alike, variances)
    return GaussianProcess(
        lengths=lengths.astype(np.float32), points=(x / lengths).astype(np.float32),
        weights=np.linalg.solve(covariance, gaps).astype(np.float32), gpu=places.gpu, kin=places.kin,
        shares=variances[:3].astype(np.float32),
    )  # fmt: skip


def _alike(rows: Rows, places: Places) -> Array:
    """Return masks of rows that share all, kin and GPU, and weights of equal shapes: (6, rows, rows)."""
    kin, gpu, shape, pass_ = (
        names[:, None] == names for names in (places.kin, places.gpu, rows.shape, rows.work.pass_)
    )
    batch = np.log(rows.work.n)
    own = shape * pass_ * np.exp(-(((batch[:, None] - batch) / _BATCHES) ** 2) / 2)
    return np.stack([np.ones(kin.shape), kin, gpu, own, own * kin, own * gpu])


def _covariance(z: Array, alike: Array, variances: Array) -> tuple[Array, Array]:
    """Return the covariance of the errors, and the part that the process explains."""
    known = near(z, z) * np.tensordot(variances[:3], alike[:3], 1)
    return known + np.tensordot(variances[3:6], alike[3:], 1) + variances[6] * np.eye(len(z)), known


def _improbable(logs: Array, prior: tuple[Array, Array], x: Array, alike: Array, gaps: Array) -> tuple[float, Array]:
    """Return the negative log likelihood of the errors up to a constant, and its gradient."""
    first, on = prior
    count = x.shape[1]
    z, variances = x / np.exp(logs[:count]), np.exp(2 * logs[count:]) * on
    covariance, known = _covariance(z, alike, variances)
    root = cholesky(covariance, lower=True)
    inverse = cho_solve((root, True), np.eye(len(gaps)))
    weights = inverse @ gaps
    pull = inverse - np.outer(weights, weights)
    by_point = pull * known
    by_length = (z**2 * by_point.sum(axis=1)[:, None]).sum(axis=0) - (z * (by_point @ z)).sum(axis=0)
    spread = pull * near(z, z)
    by_share = [variances[i] * np.vdot(spread if i < 3 else pull, alike[i]) for i in range(6)]
    away = (logs - first) / _PRIOR_SD
    value = gaps @ weights / 2 + np.log(np.diag(root)).sum() + away @ away / 2
    return float(value), np.r_[by_length, by_share, variances[6] * np.trace(pull)] + away / _PRIOR_SD

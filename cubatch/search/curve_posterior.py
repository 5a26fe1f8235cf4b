"""
Fit the posterior of the step cost at all batch sizes to the timings of a few.

The logarithm of the cost of a step is modeled as

    log cost(n) = a shape  +  smooth misfit  +  steps  +  error of the timings

The shapes are two-term lines, `overhead + work * n` for every ratio of the two.  The misfit bends over octaves.
Steps are jumps of the curve: wave quantization, another algorithm, a cache that no longer holds the data, threads.  The
amplitude of both is unknown before measuring.  So the model is a mixture of Gaussian processes (Rasmussen and Williams,
chapter 2).  It has one process for each shape and pair of amplitudes, weighted by its likelihood given the timings.
The result is one normal distribution with the mean and covariance of the mixture.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

KNEES = 2.0 ** np.arange(-3, 15)
"""Batch sizes at which work takes as long as overhead: the shapes, all with the same prior probability."""
SMOOTH = ((0.02, 0.4), (0.1, 0.4), (0.35, 0.2))
"""Standard deviations of the smooth misfit, as a share of the cost, and their prior probabilities."""
ALL = math.inf  # steps occur at all sizes
STEPS = ((0.003, 0.25, ALL, 0.4), (0.02, 0.25, ALL, 0.35), (0.08, 0.25, ALL, 0.245), (2.0, 8.0, ALL, 0.005))
"""Standard deviations of steps in the curve, length scales in octaves, sizes below which they occur, and probabilities.
On a GPU one more wave, or another algorithm, costs up to tens of percent.  The last entry allows any jump."""
HOST_SMOOTH = ((0.005, 0.95), (0.1, 0.05))
HOST_JUMPS = tuple((2.0, 8.0, below, 0.005 / 7) for below in (2, 4, 8, 16, 32, 64, ALL))
HOST_STEPS = ((0.002, 0.25, ALL, 0.95), (0.03, 0.25, ALL, 0.03), (0.1, 0.25, ALL, 0.015), *HOST_JUMPS)
"""Both for a CPU, which has no wave quantization: mostly a two-term line, and only clear departures count.
On a busy CPU, steps of few samples can take a hundred times as long.  40 fake hosts (`bench_hosts --jumps --family 53`)
lost 0.9 % in 18 s with these jumps, and 1.8 % in 26 s with jumps at all sizes alone.  They chose no value."""
SMOOTH_OCTAVES = 2.0  # length scale
SCALE = 10.0  # log cost of the whole curve is unknown within e to this power
LEAST_VARIANCE = 1e-10  # of a log cost, so that a covariance has a Cholesky factor, and of a difference of two
NEGLIGIBLE = 1e-3  # processes whose weight is smaller, relative to the largest, are left out
Z_90 = 1.645  # standard deviations to both sides that hold 90 %


@attrs.frozen
class SizeEstimate:
    """The estimated log cost of a step of one batch size, from the timings of this size alone, and its error."""

    batch_size: int
    log_cost: float  # of a step, in seconds or joules, at the usual host speed
    variance: float  # of its own error
    host: float = 0.0  # mean log slowdown of the host, by which the error of the common slope is multiplied


@attrs.frozen(eq=False)
class CurvePosterior:
    """The posterior of the log of a step's cost (seconds or joules) at some batch sizes: a normal distribution."""

    sizes: NDArray[np.int64]  # batch sizes, ascending
    mean: Array  # of the log cost, by size
    covariance: Array  # of the log costs

    @property
    def sd(self) -> Array:
        """Standard deviation of the log cost, by size; about the relative error of the cost where it is small."""
        return np.sqrt(np.diag(self.covariance))

    def place(self, n: int) -> int:
        """Return the index in `sizes` of batch size `n`, which must be one of them."""
        return int(np.searchsorted(self.sizes, n))

    def cost(self, n: int) -> float:
        """Return the posterior median of the cost of a step of batch size `n`, in seconds or joules."""
        return math.exp(self.mean[self.place(n)])

    def interval(self, n: int) -> tuple[float, float]:
        """Return the 90 % interval (low, high) of the cost of a step of batch size `n`, in seconds or joules."""
        middle, half = float(self.mean[self.place(n)]), Z_90 * float(self.sd[self.place(n)])
        return math.exp(middle - half), math.exp(middle + half)

    def difference_sd(self, first: int, second: int) -> float:
        """Return the standard deviation of the difference of the log costs at two indices in `sizes`."""
        spread = self.covariance
        variance = spread[first, first] + spread[second, second] - 2 * spread[first, second]
        return math.sqrt(max(float(variance), LEAST_VARIANCE))


def usual_errors() -> np.errstate:
    """Return a context with NumPy's default error handling, which code of the user may have changed."""
    return np.errstate(divide="warn", over="warn", under="ignore", invalid="warn")


def fit_curve(
    estimates: Sequence[SizeEstimate], sizes: Sequence[int], *, slope_variance: float = 0.0, host: bool = False
) -> CurvePosterior:
    """
    Return the posterior of the log of the step cost (seconds or joules) at the given batch sizes.

    Args:
        estimates: Estimates of the measured sizes; without any, the result is the prior.
        sizes: The batch sizes to predict, in any order.
        slope_variance: Variance of the common slope of host slowdowns: see `noise.Noise`.
        host: Whether the steps run on a CPU, with a reference step.
    """
    measured = np.array([estimate.batch_size for estimate in estimates], dtype=np.float64)
    predicted = np.array(sorted(sizes), dtype=np.float64)
    log_cost = np.array([estimate.log_cost for estimate in estimates])
    slowdown = np.array([estimate.host for estimate in estimates])
    noise = np.diag([estimate.variance for estimate in estimates]) + slope_variance * np.outer(slowdown, slowdown)
    misfits = itertools.product(HOST_SMOOTH if host else SMOOTH, HOST_STEPS if host else STEPS)
    processes = np.array([(smooth, *step, p * q) for (smooth, p), (*step, q) in misfits])
    # Arrays below have the axes (process, measured size or predicted size, shape).
    factor = np.linalg.cholesky(_covariances(measured, measured, processes) + noise)
    explained = np.linalg.solve(factor, log_cost[:, None] - _shapes(measured))
    determinant = np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(axis=1)
    likelihood = (np.log(processes[:, 4]) - determinant)[:, None] - 0.5 * (explained**2).sum(axis=1)
    weights = np.exp(likelihood - likelihood.max())
    likely = weights.max(axis=1) > NEGLIGIBLE
    weights, processes, explained = weights[likely] / weights[likely].sum(), processes[likely], explained[likely]
    across = np.linalg.solve(factor[likely], _covariances(measured, predicted, processes))
    means = _shapes(predicted) + across.swapaxes(1, 2) @ explained
    mean = np.einsum("psk,pk->s", means, weights)
    spread = np.sqrt(weights)[:, None, :] * (means - mean[:, None])
    covariances = _covariances(predicted, predicted, processes) - across.swapaxes(1, 2) @ across
    covariance = np.tensordot(weights.sum(axis=1), covariances, axes=1)
    covariance += np.tensordot(spread, spread, axes=((0, 2), (0, 2)))
    return CurvePosterior(predicted.astype(np.int64), mean, covariance)


def _covariances(a: Array, b: Array, processes: Array) -> Array:
    """
    Return the prior covariances of the log cost between two lists of sizes, a matrix for each process.

    Columns of `processes` are the standard deviation of the smooth misfit and that of steps.  Then follow the length
    scale of steps in octaves and the size below which they occur.
    """
    smooth, steps, length, below = processes[:, :4].T[:, :, None, None]
    octaves = np.abs(np.log2(a)[:, None] - np.log2(b))
    bend = np.sqrt(3.0) * octaves / SMOOTH_OCTAVES
    covariances: Array = (
        SCALE**2
        + smooth**2 * (1.0 + bend) * np.exp(-bend)  # Matern 3/2: no corners, but a rough slope
        + steps**2 * np.exp(-octaves / length) * (a[:, None] < below) * (b < below)  # Matern 1/2: corners everywhere
    )
    return covariances


def _shapes(sizes: Array) -> Array:
    """Return the prior mean curves of the log cost, log(knee + size): a row per size, a column per knee."""
    return np.log(KNEES + sizes[:, None])

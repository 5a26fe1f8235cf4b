"""
The posterior of the step cost at all batch sizes, from the timings of a few.

The logarithm of the cost of a step is modeled as

    log cost(n) = a shape  +  smooth misfit  +  teeth  +  error of the timings

The shapes are two-term lines, `overhead + work * n` for every ratio of the two.  The misfit bends over octaves.  Teeth
are what no smooth curve shows: a wave more, another algorithm, a cache that no longer holds the work.  How large both
are is not known beforehand.  So everything is a mixture of Gaussian processes (Rasmussen and Williams, chapter 2), one
for each shape and pair of sizes, weighted by how likely it makes the timings.  The mixture is handed on as one normal
distribution with its mean and covariance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

KNEES = 2.0 ** np.arange(-3, 15)
"""Batch sizes at which work takes as long as overhead: the shapes, as likely as each other beforehand."""
SMOOTH = ((0.02, 0.4), (0.1, 0.4), (0.35, 0.2))
"""Standard deviations of the smooth misfit, as a share of the cost, and their prior probabilities."""
TEETH = ((0.003, 0.4), (0.02, 0.35), (0.08, 0.25))
"""The same of teeth: on a GPU a wave more, or another algorithm, costs up to tens of percent."""
HOST_SMOOTH, HOST_TEETH = ((0.005, 0.95), (0.1, 0.05)), ((0.002, 0.95), (0.03, 0.03), (0.1, 0.02))
"""The same on a CPU, where no waves are: mostly a two-term line.  What departs from it must be seen clearly."""
SMOOTH_OCTAVES, TEETH_OCTAVES = 2.0, 0.25  # over what each changes
SCALE = 10.0  # log cost of the whole curve is unknown within e to this power
LEAST_VARIANCE = 1e-12  # of a difference of two sizes, which may be one
_NEGLIGIBLE = 1e-3  # weight of a process, against the heaviest, that is left out


@attrs.frozen
class Seen:
    """
    The estimate from the timings of one size.

    Attributes:
        batch_size: The size.
        log_cost: Logarithm of the cost of a step, in seconds or joules, at the usual host speed.
        variance: Of its own error.
        host: Mean log slowdown of the host in its timings: how strongly the error of the common slope enters.
    """

    batch_size: int
    log_cost: float
    variance: float
    host: float = 0.0


@attrs.frozen(eq=False)
class Belief:
    """
    The posterior of the log cost of a step at some sizes: a normal distribution.

    Attributes:
        sizes: Batch sizes, ascending.
        mean: Of the log cost, by size.
        covariance: Of the log costs.
    """

    sizes: NDArray[np.int64]
    mean: Array
    covariance: Array

    @property
    def sd(self) -> Array:
        """Standard deviation by size: a relative error of the cost where it is small."""
        return np.sqrt(np.diag(self.covariance))

    def difference_sd(self, first: int, second: int) -> float:
        """Return the standard deviation of the difference of the log costs at two positions."""
        spread = self.covariance
        variance = spread[first, first] + spread[second, second] - 2 * spread[first, second]
        return math.sqrt(max(float(variance), LEAST_VARIANCE))


def believe(seen: Sequence[Seen], sizes: Sequence[int], *, slope_variance: float = 0.0, host: bool = False) -> Belief:
    """
    Return the posterior of the step cost at all these sizes.

    Args:
        seen: Estimates of the measured sizes, at least one.
        sizes: The sizes to predict.
        slope_variance: Variance of the common slope of host slowdowns: see `noise.Noise`.
        host: Whether the steps run on a CPU, next to a reference step.

    Example:
        >>> readings = [Seen(n, np.log(1.0 + n / 32), 1e-6) for n in (1, 8, 64, 512)]
        >>> belief = believe(readings, [32, 256])
        >>> np.exp(belief.mean).round(1).tolist()
        [2.0, 9.0]
    """
    read = np.array([one.batch_size for one in seen], dtype=np.float64)
    asked = np.array(sorted(sizes), dtype=np.float64)
    log_cost = np.array([one.log_cost for one in seen])
    slowdown = np.array([one.host for one in seen])
    noise = np.diag([one.variance for one in seen]) + slope_variance * np.outer(slowdown, slowdown)
    shapes = _shapes(read)
    rest = log_cost[:, None] - shapes  # (read, shapes)
    processes = [
        _Process(read, asked, noise, rest, smooth, teeth, np.log(p) + np.log(q))
        for smooth, p in (HOST_SMOOTH if host else SMOOTH)
        for teeth, q in (HOST_TEETH if host else TEETH)
    ]
    weights = np.exp(_less_their_highest(np.array([process.likelihood for process in processes])))
    weights[weights < _NEGLIGIBLE] = 0.0
    weights /= weights.sum()
    curves = _shapes(asked)
    means = np.array(
        [
            curves + process.alike.T @ process.solved if row.any() else np.zeros_like(curves)
            for process, row in zip(processes, weights, strict=True)
        ]
    )  # (processes, asked, shapes)
    mean = np.einsum("psk,pk->s", means, weights)
    spread = np.sqrt(weights)[:, None, :] * (means - mean[None, :, None])
    covariance = np.einsum("psk,ptk->st", spread, spread, optimize=True)
    for process, weight in zip(processes, weights.sum(axis=1), strict=True):
        if weight:
            covariance += weight * process.covariance()
    return Belief(asked.astype(np.int64), mean, covariance)


class _Process:
    """One Gaussian process: its likelihood under each shape, and its prediction."""

    def __init__(
        self, read: Array, asked: Array, noise: Array, rest: Array, smooth: float, teeth: float, likely: float
    ) -> None:
        self._asked, self._smooth, self._teeth = asked, smooth, teeth
        covariance = _covariance(read, read, smooth, teeth) + noise
        self._factor = np.linalg.cholesky(covariance)
        half = np.linalg.solve(self._factor, rest)
        self.solved = np.linalg.solve(self._factor.T, half)  # covariance^-1 rest
        self.likelihood = likely - 0.5 * (half * half).sum(axis=0) - np.log(np.diag(self._factor)).sum()
        self.alike = _covariance(read, asked, smooth, teeth)  # (read, asked)

    def covariance(self) -> Array:
        """Return the posterior covariance of the predicted costs."""
        half = np.linalg.solve(self._factor, self.alike)
        known: Array = half.T @ half
        return _covariance(self._asked, self._asked, self._smooth, self._teeth) - known


def _covariance(a: Array, b: Array, smooth: float, teeth: float) -> Array:
    """Return the prior covariance between two lists of sizes; the unknown scale of the curve is common to all."""
    octaves = np.abs(np.log2(a)[:, None] - np.log2(b)[None])
    bend = np.sqrt(3.0) * octaves / SMOOTH_OCTAVES
    covariance: Array = (
        SCALE**2
        + smooth**2 * (1.0 + bend) * np.exp(-bend)  # Matern 3/2: no corners, but no more than that
        + teeth**2 * np.exp(-octaves / TEETH_OCTAVES)  # Matern 1/2: corners everywhere
    )
    return covariance


def _shapes(sizes: Array) -> Array:
    """Return the log cost at each size by each shape, up to what is common to a shape."""
    shapes: Array = np.log(KNEES[None] + sizes[:, None])
    return shapes


def _less_their_highest(logarithms: Array) -> Array:
    highest: float = logarithms.max()
    return logarithms - highest

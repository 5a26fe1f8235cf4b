"""
What readings of a few batch sizes say about all the others: a curve of step costs, and its doubt.

The logarithm of what a step costs is taken to be

    log cost(n) = a shape, one of SHAPES or a model's  +  smooth misfit  +  teeth  +  error of the readings

The shapes are two-term lines, `overhead + work * n` for every ratio of the two, and where a model of time
is at hand its curve up to a factor; the misfit bends over octaves, teeth are what no smooth
curve knows: a wave more, another algorithm, a cache left.  How large both are is not known beforehand
either.  So everything is a mixture of Gaussian processes (Rasmussen and Williams, chapter 2), one for each shape and
pair of sizes, weighted by how likely it makes what was read: a model that is wrong loses its weight to
the readings.  The mixture is handed on as one normal distribution with its mean and covariance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

KNEES = 2.0 ** np.arange(-3, 15)
"""Batch sizes at which work takes as long as overhead: the shapes, as likely as each other beforehand."""
SMOOTH = ((0.02, 0.4), (0.1, 0.4), (0.35, 0.2))
"""Sizes of the smooth misfit, as a share of the cost, and how likely each is beforehand."""
TEETH = ((0.003, 0.4), (0.02, 0.35), (0.08, 0.25))
"""The same of teeth."""
MODEL_WEIGHT = 0.5  # of a model's shape beside all two-term lines together
SMOOTH_OCTAVES, TEETH_OCTAVES = 2.0, 0.25  # over what each changes
SCALE = 10.0  # log cost of the whole curve is unknown within e to this power
_NEGLIGIBLE = 1e-3  # weight of a process, against the heaviest, that is left out


@attrs.frozen
class Seen:
    """
    What was read of one size.

    Attributes:
        batch_size: The size.
        log_cost: Logarithm of what a step costs: seconds or joules.
        variance: Of that, as an estimate of what a step really costs.
    """

    batch_size: int
    log_cost: float
    variance: float


@attrs.frozen(eq=False)
class Belief:
    """
    What the cost of a step may be at some sizes, as a normal distribution of its logarithm.

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


def believe(seen: Sequence[Seen], sizes: Sequence[int], model: Mapping[int, float] | None = None) -> Belief:
    """
    Say what steps of all these sizes may cost, by what was read of some.

    Args:
        seen: At least one size that was read.
        sizes: The sizes that are asked about.
        model: What a model of time says of a step, for all sizes asked about and read; None where there is none. Only
            its shape counts.

    Example:
        >>> readings = [Seen(n, np.log(1.0 + n / 32), 1e-6) for n in (1, 8, 64, 512)]
        >>> belief = believe(readings, [32, 256])
        >>> np.exp(belief.mean).round(1).tolist()
        [2.0, 9.0]
    """
    read = np.array([one.batch_size for one in seen], dtype=np.float64)
    asked = np.array(sorted(sizes), dtype=np.float64)
    log_cost = np.array([one.log_cost for one in seen])
    noise = np.diag([one.variance for one in seen])
    shapes, likely = _shapes(read, model), _likely(model)
    rest = log_cost[:, None] - shapes  # (read, shapes)
    processes = [
        _Process(read, asked, noise, rest, smooth, teeth, np.log(p) + np.log(q))
        for smooth, p in SMOOTH
        for teeth, q in TEETH
    ]
    weights = np.exp(_less_their_highest(np.array([process.likelihood + likely for process in processes])))
    weights[weights < _NEGLIGIBLE] = 0.0
    weights /= weights.sum()
    curves = _shapes(asked, model)
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
    """One Gaussian process: its likelihood under each shape, and what it says of the sizes asked about."""

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
        """Give the covariance of the costs of the sizes asked about, after the readings."""
        half = np.linalg.solve(self._factor, self.alike)
        known: Array = half.T @ half
        return _covariance(self._asked, self._asked, self._smooth, self._teeth) - known


def _covariance(a: Array, b: Array, smooth: float, teeth: float) -> Array:
    """Give how alike the misfits at two lists of sizes are; the unknown scale of the curve is common to all."""
    octaves = np.abs(np.log2(a)[:, None] - np.log2(b)[None])
    bend = np.sqrt(3.0) * octaves / SMOOTH_OCTAVES
    covariance: Array = (
        SCALE**2
        + smooth**2 * (1.0 + bend) * np.exp(-bend)  # Matern 3/2: no corners, but no more than that
        + teeth**2 * np.exp(-octaves / TEETH_OCTAVES)  # Matern 1/2: corners everywhere
    )
    return covariance


def _shapes(sizes: Array, model: Mapping[int, float] | None) -> Array:
    """Give the log cost at each size by each shape, up to what is common to a shape."""
    lines: Array = np.log(KNEES[None] + sizes[:, None])
    if model is None:
        return lines
    return np.column_stack([lines, np.log([model[int(n)] for n in sizes])])


def _likely(model: Mapping[int, float] | None) -> Array:
    """Give how likely each shape is beforehand, as logarithms."""
    lines = np.full(len(KNEES), 1.0 / len(KNEES))
    likely: Array = np.log(lines if model is None else np.append(lines * (1 - MODEL_WEIGHT), MODEL_WEIGHT))
    return likely


def _less_their_highest(logarithms: Array) -> Array:
    highest: float = logarithms.max()
    return logarithms - highest

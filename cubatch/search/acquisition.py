"""
Compute the value of another trial from the posterior of the step cost.

    sizes_between         sizes between known ones that may be measured
    draw_losses           loss of stopping now: the search ends where its mean is small
    knowledge_gradient    reduction of that loss by one trial of a size, averaged over its outcomes

Gains are differences of the logarithm of the objective beyond the tolerance: shares, where they are small.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import attrs
import numpy as np
from numpy.typing import NDArray

from cubatch.search.curve_posterior import Array, CurvePosterior

DRAWS = 256
_JITTER = 1e-10  # added to the diagonal of a covariance, so that its Cholesky factor exists
_OUTCOMES = np.array([-2.5, -1.75, -1.0, -0.5, 0.0, 0.5, 1.0, 1.75, 2.5])
_WEIGHTS = np.exp(-0.5 * _OUTCOMES**2) * np.gradient(_OUTCOMES)
_WEIGHTS /= _WEIGHTS.sum()
FINEST = 0.01  # sizes nearer to each other than this share are one size


@attrs.frozen(eq=False)
class AcquisitionInputs:
    """
    The posterior and the limits on which the expected gain of a trial depends.

    Attributes:
        posterior: Posterior of the log cost of a step.
        value: Mean log of the objective at each size, up to a constant: more is better.
        feasibility: Probability that a size runs and keeps the limits.
        recommended: Position of the size that would be recommended now.
        tolerance: Allowed loss, as a difference of logarithms.
    """

    posterior: CurvePosterior
    value: Array
    feasibility: Array
    recommended: int
    tolerance: float


def draw_losses(inputs: AcquisitionInputs) -> Array:
    """
    Return random draws of the loss if the search stopped now; 0 where nothing would be lost.

    A loss is the logarithm of the best value over that of the recommended size, less the tolerance.
    """
    random = np.random.default_rng(0)  # the same draws each time: decisions are reproducible
    count = len(inputs.value)
    root = np.linalg.cholesky(inputs.posterior.covariance + _JITTER * np.eye(count))
    values = inputs.value[:, None] - root @ random.standard_normal((count, DRAWS))
    ahead = values - values[inputs.recommended] - inputs.tolerance
    ahead[random.random((count, DRAWS)) > inputs.feasibility[:, None]] = 0.0
    lost: Array = np.maximum(ahead.max(axis=0), 0.0)
    return lost


def knowledge_gradient(inputs: AcquisitionInputs, variance: float, measured: NDArray[np.bool_]) -> Array:
    """
    Return, by size, how much one trial is expected to improve the log objective of the recommended size.

    The knowledge gradient with correlated beliefs (Frazier, Powell and Dayanik 2009).  A trial moves the posterior of
    all similar sizes, and the best measured size is recommended.

    Args:
        inputs: The posterior and the limits.
        variance: Variance of the log cost that a trial measures.
        measured: Which sizes were measured, and so may be recommended.
    """
    covariance = inputs.posterior.covariance
    moved = covariance / np.sqrt(np.diag(covariance) + variance)[None]  # (any size, size of the trial)
    shift = moved - moved[inputs.recommended]
    ahead = inputs.value - inputs.value[inputs.recommended] - inputs.tolerance
    ahead[inputs.recommended] = 0.0
    now = float(ahead[measured].max())
    gain = np.zeros(len(ahead))
    for outcome, weight in zip(_OUTCOMES, _WEIGHTS, strict=True):
        known = (ahead[measured, None] - shift[measured] * outcome).max(axis=0)
        own = ahead - np.diag(shift) * outcome
        gain += weight * (np.maximum(known, own) - now)
    return np.maximum(gain, 0.0) * inputs.feasibility


def sizes_between(known: Iterable[int], multiple: int = 1) -> list[int]:
    """
    Return up to three sizes between each pair of neighbors, evenly spaced in their logarithm.

    Args:
        known: Candidate sizes and measured sizes.
        multiple: Only multiples of this are returned.
    """
    between: set[int] = set()
    sizes = sorted(known)
    for low, high in itertools.pairwise(sizes):
        if high <= low * (1 + FINEST):
            continue
        for part in (0.25, 0.5, 0.75):
            size = round(low * (high / low) ** part / multiple) * multiple
            if low < size < high:
                between.add(size)
    return sorted(between)

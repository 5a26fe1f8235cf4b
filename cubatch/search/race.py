"""
The value of another trial, computed from the posterior of the step cost.

    openings      sizes between known ones that may be measured
    losses        expected loss of answering now: the search ends where it is small
    learning      how much of that loss one trial of a size would win back, on average over its outcomes

Gains are differences of the logarithm of the objective beyond the tolerance: shares, where they are small.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import attrs
import numpy as np
from numpy.typing import NDArray

from cubatch.search.belief import Array, Belief

DRAWS = 256
_JITTER = 1e-10  # of a covariance that is to have a root
_OUTCOMES = np.array([-2.5, -1.75, -1.0, -0.5, 0.0, 0.5, 1.0, 1.75, 2.5])
_WEIGHTS = np.exp(-0.5 * _OUTCOMES**2) * np.gradient(_OUTCOMES)
_WEIGHTS /= _WEIGHTS.sum()
FINEST = 0.01  # sizes nearer to each other than this share are one size


@attrs.frozen(eq=False)
class Field:
    """
    The posterior and the limits that a decision rests on.

    Attributes:
        belief: Posterior of the log cost of a step.
        value: Mean log of the objective, up to a constant: more is better.
        allowed: Probability that a size runs at all and keeps the limits.
        answer: Position of the size that would be recommended now.
        tolerance: Loss that is allowed, as a log.
    """

    belief: Belief
    value: Array
    allowed: Array
    answer: int
    tolerance: float


def losses(field: Field) -> Array:
    """Return the loss of answering now beyond the tolerance, in draws from the posterior."""
    random = np.random.default_rng(0)  # the same draws each time: decisions repeat themselves
    count = len(field.value)
    root = np.linalg.cholesky(field.belief.covariance + _JITTER * np.eye(count))
    values = field.value[:, None] - root @ random.standard_normal((count, DRAWS))
    ahead = values - values[field.answer] - field.tolerance
    ahead[random.random((count, DRAWS)) > field.allowed[:, None]] = 0.0
    lost: Array = np.maximum(ahead.max(axis=0), 0.0)
    return lost


def learning(field: Field, variance: Array, visited: NDArray[np.bool_]) -> Array:
    """
    Return by how much one trial of each size would improve the answer, on average.

    The knowledge gradient with correlated beliefs (Frazier, Powell and Dayanik 2009): a trial moves the posterior of
    all similar sizes, and the best measured size becomes the answer.

    Args:
        field: The posterior and the limits.
        variance: Variance of the outcome of a trial, by size.
        visited: Which sizes were measured, and so may be the answer.
    """
    covariance = field.belief.covariance
    moved = covariance / np.sqrt(np.diag(covariance) + variance)[None]  # (any size, size that is visited)
    shift = moved - moved[field.answer]
    ahead = field.value - field.value[field.answer] - field.tolerance
    ahead[field.answer] = 0.0
    now = float(ahead[visited].max())
    gain = np.zeros(len(ahead))
    for outcome, weight in zip(_OUTCOMES, _WEIGHTS, strict=True):
        known = (ahead[visited, None] - shift[visited] * outcome).max(axis=0)
        own = ahead - np.diag(shift) * outcome
        gain += weight * (np.maximum(known, own) - now)
    return np.maximum(gain, 0.0) * field.allowed


def openings(known: Iterable[int], multiple: int = 1) -> list[int]:
    """
    Return up to three sizes between each pair of neighbors, evenly spaced in their logarithm.

    Args:
        known: Sizes of the ladder and those that were measured.
        multiple: Only multiples of this.

    Example:
        >>> openings([1, 8, 16])
        [2, 3, 5, 10, 11, 13]
    """
    found: set[int] = set()
    sizes = sorted(known)
    for low, high in itertools.pairwise(sizes):
        if high <= low * (1 + FINEST):
            continue
        for part in (0.25, 0.5, 0.75):
            size = round(low * (high / low) ** part / multiple) * multiple
            if low < size < high:
                found.add(size)
    return sorted(found)

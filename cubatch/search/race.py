"""
Which size to look at next, and whether to go on at all: the rules of the search, apart from the measuring.

Everything is a number here: what is believed of every size, what a visit costs, what the answer would be now.

    openings      the sizes between those that are known that deserve a thought
    losses        what is lost by answering now, over all that the curve may be: the search ends where that is little
    learning      how much of it one visit to a size would win back, on average over what it may read

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
    What a decision looks at: the sizes, what they may be worth, and which may be the answer.

    Attributes:
        belief: Of the log cost of a step.
        value: Mean log of the objective, up to a constant: more is better.
        allowed: Probability that a size runs at all and keeps the limits.
        answer: Place of what the answer would be now.
        tolerance: What may be given up, as a log.
    """

    belief: Belief
    value: Array
    allowed: Array
    answer: int
    tolerance: float


def losses(field: Field) -> Array:
    """
    Say what may be lost by answering now: draws from what the curve may be, the share beyond the tolerance in each.

    Their mean is what the search still has to win.
    """
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
    Say how much better the answer would be after one visit to each size, on average.

    The knowledge gradient with correlated beliefs (Frazier, Powell and Dayanik 2009): a reading moves
    what is believed of all sizes that are alike, and the best of those that were visited becomes the answer.

    Args:
        field: What is known.
        variance: Of what a visit reads, by size.
        visited: Which sizes were visited, and so may be the answer, as the one now is.
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
    List up to three sizes between each pair of neighbours, evenly spaced in their logarithm.

    Args:
        known: Sizes of the ladder and those that were visited.
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

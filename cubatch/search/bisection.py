"""
Where a limit lies: between the largest size that kept it and the smallest that did not.

Memory without a plan, a plan that proved wrong and a latency limit are met only by running into them.
"""

from __future__ import annotations

import math

MET = 0.02
"""A limit is met where the sizes on its two sides are as near as this share of the smaller, or 1 apart."""
_MARGIN = 0.1  # of the gap, that a guess keeps from both ends: the worst of guesses narrows it all the same
_FAR = 2.0  # of sizes farther apart than this factor the middle is that of their logarithms


def is_met(low: int, high: int) -> bool:
    """
    Say whether the gap between a size that keeps a limit and one that does not is as good as closed.

    Example:
        >>> is_met(100, 102), is_met(100, 103), is_met(3, 4)
        (True, False, True)
    """
    return high - low <= max(1, int(MET * low))


def between(low: int, high: int, guess: float | None = None, multiple: int = 1) -> int | None:
    """
    Choose the next size to try in the gap: the guess where it narrows the gap well, else the middle.

    Args:
        low: The largest size that keeps the limit.
        high: The smallest that does not.
        guess: Where the limit is thought to be; None where nothing is known.
        multiple: Only multiples of this.

    Returns:
        A size strictly between, or None where the limit is met or no multiple lies between.

    Example:
        >>> between(64, 512), between(256, 512), between(256, 512, guess=300.7)
        (181, 384, 300)
        >>> between(100, 102) is None, between(97, 105, multiple=8)
        (True, 104)
    """
    if is_met(low, high):
        return None
    middle = math.sqrt(low * high) if high > _FAR * low else (low + high) / 2
    if guess is not None:
        margin = _MARGIN * (high - low)
        middle = min(max(guess, low + margin), high - margin)
    size = int(middle) // multiple * multiple
    if size <= low:
        size = (low // multiple + 1) * multiple
    return size if size < high else None

"""
Narrow the gap between the largest size within a limit and the smallest beyond it.

A latency limit, memory without a plan and a plan that proved wrong show only when a size exceeds them.
"""

from __future__ import annotations

import math

CLOSED = 0.02
"""A gap is closed where its two sizes differ by at most this share of the smaller, or by 1."""
_MARGIN = 0.1  # of the gap: a guess keeps this far from both ends, so that a bad guess narrows it too
_FAR = 2.0  # factor between two sizes from which their geometric mean is the middle


def is_closed(low: int, high: int) -> bool:
    """Return whether two sizes are so near to each other that no trial between them is worth it: within 2 % or 1."""
    return high - low <= max(1, int(CLOSED * low))


def next_size(low: int, high: int, guess: float | None = None, multiple: int = 1) -> int | None:
    """
    Return the next size to try between two sizes: near the guess if there is one, else in the middle.

    Args:
        low: The largest size within the limit.
        high: The smallest size beyond it.
        guess: Expected size at the limit; None if unknown.
        multiple: Only multiples of this are returned.

    Returns:
        A size strictly between, or None if the gap is closed or holds no multiple.
    """
    if is_closed(low, high):
        return None
    middle = math.sqrt(low * high) if high > _FAR * low else (low + high) / 2
    if guess is not None:
        margin = _MARGIN * (high - low)
        middle = min(max(guess, low + margin), high - margin)
    size = int(middle) // multiple * multiple
    if size <= low:
        size = (low // multiple + 1) * multiple
    return size if size < high else None

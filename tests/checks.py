"""
Comparing numbers against derived bounds, with failures that need no debugger.

A tolerance is derived from the arithmetic, never chosen: `gamma` bounds the relative rounding error
of a sum of k products whatever the order (Higham, Accuracy and Stability of Numerical Algorithms,
2nd ed., section 3.1).
"""

from __future__ import annotations

from typing import Any

import numpy as np

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
_MOST_SHOWN = 3


def gamma(operations: int, unit_roundoff: float) -> float:
    """
    Bound the relative error of a result that went through so many roundings: k u / (1 - k u).

    Example:
        >>> gamma(3, 2.0**-24) / 2.0**-24 > 3
        True
    """
    lost = operations * unit_roundoff
    if not lost < 1:
        raise ValueError(f"{operations} roundings of {unit_roundoff} leave no correct digit")
    return lost / (1 - lost)


def assert_within(got: Any, want: Any, bound: Any, *, axes: str = "", label: str = "") -> None:
    """
    Assert |got - want| <= bound in every element; NaN on either side breaks it.

    Args:
        got: The result under test.
        want: The true values, of the same shape.
        bound: Largest admissible error, an array or a number.
        axes: One letter for each axis, for the message.
        label: What was compared.

    Raises:
        AssertionError: With the number of elements outside, the worst of them, and where they lie.
    """
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{label}: got shape {got.shape}, want {want.shape}"
    got, want = np.atleast_1d(got, want)
    error = np.abs(got.astype(np.float64) - want)
    bound = np.broadcast_to(np.asarray(bound, dtype=np.float64), want.shape)
    outside = ~(error <= bound)
    if not outside.any():
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(outside, error / bound, 0)
    worst = np.unravel_index(np.argmax(np.where(np.isnan(times), np.inf, times)), times.shape)
    letters = axes or "ijklmnop"[: want.ndim]
    place = ", ".join(f"{letter}={index}" for letter, index in zip(letters, worst, strict=True))
    hits = "; ".join(f"{letter} in {_some(hit)}" for letter, hit in zip(letters, np.nonzero(outside), strict=True))
    raise AssertionError(
        f"{label}: {outside.sum()} of {outside.size} elements break the rounding bound\n"
        f"  worst  [{place}]: got {got[worst]:.7g}, want {want[worst]:.7g}, {times[worst]:.3g}x the bound\n"
        f"  hits   {hits}"
    )


def _some(indices: np.ndarray[Any, Any]) -> str:
    found = sorted({int(index) for index in indices})
    return str(found) if len(found) <= _MOST_SHOWN else str(found[:_MOST_SHOWN]) + "..."

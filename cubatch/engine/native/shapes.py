"""Checks of shapes that several operations make before a kernel writes where it is told."""

from __future__ import annotations

from typing import Any

from cubatch.errors import InvalidArgument


def check_shape(name: str, array: Any, wanted: tuple[int, ...]) -> None:
    """
    Check an array's shape: a kernel would write beyond an array that is smaller.

    Raises:
        InvalidArgument: If it is another.

    Example:
        >>> import numpy as np
        >>> check_shape("out", np.zeros((2, 3)), (2, 3))
    """
    if tuple(array.shape) != tuple(wanted):
        raise InvalidArgument(name, tuple(array.shape), f"of shape {tuple(wanted)}")

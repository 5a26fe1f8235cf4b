"""Bringing arrays to where kernels run so that they start between vectors of 16 bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def place(launcher: Any, array: np.ndarray[Any, Any], shift: int = 0) -> Any:
    """Bring an array to the device, `shift` elements past the start of an allocation, which is aligned."""
    flat = np.concatenate([np.zeros(shift, array.dtype), array.reshape(-1)])
    return launcher.put(flat)[shift:].reshape(array.shape)


def room(launcher: Any, shape: Any, dtype: Any, shift: int = 0) -> Any:
    """Give an unwritten array, `shift` elements past the start of an allocation."""
    return launcher.unwritten((math.prod(shape) + shift,), dtype)[shift:].reshape(shape)

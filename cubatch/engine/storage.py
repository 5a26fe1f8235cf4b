"""
Storage of elements: NumPy's types by dtype, and conversion from and to float32.

For kernels, bfloat16 is its bits in uint16, since CuPy's arrays have no such type. For NumPy's own calls it is the type
of ml_dtypes, which converts by itself; only tests use that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.errors import MissingDependency

_TYPES = {"float64": np.float64, "float32": np.float32, "tf32": np.float32, "float16": np.float16}
_BITS = np.dtype(np.uint16)
_QUIET_NAN = 0x7FFF


def element_type(dtype: str, library: str) -> Any:
    """
    Return NumPy's type for the elements of a dtype.

    Args:
        dtype: "float32", "tf32", "float16" or "bfloat16"; the tests' "float64" too.
        library: "cubatch" or "im2col": the library that computes with the elements.

    Example:
        >>> element_type("bfloat16", "cubatch").__name__, element_type("tf32", "cubatch").__name__
        ('uint16', 'float32')
    """
    if dtype != "bfloat16":
        return _TYPES[dtype]
    if library == "cubatch":
        return np.uint16
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependency("ml_dtypes", "bfloat16 on NumPy", "test") from error
    return ml_dtypes.bfloat16


def sum_type(dtype: str) -> Any:
    """Return NumPy's type for statistics, master weights and optimizer state of a dtype: at least float32."""
    return np.float64 if dtype == "float64" else np.float32


def encoded(values: Any, kind: Any) -> Any:
    """
    Return numbers rounded to their storage type: to nearest, ties to even.

    Args:
        values: An array of floats, of NumPy or CuPy.
        kind: A result of `element_type`.
    """
    if np.dtype(kind) != _BITS:
        return values.astype(kind, copy=False)
    bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return np.where(np.isnan(values), _QUIET_NAN, rounded).astype(np.uint16)


def decoded(stored: Any) -> Any:
    """Return stored numbers as float32; float64 stays float64."""
    if stored.dtype == _BITS:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32) if stored.itemsize < np.dtype(np.float32).itemsize else stored

"""Copies of operands into the layout that a product needs."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.native.arrays import check
from cubatch.engine.native.context import Context
from cubatch.kernels.workspace.misc import THREADS

_TILE = 32  # of kernels/misc/layout.cu


def copy_channels(context: Context, x: Any, *, out: Any) -> Any:
    """Copy (..., c) into `out` (..., wanted) of the same type: zeros follow if it is wider, else channels are cut."""
    channels, wanted = x.shape[-1], out.shape[-1]
    check(x.dtype, x.shape, x=x)
    check(x.dtype, (*x.shape[:-1], wanted), out=out)
    rows = x.size // channels
    context.run("copy_channels", x, (-(-rows // THREADS), 1, 1), x, out, np.int64(rows), channels, wanted)
    return out


def transpose(context: Context, x: Any, *, out: Any) -> Any:
    """Copy a matrix (rows, columns) into `out` (columns, rows) of the same type."""
    rows, columns = x.shape
    check(x.dtype, x.shape, x=x)
    check(x.dtype, (columns, rows), out=out)
    grid = (-(-columns // _TILE), -(-rows // _TILE), 1)
    context.run("transpose", x, grid, x, out, rows, columns)
    return out

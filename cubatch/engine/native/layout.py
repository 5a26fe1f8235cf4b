"""Copies of operands into the layout that a product needs."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.native.arrays import check
from cubatch.engine.native.context import Context
from cubatch.kernels.workspace.misc import THREADS
from cubatch.network.windows import Pair

_TILE = 32  # of kernels/misc/layout.cu


def copy_filter(context: Context, w: Any, patch: Pair = (1, 1), *, out: Any, back: bool = False) -> Any:
    """
    Copy filters (k, r, s, c) into filters over patches of a stored batch, or `back`, and return `out`.

    Each tap of a patch has an equal share of the channels: its own, and zeros. Taps beyond the filter are zero.
    `kernels.padding` describes the patches.
    """
    (k, r, s, c), (high, wide), channels = w.shape, patch, out.shape[-1]
    share = channels // (high * wide)
    check(w.dtype, w=w)
    check(w.dtype, (k, -(-r // high), -(-s // wide), max(share, c) * high * wide), out=out)
    taps = out.size // share
    arrays = (out, w) if back else (w, out)
    numbers = np.int64(taps), r, s, c, high, wide, share, back
    context.run("copy_filter", w, (-(-taps // THREADS), 1, 1), *arrays, *numbers)
    return out


def transpose(context: Context, x: Any, *, out: Any) -> Any:
    """Copy a matrix (rows, columns) into `out` (columns, rows) of the same type, and return `out`."""
    rows, columns = x.shape
    check(x.dtype, x.shape, x=x)
    check(x.dtype, (columns, rows), out=out)
    grid = (-(-columns // _TILE), -(-rows // _TILE), 1)
    context.run("transpose", x, grid, x, out, rows, columns)
    return out

"""
Structures that the host passes to tiled kernels by value, as NumPy dtypes: the mirror of kernels/common/structs.cuh.

`python -m benchmarks.kernel_budget` compares both layouts with the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

PRODUCT = np.dtype(
    [(name, np.int64) for name in ("m", "k")]
    + [(name, np.int32) for name in ("n", "groups", "tiles_m", "tiles_n", "band", "batch")],
    align=True,
)
OUTPUT = np.dtype(
    [("elements", np.int64)] + [(name, np.int32) for name in ("columns", "activation", "wide", "slices")], align=True
)
DIVISOR = np.dtype([(name, np.uint32) for name in ("divisor", "multiplier", "shift")])
CONV = np.dtype(
    [(name, np.int32) for name in ("h", "w", "c", "p", "q", "k", "r", "s")]
    + [(name, np.int32) for name in ("stride_h", "stride_w", "step_h", "step_w", "top", "left", "group_c", "group_k")]
    + [(name, np.int32) for name in ("tap_step_h", "tap_step_w", "source_step_h", "source_step_w")]
    + [(name, DIVISOR) for name in ("rows", "columns", "short_rows", "short_columns")],
    align=True,
)
TILES = np.dtype(
    [("image", np.int64)] + [(name, np.int32) for name in ("first", "count", "rows", "columns")], align=True
)
STRUCTS: Mapping[str, np.dtype[np.void]] = {
    "Product": PRODUCT, "Output": OUTPUT, "Divisor": DIVISOR, "Conv": CONV, "Tiles": TILES,
}  # fmt: skip

"""Matrix products of each head of each sample on hand-written kernels, between the projections of attention."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np

from cubatch.engine.native.arrays import check
from cubatch.engine.native.context import Context, dtype_of
from cubatch.errors import InvalidArgument
from cubatch.kernels.attention_launches import find
from cubatch.kernels.workspace.attention_scratch import HEADS_TILE

_LIMIT = 1 << 31
# Heads and HeadsProduct of kernels/attention/product.cuh.
_HEADS = np.dtype([("sample_stride", np.int64), ("head_stride", np.int32), ("stride", np.int32)])
_PRODUCT = np.dtype(
    [(name, _HEADS) for name in "abc"] + [(name, np.int32) for name in "mnk"] + [("factor", np.float32)]
)


@attrs.frozen(eq=False)
class Heads:
    """The matrices of all heads of all samples, and their layout in an array."""

    array: Any  # C-contiguous, (n, ...)
    heads: int  # matrices of a sample
    rows: int  # rows, columns: extents of a matrix
    columns: int
    begin: int  # elements before the first matrix in a sample
    head_stride: int  # head_stride, stride: elements from a matrix to the next, and from a row to the next
    stride: int

    @classmethod
    def side_by_side(cls, array: Any, heads: int, width: int, part: int = 0) -> Heads:
        """Return the matrices in part `part` of an array (n, t, parts x heads x width): `width` columns a head."""
        _, t, stride = array.shape
        return cls(array, heads, t, width, part * heads * width, width, stride)

    @classmethod
    def one_by_one(cls, array: Any, columns: int | None = None) -> Heads:
        """Return the matrices of an array (n, heads, rows, stride), with `columns` elements of each row; None: all."""
        _, heads, rows, stride = array.shape
        return cls(array, heads, rows, columns or stride, 0, rows * stride, stride)


def multiply_heads(
    context: Context, layout: str, a: Heads, b: Heads, out: Heads, *, factor: float = 1.0
) -> None:  # fmt: skip
    """
    Compute out = factor * a b for each head of each sample.

    Args:
        layout: "nt": b is transposed; "nn": neither; "tn": a is.
        a, b: The left and right matrices, with extents as stored.
        out: Receives the products.
        factor: Factor of each result, applied in float32 before it is stored.

    Raises:
        InvalidArgument: If extents, samples or dtypes do not fit together, or a sample has 2^31 elements or more.
    """
    m, k = (a.rows, a.columns) if layout[0] == "n" else (a.columns, a.rows)
    b_k, n = (b.rows, b.columns) if layout[1] == "n" else (b.columns, b.rows)
    if (b_k, out.rows, out.columns, b.heads, out.heads) != (k, m, n, a.heads, a.heads):
        given, wanted = ((each.heads, each.rows, each.columns) for each in (b, out)), (a.heads, a.rows, a.columns)
        raise InvalidArgument(
            "b, out", tuple(given), f"of (heads, rows, columns) that suit those of a, {wanted}, in layout {layout}"
        )
    samples = len(a.array)
    for name, matrix in (("a", a), ("b", b), ("out", out)):
        check(a.array.dtype, **{name: matrix.array})
        if len(matrix.array) != samples:
            raise InvalidArgument(name, len(matrix.array), f"an array of {samples} samples, as a")
        if math.prod(matrix.array.shape[1:]) >= _LIMIT:
            raise InvalidArgument(name, matrix.array.shape, "of fewer than 2^31 elements a sample")
    product = np.zeros((), dtype=_PRODUCT)
    for name, matrix in zip("abc", (a, b, out), strict=True):
        product[name] = (math.prod(matrix.array.shape[1:]), matrix.head_stride, matrix.stride)
    product["m"], product["n"], product["k"], product["factor"] = m, n, k, factor
    tiles = -(-m // HEADS_TILE) * -(-n // HEADS_TILE)
    firsts = [matrix.array.reshape(-1)[matrix.begin :] for matrix in (a, b, out)]
    kernel = find(f"heads_{layout}", dtype_of(a.array), context.device)
    context.launch(kernel, (samples * tiles, a.heads, 1), [*firsts, product[()]])

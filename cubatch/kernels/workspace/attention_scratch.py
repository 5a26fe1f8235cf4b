"""Blocks and scratch memory of attention, for the memory plan, the cost model and the launches."""

from __future__ import annotations

from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.kernels.padding import WIDEST_HEAD, stored_row
from cubatch.kernels.workspace.product_scratch import linear_workspace
from cubatch.network.passes import Pass

_ALIGNMENT = 64

HEADS_TILE = 64
"""Rows and columns of a block's results in kernels/attention/heads.cu and heads_mma.cu."""

QUERIES, KEYS = 64, 32
"""Queries of a block of kernels/attention/attend.cu and attend_mma.cu; keys of a step of attend.cu."""

Extents = tuple[int, int, int]
"""Samples, tokens of a sample, channels."""


def stores_weights(c: int, heads: int, *, saves: bool) -> bool:
    """Return whether a forward pass stores attention weights: to save them, or if heads have over 64 channels."""
    return saves or c // heads > WIDEST_HEAD


def saved_bytes(extents: Extents, heads: int, dtype: str, *, by_sums: bool = False) -> tuple[int, int, int]:
    """
    Return the bytes of queries, keys and values; of weights; and of weighted sums of values, each a multiple of 64.

    Rows of weights have `padding.stored_row` elements. With `by_sums` there is a float32 per query and head instead.

    Example:
        >>> saved_bytes((1, 5, 12), 2, "float16")
        (384, 192, 128)
    """
    n, t, c = extents
    row = BYTES_PER_ELEMENT["float32"] if by_sums else stored_row(t) * BYTES_PER_ELEMENT[dtype]
    sizes = n * t * 3 * c * BYTES_PER_ELEMENT[dtype], n * heads * t * row, n * t * c * BYTES_PER_ELEMENT[dtype]
    queries, weights, mixed = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    return queries, weights, mixed


def attention_workspace(extents: Extents, heads: int, dtype: str, device: Device, *, saves: bool) -> int:
    """Return the bytes of scratch memory of attention: for its projections, and for values that are not saved."""
    linear = _projections_workspace((Pass.FPROP,), extents, dtype, device)
    queries, weights, mixed = saved_bytes(extents, heads, dtype)
    return linear if saves else linear + queries + mixed + weights * stores_weights(extents[2], heads, saves=saves)


def attention_backward_workspace(
    extents: Extents, heads: int, dtype: str, device: Device, *, by_sums: bool = False
) -> int:
    """
    Return the bytes of scratch memory of attention's gradients: for its projections and all values between them.

    `by_sums` is whether the forward pass stored logarithms of sums instead of weights.
    """
    linear = _projections_workspace((Pass.WGRAD, Pass.DGRAD), extents, dtype, device)
    return linear + sum(saved_bytes(extents, heads, dtype, by_sums=by_sums))


def _projections_workspace(passes: tuple[Pass, ...], extents: Extents, dtype: str, device: Device) -> int:
    n, t, c = extents
    return max(linear_workspace(pass_, (n * t, c, k), dtype, device) for pass_ in passes for k in (3 * c, c))

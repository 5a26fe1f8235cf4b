"""Blocks and scratch memory of attention, for the memory plan, the cost model and the launches."""

from __future__ import annotations

from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.kernels.padding import stored_row
from cubatch.kernels.workspace.product_scratch import linear_workspace
from cubatch.network.passes import Pass

_ALIGNMENT = 64

HEADS_TILE = 64
"""Rows and columns of a block's results in kernels/attention/heads.cu and heads_mma.cu."""

QUERIES, KEYS = 64, 32
"""Queries of a block of kernels/attention/attend.cu and attend_mma.cu; keys of a step of attend.cu."""

WIDEST_HEAD = 64
"""Most channels of a head in the attend kernels: WIDTH there."""

Extents = tuple[int, int, int]
"""Samples, tokens of a sample, channels."""


def stores_weights(c: int, heads: int, *, saves: bool) -> bool:
    """Return whether a forward pass stores attention weights: to save them, or if heads have over 64 channels."""
    return saves or c // heads > WIDEST_HEAD


def saved_bytes(extents: Extents, heads: int, dtype: str) -> tuple[int, int, int]:
    """
    Return the bytes of queries, keys and values; of weights; and of weighted sums of values, each aligned.

    Rows of weights have `padding.stored_row` elements.

    Example:
        >>> saved_bytes((1, 5, 12), 2, "float16")
        (384, 192, 128)
    """
    n, t, c = extents
    elements = n * t * 3 * c, n * heads * t * stored_row(t), n * t * c
    queries, weights, mixed = (-(-BYTES_PER_ELEMENT[dtype] * count // _ALIGNMENT) * _ALIGNMENT for count in elements)
    return queries, weights, mixed


def attention_workspace(extents: Extents, heads: int, dtype: str, device: Device, *, saves: bool) -> int:
    """Return the bytes of scratch memory of attention: for its projections, and for values that are not saved."""
    linear = _projections_workspace((Pass.FPROP,), extents, dtype, device)
    queries, weights, mixed = saved_bytes(extents, heads, dtype)
    return linear if saves else linear + queries + mixed + weights * stores_weights(extents[2], heads, saves=saves)


def attention_backward_workspace(extents: Extents, heads: int, dtype: str, device: Device) -> int:
    """Return the bytes of scratch memory of attention's gradients: for its projections and all values between them."""
    linear = _projections_workspace((Pass.WGRAD, Pass.DGRAD), extents, dtype, device)
    return linear + sum(saved_bytes(extents, heads, dtype))


def _projections_workspace(passes: tuple[Pass, ...], extents: Extents, dtype: str, device: Device) -> int:
    n, t, c = extents
    return max(linear_workspace(pass_, (n * t, c, k), dtype, device) for pass_ in passes for k in (3 * c, c))

"""Blocks and scratch memory of attention on hand-written kernels, for memory plan, cost and launches alike."""

from __future__ import annotations

from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.kernels.padding import stored_row
from cubatch.kernels.workspace import product_scratch

_ALIGNMENT = 64

HEADS_TILE = 64
"""Rows and columns of results of a block of kernels/attention/heads.cu, and of heads_mma.cu."""

QUERIES, KEYS = 64, 32
"""Queries of a block of kernels/attention/attend.cu and attend_mma.cu, and the keys that the former steps over by."""

WIDEST_HEAD = 64
"""Channels of a head that it holds: WIDTH there."""


def stores_weights(c: int, heads: int, *, saves: bool) -> bool:
    """
    Say whether a forward pass stores the weights: where they are saved, or heads are too wide to do without.

    Example:
        >>> stores_weights(192, 3, saves=False), stores_weights(192, 1, saves=False), stores_weights(192, 3, saves=True)
        (False, True, True)
    """
    return saves or c // heads > WIDEST_HEAD


def kept_bytes(n: int, t: int, c: int, heads: int, dtype: str) -> tuple[int, int, int]:
    """
    Count the bytes of queries, keys and values, of weights, and of mixed values, each in whole units of alignment.

    Rows of weights have `padding.stored_row` elements.

    Args:
        n: Samples.
        t: Positions of a sample.
        c: Channels.
        heads: Number of heads.
        dtype: Storage of the elements.

    Example:
        >>> kept_bytes(1, 5, 12, 2, "float16")
        (384, 192, 128)
    """
    elements = n * t * 3 * c, n * heads * t * stored_row(t), n * t * c
    queries, weights, mixed = (-(-BYTES_PER_ELEMENT[dtype] * count // _ALIGNMENT) * _ALIGNMENT for count in elements)
    return queries, weights, mixed


def attention_workspace(n: int, t: int, c: int, heads: int, dtype: str, device: Device, *, saves: bool) -> int:
    """
    Count the bytes for attention: of its projections, and where nothing is saved of all that lies between them.

    Example:
        >>> device = Device(name="V100", compute_capability=(7, 0), num_sms=80)
        >>> saving, alone = (attention_workspace(64, 197, 192, 3, "float32", device, saves=saves) for saves in (1, 0))
        >>> queries, _, mixed = kept_bytes(64, 197, 192, 3, "float32")
        >>> alone - saving == queries + mixed
        True
    """
    linear = max(product_scratch.linear_workspace(n * t, c, k, dtype, device) for k in (3 * c, c))
    queries, weights, mixed = kept_bytes(n, t, c, heads, dtype)
    between = queries + mixed + weights * stores_weights(c, heads, saves=saves)
    return linear if saves else linear + between


def attention_backward_workspace(n: int, t: int, c: int, heads: int, dtype: str, device: Device) -> int:
    """Count the bytes for attention's gradients: those of all that lies between the projections, and of these."""
    passes = (product_scratch.linear_wgrad_workspace, product_scratch.linear_dgrad_workspace)
    linear = max(of(n * t, c, k, dtype, device) for of in passes for k in (3 * c, c))
    return linear + sum(kept_bytes(n, t, c, heads, dtype))

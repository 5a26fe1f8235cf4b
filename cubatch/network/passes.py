"""
The three passes of a layer, and the extents of their matrix products.

`product_extents` maps a pass of a convolution or linear layer to its product, and `linear_of` maps it back.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs


class Pass(enum.Enum):
    """The passes of a layer: output, gradient of the input, gradient of the filter."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"

    @property
    def layout(self) -> str:
        """How the product reads its two factors, "n" as they are stored and "t" transposed: "nt", "nn" or "tn"."""
        return _LAYOUTS[self]


_LAYOUTS = {Pass.FPROP: "nt", Pass.DGRAD: "nn", Pass.WGRAD: "tn"}


@attrs.frozen
class Gemm:
    """Extents of `count` equal matrix products (m, k) x (k, n) -> (m, n), such as one per group of a convolution."""

    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> int:
        """FLOP of all `count` products; a multiply-add is two."""
        return 2 * self.m * self.n * self.k * self.count


def product_extents(pass_: Pass, *, outputs: Any, inputs: Any, c: Any, k: Any, taps: Any = 1) -> tuple[Any, Any, Any]:
    """
    Return the extents (m, n, k) of a pass's matrix product; arguments and results may be arrays, one entry per case.

    A linear layer is a convolution of one tap with as many outputs as inputs.

    Args:
        outputs: Output pixels of the batch, n p q.
        inputs: Input pixels of the batch, n h w.
        c: Input channels of a group.
        k: Output channels of a group.
        taps: Filter taps, r s; of a strided input gradient the taps of one phase.

    Example:
        >>> [product_extents(pass_, outputs=100, inputs=400, c=3, k=64, taps=9) for pass_ in Pass]
        [(100, 64, 27), (400, 3, 576), (64, 27, 100)]
    """
    return {
        Pass.FPROP: (outputs, k, taps * c),
        Pass.DGRAD: (inputs, c, taps * k),
        Pass.WGRAD: (k, taps * c, outputs),
    }[pass_]


def linear_of(pass_: Pass, m: int, n: int, k: int) -> tuple[int, int, int]:
    """
    Return rows, input features and output features of the linear layer whose pass is the product (m, k) x (k, n).

    Example:
        >>> rows, c, features = linear_of(Pass.WGRAD, 64, 27, 100)
        >>> product_extents(Pass.WGRAD, outputs=rows, inputs=rows, c=c, k=features)
        (64, 27, 100)
    """
    return {Pass.FPROP: (m, k, n), Pass.DGRAD: (m, n, k), Pass.WGRAD: (k, n, m)}[pass_]

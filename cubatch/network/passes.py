"""The three passes of a layer, and the matrix products that they are."""

from __future__ import annotations

import enum

import attrs


class Pass(enum.Enum):
    """One of the three products of a layer: output, gradient of the input, gradient of the filter."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@attrs.frozen
class Gemm:
    """Extents of `count` equal matrix products (m, k) x (k, n) -> (m, n); `count` is the groups of a convolution."""

    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> int:
        """FLOP of the whole product, a multiply-add counted as two."""
        return 2 * self.m * self.n * self.k * self.count

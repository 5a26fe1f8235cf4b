"""Calls of the vendor's libraries: a pass of a layer, or an operator of a traced step, at several batch sizes."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from cubatch.estimate.vendor.algorithms import Array
from cubatch.hardware.facts import BYTES_PER_ELEMENT
from cubatch.network.layer import Layer
from cubatch.network.passes import Gemm, Pass, linear_of

EXTENTS = ("n", "h", "w", "c", "k", "r", "s", "p", "q", "stride_h", "stride_w", "dilation", "groups")
"""Extents of a convolution or matrix product, as in `algorithms.Work`."""
_AT = {name: place for place, name in enumerate(EXTENTS)}


@attrs.frozen(eq=False)
class Call:
    """A call of the vendor's library at several batch sizes: the extents of its products, or its bytes and FLOP."""

    pass_: Pass  # the pass of the convolution or linear layer that it computes
    # EXTENTS of its products, as an array (products, batch sizes, extents); without products it only moves bytes
    extents: Array
    num_bytes: Array  # bytes read and written by a call without products, by batch size
    flops: Array | float = 0.0  # FLOP of a call without known extents, by batch size
    launches: Array | int = 1  # kernels of a call without products
    is_convolution: bool = False  # whether its product is a convolution
    is_attention: bool = False  # whether its products depend on each other

    @classmethod
    def of_layer(cls, layer: Layer, pass_: Pass, sizes: Array, dtype: str) -> Call:
        """Return the call that computes a pass of a layer; `sizes` are the batch sizes of its extents and bytes."""
        first = layer.gemms(pass_, 1)
        least, next_ = (layer.traffic(pass_, n) for n in (1, 2))  # linear in the batch size
        if (shape := layer.convolution) is not None and first:
            v, u = shape.vertical, shape.horizontal
            extents = (
                v.size, u.size, shape.c, shape.k, v.taps, u.taps, v.out, u.out, v.stride, u.stride,
                max(v.step, u.step), shape.groups,
            )  # fmt: skip
            rows: list[list[tuple[float, ...]]] = [[(n, *extents) for n in sizes]]
        else:
            gemms = [layer.gemms(pass_, int(n)) for n in sizes] if first else []
            rows = [[of_product(each[place], pass_) for each in gemms] for place in range(len(first))]
        return cls(
            pass_=pass_,
            extents=np.array(rows, float).reshape(len(rows), len(sizes), len(EXTENTS)),
            num_bytes=(least + (next_ - least) * (sizes - 1)) * BYTES_PER_ELEMENT[dtype],
            is_convolution=shape is not None,
            is_attention=layer.products_in_turn,
        )

    @property
    def is_plain_3x3(self) -> bool:
        """Whether the call is a 3x3 convolution of stride 1 without dilation and groups."""
        names = ("r", "s", "stride_h", "stride_w", "dilation", "groups")
        return self.is_convolution and [self._first(name) for name in names] == [3, 3, 1, 1, 1, 1]

    @property
    def is_depthwise(self) -> bool:
        """Whether the call is a convolution of each channel by itself, whose time its bytes determine."""
        return self.is_convolution and self._first("groups") > 1 and self.channels[0] == 1

    @property
    def is_grouped_or_dilated(self) -> bool:
        """Whether the call is a convolution with groups or dilation."""
        return self.is_convolution and (self._first("groups") > 1 or self._first("dilation") > 1)

    @property
    def channels(self) -> tuple[float, float]:
        """Number of input channels and of output channels of one group of the first product."""
        return self._first("c") / self._first("groups"), self._first("k") / self._first("groups")

    def _first(self, name: str) -> float:
        return float(self.extents[0, 0, _AT[name]])


def direct_flops(extents: Array | Sequence[float]) -> Array:
    """
    Return the FLOP of a pass of convolutions by direct computation; a multiply-add counts as two.

    Args:
        extents: Arrays whose last axis has the EXTENTS of a convolution, in this order.
    """
    n, _, _, c, k, r, s, p, q, *_, groups = np.moveaxis(np.asarray(extents, float), -1, 0)
    flops: Array = 2 * n * p * q * k * c / groups * r * s
    return flops


def of_product(gemm: Gemm, pass_: Pass) -> tuple[float, ...]:
    """
    Return the extents, in the order of EXTENTS, of a linear layer whose pass `pass_` computes this matrix product.

    Several equal products become groups of the layer.
    """
    batch, c, filters = linear_of(pass_, gemm.m, gemm.n, gemm.k)
    return (batch, 1, 1, c * gemm.count, filters * gemm.count, 1, 1, 1, 1, 1, 1, 1, gemm.count)


def table(calls: Sequence[Call], multiple: int) -> tuple[dict[str, Array], np.ndarray, list[np.ndarray]]:
    """
    Return the products of calls as a column for each name of EXTENTS, the call of each row, and the rows of each call.

    The rows of a call are an array (products, batch sizes). Tensor Cores pad channels to a `multiple`; 1 without them.
    """
    counts = [call.extents.shape[0] * call.extents.shape[1] for call in calls]
    ends = np.cumsum([0, *counts])
    rows = [
        np.arange(begin, end).reshape(call.extents.shape[:2])
        for begin, end, call in zip(ends, ends[1:], calls, strict=False)
    ]
    columns = np.concatenate([call.extents.reshape(-1, len(EXTENTS)) for call in calls]).T
    for name in ("c", "k"):
        columns[_AT[name]] = np.ceil(columns[_AT[name]] / multiple) * multiple
    return dict(zip(EXTENTS, columns, strict=True)), np.repeat(np.arange(len(calls)), counts), rows

"""Operands of a tiled kernel: its problem, its arrays, the terms of its epilogue, and a convolution's geometry."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np

from cubatch.errors import InvalidArgument
from cubatch.kernels.problem import Problem
from cubatch.kernels.structs import CONV
from cubatch.network.windows import ConvShape

NO_CONV = np.zeros((), dtype=CONV)[()]
"""The geometry of a product that is no convolution."""

_LIMIT = 1 << 31
_BY_FILTER = ("conv2d_wgrad", "gemm_tn")


@attrs.frozen(kw_only=True, eq=False)
class RowSums:
    """
    Sums over the rows of a product's output, for the batch norm next to it, or the slope of an activation.

    A variant may compute none; `product.launch` returns the number of tiles for which it does.

    Attributes:
        partials: float32, flat, for `misc.product_tiles` tiles. Receives count, mean and sum of squared deviations of
            the output (tiles, 3, columns) in a forward pass. Of a gradient it receives the sums of dy * xhat and of dy
            (tiles, 2, columns), where dy is the output.
        x, mean, inv_std: For a gradient: input and statistics of the norm, so that xhat = (x - mean) * inv_std.
        gamma, beta: Parameters of the norm if the mask is a ReLU of its result: x has the same slope. Else None.
        curve: Type of an activation instead of a norm, else None. The gradient of an input is multiplied by its slope
            at x. Then `partials` receives the sums of the output (tiles, columns); None for no sums.
    """

    partials: Any = None
    x: Any = None
    mean: Any = None
    inv_std: Any = None
    gamma: Any = None
    beta: Any = None
    curve: str | None = None


@attrs.frozen(kw_only=True, eq=False)
class Fused:
    """
    Further terms of a product, applied before it is stored; None leaves a term out.

    y = activation(scale * product + shift + bias + residual), and zero where mask is not positive.

    A forward pass (fprop, nt) takes all terms but the mask. The gradient of an input (dgrad, nn) takes residual and
    mask, the gradient of a filter (wgrad, tn) the residual.
    """

    scale: Any = None  # scale, shift: float32 (columns,), both or none: a folded batch norm
    shift: Any = None
    residual: Any = None  # added; of the output's shape and type. May be the output
    activation: str = "none"  # "none", "relu", ...
    mask: Any = None  # saved output of a ReLU, of the output's shape: its gradient passes where that was positive
    sums: RowSums | None = None  # sums of the output over its rows, or the slope of an activation


PLAIN = Fused()


@attrs.frozen(kw_only=True, eq=False)
class Operands:
    """A product and its arrays."""

    problem: Problem  # extents
    a: Any  # a, b: left and right operand
    b: Any
    out: Any  # receives the result
    bias: Any = None  # (columns,), or None
    fused: Fused = PLAIN  # further terms
    shape: ConvShape | None = None  # geometry of a convolution; None for a matrix product
    workspace: Any = None  # 1-D uint8 array of `product_scratch.product_workspace` bytes; None allocates one if needed
    conv: Any = attrs.field(init=False)  # the geometry for the kernels

    @conv.default
    def _packed(self) -> Any:
        return NO_CONV if self.shape is None else geometry(self.shape, of_input=self.problem.operation[-5:] == "dgrad")

    @property
    def columns(self) -> int:
        """Columns of the whole output, all groups."""
        by_filter = self.problem.operation in _BY_FILTER
        return int(self.out.size // max(len(self.out), 1) if by_filter else self.out.shape[-1])

    @property
    def batch(self) -> int:
        """Samples of a convolution, else 0."""
        return 0 if self.shape is None else len(self.a)

    @property
    def ends(self) -> tuple[Any, ...]:
        """The output and the terms of the epilogue: out, bias, scale, shift, residual, mask."""
        fused = self.fused
        return self.out, self.bias, fused.scale, fused.shift, fused.residual, fused.mask


def geometry(shape: ConvShape, *, of_input: bool = False) -> Any:
    """
    Return a convolution's geometry in the structure that the kernels read, a record `structs.CONV`.

    Args:
        of_input: Whether gemm_m counts the pixels of the input, phase by phase, instead of the output's.

    Raises:
        InvalidArgument: If an image, its padding or the filter has 2^31 elements or more.
    """
    v, h = shape.vertical, shape.horizontal
    padded = (v.span(v.out) + max(0, -v.offset)) * (h.span(h.out) + max(0, -h.offset)) * shape.c
    largest = max(padded, v.size * h.size * shape.c, v.out * h.out * shape.k, shape.filter_elements)
    if largest >= _LIMIT:
        raise InvalidArgument("shape", shape, "one image, its padding and the filter below 2^31 elements each")
    extents = (v.size, h.size, shape.c, v.out, h.out, shape.k, v.taps, h.taps)
    steps = (v.stride, h.stride, v.step, h.step, -v.offset, -h.offset, shape.c // shape.groups, shape.k // shape.groups)
    common = math.gcd(v.stride, v.step), math.gcd(h.stride, h.step)
    phase = (v.stride // common[0], h.stride // common[1], v.step // common[0], h.step // common[1])
    counts = (v.out, h.out, v.out, h.out)
    if of_input:  # of the first phase, then of the last
        counts = (-(-v.size // v.stride), -(-h.size // h.stride), v.size // v.stride, h.size // h.stride)
    return np.array(extents + steps + phase + tuple(divisor(max(1, count)) for count in counts), dtype=CONV)[()]


def divisor(number: int) -> tuple[int, int, int]:
    """
    Return the number, and the multiplier and shift that divide by it: see divide() in kernels/common/conv_geometry.cuh.

    Args:
        number: From 1 to 2^31 - 1; the kernels treat 1 separately.

    Example:
        >>> number, multiplier, shift = divisor(7)
        >>> [(x * multiplier >> 32 + shift) for x in (6, 7, 2**31 - 1)] == [0, 1, (2**31 - 1) // 7]
        True
    """
    shift = max(0, (number - 1).bit_length() - 1)
    multiplier = -(-(1 << 32 + shift) // number) if number > 1 else 0
    return number, multiplier, shift

"""
Layers whose work is a matrix product: convolution, and the linear layer.

Convolution extents follow the field: input h, w, c; filter r, s; output p, q, k.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import attrs
from attrs import field

from cubatch.errors import InvalidSpec
from cubatch.network.extents import PAIR, QUAD, Extents, at_least, check_flag, pair, quad, whole
from cubatch.network.layer import Layer
from cubatch.network.layers.window import check_window, window_extents
from cubatch.network.passes import Gemm, Pass


@attrs.frozen(kw_only=True)
class Conv2d(Layer):
    """
    A two-dimensional convolution (cross-correlation, as everywhere in the field).

    Attributes:
        k: Output channels.
        r, s: Filter height and width.
        stride: Step of the filter: int or [h, w].
        pad: Zeros around the input: int, [h, w] or [top, bottom, left, right].
        dilation: Distance between taps: int or [h, w].
        groups: Parts that channels and filters are divided into; `groups == c` is depthwise.
        bias: Whether a bias is added.

    Raises:
        InvalidSpec: If a value is out of range, groups do not divide c and k, or the filter is larger
            than the padded input.

    Example:
        >>> conv = Conv2d(h=56, w=56, c=64, k=128, r=3, s=3, pad=1)
        >>> conv.output_shape, conv.parameters
        ((56, 56, 128), 73856)
    """

    type: ClassVar[str] = "conv2d"
    saves: ClassVar[frozenset[str]] = frozenset({"x"})

    k: int = field(converter=whole, validator=at_least(1))
    r: int = field(converter=whole, validator=at_least(1))
    s: int = field(converter=whole, validator=at_least(1))
    stride: tuple[int, int] = field(default=(1, 1), converter=pair, validator=PAIR)
    pad: tuple[int, int, int, int] = field(default=(0, 0, 0, 0), converter=quad, validator=QUAD)
    dilation: tuple[int, int] = field(default=(1, 1), converter=pair, validator=PAIR)
    groups: int = field(default=1, converter=whole, validator=at_least(1))
    bias: bool = field(default=True, validator=check_flag)

    def check(self) -> None:
        """Check groups and that the filter fits into the padded input."""
        h, w, c = self.input_shape
        for name, channels in (("c", c), ("k", self.k)):
            if channels % self.groups:
                raise InvalidSpec("groups", self.groups, f"a divisor of {name}={channels}")
        check_window(self.r, self.s, self.pad, self.dilation, h, w)

    @property
    def output_shape(self) -> Extents:
        """(p, q, k)."""
        p, q = window_extents(self.input_shape, self.r, self.s, self.stride, self.pad, self.dilation, ceil=False)
        return p, q, self.k

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Filter (k, r, s, c / groups) and bias (k,)."""
        shapes: dict[str, tuple[int, ...]] = {"w": (self.k, self.r, self.s, self.input_shape[2] // self.groups)}
        return shapes | {"b": (self.k,)} if self.bias else shapes

    def gemms(self, pass_: Pass, batch_size: int) -> tuple[Gemm, ...]:
        """
        Give the extents of the implicit product.

        fprop: (n p q) x k over (r s c); dgrad: (n h w) x c over (r s k), when strided one product for each
        phase of input pixels, so that no tap is wasted on the stride; wgrad: k x (r s c) over (n p q).  Those
        of dgrad include taps that come from beyond the output's border: a kernel multiplies them by zero.
        """
        h, w, c = self.input_shape
        p, q, k = self.output_shape
        taps, pixels = self.r * self.s, batch_size * p * q
        c, k = c // self.groups, k // self.groups
        if pass_ is Pass.FPROP:
            return (Gemm(pixels, k, taps * c, self.groups),)
        if pass_ is Pass.WGRAD:
            return (Gemm(k, taps * c, pixels, self.groups),)
        (step_h, step_w), (spread_h, spread_w) = self.stride, self.dilation
        return tuple(
            Gemm(batch_size * rows * columns, c, taps_h * taps_w * k, self.groups)
            for rows, taps_h in _phases(h, step_h, self.pad[0], self.r, spread_h)
            for columns, taps_w in _phases(w, step_w, self.pad[2], self.s, spread_w)
        )

    def pass_flops(self, pass_: Pass, batch_size: int = 1) -> int:  # noqa: ARG002
        """Each pass pairs every output with every tap of its filter, once: all have the FLOP of fprop."""
        return super().pass_flops(Pass.FPROP, batch_size)


def _phases(extent: int, step: int, pad: int, taps: int, spread: int) -> list[tuple[int, int]]:
    """
    Divide one axis of the input by which taps reach a pixel: (pixels, taps) of each phase that any reaches.

    A pixel is reached by a tap if pixel + pad - tap * spread is a multiple of the step: all pixels
    of one remainder are reached by the same taps.
    """
    phases = Counter((tap * spread - pad) % step for tap in range(taps))
    return [(len(range(phase, extent, step)), count) for phase, count in sorted(phases.items()) if phase < extent]


@attrs.frozen(kw_only=True)
class Linear(Layer):
    """
    A fully connected layer on the channels, applied at every position (h, w).

    Attributes:
        k: Output features.
        bias: Whether a bias is added.

    Example:
        >>> Linear(c=1000, k=100).parameters
        100100
    """

    type: ClassVar[str] = "linear"
    saves: ClassVar[frozenset[str]] = frozenset({"x"})

    k: int = field(converter=whole, validator=at_least(1))
    bias: bool = field(default=True, validator=check_flag)

    @property
    def input_shape(self) -> Extents:
        """(h, w, c); h and w are 1 for a layer on its own that was given only c."""
        if self.c is not None and self.h is None and self.w is None:
            return 1, 1, self.c
        return super().input_shape

    @property
    def output_shape(self) -> Extents:
        """(h, w, k)."""
        h, w, _ = self.input_shape
        return h, w, self.k

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights (k, c) and bias (k,)."""
        shapes: dict[str, tuple[int, ...]] = {"w": (self.k, self.input_shape[2])}
        return shapes | {"b": (self.k,)} if self.bias else shapes

    def gemms(self, pass_: Pass, batch_size: int) -> tuple[Gemm, ...]:
        """Give the product of one pass: (n h w) x k over c and its two gradients."""
        h, w, c = self.input_shape
        rows = batch_size * h * w
        extents = {
            Pass.FPROP: (rows, self.k, c),
            Pass.DGRAD: (rows, c, self.k),
            Pass.WGRAD: (self.k, c, rows),
        }
        return (Gemm(*extents[pass_]),)

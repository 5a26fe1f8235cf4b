"""
Layers whose work is a matrix product: convolution, and the linear layer.

Extents of a convolution: input h, w, c; filter r, s; output p, q, k.
"""

from __future__ import annotations

import attrs
from attrs import field

from cubatch.errors import InvalidSpec
from cubatch.network.extents import PAIR, QUAD, Extents, at_least, check_flag, pair, quad, whole
from cubatch.network.layer import Layer
from cubatch.network.passes import Gemm, Pass, product_extents
from cubatch.network.windows import ConvShape, check_window, conv_shape, working_phases


@attrs.frozen(kw_only=True)
class Conv2d(Layer, type="conv2d", can_clamp=True, backward_reads=frozenset("x")):
    """
    A two-dimensional convolution (cross-correlation).

    Attributes:
        k: Output channels.
        r, s: Filter height and width.
        stride: Step of the filter: int or [h, w].
        pad: Zeros around the input: int, [h, w] or [top, bottom, left, right].
        dilation: Distance between taps: int or [h, w].
        groups: Groups that channels and filters are divided into; `groups == c` is depthwise.
        bias: Whether a bias is added.

    Raises:
        InvalidSpec: If a value is out of range, groups do not divide c and k, or the filter is larger
            than the padded input.

    Example:
        >>> conv = Conv2d(h=56, w=56, c=64, k=128, r=3, s=3, pad=1)
        >>> conv.output_shape, conv.parameters
        ((56, 56, 128), 73856)
    """

    k: int = field(converter=whole, validator=at_least(1))
    r: int = field(converter=whole, validator=at_least(1))
    s: int = field(converter=whole, validator=at_least(1))
    stride: tuple[int, int] = field(default=(1, 1), converter=pair, validator=PAIR)
    pad: tuple[int, int, int, int] = field(default=(0, 0, 0, 0), converter=quad, validator=QUAD)
    dilation: tuple[int, int] = field(default=(1, 1), converter=pair, validator=PAIR)
    groups: int = field(default=1, converter=whole, validator=at_least(1))
    bias: bool = field(default=True, validator=check_flag)

    def check(self) -> None:
        """Raise InvalidSpec unless the groups divide c and k, and the filter fits into the padded input."""
        h, w, c = self.input_shape
        for name, channels in (("c", c), ("k", self.k)):
            if channels % self.groups:
                raise InvalidSpec("groups", self.groups, f"a divisor of {name}={channels}")
        check_window((h, w), (self.r, self.s), self.pad, self.dilation)

    @property
    def convolution(self) -> ConvShape:
        """Geometry of the filter over the input."""
        filters = (self.k, self.r, self.s, self.input_shape[2] // self.groups)
        return conv_shape(self.input_shape, filters, self.stride, self.pad, self.dilation, groups=self.groups)

    @property
    def output_shape(self) -> Extents:
        """(p, q, k): height, width and channels of the output."""
        window = self.convolution
        return window.vertical.out, window.horizontal.out, self.k

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the filter "w", (k, r, s, c / groups), and of the bias "b", (k,), if it has one."""
        shapes: dict[str, tuple[int, ...]] = {"w": (self.k, self.r, self.s, self.input_shape[2] // self.groups)}
        return shapes | {"b": (self.k,)} if self.bias else shapes

    @property
    def product_channels(self) -> dict[str, int]:
        """Channels of a group, "c" in and "k" out; empty where each filter reads one channel."""
        channels = {"c": self.input_shape[2] // self.groups, "k": self.k // self.groups}
        return {} if channels["c"] == 1 and self.groups > 1 else channels

    @property
    def has_epilogue(self) -> bool:
        """True unless it is depthwise; kernels of depthwise convolutions apply only bias and ReLU."""
        return not self.convolution.is_depthwise

    def gemms(self, pass_: Pass, batch_size: int) -> tuple[Gemm, ...]:
        """
        Return the extents of the implicit matrix products of one pass, with c and k of one group.

        - fprop: (n p q) x k over (r s c).
        - dgrad: (n h w) x c over (r s k); if strided, one product for each phase of input pixels, so that no tap is
          wasted on the stride. It includes taps beyond the border of the output, which a kernel multiplies by zero.
        - wgrad: k x (r s c) over (n p q).
        """
        window = self.convolution
        c, k = window.c // self.groups, window.k // self.groups
        parts = [(window.pixels, window.taps)]
        if pass_ is Pass.DGRAD:
            parts = [(phase.vertical.out * phase.horizontal.out, phase.taps) for phase in working_phases(window)]
        return tuple(
            Gemm(
                *product_extents(pass_, outputs=batch_size * pixels, inputs=batch_size * pixels, c=c, k=k, taps=taps),
                self.groups,
            )
            for pixels, taps in parts
        )

    def pass_flops(self, pass_: Pass, batch_size: int = 1) -> int:  # noqa: ARG002
        """
        Return the FLOP of one pass over a batch, two for each multiply-add; they are equal for all passes.

        Each pass multiplies and adds once for every output and every weight of its filter.
        """
        return super().pass_flops(Pass.FPROP, batch_size)


@attrs.frozen(kw_only=True)
class Linear(Layer, type="linear", can_clamp=True, has_epilogue=True, backward_reads=frozenset("x")):
    """
    A fully connected layer on the channels, applied at every position (h, w).

    Attributes:
        k: Output features.
        bias: Whether a bias is added.

    Example:
        >>> Linear(c=1000, k=100).parameters
        100100
    """

    k: int = field(converter=whole, validator=at_least(1))
    bias: bool = field(default=True, validator=check_flag)

    @property
    def input_shape(self) -> Extents:
        """(h, w, c); h and w are 1 for a single layer with c alone."""
        if self.c is not None and self.h is None and self.w is None:
            return 1, 1, self.c
        return super().input_shape

    @property
    def output_shape(self) -> Extents:
        """(h, w, k) of one sample: height and width of the input, and k output channels."""
        h, w, _ = self.input_shape
        return h, w, self.k

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights "w", (k, c), and of the bias "b", (k,), if it has one."""
        shapes: dict[str, tuple[int, ...]] = {"w": (self.k, self.input_shape[2])}
        return shapes | {"b": (self.k,)} if self.bias else shapes

    @property
    def product_channels(self) -> dict[str, int]:
        """Input features "c" and output features "k"."""
        return {"c": self.input_shape[2], "k": self.k}

    def gemms(self, pass_: Pass, batch_size: int) -> tuple[Gemm, ...]:
        """Return the matrix product of one pass over a batch: forward it is (n h w) x k over c."""
        h, w, c = self.input_shape
        rows = batch_size * h * w
        return (Gemm(*product_extents(pass_, outputs=rows, inputs=rows, c=c, k=self.k)),)

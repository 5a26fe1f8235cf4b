"""Pooling layers."""

from __future__ import annotations

import math

import attrs
from attrs import field

from cubatch.errors import InvalidSpec
from cubatch.network.extents import PAIR, QUAD, Extents, at_least, check_flag, pair, quad, whole
from cubatch.network.layer import Layer, plain
from cubatch.network.windows import Axis, Window, check_window, pool_axes


@attrs.frozen(kw_only=True)
class _Pool(Layer):
    """The fields of both pooling layers with a window; the default stride is the window's size."""

    r: int = field(converter=whole, validator=at_least(1))
    s: int = field(converter=whole, validator=at_least(1))
    stride: tuple[int, int] = field(
        default=attrs.Factory(lambda self: (self.r, self.s), takes_self=True), converter=pair, validator=PAIR
    )
    pad: tuple[int, int, int, int] = field(default=(0, 0, 0, 0), converter=quad, validator=QUAD)
    ceil: bool = field(default=False, validator=check_flag)

    def check(self) -> None:
        """Raise InvalidSpec unless the window fits into the padded input and exceeds the padding on each side."""
        h, w, _ = self.input_shape
        check_window((h, w), (self.r, self.s), self.pad)
        if max(self.pad[:2]) >= self.r or max(self.pad[2:]) >= self.s:
            raise InvalidSpec("pad", plain(self.pad), f"smaller than the window ({self.r} x {self.s})")

    @property
    def window(self) -> Window:
        """Size, stride, padding and rounding of the window, without the input."""
        return Window(self.r, self.s, self.stride, self.pad, self.ceil)

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Geometry of the window over the input: vertical and horizontal."""
        h, w, _ = self.input_shape
        return pool_axes((h, w), self.window)

    @property
    def output_shape(self) -> Extents:
        """(p, q, c): height, width and channels of the output."""
        vertical, horizontal = self.axes
        return vertical.out, horizontal.out, self.input_shape[2]


MOST_TAPS = 254  # the position of the largest value is saved in one byte, which also needs values for "none"


@attrs.frozen(kw_only=True)
class MaxPool2d(_Pool, type="max_pool2d"):
    """
    Largest value of a window, per channel.

    Attributes:
        r, s: Window height and width.
        stride: Step of the window; the window itself unless given.
        pad: Border that is ignored.
        ceil: Round the number of windows up instead of down.
    """

    def check(self) -> None:
        """Raise InvalidSpec unless the window fits and has at most 254 pixels: a position is stored in one byte."""
        super().check()
        if self.r * self.s > MOST_TAPS:
            raise InvalidSpec("r", self.r, f"such that r x s is at most {MOST_TAPS} (s is {self.s})")

    def saved_elements(self) -> dict[str, tuple[int, int]]:
        """Return {"argmax": (outputs per sample, 1)}: one byte has the position of an output's value in its window."""
        return {"argmax": (math.prod(self.output_shape), 1)}


@attrs.frozen(kw_only=True)
class AvgPool2d(_Pool, type="avg_pool2d"):
    """
    Mean of a window, per channel.

    Attributes:
        r, s: Window height and width.
        stride: Step of the window; the window itself unless given.
        pad: Zeros around the input.
        ceil: Round the number of windows up instead of down.
        count_pad: Divide by the size of the whole window, border included, not by the pixels in it.
    """

    count_pad: bool = field(default=True, validator=check_flag)

    @property
    def window(self) -> Window:
        """Size, stride, padding, rounding and divisor of the window, without the input."""
        return super().window._replace(count_include_pad=self.count_pad)


@attrs.frozen(kw_only=True)
class GlobalAvgPool(Layer, type="global_avg_pool", adds_gradients=True):
    """Mean over all positions, per channel: (h, w, c) -> (1, 1, c)."""

    @property
    def output_shape(self) -> Extents:
        """(1, 1, c)."""
        return 1, 1, self.input_shape[2]

"""
Every kind of layer, one record each.

Convolution extents follow the field: input h, w, c; filter r, s; output p, q, k.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import attrs
from attrs import field

from cubatch.errors import InvalidSpec
from cubatch.layer import (
    PAIR,
    QUAD,
    Extents,
    Gemm,
    Layer,
    Pass,
    at_least,
    check_flag,
    check_fraction,
    check_integer,
    integers,
    pair,
    plain,
    quad,
    whole,
)


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
        _check_window(self.r, self.s, self.pad, self.dilation, h, w)

    @property
    def output_shape(self) -> Extents:
        """(p, q, k)."""
        p, q = _window_extents(self.input_shape, self.r, self.s, self.stride, self.pad, self.dilation, ceil=False)
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
        phase of input pixels, so that no tap is wasted; wgrad: k x (r s c) over (n p q).
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


def _phases(extent: int, step: int, pad: int, taps: int, spread: int) -> list[tuple[int, int]]:
    """
    Divide one axis of the input by which taps reach a pixel: (pixels, taps) of each phase that any reaches.

    A pixel is reached by a tap if pixel + pad - tap * spread is a multiple of the step: all pixels
    of one remainder are reached by the same taps.
    """
    phases = Counter((tap * spread - pad) % step for tap in range(taps))
    return [(len(range(phase, extent, step)), count) for phase, count in sorted(phases.items()) if phase < extent]


def _check_window(r: int, s: int, pad: tuple[int, int, int, int], dilation: tuple[int, int], h: int, w: int) -> None:
    for name, taps, spread, extent, letter, around in (
        ("r", r, dilation[0], h, "h", pad[0] + pad[1]),
        ("s", s, dilation[1], w, "w", pad[2] + pad[3]),
    ):
        reach = (taps - 1) * spread + 1
        if reach > extent + around:
            raise InvalidSpec(
                name,
                taps,
                f"at most {(extent + around - 1) // spread + 1}, for the filter to fit the padded input "
                f"({letter}={extent} + pad {around}, dilation {spread})",
            )


def _window_extents(
    shape: Extents,
    r: int,
    s: int,
    stride: tuple[int, int],
    pad: tuple[int, int, int, int],
    dilation: tuple[int, int],
    *,
    ceil: bool,
) -> tuple[int, int]:
    """Count window positions: floor((extent + pad - reach) / stride) + 1, or ceil as pooling may ask."""
    result = []
    for extent, taps, step, low, high, spread in (
        (shape[0], r, stride[0], pad[0], pad[1], dilation[0]),
        (shape[1], s, stride[1], pad[2], pad[3], dilation[1]),
    ):
        room = extent + low + high - (taps - 1) * spread - 1
        count = (-(-room // step) if ceil else room // step) + 1
        if ceil and (count - 1) * step >= extent + low:
            count -= 1  # the last window must start inside the input or its leading pad
        result.append(count)
    return result[0], result[1]


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


@attrs.frozen(kw_only=True)
class _Pool(Layer):
    """What the two window pools share; the stride is the window unless given."""

    r: int = field(converter=whole, validator=at_least(1))
    s: int = field(converter=whole, validator=at_least(1))
    # Without a stride of its own a pool steps by its window.
    stride: tuple[int, int] = field(
        default=attrs.Factory(lambda self: (self.r, self.s), takes_self=True), converter=pair, validator=PAIR
    )
    pad: tuple[int, int, int, int] = field(default=(0, 0, 0, 0), converter=quad, validator=QUAD)
    ceil: bool = field(default=False, validator=check_flag)

    def check(self) -> None:
        """Check that the window fits, and holds at least one real pixel wherever it stands."""
        h, w, _ = self.input_shape
        _check_window(self.r, self.s, self.pad, (1, 1), h, w)
        if max(self.pad[:2]) >= self.r or max(self.pad[2:]) >= self.s:
            raise InvalidSpec("pad", plain(self.pad), f"smaller than the window ({self.r} x {self.s})")

    @property
    def output_shape(self) -> Extents:
        """(p, q, c)."""
        p, q = _window_extents(self.input_shape, self.r, self.s, self.stride, self.pad, (1, 1), ceil=self.ceil)
        return p, q, self.input_shape[2]


# The tap that won is kept in one byte, which also needs values for "none".
MOST_TAPS = 254


@attrs.frozen(kw_only=True)
class MaxPool2d(_Pool):
    """
    Largest value of a window, per channel.

    Attributes:
        r, s: Window height and width.
        stride: Step of the window; the window itself unless given.
        pad: Border that never wins.
        ceil: Round the number of windows up instead of down.
    """

    type: ClassVar[str] = "max_pool2d"

    def check(self) -> None:
        """Check the window; the position of the largest value is kept in one byte."""
        super().check()
        if self.r * self.s > MOST_TAPS:
            raise InvalidSpec("r", self.r, f"such that r x s is at most {MOST_TAPS} (s is {self.s})")

    def saved_elements(self) -> dict[str, tuple[int, int]]:
        """Keep which tap won: one byte per output."""
        return {"argmax": (math.prod(self.output_shape), 1)}


@attrs.frozen(kw_only=True)
class AvgPool2d(_Pool):
    """
    Mean of a window, per channel.

    Attributes:
        r, s: Window height and width.
        stride: Step of the window; the window itself unless given.
        pad: Zeros around the input.
        ceil: Round the number of windows up instead of down.
        count_pad: Divide by the whole window, border included, instead of by the real pixels in it.
    """

    type: ClassVar[str] = "avg_pool2d"
    count_pad: bool = field(default=True, validator=check_flag)


@attrs.frozen(kw_only=True)
class GlobalAvgPool(Layer):
    """Mean over all positions, per channel: (h, w, c) -> (1, 1, c)."""

    type: ClassVar[str] = "global_avg_pool"

    @property
    def output_shape(self) -> Extents:
        """(1, 1, c)."""
        return 1, 1, self.input_shape[2]


@attrs.frozen(kw_only=True)
class BatchNorm2d(Layer):
    """
    Batch normalisation over n, h, w, per channel, with a trained scale and shift.

    Attributes:
        eps: Added to the variance.
        momentum: Share of the new batch in the running statistics.
    """

    type: ClassVar[str] = "batch_norm2d"
    saves: ClassVar[frozenset[str]] = frozenset({"x"})

    eps: float = field(default=1e-5, validator=check_fraction)
    momentum: float = field(default=0.1, validator=check_fraction)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Scale and shift, (c,) each."""
        c = self.input_shape[2]
        return {"gamma": (c,), "beta": (c,)}

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Running mean and variance, (c,) each."""
        c = self.input_shape[2]
        return {"mean": (c,), "var": (c,)}


@attrs.frozen(kw_only=True)
class LayerNorm(Layer):
    """Normalisation over the channels of each position, with a trained scale and shift."""

    type: ClassVar[str] = "layer_norm"
    saves: ClassVar[frozenset[str]] = frozenset({"x"})

    eps: float = field(default=1e-6, validator=check_fraction)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Scale and shift, (c,) each."""
        c = self.input_shape[2]
        return {"gamma": (c,), "beta": (c,)}

    def saved_elements(self) -> dict[str, tuple[int, int]]:
        """Keep mean and inverse deviation of every position, in float32."""
        h, w, _ = self.input_shape
        return {"statistics": (2 * h * w, 4)}


@attrs.frozen(kw_only=True)
class _Activation(Layer):
    """An elementwise function."""

    elementwise: ClassVar[bool] = True


@attrs.frozen(kw_only=True)
class ReLU(_Activation):
    """max(x, 0)."""

    type: ClassVar[str] = "relu"
    saves: ClassVar[frozenset[str]] = frozenset({"y"})


@attrs.frozen(kw_only=True)
class ReLU6(_Activation):
    """min(max(x, 0), 6)."""

    type: ClassVar[str] = "relu6"
    saves: ClassVar[frozenset[str]] = frozenset({"y"})


@attrs.frozen(kw_only=True)
class Sigmoid(_Activation):
    """1 / (1 + exp(-x)), whose slope is y (1 - y)."""

    type: ClassVar[str] = "sigmoid"
    saves: ClassVar[frozenset[str]] = frozenset({"y"})


@attrs.frozen(kw_only=True)
class HardSigmoid(_Activation):
    """min(max(x + 3, 0), 6) / 6, the gate of MobileNetV3 (Howard et al., 2019, arXiv:1905.02244, section 5.2)."""

    type: ClassVar[str] = "hard_sigmoid"
    saves: ClassVar[frozenset[str]] = frozenset({"y"})


@attrs.frozen(kw_only=True)
class HardSwish(_Activation):
    """Input times its hard sigmoid (Howard et al., 2019, arXiv:1905.02244, section 5.2)."""

    type: ClassVar[str] = "hard_swish"
    saves: ClassVar[frozenset[str]] = frozenset({"x"})


@attrs.frozen(kw_only=True)
class SiLU(_Activation):
    """Input times its sigmoid (Elfwing et al., 2017, arXiv:1702.03118)."""

    type: ClassVar[str] = "silu"
    saves: ClassVar[frozenset[str]] = frozenset({"x"})


@attrs.frozen(kw_only=True)
class GELU(_Activation):
    """Input times the normal distribution function of it."""

    type: ClassVar[str] = "gelu"
    saves: ClassVar[frozenset[str]] = frozenset({"x"})


@attrs.frozen(kw_only=True)
class Softmax(Layer):
    """exp(x) over its sum along the channels; a network for training ends in logits, without it."""

    type: ClassVar[str] = "softmax"
    saves: ClassVar[frozenset[str]] = frozenset({"y"})


@attrs.frozen(kw_only=True)
class Dropout(_Activation):
    """
    Zero a share of the elements while training and scale the rest up; nothing in inference.

    Attributes:
        p: Share of the elements that is zeroed.
    """

    type: ClassVar[str] = "dropout"
    p: float = field(default=0.5)

    @p.validator
    def _check_p(self, _: attrs.Attribute[float], value: object) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
            raise InvalidSpec("p", value, "a number from 0, below 1")

    def saved_elements(self) -> dict[str, tuple[int, int]]:
        """Keep which elements survived: one byte each."""
        return {"mask": (math.prod(self.input_shape), 1)}


@attrs.frozen(kw_only=True)
class Flatten(Layer):
    """(h, w, c) -> (1, 1, h w c): the same memory under another shape."""

    type: ClassVar[str] = "flatten"

    @property
    def output_shape(self) -> Extents:
        """(1, 1, h w c)."""
        return 1, 1, math.prod(self.input_shape)

    def traffic(self, pass_: Pass, batch_size: int) -> int:  # noqa: ARG002
        """Nothing moves."""
        return 0


@attrs.frozen(kw_only=True)
class Add(Layer):
    """
    Sum of layers of one shape.

    Attributes:
        count: How many are added; inferred in a network.
    """

    type: ClassVar[str] = "add"
    arity: ClassVar[tuple[int, int]] = (2, 1024)
    count: int = field(default=2, converter=whole, validator=at_least(2))

    @property
    def input_shapes(self) -> tuple[Extents, ...]:
        """(h, w, c), `count` times."""
        return (self.input_shape,) * self.count

    def with_inputs(self, shapes: Sequence[Extents]) -> Self:
        """Fill in the extents; all inputs must have the same."""
        for other in shapes[1:]:
            if other != shapes[0]:
                raise InvalidSpec("inputs", list(self.inputs or ()), f"of one shape, not {shapes[0]} and {other}")
        return attrs.evolve(super().with_inputs(shapes), count=len(shapes))


@attrs.frozen(kw_only=True)
class Concat(Layer):
    """
    Inputs of equal height and width, side by side along the channels.

    Attributes:
        channels: Channels of each input; inferred in a network, where c is their sum.
    """

    type: ClassVar[str] = "concat"
    arity: ClassVar[tuple[int, int]] = (2, 1024)
    channels: tuple[int, ...] | None = field(default=None, converter=integers)

    @channels.validator
    def _check_channels(self, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is None:
            return
        if not isinstance(value, tuple) or len(value) < 2:  # noqa: PLR2004
            raise InvalidSpec(attribute.name, value, "a list of at least two whole numbers")
        for item in value:
            check_integer(item, attribute.name, 1)

    def check(self) -> None:
        """Check that the parts add up."""
        if self.channels is None or sum(self.channels) != self.c:
            raise InvalidSpec("channels", self.channels, f"given, with the sum c={self.c}")

    @property
    def input_shapes(self) -> tuple[Extents, ...]:
        """(h, w, channels) of every input."""
        h, w, _ = self.input_shape
        return tuple((h, w, c) for c in self.channels or ())

    def with_inputs(self, shapes: Sequence[Extents]) -> Self:
        """Fill in the extents; height and width must be equal."""
        for other in shapes[1:]:
            if other[:2] != shapes[0][:2]:
                names = list(self.inputs or ())
                raise InvalidSpec("inputs", names, f"of one height and width, not {shapes[0][:2]} and {other[:2]}")
        if len(shapes) < self.arity[0]:
            return super().with_inputs(shapes)
        h, w, _ = shapes[0]
        channels = tuple(shape[2] for shape in shapes)
        return self._merge({"h": h, "w": w, "c": sum(channels), "channels": channels})


@attrs.frozen(kw_only=True)
class Scale(Layer):
    """Its first input times its second, a (1, 1, c) factor per sample and channel: squeeze-and-excite."""

    type: ClassVar[str] = "scale"
    arity: ClassVar[tuple[int, int]] = (2, 2)
    saves: ClassVar[frozenset[str]] = frozenset({"x"})

    @property
    def input_shapes(self) -> tuple[Extents, ...]:
        """(h, w, c) and (1, 1, c)."""
        return self.input_shape, (1, 1, self.input_shape[2])

    def with_inputs(self, shapes: Sequence[Extents]) -> Self:
        """Fill in the extents; the factor must be (1, 1, c)."""
        if len(shapes) == 2 and shapes[1] != (1, 1, shapes[0][2]):  # noqa: PLR2004
            raise InvalidSpec("inputs", list(self.inputs or ()), f"{shapes[0]} and (1, 1, {shapes[0][2]})")
        return super().with_inputs(shapes)


@attrs.frozen(kw_only=True)
class Tokens(Layer):
    """
    Pixels to tokens, as a vision transformer begins: (h, w, c) -> (h w + 1, 1, c).

    A learned class token is put in front and a learned position embedding is added.
    """

    type: ClassVar[str] = "tokens"

    @property
    def output_shape(self) -> Extents:
        """(h w + 1, 1, c)."""
        h, w, c = self.input_shape
        return h * w + 1, 1, c

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Class token (c,) and position embedding (h w + 1, c)."""
        tokens, _, c = self.output_shape
        return {"token": (c,), "position": (tokens, c)}


@attrs.frozen(kw_only=True)
class ClassToken(Layer):
    """The first token alone: (tokens, 1, c) -> (1, 1, c)."""

    type: ClassVar[str] = "class_token"

    @property
    def output_shape(self) -> Extents:
        """(1, 1, c)."""
        return 1, 1, self.input_shape[2]


@attrs.frozen(kw_only=True)
class Attention(Layer):
    """
    Multi-head self-attention over the h w positions, with its input and output projections.

    Attributes:
        heads: Number of heads; divides c.
        bias: Whether the projections have a bias.
    """

    type: ClassVar[str] = "attention"
    saves: ClassVar[frozenset[str]] = frozenset({"x"})

    heads: int = field(converter=whole, validator=at_least(1))
    bias: bool = field(default=True, validator=check_flag)

    def check(self) -> None:
        """Check that the heads divide the channels."""
        if self.input_shape[2] % self.heads:
            raise InvalidSpec("heads", self.heads, f"a divisor of c={self.input_shape[2]}")

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Projections in (3c, c) and out (c, c), with their biases."""
        c = self.input_shape[2]
        shapes: dict[str, tuple[int, ...]] = {"w_in": (3 * c, c), "w_out": (c, c)}
        return shapes | {"b_in": (3 * c,), "b_out": (c,)} if self.bias else shapes

    def gemms(self, pass_: Pass, batch_size: int) -> tuple[Gemm, ...]:
        """Give the two projections, and the two products between tokens (whose gradients are products of both)."""
        h, w, c = self.input_shape
        tokens, head = h * w, c // self.heads
        rows, count = batch_size * tokens, batch_size * self.heads
        between = (Gemm(tokens, tokens, head, count), Gemm(tokens, head, tokens, count))
        if pass_ is Pass.WGRAD:
            return Gemm(3 * c, c, rows), Gemm(c, c, rows)
        if pass_ is Pass.FPROP:
            return Gemm(rows, 3 * c, c), Gemm(rows, c, c), *between
        # Queries, keys and values each have a gradient of the mixing form, the weights one of the scoring form.
        scores, mixed = between
        return Gemm(rows, c, 3 * c), Gemm(rows, c, c), scores, mixed, mixed, mixed

    def saved_elements(self) -> dict[str, tuple[int, int]]:
        """Keep queries, keys and values, the attention weights and the mixed values."""
        h, w, c = self.input_shape
        tokens = h * w
        return {"qkv": (3 * tokens * c, 0), "weights": (self.heads * tokens * tokens, 0), "mixed": (tokens * c, 0)}


LAYERS: dict[str, type[Layer]] = {
    cls.type: cls
    for cls in (
        Conv2d, Linear, MaxPool2d, AvgPool2d, GlobalAvgPool, BatchNorm2d, LayerNorm, ReLU, ReLU6, HardSwish,
        HardSigmoid, Sigmoid, SiLU, GELU, Softmax, Dropout, Flatten, Add, Scale, Concat, Tokens, ClassToken, Attention,
    )
}  # fmt: skip

"""Layers that join values, cut them, or change their shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import attrs
from attrs import field

from cubatch.errors import InvalidSpec
from cubatch.network.extents import Extents, at_least, check_integer, listed, whole
from cubatch.network.layer import Layer
from cubatch.network.passes import Pass


@attrs.frozen(kw_only=True)
class Flatten(Layer, type="flatten", aliases_input=True):
    """(h, w, c) -> (1, 1, h w c): the same memory with another shape."""

    @property
    def output_shape(self) -> Extents:
        """(1, 1, h w c)."""
        return 1, 1, math.prod(self.input_shape)

    def traffic(self, pass_: Pass, batch_size: int) -> int:  # noqa: ARG002
        """Return 0: no element is moved."""
        return 0


@attrs.frozen(kw_only=True)
class Add(Layer, type="add", in_place=True, can_clamp=True, passes_gradient=True):
    """
    Sum of layers of one shape.

    Attributes:
        count: Number of inputs; inferred in a network.
    """

    arity: ClassVar[tuple[int, int]] = (2, 1024)
    count: int = field(default=2, converter=whole, validator=at_least(*arity))

    @property
    def input_shapes(self) -> tuple[Extents, ...]:
        """(h, w, c), `count` times."""
        return (self.input_shape,) * self.count

    def with_inputs(self, shapes: Sequence[Extents]) -> Self:
        """Return a copy with these input extents; raise InvalidSpec unless they are equal."""
        for other in shapes[1:]:
            if other != shapes[0]:
                raise InvalidSpec("inputs", list(self.inputs or ()), f"of one shape, not {shapes[0]} and {other}")
        return attrs.evolve(super().with_inputs(shapes), count=len(shapes))


@attrs.frozen(kw_only=True)
class Concat(Layer, type="concat", arity=(2, 1024)):
    """
    Inputs of equal height and width, side by side along the channels.

    Attributes:
        channels: Channels of each input; None until inferred in a network, where c is their sum.
    """

    channels: tuple[int, ...] | None = field(default=None, converter=listed)

    @channels.validator
    def _check_channels(self, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is None:
            return
        low, high = self.arity
        if not isinstance(value, tuple) or not low <= len(value) <= high:
            raise InvalidSpec(attribute.name, value, f"a list of {low} to {high} whole numbers, one for each input")
        for item in value:
            check_integer(item, attribute.name, 1)

    def check(self) -> None:
        """Raise InvalidSpec unless the channels of the inputs are known and their sum is c."""
        if self.channels is None or sum(self.channels) != self.c:
            raise InvalidSpec("channels", self.channels, f"given, with the sum c={self.c}")

    @property
    def input_shapes(self) -> tuple[Extents, ...]:
        """(h, w, channels) of every input."""
        h, w, _ = self.input_shape
        return tuple((h, w, c) for c in self.channels or ())

    def with_inputs(self, shapes: Sequence[Extents]) -> Self:
        """Return a copy with these input extents; raise InvalidSpec unless height and width are equal."""
        for other in shapes[1:]:
            if other[:2] != shapes[0][:2]:
                names = list(self.inputs or ())
                raise InvalidSpec("inputs", names, f"of one height and width, not {shapes[0][:2]} and {other[:2]}")
        if not self.arity[0] <= len(shapes) <= self.arity[1]:
            return super().with_inputs(shapes)
        h, w, _ = shapes[0]
        channels = tuple(shape[2] for shape in shapes)
        return self._merge({"h": h, "w": w, "c": sum(channels), "channels": channels})


@attrs.frozen(kw_only=True)
class Slice(Layer, type="slice"):
    """
    A range of the channels: (h, w, c) -> (h, w, end - start).

    Attributes:
        start: First channel of the range, from 0.
        end: Channel after the last of the range.
    """

    start: int = field(default=0, converter=whole, validator=at_least(0))
    end: int = field(converter=whole, validator=at_least(1))

    def check(self) -> None:
        """Raise InvalidSpec unless the range is not empty and within the channels of the input."""
        if self.end > self.input_shape[2]:
            raise InvalidSpec("end", self.end, f"at most {self.input_shape[2]}, the channels of its input")
        if self.start >= self.end:
            raise InvalidSpec("start", self.start, f"less than end={self.end}")

    @property
    def output_shape(self) -> Extents:
        """(h, w, end - start)."""
        h, w, _ = self.input_shape
        return h, w, self.end - self.start

    @property
    def channel_range(self) -> tuple[int, int]:
        """Range of input channels that it returns: (start, end)."""
        return self.start, self.end

    def traffic(self, pass_: Pass, batch_size: int) -> int:
        """
        Return the number of elements that one pass over a batch reads and writes.

        The forward pass moves the range alone; the backward pass also writes zeros for the other channels.
        """
        if pass_ is Pass.FPROP:
            return 2 * batch_size * math.prod(self.output_shape)
        return super().traffic(pass_, batch_size)


@attrs.frozen(kw_only=True)
class Scale(Layer, type="scale", arity=(2, 2), backward_reads=frozenset("x")):
    """First input times the second, a (1, 1, c) factor per sample and channel: squeeze-and-excite."""

    @property
    def input_shapes(self) -> tuple[Extents, ...]:
        """(h, w, c) of the first input, and (1, 1, c) of its factors."""
        return self.input_shape, (1, 1, self.input_shape[2])

    def with_inputs(self, shapes: Sequence[Extents]) -> Self:
        """Return a copy with these input extents; raise InvalidSpec unless the second is (1, 1, c)."""
        if len(shapes) == 2 and shapes[1] != (1, 1, shapes[0][2]):  # noqa: PLR2004
            raise InvalidSpec("inputs", list(self.inputs or ()), f"of shape {shapes[0]} and (1, 1, {shapes[0][2]})")
        return super().with_inputs(shapes)

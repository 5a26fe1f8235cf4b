"""
The layers, as frozen records that know their shapes and nothing of how they are run.

Activations are (h, w, c) per sample, filters (k, r, s, c).  Inside a network the input extents
h, w, c are inferred; a layer on its own must be given them.  FLOP follow the field's convention:
a multiply-add is two, and only the products of convolutions, linear layers and attention count
(normalisation, activation and pooling layers are bounded by the bytes they move, see `traffic`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import attrs
from attrs import field

from cubatch.errors import InvalidArgument, InvalidSpec
from cubatch.network.extents import Extents, check_extent, check_inputs, check_name, optional_whole, strings
from cubatch.network.passes import Gemm, Pass
from cubatch.network.windows import ConvShape


@attrs.frozen(kw_only=True)
class Layer:
    """
    What every layer has: an optional name, the names of the layers it reads, and its input extents.

    Attributes:
        name: Its name in the network; None is "layer1" by position.
        inputs: Names of the layers it reads; None is the layer before it.
        h, w, c: Input height, width and channels; None until inferred.
    """

    type: ClassVar[str] = ""
    arity: ClassVar[tuple[int, int]] = (1, 1)

    # Facts of a kind: whoever needs to know one of a layer asks its record, not which kind it is.
    # What the backward pass reads besides the gradient: the input "x", the output "y", both, or nothing.
    backward_reads: ClassVar[frozenset[str]] = frozenset()
    # Each output is made of the input at its place alone: its gradient may be written over the one it is made of.
    elementwise: ClassVar[bool] = False
    # May write its output over an input.
    in_place: ClassVar[bool] = False
    # Its output is its input's memory under another shape.
    aliases_input: ClassVar[bool] = False
    # Does nothing in inference.
    idle_in_inference: ClassVar[bool] = False
    # The gradient of each input is the gradient of its output, as it is.
    passes_gradient: ClassVar[bool] = False
    # Can clamp its output at zero while it is at hand, which a ReLU then need not do.
    can_clamp: ClassVar[bool] = False
    # Keeps mean and inverse deviation of each channel of the batch from forward to backward.
    has_statistics: ClassVar[bool] = False
    # Its output adds up to 1 over the channels: no logits.
    adds_up_to_one: ClassVar[bool] = False
    # Its matrix products need each other's results, so they are launches of their own.
    products_in_turn: ClassVar[bool] = False

    name: str | None = field(default=None, validator=check_name)
    inputs: tuple[str, ...] | None = field(default=None, converter=strings, validator=check_inputs)
    h: int | None = field(default=None, converter=optional_whole, validator=check_extent)
    w: int | None = field(default=None, converter=optional_whole, validator=check_extent)
    c: int | None = field(default=None, converter=optional_whole, validator=check_extent)

    def __attrs_post_init__(self) -> None:
        if self.resolved:
            self.check()

    @property
    def resolved(self) -> bool:
        """Whether the input extents are known."""
        return None not in {self.h, self.w, self.c}

    @property
    def input_shape(self) -> Extents:
        """(h, w, c) of the input, or of the first one."""
        for name in "hwc":
            if getattr(self, name) is None:
                raise InvalidSpec(f"{self.type}.{name}", None, "given, for a layer that stands alone")
        return self.h, self.w, self.c  # type: ignore[return-value]

    @property
    def input_shapes(self) -> tuple[Extents, ...]:
        """(h, w, c) of every input."""
        return (self.input_shape,)

    @property
    def output_shape(self) -> Extents:
        """(h, w, c) of the output."""
        return self.input_shape

    def check(self) -> None:
        """Check what only the known extents can tell; raises InvalidSpec."""

    def with_inputs(self, shapes: Sequence[Extents]) -> Self:
        """
        Fill in the input extents.

        Raises:
            InvalidSpec: If the layer was given other extents, or takes another number of inputs.
        """
        low, high = self.arity
        if not low <= len(shapes) <= high:
            wanted = str(low) if low == high else f"at least {low}, at most {high}"
            raise InvalidSpec("inputs", list(self.inputs or ()), f"{wanted} layer{'s' * (high != 1)}")
        return self._merge(dict(zip("hwc", shapes[0], strict=True)))

    def _merge(self, found: Mapping[str, Any]) -> Self:
        for key, value in found.items():
            given = getattr(self, key)
            if given is not None and given != value:
                remedy = "Leave it out: it is inferred in a network."
                raise InvalidSpec(key, given, f"{value}, which is what the layer before gives", remedy)
        return attrs.evolve(self, **found)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trainable parameters by name."""
        return {}

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what is kept but not trained: running statistics."""
        return {}

    @property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(math.prod(shape) for shape in self.parameter_shapes.values())

    @property
    def convolution(self) -> ConvShape | None:
        """Geometry of the windows whose values are the factors of its products; None where none are gathered."""
        return None

    @property
    def channel_range(self) -> tuple[int, int] | None:
        """First channel, and the one after the last, of those of its input that are its output; None of most kinds."""
        return None

    @property
    def product_channels(self) -> dict[str, int]:
        """Channels of one group that are extents of its products, by field: what Tensor Cores take in multiples."""
        return {}

    @property
    def projections(self) -> tuple[Layer, ...]:
        """Layers that it begins and ends with, whose products are some of its own; none of most kinds."""
        return ()

    @property
    def has_epilogue(self) -> bool:
        """Whether its products can end with more than a bias and a ReLU: a norm, another branch, a ReLU's slope."""
        return False

    @property
    def can_add(self) -> bool:
        """Whether it can add another branch to its output while that is at hand, which a sum then need not do."""
        return self.has_epilogue

    def gemms(self, pass_: Pass, batch_size: int) -> tuple[Gemm, ...]:  # noqa: ARG002
        """Matrix products that a kernel computes for one pass of a batch; none for a layer that only moves bytes."""
        return ()

    def pass_flops(self, pass_: Pass, batch_size: int = 1) -> int:
        """FLOP of one pass as the field counts them; its matrix products may also multiply zeros, see `Conv2d`."""
        return sum(gemm.flops for gemm in self.gemms(pass_, batch_size))

    def flops(self, mode: str = "inference") -> int:
        """FLOP of one sample: forward, or in "training" all three passes."""
        passes = (Pass.FPROP,) if check_mode(mode) == "inference" else tuple(Pass)
        return sum(map(self.pass_flops, passes))

    def saved_elements(self) -> dict[str, tuple[int, int]]:
        """What the forward pass keeps beside x and y: {name: (elements per sample, bytes per element or 0 = dtype)}."""
        return {}

    def traffic(self, pass_: Pass, batch_size: int) -> int:
        """
        Elements that one pass must at least read and write, each counted once.

        This is the byte count of the roofline; a kernel that reads something twice moves more.
        """
        x = batch_size * sum(math.prod(shape) for shape in self.input_shapes)
        y = batch_size * math.prod(self.output_shape)
        if pass_ is Pass.WGRAD:
            return x + y + self.parameters if self.parameters else 0
        # Products need what they saved for wgrad only; all others need it here: relu its y, a norm its x.
        saved = self.backward_reads if pass_ is Pass.DGRAD and not self.gemms(Pass.FPROP, 1) else frozenset()
        return x + y + self.parameters + (x if "x" in saved else 0) + (y if "y" in saved else 0)

    def to_mapping(self) -> dict[str, Any]:
        """Return the layer as a plain mapping, in the form of a spec file; defaults are left out."""
        fields = attrs.fields(type(self))
        given = {a.name: getattr(self, a.name) for a in fields}
        untouched = type(self)(**{a.name: given[a.name] for a in fields if a.default is attrs.NOTHING})
        changed = {name: value for name, value in given.items() if value != getattr(untouched, name)}
        required = {a.name: given[a.name] for a in fields if a.default is attrs.NOTHING}
        own = {a.name for a in fields} - {"name", "inputs", "h", "w", "c"}
        order = ["name", "inputs", "h", "w", "c", *(a.name for a in fields if a.name in own)]
        facts = changed | required
        return {"type": self.type} | {name: _written(name, facts[name]) for name in order if name in facts}

    def __str__(self) -> str:
        facts = ", ".join(
            f"{key}={value}" for key, value in self.to_mapping().items() if key not in {"type", "name", "inputs"}
        )
        return f"{type(self).__name__}({facts})"


@functools.lru_cache(maxsize=4096)
def extents(layer: Layer) -> Layer:
    """The layer without its name and place: equal for layers that do equal work."""
    return attrs.evolve(layer, name=None, inputs=None)


def without_bias(layer: Layer) -> Layer:
    """The layer without a bias, where it has one."""
    without: dict[str, Any] = {"bias": False}
    return attrs.evolve(layer, **without) if getattr(layer, "bias", False) else layer


def plain(value: tuple[int, ...]) -> object:
    """Write a pair or quad as a person would: (1, 1) is 1, (0, 0, 1, 1) is a list."""
    return value[0] if len(set(value)) == 1 else list(value)


def _written(name: str, value: object) -> object:
    if not isinstance(value, tuple):
        return value
    return plain(value) if name in {"stride", "pad", "dilation"} else list(value)


def check_mode(mode: str) -> str:
    """Return the mode, or raise InvalidArgument if it is neither "inference" nor "training"."""
    if not isinstance(mode, str) or mode not in {"inference", "training"}:
        raise InvalidArgument("mode", mode, '"inference" or "training"')
    return mode

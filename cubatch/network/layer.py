"""
Layer: the base of the frozen records that hold shapes and costs of layers, and no code to run them.

Activations are (h, w, c) per sample, filters (k, r, s, c). A network infers the input extents h, w, c; a single layer
needs them as arguments. A multiply-add is two FLOP. Only the products of convolutions, linear layers and attention
count as FLOP; all other layers are bounded by the bytes that they move, see `traffic`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import attrs
from attrs import field
from attrs.validators import optional

from cubatch.errors import InvalidArgument, InvalidSpec
from cubatch.network.extents import Extents, at_least, check_inputs, check_name, listed, whole
from cubatch.network.passes import Gemm, Pass
from cubatch.network.windows import ConvShape


@attrs.frozen(kw_only=True)
class Layer:
    """
    The fields of every layer: an optional name, the names of its inputs, and its input extents.

    Attributes:
        name: Its name in the network; None is "layer1" by position.
        inputs: Names of the layers that it reads; None is the layer before it.
        h, w, c: Input height, width and channels; None until inferred.
    """

    type: ClassVar[str] = ""
    arity: ClassVar[tuple[int, int]] = (1, 1)

    # Facts of a layer type, so that other packages need not know the types: keywords of the class statement.
    backward_reads: ClassVar[frozenset[str]] = frozenset()  # of the input "x" and the output "y"
    elementwise: ClassVar[bool] = False  # the gradient may be written over the gradient that it is computed from
    in_place: ClassVar[bool] = False  # may write its output over an input
    aliases_input: ClassVar[bool] = False  # its output is the memory of its input with another shape
    idle_in_inference: ClassVar[bool] = False
    passes_gradient: ClassVar[bool] = False  # the gradient of each input is that of the output
    can_clamp: ClassVar[bool] = False  # can apply a following ReLU to its output
    can_activate: ClassVar[bool] = False  # kernels compute a following activation, and its slope from the input of both
    slope_of_input: ClassVar[bool] = False  # its slope has one formula in its input, so that no output is needed
    adds_gradients: ClassVar[bool] = False  # its gradient's kernel adds the gradients of other readers of its input
    # one kernel computes the gradients of its input and its parameters, unless its rows are too long
    gradients_at_once: ClassVar[bool] = False
    has_statistics: ClassVar[bool] = False  # keeps mean and inverse deviation of the batch for the backward pass
    adds_up_to_one: ClassVar[bool] = False  # outputs are shares over the channels, not logits
    products_in_turn: ClassVar[bool] = False  # its matrix products depend on each other, so each is a launch

    name: str | None = field(default=None, validator=check_name)
    inputs: tuple[str, ...] | None = field(default=None, converter=listed, validator=check_inputs)
    h: int | None = field(default=None, converter=whole, validator=optional(at_least(1)))
    w: int | None = field(default=None, converter=whole, validator=optional(at_least(1)))
    c: int | None = field(default=None, converter=whole, validator=optional(at_least(1)))

    def __init_subclass__(cls, **facts: object) -> None:
        super().__init_subclass__()
        for name, value in facts.items():
            if not hasattr(cls, name):
                raise TypeError(f"{cls.__name__}: {name} is no class attribute of Layer")
            setattr(cls, name, value)

    def __attrs_post_init__(self) -> None:
        if self.resolved:
            self.check()

    @property
    def resolved(self) -> bool:
        """Whether the input extents are known."""
        return None not in {self.h, self.w, self.c}

    @property
    def input_shape(self) -> Extents:
        """(h, w, c) of the first input; raises InvalidSpec while they are unknown."""
        for name in "hwc":
            if getattr(self, name) is None:
                raise InvalidSpec(f"{self.type}.{name}", None, "given, for a layer that stands alone")
        return self.h, self.w, self.c  # type: ignore[return-value]

    @property
    def input_shapes(self) -> tuple[Extents, ...]:
        """(h, w, c) of one sample of every input; raises InvalidSpec while they are unknown."""
        return (self.input_shape,)

    @property
    def output_shape(self) -> Extents:
        """(h, w, c) of one sample of the output; raises InvalidSpec while the input's are unknown."""
        return self.input_shape

    def check(self) -> None:
        """Raise InvalidSpec if the fields do not fit the input extents."""

    def with_inputs(self, shapes: Sequence[Extents]) -> Self:
        """Return a copy with these input extents; raise InvalidSpec if their number is wrong or a field differs."""
        low, high = self.arity
        if not low <= len(shapes) <= high:
            count = str(low) if low == high else f"at least {low}, at most {high}"
            raise InvalidSpec("inputs", list(self.inputs or ()), f"{count} layer{'s' * (high != 1)}")
        return self._merge(dict(zip("hwc", shapes[0], strict=True)))

    def _merge(self, inferred: Mapping[str, Any]) -> Self:
        for key, value in inferred.items():
            given = getattr(self, key)
            if given is not None and given != value:
                remedy = "Leave it out: it is inferred in a network."
                raise InvalidSpec(key, given, f"{value}, the extent of its input", remedy)
        return attrs.evolve(self, **inferred)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trainable parameters by name; empty for a layer that has none."""
        return {}

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of running statistics by name; empty for layers other than batch norms."""
        return {}

    @property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(math.prod(shape) for shape in self.parameter_shapes.values())

    @property
    def convolution(self) -> ConvShape | None:
        """Geometry of its convolution; None for layers that are no convolution."""
        return None

    @property
    def channel_range(self) -> tuple[int, int] | None:
        """Range of input channels that it returns, as (first, last + 1); None for all layers but slices."""
        return None

    @property
    def product_channels(self) -> dict[str, int]:
        """Channels of one group, "c" in and "k" out, which Tensor Cores need in multiples; empty for most types."""
        return {}

    @property
    def projections(self) -> tuple[Layer, ...]:
        """Linear layers with which it begins and ends, whose products are among `gemms`; none for most types."""
        return ()

    @property
    def has_epilogue(self) -> bool:
        """Whether the kernels of its products can apply a norm, add another branch, or apply a ReLU's slope."""
        return False

    @property
    def can_add(self) -> bool:
        """Whether its kernel can add another branch to its output, so that no Add runs."""
        return self.has_epilogue

    def gemms(self, pass_: Pass, batch_size: int) -> tuple[Gemm, ...]:  # noqa: ARG002
        """Return the matrix products of one pass over a batch; none for a layer that only moves bytes."""
        return ()

    def pass_flops(self, pass_: Pass, batch_size: int = 1) -> int:
        """
        Return the FLOP of one pass over a batch, two for each multiply-add; 0 for a layer that only moves bytes.

        A convolution's `gemms` may have more, since they also multiply zeros.
        """
        return sum(gemm.flops for gemm in self.gemms(pass_, batch_size))

    def flops(self, mode: str = "inference") -> int:
        """Return the FLOP of one sample: of the forward pass, or in "training" of all three passes."""
        passes = (Pass.FPROP,) if check_mode(mode) == "inference" else tuple(Pass)
        return sum(map(self.pass_flops, passes))

    def saved_elements(self) -> dict[str, tuple[int, int]]:
        """
        Return {name: (elements per sample, bytes per element)} of arrays that training saves besides input and output.

        0 bytes per element stand for the size of the dtype. Empty if nothing else is saved.
        """
        return {}

    def traffic(self, pass_: Pass, batch_size: int) -> int:
        """Return the number of elements that one pass over a batch must read and write, each counted once."""
        x = batch_size * sum(math.prod(shape) for shape in self.input_shapes)
        y = batch_size * math.prod(self.output_shape)
        if pass_ is Pass.WGRAD:
            return x + y + self.parameters if self.parameters else 0
        # Products read what they saved in wgrad only; all other layers read it here: relu its y, a norm its x.
        saved = self.backward_reads if pass_ is Pass.DGRAD and not self.gemms(Pass.FPROP, 1) else frozenset()
        return x + y + self.parameters + (x if "x" in saved else 0) + (y if "y" in saved else 0)

    def to_mapping(self) -> dict[str, Any]:
        """Return the layer as a plain mapping, in the form of a spec file; defaults are left out."""
        given = {each.name: getattr(self, each.name) for each in attrs.fields(type(self))}
        required = {a.name: given[a.name] for a in attrs.fields(type(self)) if a.default is attrs.NOTHING}
        untouched = type(self)(**required)
        facts = {k: value for k, value in given.items() if k in required or value != getattr(untouched, k)}
        return {"type": self.type} | {name: _written(name, value) for name, value in facts.items()}

    def __str__(self) -> str:
        facts = ", ".join(
            f"{key}={value}" for key, value in self.to_mapping().items() if key not in {"type", "name", "inputs"}
        )
        return f"{type(self).__name__}({facts})"


@functools.lru_cache(maxsize=4096)
def extents(layer: Layer) -> Layer:
    """Return the layer without its name and inputs: equal for layers of equal type and fields."""
    return attrs.evolve(layer, name=None, inputs=None)


def without_bias(layer: Layer) -> Layer:
    """Return a copy of the layer without a bias; a layer that has none unchanged."""
    without: dict[str, Any] = {"bias": False}
    return attrs.evolve(layer, **without) if getattr(layer, "bias", False) else layer


def plain(value: tuple[int, ...]) -> object:
    """Return a pair or quad as in a spec file: one number if all are equal, as 1 for (1, 1), else a list."""
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

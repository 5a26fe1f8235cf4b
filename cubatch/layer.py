"""
The layers, as frozen records that know their shapes and nothing of how they are run.

Activations are (h, w, c) per sample, filters (k, r, s, c).  Inside a network the input extents
h, w, c are inferred; a layer on its own must be given them.  FLOP follow the field's convention:
a multiply-add is two, and only the products of convolutions, linear layers and attention count
(normalisation, activation and pooling layers are bounded by the bytes they move, see `traffic`).
"""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import attrs
from attrs import field

from cubatch.errors import InvalidSpec

Extents = tuple[int, int, int]
MAX_EXTENT = 2**31 - 1


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


def check_integer(value: object, name: str, minimum: int) -> int:
    """Return a whole number from `minimum` to MAX_EXTENT, or raise InvalidSpec naming the field."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidSpec(name, value, f"a whole number, at least {minimum}")
    if not minimum <= value <= MAX_EXTENT:
        raise InvalidSpec(name, value, f"from {minimum} to {MAX_EXTENT}")
    return value


# Converters only bring values into one form, since they do not know the field; validators judge them.
def whole(value: object) -> int:
    """Turn NumPy's integers into Python's."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return value  # type: ignore[return-value]


def _optional(value: object) -> int | None:
    return None if value is None else whole(value)


def pair(value: object) -> tuple[int, int]:
    """1 -> (1, 1)."""
    return _tuple(value) if _is_list(value) else (whole(value),) * 2  # type: ignore[return-value]


def quad(value: object) -> tuple[int, int, int, int]:
    """1 -> (1, 1, 1, 1); [h, w] -> (h, h, w, w)."""
    items = _tuple(value) if _is_list(value) else (whole(value),) * 4
    return (items[:1] * 2 + items[1:] * 2) if len(items) == 2 else items  # type: ignore[return-value]  # noqa: PLR2004


def _strings(value: object) -> tuple[str, ...] | None:
    return tuple(value) if _is_list(value) else value  # type: ignore[return-value, arg-type]


def integers(value: object) -> tuple[int, ...] | None:
    """[1, 2] -> (1, 2); anything that is no list is left for the validator."""
    return _tuple(value) if _is_list(value) else value  # type: ignore[return-value]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _tuple(value: object) -> tuple[int, ...]:
    return tuple(whole(item) for item in value)  # type: ignore[attr-defined]


Validator = Callable[[object, "attrs.Attribute[Any]", Any], None]


def at_least(minimum: int) -> Validator:
    """Give the validator of whole numbers from `minimum` on."""

    def validate(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        check_integer(value, attribute.name, minimum)

    return validate


def _each_at_least(minimum: int, length: int, form: str) -> Validator:
    def validate(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, tuple) or len(value) != length:
            raise InvalidSpec(attribute.name, value, form)
        for item in value:
            check_integer(item, attribute.name, minimum)

    return validate


PAIR = _each_at_least(1, 2, "a whole number or [h, w]")
QUAD = _each_at_least(0, 4, "a whole number, [h, w] or [top, bottom, left, right]")


def _check_extent(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None:
        check_integer(value, attribute.name, 1)


def check_flag(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Refuse all but true and false."""
    if not isinstance(value, bool):
        raise InvalidSpec(attribute.name, value, "true or false")


def _check_name(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidSpec(attribute.name, value, "text, not empty")


def _check_inputs(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not (isinstance(value, tuple) and all(isinstance(name, str) for name in value)):
        raise InvalidSpec(attribute.name, value, "a list of layer names")


def check_fraction(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Refuse all but numbers above 0 and at most 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise InvalidSpec(attribute.name, value, "a number above 0, at most 1")


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
    # What the backward pass reads besides the gradient: the input "x", the output "y", both, or nothing.
    saves: ClassVar[frozenset[str]] = frozenset()
    # Elementwise: may write its output over its input.
    elementwise: ClassVar[bool] = False

    name: str | None = field(default=None, validator=_check_name)
    inputs: tuple[str, ...] | None = field(default=None, converter=_strings, validator=_check_inputs)
    h: int | None = field(default=None, converter=_optional, validator=_check_extent)
    w: int | None = field(default=None, converter=_optional, validator=_check_extent)
    c: int | None = field(default=None, converter=_optional, validator=_check_extent)

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
            wanted = str(low) if low == high else f"at least {low}"
            raise InvalidSpec("inputs", list(self.inputs or ()), f"{wanted} layer{'s' * (low != 1)}")
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
        saved = self.saves if pass_ is Pass.DGRAD and not self.gemms(Pass.FPROP, 1) else frozenset()
        return x + y + self.parameters + (x if "x" in saved else 0) + (y if "y" in saved else 0)

    def to_mapping(self) -> dict[str, Any]:
        """Give the layer as a plain mapping, in the form of a spec file; defaults are left out."""
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
        raise InvalidSpec("mode", mode, '"inference" or "training"')
    return mode

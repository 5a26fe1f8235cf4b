"""The layer that stands for an operator without a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import attrs
from attrs import field

from cubatch.errors import InvalidSpec
from cubatch.network.extents import A_NAME, Extents, at_least, check_integer, is_name, listed, whole
from cubatch.network.layer import Layer
from cubatch.network.passes import Gemm, Pass

MOST_FLOP = 2**63 - 1


def _extents(value: object) -> Extents | None:
    return None if value is None else listed(value)


def _list_of_extents(value: object) -> tuple[Extents, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(listed(item) for item in value)
    return value  # type: ignore[return-value]


def _check_extents(attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, tuple) or len(value) != 3:  # noqa: PLR2004
        raise InvalidSpec(attribute.name, value, "three whole numbers (h, w, c)")
    for extent in value:
        check_integer(extent, attribute.name, 1)


@attrs.frozen(kw_only=True)
class Opaque(Layer, type="opaque", arity=(1, 1024), products_in_turn=True, backward_reads=frozenset("x")):
    """
    An operator of an imported network without a layer: can be planned and predicted, but not run.

    Attributes:
        operator: Name in the imported network: "aten.cumsum".
        output: (h, w, c) of its output; None is that of its input.
        others: (h, w, c) of each input after the first; inferred in a network.
        flop: FLOP of its matrix products in the forward pass of one sample.
        weights: Number of trained parameters.

    Example:
        >>> Opaque(operator="aten.cumsum", h=7, w=7, c=64, output=(1, 1, 64)).output_shape
        (1, 1, 64)
    """

    operator: str = field(default="unknown")
    output: Extents | None = field(default=None, converter=_extents)
    others: tuple[Extents, ...] = field(default=(), converter=_list_of_extents)
    flop: int = field(default=0, converter=whole, validator=at_least(0, MOST_FLOP))
    weights: int = field(default=0, converter=whole, validator=at_least(0))

    @operator.validator
    def _check_operator(self, attribute: attrs.Attribute[Any], value: object) -> None:
        if not is_name(value):
            raise InvalidSpec(attribute.name, value, A_NAME)

    @output.validator
    def _check_output(self, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is not None:
            _check_extents(attribute, value)

    @others.validator
    def _check_others(self, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, tuple) or len(value) >= self.arity[1]:
            raise InvalidSpec(attribute.name, value, f"a list of (h, w, c), fewer than {self.arity[1]}")
        for item in value:
            _check_extents(attribute, item)

    @property
    def input_shapes(self) -> tuple[Extents, ...]:
        """(h, w, c) of every input."""
        return self.input_shape, *self.others

    @property
    def output_shape(self) -> Extents:
        """(h, w, c) of the output."""
        return self.input_shape if self.output is None else self.output

    def with_inputs(self, shapes: Sequence[Extents]) -> Self:
        """Return a copy with these input extents: h, w, c of the first and `others` of the rest."""
        return attrs.evolve(super().with_inputs(shapes), others=tuple(shapes[1:]))

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of "w", which holds all parameters as one array; empty if there are none."""
        return {"w": (self.weights,)} if self.weights else {}

    def gemms(self, pass_: Pass, batch_size: int) -> tuple[Gemm, ...]:
        """
        Return matrix products with the operator's FLOP in one pass; none if `flop` is 0.

        The forward product has the output's rows and columns, and a depth that amounts to `flop`. The input gradient
        has one such product, or two for several inputs without weights. Without weights there is no weight gradient.
        """
        if not self.flop:
            return ()
        h, w, c = self.output_shape
        rows, depth = batch_size * h * w, -(-self.flop // (2 * math.prod(self.output_shape)))
        if pass_ is Pass.WGRAD:
            return (Gemm(c, depth, rows),) if self.weights else ()
        if pass_ is Pass.FPROP:
            return (Gemm(rows, c, depth),)
        # A product has two factors: parameters are one of them, and of attention's three inputs each product reads two.
        return (Gemm(rows, depth, c),) * (1 if self.weights else min(len(self.input_shapes), 2))

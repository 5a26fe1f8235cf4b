"""Patterns of several ONNX nodes that are one layer of cubatch: GELU by an error function, attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cubatch.network.importers.onnx_operators import default_softmax_axis

_STEP = {"float16": 2**-10, "bfloat16": 2**-7}  # distance from 1 to the next number


class Patterns:
    """
    Recognizes groups of nodes that are GELU or attention, by their last node.

    Args:
        nodes: Nodes of the graph.
        constants: Arrays that do not depend on the network's input, by name; more may be added later.
        shapes: Shapes of all other values, by name.
        opset: Version of the operators.
    """

    def __init__(
        self,
        nodes: Sequence[Any],
        constants: Mapping[str, np.ndarray[Any, Any]],
        shapes: Mapping[str, tuple[int, ...]],
        opset: int,
    ) -> None:
        self._makers = {name: node for node in nodes for name in node.output}
        self._constants, self._shapes = constants, shapes
        self._softmax_axis = default_softmax_axis(opset)
        # Factors are roots of roots, each rounded, and their product: two rounding steps. Casts hide a constant's type.
        self._rounding = 2 * max((_STEP.get(array.dtype.name, 0) for array in constants.values()), default=0)

    def match(self, node: Any) -> tuple[str, tuple[str, ...]] | None:
        """Return "gelu" or "attention_kt" and its inputs' names if a node completes that pattern; None otherwise."""
        if node.op_type == "Mul" and (x := self._gelu_of(node)):
            return "gelu", (x,)
        if node.op_type == "MatMul" and (parts := self._attention_of(node)):
            return "attention_kt", parts
        return None

    def _attention_of(self, node: Any) -> tuple[str, str, str] | None:
        """
        Return the names of q, transposed k and v if a node computes softmax(q k' / sqrt d) v; None otherwise.

        The factor may be applied to q, k or their product.
        """
        softmax = self._maker(node.input[0], "Softmax")
        if softmax is None or node.input[1] in self._constants:
            return None
        scores, factor = self._scaled(softmax.input[0])
        product = self._maker(scores, "MatMul")
        if product is None:
            return None
        (q, of_q), (k, of_k) = (self._scaled(name) for name in product.input)
        shape = self._shapes.get(q, ())
        rank, axis = len(shape), next((each.i for each in softmax.attribute if each.name == "axis"), self._softmax_axis)
        if rank != 4 or axis not in {-1, 3} or {q, k} & self._constants.keys():  # noqa: PLR2004
            return None
        if not math.isclose(factor * of_q * of_k, shape[-1] ** -0.5, rel_tol=max(1e-5, self._rounding)):
            return None
        return q, k, node.input[1]

    def _gelu_of(self, node: Any) -> str | None:
        """Return the name of x if a node computes x / 2 (1 + erf(x / sqrt 2)), factors in any order; None otherwise."""
        factors = self._factors(node)
        numbers = [self._number(name) for name in factors if self._is_number(name)]
        values = [name for name in factors if not self._is_number(name)]
        if math.prod(numbers) != 0.5 or len(values) != 2:  # noqa: PLR2004
            return None
        for x, other in (values, values[::-1]):
            plus = self._maker(other, "Add")
            if plus is None or 1.0 not in [self._number(name) for name in plus.input if self._is_number(name)]:
                continue
            erf = self._maker(next(name for name in plus.input if not self._is_number(name)), "Erf")
            inner, factor = self._scaled(erf.input[0]) if erf is not None else ("", 1.0)
            if inner == x and math.isclose(factor, math.sqrt(0.5), rel_tol=max(1e-6, self._rounding)):
                return x
        return None

    def _maker(self, name: str, kind: str) -> Any:
        node = self._makers.get(name)
        return node if node is not None and node.op_type == kind else None

    def _scaled(self, name: str) -> tuple[str, float]:
        """Return (name of a value, constant factor) whose product is the given value; itself and 1.0 without one."""
        node = self._makers.get(name)
        if node is None or node.op_type not in {"Mul", "Div"} or not any(map(self._is_number, node.input)):
            return name, 1.0
        first, second = node.input
        if node.op_type == "Div":
            return (first, 1 / self._number(second)) if self._is_number(second) else (name, 1.0)
        return (first, self._number(second)) if self._is_number(second) else (second, self._number(first))

    def _factors(self, node: Any) -> list[str]:
        """Return the names of the factors of a product, those of products in it included."""
        factors: list[str] = []
        for name in node.input:
            inner = None if name in self._constants else self._maker(name, "Mul")
            factors += [name] if inner is None else self._factors(inner)
        return factors

    def _is_number(self, name: str) -> bool:
        return name in self._constants and self._constants[name].size == 1

    def _number(self, name: str) -> float:
        return float(self._constants[name].reshape(()))

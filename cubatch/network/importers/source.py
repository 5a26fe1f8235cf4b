"""A foreign network as a list of steps: the readers of PyTorch and ONNX make it, the builder turns it into layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from cubatch.network.importers.refusal import AS_IT_IS

DROPS_ALL = "it drops everything in training"  # why a dropout of probability 1 has no layer

Meaning = tuple[str, Mapping[str, Any], Mapping[str, Any]]
"""An operator in the builder's terms: kind, constants by role (None where one is missing), options."""

Parameters = frozenset[tuple[str, int]]
"""Trained parameters, each with its name and number of elements."""


def united(trained: Mapping[Any, Parameters], read: Iterable[Any]) -> Parameters:
    """
    Return the trained parameters, as (name, elements), on which at least one value in `read` depends.

    `trained` has the parameters on which each value depends; a value that it lacks depends on none.

    Example:
        >>> sorted(united({"w": frozenset({("w", 6)}), "2 w": frozenset({("w", 6)})}, ["w", "2 w", "x"]))
        [('w', 6)]
    """
    return frozenset().union(*(trained.get(each, frozenset()) for each in read))


def einsum_flop(equation: str, shapes: Sequence[Sequence[int]]) -> int:
    """
    Return the FLOP of an Einstein sum of two factors; 0 for another number of factors or shapes that do not fit.

    Example:
        >>> einsum_flop("bij, bjk -> bik", [(2, 3, 4), (2, 4, 5)])
        240
    """
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if len(terms) != 2 or len(shapes) != 2:  # noqa: PLR2004
        return 0
    sizes: dict[str | int, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        before, dots, after = term.partition("...")
        others = len(shape) - len(before) - len(after)
        if others < 0 or (others and not dots):
            return 0
        # Axes of an ellipsis are numbered from the last one, and one factor may have size 1 there.
        for axis, size in zip([*before, *range(-others, 0), *after], shape, strict=True):
            sizes[axis] = max(size, sizes.get(axis, 1))
    return 2 * math.prod(sizes.values())


def unlike(reason: str) -> Meaning:
    """Return (kind, constants, options) of an operator that has no layer: no kind, and the reason as an option."""
    return "", {}, {"reason": reason}


def first_position(start: int, extent: int) -> int:
    """
    Return the first position of a slice of an axis of `extent` positions; a negative start counts from its end.

    Example:
        >>> [first_position(start, 8) for start in (3, -3, -9)]
        [3, 5, 0]
    """
    return start if start >= 0 else max(start + extent, 0)


_SEVERAL_INPUTS = frozenset({"", "add", "mul", "concat", "prepend", "attention", "attention_kt", "reshape"})


def single_input(meaning: Meaning, num_values: int) -> Meaning:
    """Return `meaning`, or that of a call without a layer if the call reads several values and its layer only one."""
    if meaning[0] in _SEVERAL_INPUTS or num_values == 1:
        return meaning
    return unlike(f"it reads {num_values} values that depend on the input, where its layer reads one")


@attrs.frozen(kw_only=True)
class Step:
    """An operator of the network that is imported."""

    kind: str  # a key of `layer_rules.RULES`; any other text has no layer
    operator: str  # its name in that network: "aten.conv2d", "Conv"
    place: str  # the path of its module, or the name of its node
    reads: tuple[str, ...]  # names of the values that it reads, without constants
    result: str  # name of the value that it makes
    shape: tuple[int, ...]  # shape of the result, with the batch in front
    # arrays that it reads, by role: "w" and "b" of a product, "gamma", "beta", "mean" and "var" of a norm
    constants: Mapping[str, Any] = attrs.field(factory=dict)
    options: Mapping[str, Any] = attrs.field(factory=dict)  # further arguments, by the names that its rule reads
    flop: int = 0  # FLOP of its matrix product for the whole batch
    weights: int = 0  # number of trained parameters that it reads


@attrs.frozen(kw_only=True)
class Source:
    """A network of another framework, as read from a file or a traced module."""

    name: str  # its name
    input: str  # name of the input value
    input_shape: tuple[int, ...]  # shape of the input, with the batch in front
    steps: tuple[Step, ...]  # its operators in order of execution
    output: str  # name of the output value
    as_it_is: str = AS_IT_IS  # how to tune it without importing it, as the end of a sentence

"""A foreign network as steps in order, whoever wrote it: what the front ends make, and the builder reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from cubatch.network.importers.refusal import AS_IT_IS

DROPS_ALL = "it drops everything in training"
"""Why a dropout of probability 1 has no layer."""

Meaning = tuple[str, Mapping[str, Any], Mapping[str, Any]]
"""What a front end makes of an operator: kind, constants by role (None: there is none), options."""

Parameters = frozenset[tuple[str, int]]
"""Trained parameters, each by its name and how many numbers it has."""


def united(trained: Mapping[Any, Parameters], read: Iterable[Any]) -> Parameters:
    """
    Return the parameters that are in anything of what is read, each once.

    Example:
        >>> sorted(united({"w": frozenset({("w", 6)}), "2 w": frozenset({("w", 6)})}, ["w", "2 w", "x"]))
        [('w', 6)]
    """
    return frozenset().union(*(trained.get(each, frozenset()) for each in read))


def einsum_flop(equation: str, shapes: Sequence[Sequence[int]]) -> int:
    """
    Count the FLOP of an Einstein sum of two factors; 0 of what is no product of two.

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
        # What dots stand for is counted from its last axis on, and there may be one position of it in one factor.
        for axis, size in zip([*before, *range(-others, 0), *after], shape, strict=True):
            sizes[axis] = max(size, sizes.get(axis, 1))
    return 2 * math.prod(sizes.values())


def unlike(reason: str) -> Meaning:
    """Return the meaning of an operator that has no layer as it was called, and why."""
    return "", {}, {"reason": reason}


def first_position(start: int, extent: int) -> int:
    """
    Return the first position of a slice of an axis: a negative one counts from its end.

    Example:
        >>> [first_position(start, 8) for start in (3, -3, -9)]
        [3, 5, 0]
    """
    return start if start >= 0 else max(start + extent, 0)


_OF_SEVERAL = frozenset({"", "add", "mul", "concat", "prepend", "attention", "attention of turned keys", "reshape"})


def of_one(meaning: Meaning, num_values: int) -> Meaning:
    """Refuse what has a layer of one input, and reads more that depends on the network's input: a bias, a bound."""
    if meaning[0] in _OF_SEVERAL or num_values == 1:
        return meaning
    return unlike(f"it reads {num_values} values that depend on the input, where its layer reads one")


@attrs.frozen(kw_only=True)
class Step:
    """
    One operator of a foreign network.

    Attributes:
        kind: What it does, in the builder's words (`rules.RULES`); what is none of them has no layer.
        operator: As its source calls it: "aten.conv2d", "Conv".
        place: Where it is: the path of a module, the name of a node.
        reads: Values that it reads, without constants.
        result: The value that it makes.
        shape: Of the result, with the batch in front.
        constants: Arrays that it reads, by role: "w" and "b" of a product, "gamma", "beta", "mean" and "var" of a norm.
        options: What else it was told, by the names that its rule takes.
        flop: FLOP of its matrix product, of the whole batch.
        weights: Number of trained parameters that it reads.
    """

    kind: str
    operator: str
    place: str
    reads: tuple[str, ...]
    result: str
    shape: tuple[int, ...]
    constants: Mapping[str, Any] = attrs.field(factory=dict)
    options: Mapping[str, Any] = attrs.field(factory=dict)
    flop: int = 0
    weights: int = 0


@attrs.frozen(kw_only=True)
class Source:
    """
    A foreign network.

    Attributes:
        name: What it is called.
        input: The value that it is given.
        input_shape: Shape of that, with the batch in front.
        steps: Its operators in order of execution.
        output: The value that it gives.
        as_it_is: How it is tuned without being imported, as a phrase.
    """

    name: str
    input: str
    input_shape: tuple[int, ...]
    steps: tuple[Step, ...]
    output: str
    as_it_is: str = AS_IT_IS

"""Converters and validators of layer fields: extents, windows, flags, names."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from cubatch.errors import InvalidSpec
from cubatch.units import is_visible, visible

Extents = tuple[int, int, int]
MAX_EXTENT = 2**31 - 1
MOST_NAME = 1000  # characters
A_NAME = f"text without control characters, not empty, of at most {MOST_NAME} characters"


def check_integer(value: object, name: str, minimum: int, most: int = MAX_EXTENT) -> int:
    """Return the value if it is a whole number from `minimum` to `most`; else raise InvalidSpec for field `name`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidSpec(name, value, f"a whole number from {minimum} to {most}")
    if not minimum <= value <= most:
        raise InvalidSpec(name, value, f"from {minimum} to {most}")
    return value


# Converters do not know the field, so they leave invalid values to the validators.
def whole(value: object) -> int:
    """Return an integer of any type, such as NumPy's, as a Python int; all other values, such as None, unchanged."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return value  # type: ignore[return-value]


def pair(value: object) -> tuple[int, int]:
    """Return a single value as a pair, 1 as (1, 1), and a list of any length as a tuple."""
    return _tuple(value) if _is_list(value) else (whole(value),) * 2  # type: ignore[return-value]


def quad(value: object) -> tuple[int, int, int, int]:
    """Return a single value four times, [h, w] as (h, h, w, w), and any other list as a tuple."""
    items = _tuple(value) if _is_list(value) else (whole(value),) * 4
    return (items[:1] * 2 + items[1:] * 2) if len(items) == 2 else items  # type: ignore[return-value]  # noqa: PLR2004


def listed(value: object) -> Any:
    """Return a list as a tuple, with integers of any type as Python ints; all other values, such as None, unchanged."""
    return _tuple(value) if _is_list(value) else value


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _tuple(value: object) -> tuple[int, ...]:
    return tuple(whole(item) for item in value)  # type: ignore[attr-defined]


Validator = Callable[[object, "attrs.Attribute[Any]", Any], None]


def at_least(minimum: int, most: int = MAX_EXTENT) -> Validator:
    """Return a validator that raises InvalidSpec unless a field is a whole number from `minimum` to `most`."""

    def validate(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        check_integer(value, attribute.name, minimum, most)

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


def check_flag(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Raise InvalidSpec unless the field is True or False."""
    if not isinstance(value, bool):
        raise InvalidSpec(attribute.name, value, "true or false")


def is_name(value: object) -> bool:
    """Return whether a value is a valid name of a layer or network: text of 1 to 1000 visible characters."""
    return isinstance(value, str) and 0 < len(value) <= MOST_NAME and is_visible(value)


def printable(name: str) -> str:
    r"""
    Return a valid name of a layer or network for any text: shortened, with control characters escaped, or "unnamed".

    Example:
        >>> print(printable("conv\x1b[2J"))
        conv\x1b[2J
    """
    return visible(name, keep="")[: MOST_NAME // 2] or "unnamed"


def check_name(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Raise InvalidSpec unless the field is None or a valid name."""
    if value is not None and not is_name(value):
        raise InvalidSpec(attribute.name, value, A_NAME)


def check_inputs(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Raise InvalidSpec unless the field is None or a tuple of valid layer names."""
    if value is not None and not (isinstance(value, tuple) and all(map(is_name, value))):
        raise InvalidSpec(attribute.name, value, "a list of layer names")


def between(low: float, high: float, allowed: str, *, low_open: bool = False, high_open: bool = False) -> Validator:
    """
    Return a validator that raises InvalidSpec unless a field is a number from `low` to `high`.

    `low_open` and `high_open` exclude that end. `allowed` describes the range in the error.
    """

    def validate(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not is_number or (low_open and value == low) or (high_open and value == high):
            raise InvalidSpec(attribute.name, value, allowed)

    return validate

"""
Converters for the fields of records that are written as JSON and read back.

Each takes what a caller or a JSON file may hold, gives what the record keeps, and refuses the rest
with a TypeError or ValueError whose text continues "<field> ...".  NaN and infinity are refused:
what is unknown is None.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Any

from cubatch.errors import InvalidArgument


def required_number(value: float) -> float:
    """Take a finite number; NumPy's become Python's."""
    if not _is(value, Real):
        raise TypeError(f"must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"must be finite, got {value!r}")
    return float(value)


def number(value: float | None) -> float | None:
    """Take a finite number or None."""
    return None if value is None else required_number(value)


def required_whole(value: int) -> int:
    """Take an integer; NumPy's become Python's."""
    if not _is(value, Integral):
        raise TypeError(f"must be an integer, got {value!r}")
    return int(value)


def whole(value: int | None) -> int | None:
    """Take an integer or None."""
    return None if value is None else required_whole(value)


def required_text(value: str) -> str:
    """Take text."""
    if not _is(value, str):
        raise TypeError(f"must be text, got {value!r}")
    return value


def text(value: str | None) -> str | None:
    """Take text or None."""
    return None if value is None else required_text(value)


def items(value: Iterable[Any]) -> tuple[Any, ...]:
    """Take a list of anything."""
    if _is(value, str | Mapping) or not _is(value, Iterable):
        raise TypeError(f"must be a list, got {value!r}")
    return tuple(value)


def texts(value: Iterable[str]) -> tuple[str, ...]:
    """Take a list of text."""
    return tuple(required_text(item) for item in items(value))


def wholes(value: Iterable[int]) -> tuple[int, ...]:
    """Take a list of integers."""
    return tuple(required_whole(item) for item in items(value))


def numbers(value: Iterable[float]) -> tuple[float, ...]:
    """Take a list of finite numbers."""
    return tuple(required_number(item) for item in items(value))


def interval(value: Sequence[float] | None) -> tuple[float, float] | None:
    """Take [low, high] or None."""
    if value is None:
        return None
    ends = numbers(value)
    if len(ends) != 2 or ends[0] > ends[1]:  # noqa: PLR2004 - two ends
        raise ValueError(f"must be [low, high], got {value!r}")
    return ends[0], ends[1]


def mapping(value: Mapping[str, Any]) -> dict[str, Any]:
    """Take a mapping, as JSON would give it back, so that results compare equal after a round trip."""
    if not _is(value, Mapping):
        raise TypeError(f"must be a mapping, got {value!r}")
    return {str(key): _plain(item) for key, item in value.items()}


def mappings(value: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Take a list of mappings."""
    return tuple(mapping(item) for item in items(value))


def _is(value: object, kind: type | UnionType) -> bool:
    """Check a type that annotations promise and a JSON file does not keep; True and False are no numbers."""
    return isinstance(value, kind) and not (isinstance(value, bool) and kind in (Real, Integral))


def _plain(value: object) -> object:
    if value is None or isinstance(value, str | bool):
        return value
    if type(value) is float:  # what most are: an ABC is asked slowly
        return required_number(value)
    if isinstance(value, Mapping):
        return mapping(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Integral):
        return int(value)
    if not isinstance(value, Real):
        raise TypeError(f"holds {value!r}, which JSON cannot hold")
    return required_number(float(value))


MAX_BATCH_SIZE = 2**31 - 1


def check_batch_size(value: int, name: str = "batch_size") -> int:
    """Return a batch size, or raise InvalidArgument."""
    return check_whole(name, value, most=MAX_BATCH_SIZE)


def check_whole(field: str, value: int, *, least: int = 1, most: int | None = None) -> int:
    """
    Return a whole number as Python's int.

    Raises:
        InvalidArgument: If it is none, or out of its range.
    """
    allowed = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    whole = isinstance(value, (int, Integral)) and not isinstance(value, bool)  # int first: an ABC is asked slowly
    if not whole or value < least or (most is not None and value > most):
        raise InvalidArgument(field, value, allowed)
    return int(value)


def is_number(value: object) -> bool:
    """Whether it is a number, not True or False."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_number(field: str, value: float, *, least: float = 0.0, above: float | None = None) -> float:
    """
    Return a finite number as it is.

    Args:
        field: What an error calls it.
        value: The number.
        least: It may not be below this.
        above: It must be above this; then `least` says nothing.

    Raises:
        InvalidArgument: If it is none, or out of its range.
    """
    in_range = is_number(value) and value <= sys.float_info.max and (value >= least if above is None else value > above)
    if not in_range:
        bound = f"of at least {least:g}" if above is None else f"above {above:g}"
        raise InvalidArgument(field, value, f"a finite number {bound}")
    return value


def check_kind(field: str, value: object, kind: type, allowed: str) -> None:
    """
    Refuse what is of another type.

    Raises:
        InvalidArgument: If it is.
    """
    if not isinstance(value, kind):
        raise InvalidArgument(field, value, allowed)

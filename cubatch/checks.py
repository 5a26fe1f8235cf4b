"""
Converters for the fields of records that are written as JSON and read back, and checks of arguments.

A converter takes a value of a caller or a JSON file and returns the value of the record. For any other value it raises
a TypeError or ValueError whose text continues "<field> ...". NaN and infinity are rejected: an unknown value is None.
`attrs.converters.optional` makes a converter accept None too.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar

import attrs

from cubatch.errors import InvalidArgument, UnknownName
from cubatch.units import shown

MOST = 1e30
"""Largest figure: more than all FLOP ever done, and its square and its inverse are finite numbers."""
MAX_BATCH_SIZE = 2**31 - 1
_MOST_CHARACTERS = 300  # of a validator's message
_Record = TypeVar("_Record")
EXPERIMENTAL = ("flash_attention", "gelu_products", "norm_sums", "reversed_sums", "space_to_depth")
"""Ways to run cubatch kernels that were not measured on a GPU yet: see `Model` in `cubatch.engine.network`."""


def number(value: float) -> float:
    """Return a finite number as a Python float; raise TypeError or ValueError otherwise."""
    if not _is(value, Real):
        raise TypeError(f"must be a number, got {shown(value)}")
    try:
        figure = float(value)
    except OverflowError:  # of an integer
        figure = math.inf
    if not math.isfinite(figure):
        raise ValueError(f"must be finite, got {shown(value)}")
    return figure


def positive(value: float) -> float:
    """Return a number from 1e-30 to 1e30 as a Python float; raise TypeError or ValueError otherwise."""
    figure = number(value)
    if not 1 / MOST <= figure <= MOST:
        raise ValueError(f"must be from {1 / MOST:g} to {MOST:g}, got {shown(value)}")
    return figure


def amount(value: float) -> float:
    """Return 0, or a number from 1e-30 to 1e30; raise TypeError or ValueError otherwise."""
    return number(value) if value == 0 else positive(value)


def whole(value: int) -> int:
    """Return an integer of at most 64 bits as a Python int; raise TypeError or ValueError otherwise."""
    if not _is(value, Integral):
        raise TypeError(f"must be an integer, got {shown(value)}")
    if int(value).bit_length() > 64:  # noqa: PLR2004 - the limit of other JSON readers and nearly of SQLite
        raise ValueError(f"must be an integer of at most 64 bits, got {shown(value)}")
    return int(value)


def count(value: int) -> int:
    """Return an integer from 0 to 2**64 - 1 as a Python int; raise TypeError or ValueError otherwise."""
    integer = whole(value)
    if integer < 0:
        raise ValueError(f"must be at least 0, got {integer}")
    return integer


def size(value: int) -> int:
    """Return a batch size, from 1 to MAX_BATCH_SIZE, as a Python int; raise TypeError or ValueError otherwise."""
    integer = whole(value)
    if not 1 <= integer <= MAX_BATCH_SIZE:
        raise ValueError(f"must be from 1 to {MAX_BATCH_SIZE}, got {integer}")
    return integer


def text(value: str) -> str:
    """Return the value if it is a str; raise TypeError otherwise."""
    if not _is(value, str):
        raise TypeError(f"must be text, got {shown(value)}")
    return value


def flag(value: bool) -> bool:  # noqa: FBT001 - a converter
    """Return True or False as it is; raise TypeError for any other value."""
    if not _is(value, bool):
        raise TypeError(f"must be true or false, got {shown(value)}")
    return value


def items(value: Iterable[Any]) -> tuple[Any, ...]:
    """Return the items of an iterable as a tuple; raise TypeError for a str, a mapping or an object without items."""
    if _is(value, str | Mapping) or not _is(value, Iterable):
        raise TypeError(f"must be a list, got {shown(value)}")
    return tuple(value)


def texts(value: Iterable[str]) -> tuple[str, ...]:
    """Return the items of an iterable of str as a tuple; raise TypeError if an item is no str, or for a single str."""
    return tuple(text(item) for item in items(value))


def wholes(value: Iterable[int]) -> tuple[int, ...]:
    """Return integers of at most 64 bits as a tuple; raise TypeError or ValueError otherwise."""
    return tuple(whole(item) for item in items(value))


def positives(value: Iterable[float]) -> tuple[float, ...]:
    """Return numbers from 1e-30 to 1e30 as a tuple of floats; raise TypeError or ValueError otherwise."""
    return tuple(positive(item) for item in items(value))


def interval(value: Sequence[float]) -> tuple[float, float]:
    """Return [low, high], both from 1e-30 to 1e30, as a tuple; raise TypeError or ValueError otherwise."""
    ends = positives(value)
    if len(ends) != 2 or ends[0] > ends[1]:  # noqa: PLR2004 - two ends
        raise ValueError(f"must be [low, high] with low at most high, got {shown(value)}")
    return ends[0], ends[1]


def mapping(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping as a dict of JSON types, such as lists for tuples; raise TypeError or ValueError otherwise."""
    if not _is(value, Mapping):
        raise TypeError(f"must be a mapping, got {shown(value)}")
    plain: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False, default=_plain))
    return plain


def mapping_of(value: Mapping[str, Any], known: Mapping[str, Callable[[Any], object]]) -> dict[str, Any]:
    """Return a mapping by `mapping`; the functions of `known` check the values of their keys that are not None."""
    facts = mapping(value)
    for name, check in known.items():
        if facts.get(name) is not None:
            try:
                check(facts[name])
            except (TypeError, ValueError) as error:
                raise ValueError(f"holds {name}, which {error}") from error
    return facts


def mappings(value: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return a tuple of mappings, each converted by `mapping`; raise TypeError or ValueError otherwise."""
    return tuple(mapping(item) for item in items(value))


def read(cls: type[_Record], data: object) -> _Record:
    """
    Return a record of class `cls` made of a mapping; a record of the class is returned as it is.

    Raises ValueError that names a missing or wrong field.
    """
    if isinstance(data, cls):
        return data
    if not isinstance(data, Mapping):
        raise TypeError(f"must be a mapping, got {shown(data)}")
    values = {}
    for attribute in attrs.fields(cls):  # type: ignore[arg-type]
        name = attribute.name
        if name not in data:
            if attribute.default is attrs.NOTHING:
                raise ValueError(f"{name} is missing")
            continue
        try:
            values[name] = attribute.converter(data[name]) if attribute.converter else data[name]
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{name} {error}") from error
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(str(error.args[0])[:_MOST_CHARACTERS]) from error


def _is(value: object, kind: type | UnionType) -> bool:
    """Return whether a value is of a type; True and False do not count as numbers."""
    return isinstance(value, kind) and not (isinstance(value, bool) and kind in (Real, Integral))


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"holds {shown(value)}, which JSON cannot hold")


def check_batch_size(value: int, name: str = "batch_size") -> int:
    """Return a batch size from 1 to MAX_BATCH_SIZE as an int; raise InvalidArgument on the argument `name` if not."""
    return check_whole(name, value, most=MAX_BATCH_SIZE)


def check_whole(field: str, value: int, *, least: int = 1, most: int | None = None) -> int:
    """Return an integer from `least` to `most` (None: no limit) as an int; raise InvalidArgument on `field` if not."""
    allowed = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    whole = isinstance(value, (int, Integral)) and not isinstance(value, bool)  # int first: ABCs are slow
    if not whole or value < least or (most is not None and value > most):
        raise InvalidArgument(field, value, allowed)
    return int(value)


def is_number(value: object) -> bool:
    """Return whether a value is a real number; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_number(field: str, value: float, *, least: float = 0.0, above: float | None = None, unit: str = "") -> float:
    """
    Return the value if it is a finite number in range; raise InvalidArgument otherwise.

    It must be at least `least`, or above `above` unless that is None. `unit` is for the error.
    """
    try:
        figure = number(value)
    except (TypeError, ValueError):
        figure = math.nan
    if not (figure >= least if above is None else figure > above):
        bound = f", at least {least:g}" if above is None else f" above {above:g}"
        raise InvalidArgument(field, value, f"a finite number{f' of {unit}' if unit else ''}{bound}")
    if figure and not 1 / MOST <= abs(figure) <= MOST:  # results cannot hold it
        raise InvalidArgument(field, value, f"a number{f' of {unit}' if unit else ''} from {1 / MOST:g} to {MOST:g}")
    return value


def check_kind(field: str, value: object, kind: type, allowed: str) -> None:
    """Raise InvalidArgument for `field` if the value is not of type `kind`, which `allowed` describes to the user."""
    if not isinstance(value, kind):
        raise InvalidArgument(field, value, allowed)


def check_optimizer(mode: str, optimizer: object) -> None:
    """Raise InvalidArgument in inference for an optimizer that is not the default: the mode was forgotten."""
    if mode == "inference" and optimizer != "sgd":
        allowed = "left out in inference, which has none"
        raise InvalidArgument("optimizer", optimizer, allowed, "Or pass mode='training'.")


def check_options(options: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raise UnknownName if a key of `options` is no parameter of `function`, to which they are passed as keywords."""
    known = inspect.signature(function).parameters
    for name in options:
        if name not in known:
            raise UnknownName("argument", name, known, f"The options are those of {function.__name__}().")


def check_experimental(names: Collection[str]) -> frozenset[str]:
    """
    Return a name of an experimental kernel, or a collection of such names, as a set of names.

    Raises:
        UnknownName: If a name is not in `EXPERIMENTAL`.
        InvalidArgument: If the value is no collection of names.

    Example:
        >>> sorted(check_experimental("norm_sums"))
        ['norm_sums']
    """
    given = [names] if isinstance(names, str) else names
    if not isinstance(given, Collection):
        raise InvalidArgument("experimental", names, f"a list of names out of {', '.join(EXPERIMENTAL)}")
    for name in given:
        if name not in EXPERIMENTAL:
            raise UnknownName("experimental", name, EXPERIMENTAL)
    return frozenset(given)


def check_path(path: object, field: str = "path") -> None:
    """Raise InvalidArgument for the argument `field` if the value is neither a str nor a path object."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgument(field, path, "a path: text or a pathlib.Path")

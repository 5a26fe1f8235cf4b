"""Formatting of values in tables and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from cubatch.units import format_tenths

if TYPE_CHECKING:
    from cubatch.tuning.results import TuningResult


def plain(record: Any) -> Any:
    """
    Return a record, mapping or sequence as dicts and lists for JSON, with None in place of NaN and infinity.

    Example:
        >>> plain({1: (2.0, math.inf)})
        {'1': [2.0, None]}
    """
    if attrs.has(type(record)):
        return {key: plain(value) for key, value in attrs.asdict(record, recurse=False).items()}
    if isinstance(record, Mapping):
        return {str(key): plain(value) for key, value in record.items()}
    if isinstance(record, tuple | list | set | frozenset):
        return [plain(value) for value in record]
    return None if isinstance(record, float) and not math.isfinite(record) else record


def written(write: Callable[[float], str], value: float | None) -> str | None:
    """Return write(value), the number as text; None if `value` is None."""
    return None if value is None else write(value)


def half_width(tuned: TuningResult | None) -> str | None:
    """
    Return half the width of the rate's 90 % interval at the recommended batch size as text, "± 2.3 %".

    It is None without a recommendation or an interval.
    """
    chosen = None if tuned is None or tuned.batch_size is None else tuned.sizes[tuned.batch_size]
    return None if chosen is None else written(lambda share: f"± {format_tenths(share)}", chosen.half_width)


def ended_by(tuned: TuningResult) -> str | None:
    """Return the reason for which the search ended, `decided_by`, in words; None if it is None."""
    return None if tuned.decided_by is None else tuned.decided_by.replace("_", " ")


def span(write: Callable[[Any], str], values: Iterable[float] | None) -> str | None:
    """
    Return the range of values as text, each written by `write`, or one value if all are equal; None without values.

    Example:
        >>> span(str, (8, 4, 6)), span(str, (4, 4)), span(str, ())
        ('4 to 8', '4', None)
    """
    known = sorted(values or ())
    if not known:
        return None
    least, most = write(known[0]), write(known[-1])
    return least if least == most else f"{least} to {most}"


def shape(extents: Sequence[int]) -> str:
    """
    Return the extents of an array as text.

    Example:
        >>> shape((28, 28, 1))
        '28 x 28 x 1'
    """
    return " x ".join(str(extent) for extent in extents)

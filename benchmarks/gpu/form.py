"""
Form of a pass: an item a line, and timings as columns.

A pass times hundreds of cases with a dozen variants each, and a timing has fifteen fields.  With their names in every
timing the file would be nearly four times as large.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from cubatch.measure.records import Timing

_FIELDS = {field.name for field in attrs.fields(Timing)}


def text_of(result: Mapping[str, Any]) -> str:
    """Write a pass as JSON: a line for its facts, for each stage's own, and for each item."""
    stages = [_with(run, "items", map(_line, run["items"])) for run in result["stages"]]
    return _with(result, "stages", stages) + "\n"


def columns(timings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """
    Turn timings into a list of values for each field, without fields of which no timing knows anything.

    Example:
        >>> columns([{"round": 0, "seconds": 0.5, "joules": None}, {"round": 1, "seconds": 0.25, "joules": None}])
        {'round': [0, 1], 'seconds': [0.5, 0.25]}
    """
    table = {name: [timing[name] for timing in timings] for name in timings[0]}
    return {name: values for name, values in table.items() if any(value is not None for value in values)}


def _with(record: Mapping[str, Any], name: str, lines: Iterable[str]) -> str:
    """Write a record in a line, and behind it a list of it, in lines of their own."""
    facts = _line({key: value for key, value in record.items() if key != name})
    return f'{facts[:-1]},"{name}":[\n' + ",\n".join(lines) + "\n]}"


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_small(record), separators=(",", ":"), allow_nan=False)


def _small(value: Any) -> Any:
    """Return a value with its timings as columns."""
    if isinstance(value, Mapping):
        return {key: _small(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        if value and all(isinstance(each, Mapping) and each.keys() == _FIELDS for each in value):
            return columns(value)
        return [_small(each) for each in value]
    return value

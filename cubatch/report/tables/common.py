"""How values of all kinds stand in a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    pass


Grid = dict[str, Any]


def plain(record: Any) -> Any:
    """
    Turn a record into plain mappings and lists for JSON, which knows no NaN and no infinity: those are None.

    Example:
        >>> from cubatch.measure.records import Candidate
        >>> plain(Candidate(8, ("power of two",)))["reasons"]
        ['power of two']
    """
    if attrs.has(type(record)):
        return {key: plain(value) for key, value in attrs.asdict(record, recurse=False).items()}
    if isinstance(record, Mapping):
        return {str(key): plain(value) for key, value in record.items()}
    if isinstance(record, tuple | list | set | frozenset):
        return [plain(value) for value in record]
    return None if isinstance(record, float) and not math.isfinite(record) else record


def written(write: Callable[[float], str], value: float | None) -> str | None:
    """Write a number where there is one."""
    return None if value is None else write(value)

"""Converters take what records may hold and refuse the rest, so that JSON can hold it and gives it back unchanged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubatch import fields

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("convert", "value", "kept"),
    [
        (fields.number, np.float32(0.5), 0.5),
        (fields.number, None, None),
        (fields.whole, np.int64(7), 7),
        (fields.whole, None, None),
        (fields.text, None, None),
        (fields.texts, ["a", "b"], ("a", "b")),
        (fields.wholes, [1, 2], (1, 2)),
        (fields.numbers, [1, 2.5], (1.0, 2.5)),
        (fields.interval, [1, 2], (1.0, 2.0)),
        (fields.interval, None, None),
        (fields.mapping, {"a": (1, {2: np.float64(0.5)})}, {"a": [1, {"2": 0.5}]}),
    ],
)
def test_good_values_become_what_the_record_keeps(convert: Callable[[Any], Any], value: object, kept: object) -> None:
    """NumPy's numbers become Python's, lists become tuples, and None stays None where it is allowed."""
    converted = convert(value)
    assert converted == kept
    assert type(converted) is type(kept)


@pytest.mark.parametrize(
    ("convert", "value"),
    [
        (fields.number, "1"),
        (fields.number, True),
        (fields.number, math.nan),
        (fields.number, -math.inf),
        (fields.whole, 1.0),
        (fields.whole, False),
        (fields.required_whole, None),
        (fields.required_text, None),
        (fields.text, 3),
        (fields.texts, "ab"),
        (fields.texts, [None]),
        (fields.wholes, 5),
        (fields.numbers, [None]),
        (fields.numbers, [math.nan]),
        (fields.interval, [1.0]),
        (fields.interval, [2.0, 1.0]),
        (fields.mapping, [1]),
        (fields.mapping, {"a": {1, 2}}),
        (fields.mapping, {"a": math.nan}),
        (fields.mappings, {"a": 1}),
    ],
)
def test_bad_values_are_refused(convert: Callable[[Any], Any], value: object) -> None:
    """Nothing is converted silently: text is no number, True is no 1, 1.0 is no integer, NaN is nothing."""
    with pytest.raises((TypeError, ValueError), match=r"must be|holds"):
        convert(value)


@given(st.dictionaries(st.text(), PLAIN, max_size=4))
def test_a_mapping_is_what_json_gives_back(value: dict[str, Any]) -> None:
    """Keeping a mapping and reading it back from JSON are the same."""
    kept = fields.mapping(value)
    assert json.loads(json.dumps(kept)) == kept

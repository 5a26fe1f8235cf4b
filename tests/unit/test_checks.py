"""Converters take what records may hold and refuse the rest, so that JSON can hold it and gives it back unchanged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cubatch import checks
from cubatch.errors import InvalidArgument

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 2**64, 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("convert", "value", "kept"),
    [
        (checks.number, np.float32(0.5), 0.5),
        (checks.whole, np.int64(7), 7),
        (checks.texts, ["a", "b"], ("a", "b")),
        (checks.wholes, [1, 2], (1, 2)),
        (checks.positives, [1, 2.5], (1.0, 2.5)),
        (checks.interval, [1, 2], (1.0, 2.0)),
        (checks.mapping, {"a": (1, {2: np.float64(0.5)})}, {"a": [1, {"2": 0.5}]}),
    ],
)
def test_good_values_become_what_the_record_keeps(convert: Callable[[Any], Any], value: object, kept: object) -> None:
    """NumPy's numbers become Python's, and lists become tuples."""
    converted = convert(value)
    assert converted == kept
    assert type(converted) is type(kept)


@pytest.mark.parametrize(
    ("convert", "value"),
    [
        (checks.number, "1"),
        (checks.number, True),
        (checks.number, math.nan),
        (checks.whole, 1.0),
        (checks.whole, None),
        (checks.text, None),
        (checks.text, 3),
        (checks.texts, "ab"),
        (checks.wholes, 5),
        (checks.positives, [None]),
        (checks.interval, [1.0]),
        (checks.interval, [2.0, 1.0]),
        (checks.mapping, [1]),
        (checks.mapping, {"a": {1, 2}}),
        (checks.mappings, {"a": 1}),
    ],
)
def test_bad_values_are_refused(convert: Callable[[Any], Any], value: object) -> None:
    """Nothing is converted silently: text is no number, True is no 1, 1.0 is no integer, NaN is nothing."""
    with pytest.raises((TypeError, ValueError), match=r"must be|holds"):
        convert(value)


@given(st.dictionaries(st.text(), PLAIN, max_size=4))
def test_a_mapping_is_what_json_gives_back(value: dict[str, Any]) -> None:
    """Keeping a mapping and reading it back from JSON are the same."""
    kept = checks.mapping(value)
    assert json.loads(json.dumps(kept)) == kept


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.float32(0.5), np.float16(0.5), Fraction(1, 2), 1, np.int64(1)])
def test_numbers_of_any_type_are_in_range(value: Any) -> None:
    """A limit of 64-bit floats has no value in 16 or 32 bits, which NumPy warns of."""
    assert checks.check_number("budget", value, above=0.0) == value


@pytest.mark.parametrize(
    "value", [10**400, Fraction(10**400), math.nan, math.inf, np.float32("inf"), "1", True, 0, 1e31, 1e-31]
)
def test_numbers_out_of_range_are_named(value: Any) -> None:
    """Also those that no float holds, and what is no number."""
    with pytest.raises(InvalidArgument) as refused:
        checks.check_number("budget", value, above=0.0)
    assert refused.value.field == "budget"

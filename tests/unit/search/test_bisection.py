"""Where a limit lies: what is tried between a size that keeps it and one that does not."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, example, given, strategies as st

from cubatch.search.bisection import is_closed, next_size

SIZES = st.integers(1, 10**6)


@given(low=SIZES, high=SIZES)
def test_a_limit_is_met_within_two_percent_or_one(low: int, high: int) -> None:
    """The two sides lie 1 apart, or as near as a fiftieth of the smaller."""
    assume(low < high)
    assert is_closed(low, high) == (high - low == 1 or 50 * (high - low) <= low)


@given(low=SIZES, gap=SIZES, guess=st.none() | st.floats(-1e7, 1e7), multiple=st.sampled_from([1, 2, 8, 32]))
@example(low=96, gap=8, guess=None, multiple=8)  # no multiple of 8 lies between
@example(low=97, gap=8, guess=None, multiple=8)  # one does, above the middle
def test_what_is_tried_lies_strictly_between(low: int, gap: int, guess: float | None, multiple: int) -> None:
    """Wherever the guess, the next size is neither end and a multiple; none is tried only where there is none."""
    size = next_size(low, low + gap, guess, multiple)
    if size is None:
        assert is_closed(low, low + gap) or (low + gap - 1) // multiple * multiple <= low
    else:
        assert low < size < low + gap
        assert size % multiple == 0


@given(low=SIZES, gap=SIZES, place=st.floats(0, 1), guess=st.sampled_from(["none", "right", "lowest", "highest"]))
def test_a_limit_is_met_in_logarithmically_many_tries(low: int, gap: int, place: float, guess: str) -> None:
    """
    A try leaves at most 9/10 of the gap and one size; without a guess half of it, or of its octaves.

    So after `tries` the gap is below 0.9 ** tries * gap + 10, or, without a guess, halved each time once it lies
    within a factor of two, which halving the octaves takes log2(octaves) tries for.
    """
    high = low + gap
    limit = low + int(place * (gap - 1))  # the largest size that keeps it
    guesses = {"none": None, "right": float(limit), "lowest": -1.0, "highest": 1e9}
    octaves = math.log2(high / low)
    most = math.log2(max(octaves, 1)) + math.log2(gap) + 2
    if guess != "none":
        most = math.log(gap) / math.log(1 / 0.9) + 10
    for tries in itertools.count():
        size = next_size(low, high, guesses[guess])
        if size is None:
            break
        low, high = (size, high) if size <= limit else (low, size)
        assert tries <= most
    assert low <= limit < high
    assert is_closed(low, high)


@given(low=st.integers(100, 10**5), high=st.integers(100, 10**5))
def test_a_good_guess_is_followed_and_a_bad_one_cut(low: int, high: int) -> None:
    """A guess in the middle eight tenths is tried as it is; one outside is moved to the edge of them."""
    assume(not is_closed(low, high) and low + 20 < high)
    margin = (high - low) / 10
    assert next_size(low, high, guess=(low + high) // 2) == (low + high) // 2
    assert next_size(low, high, guess=low - 5.0) == int(low + margin)
    assert next_size(low, high, guess=high + 5.0) == int(high - margin)


@pytest.mark.parametrize(("low", "high", "expected"), [(64, 129, 90), (64, 128, 96), (1, 10_000, 100)])
def test_far_apart_the_middle_is_that_of_logarithms(low: int, high: int, expected: int) -> None:
    """Beyond a factor of two it is the root of the product, and up to it half of the sum."""
    assert next_size(low, high) == expected

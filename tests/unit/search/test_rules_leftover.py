"""What is left of a budget when no other rule names a size."""

from __future__ import annotations

from cubatch.search import rules
from tests.unit.situations import view

RISING = {n: 0.1 + 0.01 * n for n in (1, 8, 64)}  # seconds of a step: throughput still rises by far at 64


def test_what_is_left_goes_to_a_size_whose_steps_are_a_guess():
    """128 takes ten steps of 1.38 s: more than two fifths of the 16 s left, which no other rule gives to a guess."""
    short = view(RISING, left=16.0)
    assert not short.affordable(128)
    assert rules.leftover(short) == [128]


def test_a_visit_that_takes_nearly_all_that_is_left_is_not_begun():
    """Of 14.4 s nine tenths are less than it takes: a guess may be short."""
    assert rules.leftover(view(RISING, ladder=(1, 8, 64, 128), left=14.4, extends=False)) == []


def test_what_is_left_stays_where_little_may_be_gained():
    """A curve that is flat from 8 to 512 promises nothing."""
    flat = {n: 0.01 * n for n in (8, 16, 32, 64, 128, 256, 512)}
    assert rules.leftover(view(flat, ladder=(*flat, 1024), left=500.0, extends=False)) == []

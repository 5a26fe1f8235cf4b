"""The arithmetic of the budget: what a size would take, and whether that fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubatch.budget import (
    Budget,
    OutOfBudget,
    extrapolate_seconds,
    guess_prepare,
    repeats_for,
    rounds_seconds,
    why_not_first,
)


def test_a_budget_counts_from_its_start_and_on_top_of_earlier_runs() -> None:
    """Of 60 s, with 20 s spent before and 15 s since the start at clock 100, 25 s are left."""
    now = [100.0]
    budget = Budget(60.0, 20.0)
    assert budget.spent() == 20.0
    budget.start(lambda: now[0])
    now[0] = 115.0
    assert (budget.spent(), budget.left()) == (35.0, 25.0)
    budget.check(25.0)
    with pytest.raises(OutOfBudget):
        budget.check(25.1)
    now[0] = 200.0
    assert budget.left() == 0.0
    with pytest.raises(OutOfBudget):
        budget.check()


def test_a_timing_spans_its_minimum_with_whole_steps() -> None:
    """Four 3 ms steps span 10 ms; a step longer than the span is taken once; a broken clock ends somewhere."""
    assert [repeats_for(step, 0.01) for step in (0.003, 0.01, 7.0, 1e-12)] == [4, 1, 1, 10_000]


def test_rounds_count_their_discarded_steps() -> None:
    """Five rounds of a 1 s step: six discarded (two in the first) and five timed; four later ones, eight in all."""
    assert rounds_seconds(1.0, 0.01, 5, is_first=True) == 11.0
    assert rounds_seconds(1.0, 0.01, 4, is_first=False) == 8.0


@given(
    overhead=st.floats(0, 1),
    per_sample=st.floats(1e-6, 1),
    sizes=st.lists(st.integers(1, 10**6), min_size=3, unique=True),
)
def test_a_straight_line_is_extrapolated_exactly_or_from_above(
    overhead: float, per_sample: float, sizes: list[int]
) -> None:
    """Step time that is a line in the batch is never guessed too low, nor above proportion."""
    *smaller, largest = sorted(sizes)
    known = {n: overhead + per_sample * n for n in smaller}
    guess = extrapolate_seconds(largest, known)
    assert guess is not None
    assert guess >= (overhead + per_sample * largest) * (1 - 1e-6)
    assert guess <= known[smaller[-1]] * largest / smaller[-1] * (1 + 1e-9)


def test_noise_cannot_make_a_larger_batch_cheaper_than_the_one_before() -> None:
    """A falling line is cut at the time of the nearest smaller size; nothing smaller known gives no guess."""
    assert extrapolate_seconds(400, {100: 2.0, 200: 1.5}) == 1.5
    assert extrapolate_seconds(50, {50: 1.0, 100: 2.0}) is None


def test_a_curve_is_continued_along_its_end() -> None:
    """From 2 s at 100 to 3 s at 200 the line says 5 s at 400, whatever a size of a quarter took."""
    assert extrapolate_seconds(400, {50: 0.1, 100: 2.0, 200: 3.0}) == 5.0


def test_a_steep_line_is_cut_at_proportion() -> None:
    """From 1 s at 100 to 3 s at 200 the line says 7 s at 400; twice the batch takes twice 3 s at most."""
    assert extrapolate_seconds(400, {100: 1.0, 200: 3.0}) == 6.0


def ask(
    left: float,
    *,
    unfinished: dict[int, int] | None = None,
    size: int = 200,
    waiting: tuple[int, ...] = (200,),
    prepare: dict[int, float] | None = None,
) -> str | None:
    """Ask for a size; 200 needs 11 s: its step is guessed at 1 s, in proportion to 0.5 s at half the size."""
    return why_not_first(
        size,
        {100: 0.5},
        left=left,
        unfinished=unfinished or {},
        waiting=waiting,
        prepare_seconds=prepare or {},
        span_seconds=0.01,
    )


def test_a_size_runs_if_its_minimum_of_rounds_fits_its_share() -> None:
    """Eleven seconds fit eleven, not ten; the reason holds both numbers."""
    assert ask(11.0) is None
    assert "would take 11.0 s, its share of the budget is 10.9 s" in (ask(10.9) or "")


def test_sizes_that_would_not_fit_their_share_take_none() -> None:
    """Of 33 s, 200 and 300 (11 s and 16.5 s) have a half each, since 400 (22 s) would not fit into a third."""
    waiting = (200, 300, 400)
    assert ask(33.0, waiting=waiting) is None
    assert ask(33.0, waiting=waiting, size=300) is None
    assert ask(32.9, waiting=waiting, size=300)
    assert ask(33.0, waiting=waiting, size=400)
    assert ask(66.0, waiting=waiting, size=400) is None


def test_what_is_promised_to_begun_sizes_is_not_shared_out() -> None:
    """A begun size with one round of 0.5 s steps still needs four, 4 s: 15 s hold both, 14.9 s do not."""
    assert ask(15.0, unfinished={100: 1}) is None
    assert ask(14.9, unfinished={100: 1})
    assert ask(11.0, unfinished={100: 7}) is None
    assert ask(10.9, unfinished={100: 7})  # rounds beyond the least give nothing back


def test_preparing_counts_in_every_round_and_never_by_its_first_time() -> None:
    """A first preparation of 50 s held compiling and is passed over; a line through 1 s and 2 s says 4 s."""
    assert ask(11.0, prepare={50: 50.0}) is None
    assert ask(31.0, prepare={50: 1.0, 100: 2.0}) is None
    assert ask(30.9, prepare={50: 1.0, 100: 2.0})
    # Four rounds of 100 are promised 2 s to prepare and 1 s each.
    assert ask(43.0, prepare={50: 1.0, 100: 2.0}, unfinished={100: 1}) is None
    assert ask(42.9, prepare={50: 1.0, 100: 2.0}, unfinished={100: 1})


def test_a_size_that_was_prepared_before_is_not_guessed_from_smaller_ones() -> None:
    """4 s stay 4 s, though a line through 2 s at 100 and 2.5 s at 200 says 3.5 s of a size that never was."""
    smaller = {100: 2.0, 200: 2.5}
    assert (guess_prepare(400, smaller), guess_prepare(400, {**smaller, 400: 4.0})) == (3.5, 4.0)


def test_a_smaller_size_takes_as_long_to_prepare_as_a_larger_one() -> None:
    """What does not grow with the batch does not shrink with it either: 2 s at 200 are 2 s at 100."""
    assert guess_prepare(100, {200: 2.0, 400: 8.0}) == 2.0


def test_the_first_of_all_sizes_runs_untried() -> None:
    """With nothing smaller known there is no guess, and somebody must begin."""
    assert why_not_first(64, {}, left=1e-3, unfinished={}, waiting=(64,), prepare_seconds={}, span_seconds=0.01) is None

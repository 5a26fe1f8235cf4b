"""Results at several extents of an axis: the token budget, rates between them, and samples of unequal length."""

from __future__ import annotations

import pytest

import cubatch as cb
from tests.unit.tuned import measurement, tuned

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def at(extent, *, fixed=0.0, square=0.0, largest=128):
    """Return the result of one extent: a step takes a fixed time, 1 µs a token, and more for its square."""

    def seconds(n):
        return fixed + n * (1e-6 * extent + square * extent**2)

    sizes = [n for n in SIZES if n <= largest]
    best = next(n for n in sizes if n / seconds(n) >= 0.99 * largest / seconds(largest))
    measured = [measurement(n, seconds(n)) for n in sizes]
    facts = {"mode": "inference", "batch_size": best, "fastest_batch_size": largest, "largest_measured": largest}
    return cb.TuningResult.from_mapping(tuned(measurements=measured, **facts))


def results_of(*extents, **options):
    """Return the results of some extents."""
    return cb.SizesResult(axis="sequence", results={extent: at(extent, **options) for extent in extents}, failed={})


def test_the_token_budget_is_the_smallest_that_keeps_up_everywhere():
    """
    With a fixed time of 320 µs and 1 µs a token, T tokens reach T / (T + 320) of what many tokens do.

    128 samples of 64 tokens are the most there, 8192 / 8512 = 96.2 %, so that 99 % of it needs T >= 6468: 8192 of the
    sizes tried.  At 256 the best is 32768 / 33088, of which 8192 tokens reach 97.2 %: within 3 %, not within 1 %.
    """
    result = results_of(64, 256, fixed=320e-6)
    assert result.token_budget is None
    tolerant = cb.SizesResult(
        axis="sequence", failed={},
        results={
            extent: cb.TuningResult.from_mapping(each.to_mapping() | {"tolerance": 0.03})
            for extent, each in result.results.items()
        },
    )  # fmt: skip
    assert tolerant.token_budget == 8192


def test_no_token_budget_where_an_extent_failed():
    """Nothing is known of the extent that could not be tuned."""
    result = cb.SizesResult(axis="sequence", results={64: at(64)}, failed={128: "out of memory"})
    assert result.token_budget is None


def test_a_token_has_the_rate_of_its_samples_times_the_extent():
    """Without a fixed time, each microsecond has one token."""
    assert results_of(64, 256).tokens_per_second == pytest.approx({64: 1e6, 256: 1e6})


def test_between_extents_the_time_of_a_sample_is_linear():
    """At 96, halfway between 64 and 128, a sample takes the mean of both times; the largest extents are bounds."""
    result = results_of(64, 128, fixed=1e-3)
    between = [1 / result.samples_per_second(extent, 8) for extent in (64, 96, 128)]
    assert between[1] == pytest.approx((between[0] + between[2]) / 2)
    assert result.samples_per_second(32, 8) == result.samples_per_second(64, 8)
    assert result.samples_per_second(129, 8) is None
    assert result.samples_per_second(128, 129) is None


def test_sorted_samples_are_faster_by_what_padding_took():
    """
    Where time is proportional to positions, the rates of two ways differ by their padding alone.

    Of the lengths 1, 2, ..., 128 sorted batches of n pad (n - 1) / 2 positions of each sample's n-th successor.
    """
    plan = results_of(1, 128).with_lengths(range(1, 129))
    ways = {way.name: way for way in plan.ways}
    assert ways["sorted"].padding_share < ways["random"].padding_share or max(ways["random"].batch_sizes.values()) == 1
    for way in plan.ways:
        assert way.tokens_per_second == pytest.approx((1 - way.padding_share) * 1e6)


def test_padding_is_counted_by_position():
    """Batches of two of the lengths 2, 4, 6 and 8, sorted, have 2 * 4 + 2 * 8 positions for 20 tokens."""
    from cubatch.tuning import length_plan

    batches = list(length_plan._of_size([2, 4, 6, 8], 2))
    way = length_plan._timed(results_of(8, 16), "sorted", iter(batches), {8: 2})
    assert way is not None
    assert way.padding_share == pytest.approx(4 / 24)


def test_where_attention_dominates_long_samples_want_small_batches():
    """With a fixed time per step and equal lengths, every way has no padding, and large batches win."""
    plan = results_of(64, 256, fixed=1e-3).with_lengths([256] * 512)
    assert plan.best.padding_share == 0
    assert plan.best.batch_sizes[256] == 128


def test_batches_of_tokens_never_exceed_the_budget():
    """Successive lengths are joined until the next one would make the padded batch too large."""
    from cubatch.tuning import length_plan

    batches = list(length_plan._of_tokens([1, 2, 3, 4, 5, 6], 8))
    assert [n for batch in batches for n in batch] == [1, 2, 3, 4, 5, 6]
    assert all(len(batch) * max(batch) <= 8 for batch in batches)


def test_a_length_beyond_what_was_measured_is_refused():
    """The error names the longest one, and what to do."""
    with pytest.raises(cb.InvalidArgument) as refused:
        results_of(64).with_lengths([10, 65])
    assert (refused.value.field, refused.value.value) == ("lengths", 65)


def test_exports_hold_the_sizes_of_the_result():
    """Buckets have the recommended sizes, and options the token budget; without one they are refused."""
    result = results_of(64, 128)
    assert result.token_budget == 128  # one sample is as fast as many
    assert result.to_fairseq() == "--max-tokens 128"
    assert result.to_vllm() == "--max-num-batched-tokens 128 --max-num-seqs 2"
    assert result.to_lhotse().splitlines()[1:] == ["bucket_duration_bins: [64, 128]", "bucket_batch_size: [1, 1]"]
    with pytest.raises(cb.InvalidArgument, match="token_budget"):
        results_of(64, 256, fixed=320e-6).to_vllm()


def test_the_figure_has_a_line_for_each_extent(tmp_path):
    """Its legend names them, and each line has the tokens per second of its sizes."""
    result = results_of(64, 128, fixed=1e-3)
    result.plot(tmp_path / "lengths.svg")
    text = (tmp_path / "lengths.svg").read_text(encoding="utf-8")
    assert all(f"sequence {extent}" in text for extent in (64, 128))

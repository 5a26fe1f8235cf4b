"""Results at several extents of an axis: the token budget, rates between them, and samples of unequal length."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

import cubatch as cb
from cubatch.tuning import length_plan
from tests.unit.tuned import measurement, tuned

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def at(extent, *, fixed=0.0, sizes=SIZES):
    """Return the result of one extent: a step takes a fixed time, and 1 µs a token."""

    def seconds(n):
        return fixed + n * 1e-6 * extent

    largest = sizes[-1]
    best = next(n for n in sizes if n / seconds(n) >= 0.99 * largest / seconds(largest))
    measured = [measurement(n, seconds(n)) for n in sizes]
    facts = {"mode": "inference", "batch_size": best, "fastest_batch_size": largest, "largest_measured": largest}
    return cb.TuningResult.from_mapping(tuned(measurements=measured, **facts))


def results_of(*extents, **options):
    """Return the results of some extents."""
    return cb.ExtentsResult(axis="sequence", results={extent: at(extent, **options) for extent in extents}, failed={})


def test_the_token_budget_is_the_smallest_that_keeps_up_everywhere():
    """
    With a fixed time of 320 µs and 1 µs a token, T tokens reach T / (T + 320) of what many tokens do.

    128 samples of 64 tokens are the most there, 8192 / 8512 = 96.2 %, so that 99 % of it needs T >= 6468: 8192 of the
    sizes tried.  At 256 the best is 32768 / 33088, of which 8192 tokens reach 97.2 %: within 3 %, not within 1 %.
    """
    result = results_of(64, 256, fixed=320e-6)
    assert result.token_budget is None
    tolerant = cb.ExtentsResult(
        axis="sequence", failed={},
        results={
            extent: cb.TuningResult.from_mapping(each.to_mapping() | {"tolerance": 0.03})
            for extent, each in result.results.items()
        },
    )  # fmt: skip
    assert tolerant.token_budget == 8192


def test_no_token_budget_where_an_extent_failed():
    """Nothing is known of the extent that could not be tuned."""
    result = cb.ExtentsResult(axis="sequence", results={64: at(64)}, failed={128: "out of memory"})
    assert result.token_budget is None


def test_a_token_has_the_rate_of_its_samples_times_the_extent():
    """Without a fixed time, each microsecond has one token."""
    assert results_of(64, 256).tokens_per_second == pytest.approx({64: 1e6, 256: 1e6})


def test_between_extents_the_time_of_a_sample_is_linear():
    """At 96, halfway between 64 and 128, a sample takes the mean of both times, and below 64 the time of 64."""
    result = results_of(64, 128, fixed=1e-3)
    between = [1 / result.rate_at(extent, 8) for extent in (64, 96, 128)]
    assert between[1] == pytest.approx((between[0] + between[2]) / 2)
    assert result.rate_at(32, 8) == result.rate_at(64, 8)


def test_between_batch_sizes_the_rate_is_linear_in_their_logarithm():
    """At the geometric mean of two measured sizes the rate is the mean of theirs."""
    sizes = [measurement(n, n / rate) for n, rate in ((4, 100.0), (16, 300.0))]
    result = cb.ExtentsResult(
        axis="sequence", results={64: cb.TuningResult.from_mapping(tuned(measurements=sizes))}, failed={}
    )
    assert result.rate_at(64, 8) == pytest.approx(200.0)
    assert result.rate_at(64, 1) == pytest.approx(25.0)  # padded to 4, which take 40 ms
    assert result.rate_at(64, 1000) == pytest.approx(300.0)  # in parts of 16


def test_rates_outside_what_was_tuned_are_refused():
    """An extent above the largest, and a batch of nothing, are named."""
    for arguments, field in (((129, 8), "sequence"), ((0, 8), "sequence"), ((128, 0), "batch_size")):
        with pytest.raises(cb.InvalidArgument) as refused:
            results_of(64, 128).rate_at(*arguments)
        assert refused.value.field == field


LENGTHS = range(1, 129)  # each once


def ways_of(lengths, *extents, **options):
    """Return the ways to form batches, by name."""
    return {way.name: way for way in results_of(*extents, **options).with_lengths(lengths).ways}


def test_rates_of_ways_differ_by_their_padding_where_time_is_that_of_positions():
    """With 1 us a position from length 1 to 128, a batch of real tokens takes what its padding adds to them."""
    for way in ways_of(LENGTHS, 1, 128, sizes=(1, 8)).values():
        assert way.tokens_per_second == pytest.approx((1 - way.padding_share) * 1e6)


def test_padding_of_sorted_batches():
    """Sorted batches of 8 have 8 times the positions of their last sample: 8, 16, ..., 128."""
    sorted_way = ways_of(LENGTHS, 128, sizes=(8,))["sorted"]
    assert sorted_way.padding_share == pytest.approx(1 - (128 * 129 / 2) / (8 * sum(range(8, 129, 8))))
    assert sorted_way.batch_sizes == {128: 8}


def test_padding_of_random_batches():
    """
    The largest of 8 distinct numbers up to 128 is 8 * 129 / 9 on average, which is independent of the order statistics.

    Over 16 batches its mean has a standard deviation of 3.2 (each 12.8), so that the share lies within 4 of them.
    """
    random_way = ways_of(LENGTHS, 128, sizes=(8,))["random"]
    mean_largest = 8 * 129 / 9
    assert (129 / 2) / (1 - random_way.padding_share) == pytest.approx(mean_largest, abs=4 * 3.2)
    assert random_way.padding_share > 0.3


def test_grouped_batches_are_sorted_within_stretches():
    """
    Of 64 samples and batches of 4, four stretches of 16 are sorted: each batch has four neighbors of its stretch.

    The padding is at least that of sorted batches, and at most that of random ones.
    """
    lengths = np.random.default_rng(5).permutation(range(1, 65)).tolist()
    batches = list(length_plan._of_groups(lengths, 4))
    assert batches[:4] == np.sort(lengths[:16])[::-1].reshape(4, 4).tolist()
    assert sorted(n for batch in batches for n in batch) == sorted(lengths)
    assert {len(batch) for batch in length_plan._of_groups([1, 2, 3], 4)} == {3}
    shares = {name: way.padding_share for name, way in ways_of(LENGTHS, 128, sizes=(4,)).items()}
    assert shares["sorted"] <= shares["grouped"] < shares["random"]


def test_the_trainer_groups_samples_where_that_saves_time():
    """Where time is that of positions, padding costs; samples of one length have none, and stay in random order."""
    result = results_of(1, 128, sizes=(8, 16))
    grouped = result.with_lengths(LENGTHS).to_huggingface()
    assert grouped == "--per_device_train_batch_size 8 --train_sampling_strategy group_by_length"
    alike = results_of(128, fixed=1e-3, sizes=(8, 16)).with_lengths([128] * 160).to_huggingface()
    assert alike == "--per_device_train_batch_size 16 --train_sampling_strategy random"


def test_lengths_may_be_in_a_file(tmp_path):
    """A line has a length; a file of other words, or none, is named."""
    path = tmp_path / "lengths.txt"
    path.write_text("10\n60\n", encoding="utf-8")
    for given in (path, str(path)):
        assert results_of(64).with_lengths(given) == results_of(64).with_lengths([10, 60])
    path.write_text("10\n6x\n", encoding="utf-8")
    for wrong in (path, tmp_path / "none.txt"):
        with pytest.raises(cb.InvalidData, match=wrong.name):
            results_of(64).with_lengths(wrong)


def test_buckets_have_the_recommended_size_of_their_extent():
    """64 samples up to 64 are padded to at most 64, and the other half to at most 128."""
    buckets = ways_of(LENGTHS, 64, 128, fixed=1e-3, sizes=(8, 16))["buckets"]
    assert buckets.batch_sizes == {64: 16, 128: 16}
    positions = (128 * 129 / 2) / (1 - buckets.padding_share)
    assert positions <= 64 * 64 + 64 * 128
    assert positions >= 16 * (16 + 32 + 48 + 64) + 16 * (80 + 96 + 112 + 128)  # what sorted batches would have


def test_token_budget_joins_as_many_samples_as_it_holds():
    """Of equal lengths, a budget of 16 samples makes batches of 16: the larger one, if steps have a fixed time."""
    way = ways_of([128] * 64, 128, fixed=1e-3, sizes=(4, 16))["token budget"]
    assert (way.token_budget, way.batch_sizes) == (16 * 128, {128: 16})
    assert way.tokens_per_second == pytest.approx(16 * 128 / (1e-3 + 16 * 128 * 1e-6))


def test_batches_of_tokens_never_exceed_the_budget():
    """Successive lengths are joined until the next one would make the padded batch too large."""
    batches = list(length_plan._of_tokens([1, 2, 3, 4, 5, 6], 8))
    assert batches == [[1, 2], [3, 4], [5], [6]]  # 2 * 2, 2 * 4, 5, 6 positions; 3 * 3 and 2 * 5 would be too many


def test_no_way_has_larger_batches_of_the_longest_samples_than_were_measured():
    """Of samples up to 500, only batches of 4 ran at 512: 128 of them, as at 32, may not fit into memory."""
    fixed = {"fixed": 5e-3}
    results = {32: at(32, **fixed), 512: at(512, sizes=(1, 2, 4), **fixed)}
    result = cb.ExtentsResult(axis="sequence", results=results, failed={})
    ways = {way.name: way for way in result.with_lengths([*[20] * 1000, 500]).ways}
    assert ways["random"].batch_sizes[500] <= 4
    assert ways["sorted"].batch_sizes[500] <= 4
    assert ways["token budget"].token_budget <= 4 * 512


def test_what_makes_rates_of_ways_doubtful_is_named():
    """An extent without a recommendation, and a busy machine; of other results nothing is said."""
    quiet, busy = at(64), cb.TuningResult.from_mapping(at(128).to_mapping() | {"batch_size": None, "disturbed": True})
    assert cb.ExtentsResult(axis="sequence", results={64: quiet}, failed={}).with_lengths([9]).reasons == ()
    doubts = cb.ExtentsResult(axis="sequence", results={64: quiet, 128: busy}, failed={}).with_lengths([9])
    assert len(doubts.reasons) == 2
    assert "128" in doubts.reasons[0]
    assert all(each in " ".join(str(doubts).split()) for each in doubts.reasons)


def test_the_fastest_way_is_the_first():
    """Where padding costs time, sorted samples come before random ones."""
    plan = results_of(1, 128, sizes=(8,)).with_lengths(LENGTHS)
    rates = [way.tokens_per_second for way in plan.ways]
    assert rates == sorted(rates, reverse=True)
    names = [way.name for way in plan.ways]
    assert names.index("sorted") < names.index("random")


@pytest.mark.parametrize(
    ("lengths", "options", "field"),
    [
        ([10, 65], {}, "sequence"), ([], {}, "lengths"), (5, {}, "lengths"), ([10], {"seed": -1}, "seed"),
        ([12.9], {}, "lengths"), (np.array([12.9]), {}, "lengths"), (["ab"], {}, "lengths"),
        (np.array([[10, 12]]), {}, "lengths"),
    ],
)  # fmt: skip
def test_lengths_that_make_no_sense_are_named(lengths, options, field):
    """The error names the argument, or the axis that was not tuned that far."""
    with pytest.raises(cb.InvalidArgument) as refused:
        results_of(64).with_lengths(lengths, **options)
    assert refused.value.field == field


def test_lengths_may_be_integers_of_an_array():
    """They are those that a tokenizer or a table of the data gives."""
    assert results_of(64).with_lengths(np.array([10, 60])) == results_of(64).with_lengths([10, 60])


def test_what_ended_the_searches_is_what_would_give_a_token_budget():
    """The remedy is in the table and in the error of an export: the argument, else the tolerance."""
    result = results_of(64, 256, fixed=320e-6)
    for ended, remedy in (("max_batch_size", "Raise max_batch_size, which ended the search at 64 and 256, or"),
                          ("peak", "Tune with a larger tolerance, or use buckets")):  # fmt: skip
        each = {
            n: cb.TuningResult.from_mapping(r.to_mapping() | {"decided_by": ended}) for n, r in result.results.items()
        }
        without = attrs.evolve(result, results=each)
        assert remedy in " ".join(str(without).split())
        with pytest.raises(cb.InvalidArgument, match=remedy):
            without.to_fairseq()


def test_an_extent_without_a_recommendation_has_no_buckets_for_loaders():
    """The exported buckets need all extents; the comparison of ways takes the fastest size that was measured there."""
    failed = cb.ExtentsResult(axis="sequence", results={64: at(64)}, failed={128: "out of memory"})
    with pytest.raises(cb.InvalidArgument) as refused:
        failed.to_lhotse()
    assert refused.value.value == 128
    assert "out of memory" in refused.value.remedy
    with pytest.raises(cb.InvalidArgument, match="at 128, or leave it out: out of memory"):
        failed.to_vllm()
    undecided = cb.TuningResult.from_mapping(at(64, fixed=1e-3, sizes=(4, 16)).to_mapping() | {"batch_size": None})
    plan = cb.ExtentsResult(axis="sequence", results={64: undecided}, failed={}).with_lengths([64] * 32)
    assert next(way for way in plan.ways if way.name == "buckets").batch_sizes == {64: 16}


def test_an_extent_without_a_time_is_refused():
    """Nothing is known of batches of that length."""
    empty = cb.TuningResult.from_mapping(tuned(measurements=[measurement(4, status="not_run")], batch_size=None))
    with pytest.raises(cb.InvalidArgument) as refused:
        cb.ExtentsResult(axis="sequence", results={64: empty}, failed={}).with_lengths([1])
    assert (refused.value.field, refused.value.value) == ("sequence", 64)


def test_exports_hold_the_sizes_of_the_result():
    """Buckets have the recommended sizes, and options the token budget; without one they are refused."""
    result = results_of(64, 128)
    assert result.token_budget == 128  # one sample is as fast as many
    assert result.to_fairseq() == "--max-tokens 128 --required-batch-size-multiple 1"  # by default 8
    assert result.to_vllm() == "--max-num-batched-tokens 128 --max-num-seqs 2"  # two prompts of 64
    assert result.to_lhotse().splitlines()[1:] == ["bucket_duration_bins: [64, 128]", "bucket_batch_size: [1, 1]"]
    assert "bucket_duration_bins: [0.64, 1.28]" in result.to_lhotse(tokens_per_unit=100)
    with pytest.raises(cb.InvalidArgument, match="token_budget"):
        results_of(64, 256, fixed=320e-6).to_vllm()


def test_the_figure_has_a_line_for_each_extent(tmp_path):
    """Its legend names them, and each line has the tokens per second of its sizes."""
    result = results_of(64, 128, fixed=1e-3)
    result.plot(tmp_path / "lengths.svg")
    text = (tmp_path / "lengths.svg").read_text(encoding="utf-8")
    assert all(f"sequence {extent}" in text for extent in (64, 128))


def test_a_column_that_is_left_out_is_not_explained():
    """Where no extent has a largest size, its table has neither the column nor the sentence on it."""
    result = results_of(64, 128)
    unknown = {
        extent: cb.TuningResult.from_mapping(each.to_mapping() | {"largest_batch_size": None})
        for extent, each in result.results.items()
    }
    assert "largest" in str(result)
    assert "largest" not in str(attrs.evolve(result, results=unknown))

"""The answer is the contract's rule, read literally; ties, limits and words follow from the same numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubatch.errors import EnergyNotAvailable, NothingMeasured
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Outcome, Timing, counting
from cubatch.tuning import answer as answers
from cubatch.tuning.results import TuningResult

SECONDS = st.floats(min_value=1e-6, max_value=1e3)
NOT_OK = ("dropped", "over_limit", "out_of_memory", "timeout", "error", "interrupted")


def rounds(batch_size: int, seconds: Sequence[float], **more: Any) -> list[Timing]:
    """Give one timing per round."""
    return [Timing(batch_size=batch_size, round=number, seconds=value, **more) for number, value in enumerate(seconds)]


def answer_of(
    seconds: Mapping[int, Sequence[float]],
    statuses: dict[int, str] | None = None,
    goal: Goal | None = None,
    **more: Any,
) -> TuningResult:
    """Choose among sizes with these seconds by round."""
    timings = [timing for n, values in seconds.items() for timing in rounds(n, values)]
    outcomes = [Outcome(n, (statuses or {}).get(n, "ok")) for n in seconds]
    measured = Measured(timings=tuple(timings), outcomes=tuple(outcomes))
    ladder = [Candidate(n) for n in seconds]
    return answers.answer(ladder, measured, goal=goal or Goal(), setting={}, **more)


@pytest.mark.case("titan-x-test-batch")
@given(
    seconds=st.dictionaries(st.integers(1, 4096), st.lists(SECONDS, min_size=1, max_size=6), min_size=1, max_size=8),
    tolerance=st.sampled_from((0.0, 0.01, 0.1, 0.5)),
    latency=st.booleans(),
    data=st.data(),
)
def test_the_answer_is_the_contracts_sentence(
    seconds: dict[int, list[float]],
    tolerance: float,
    latency: bool,
    data: st.DataObject,
) -> None:
    """Going through the ok sizes one by one, the smallest (latency: largest) that the sentence admits is the answer."""
    statuses = {n: data.draw(st.sampled_from(("ok", "ok", *NOT_OK))) for n in seconds}
    ok = sorted(n for n, status in statuses.items() if status == "ok")
    goal = Goal(objective="latency" if latency else "throughput", tolerance=tolerance)
    if not ok:
        with pytest.raises(NothingMeasured):
            answer_of(seconds, statuses, goal)
        return
    result = answer_of(seconds, statuses, goal)
    medians = {n: statistics.median(timing.seconds for timing in counting(rounds(n, seconds[n]))) for n in ok}
    rates = {n: n / medians[n] for n in ok}
    expected = None
    for n in ok:
        if latency:
            if medians[n] <= (1 + tolerance) * min(medians.values()):
                expected = n
        elif rates[n] >= (1 - tolerance) * max(rates.values()) and expected is None:
            expected = n
    assert result.batch_size == expected
    fastest = result.fastest_batch_size
    assert fastest is not None
    assert medians[fastest] == min(medians.values()) if latency else rates[fastest] == max(rates.values())
    assert result.fastest_batch_size not in result.tied_with
    assert set(result.tied_with) <= set(ok)
    assert TuningResult.from_json(result.to_json()) == result


def test_a_measurement_holds_what_its_timings_say() -> None:
    """
    Of 64 samples in 1 to 5 s: 3 s, 64/3 samples/s, 64 x 6 FLOP / 3 s, half the roofline.

    The range holds the median with 1 - 2/32, the second and fourth with 1 - 12/32: for 91 % the interval begins, by
    Hettmansperger and Sheather, 4 x 0.088 / (1 + 3 x 0.088) = 0.278 of the way from the first to the second.
    """
    timings = rounds(64, [5.0, 1.0, 3.0, 2.0, 4.0], joules=12.8, sm_clock_mhz=1500.0, peak_bytes=7, peak_device_bytes=9)
    measured = Measured(timings=tuple(timings), outcomes=(Outcome(64, "ok", "enough"),), seconds_spent=15.0)
    candidate = Candidate(64, ("power of two",), predicted_peak_bytes=8, predicted_seconds=2.5)
    result = answers.answer(
        [candidate], measured, goal=Goal(), setting={"seed": 3}, flops_per_sample=6.0, roofline_seconds={64: 1.5}
    )
    m = result.measurements[0]
    assert (m.latency_seconds, m.samples_per_second) == (3.0, 64 / 3.0)
    low, high = m.latency_interval or (math.nan, math.nan)
    assert (low, high) == (pytest.approx(1.2785, abs=1e-4), pytest.approx(4.7215, abs=1e-4))
    assert m.throughput_interval == (64 / high, 64 / low)
    assert (m.flops_per_second, m.roofline_fraction) == (128.0, 0.5)
    assert m.joules_per_sample == pytest.approx(0.2)
    assert (m.sm_clock_mhz, m.peak_bytes, m.peak_device_bytes) == (1500.0, 7, 9)
    assert (m.predicted_peak_bytes, m.predicted_seconds) == (8, 2.5)
    assert (m.timings_seconds, m.stop_reason, m.reasons) == ((5.0, 1.0, 3.0, 2.0, 4.0), "enough", ("power of two",))
    assert (result.seconds_spent, result.seed, result.spec, result.l2) == (15.0, 3, None, None)


def test_what_was_not_measured_is_none() -> None:
    """A size that ran out of memory has no number at all."""
    result = answer_of({8: [1.0] * 5, 16: []}, {16: "out_of_memory"})
    m = result.measurements[1]
    assert (m.latency_seconds, m.latency_interval, m.samples_per_second, m.throughput_interval) == (None,) * 4
    assert (m.flops_per_second, m.roofline_fraction, m.sm_clock_mhz, m.peak_bytes, m.occupancy) == (None,) * 5
    assert m.timings_seconds == ()
    assert result.largest_measured == 8


def test_occupancy_is_weighted_by_time() -> None:
    """Of 0.5 for 3 s and 1.0 for 1 s: 0.625; without measured times by predicted ones; unknown stays None."""
    layers = {
        8: [{"occupancy": 0.5, "fill": 0.2, "seconds": 3.0}, {"occupancy": 1.0, "fill": None, "seconds": 1.0}],
        16: [
            {"occupancy": 0.5, "predicted_seconds": 1.0},
            {"occupancy": 1.0, "predicted_seconds": 1.0, "seconds": 9.0},
        ],
        32: [{"kernel": "?"}],
    }
    result = answer_of({8: [1.0], 16: [1.0], 32: [1.0]}, layers=layers)
    assert [m.occupancy for m in result.measurements] == [0.625, 0.75, None]
    assert [m.fill for m in result.measurements] == [pytest.approx(0.2), None, None]
    assert result.measurements[2].layers == ({"kernel": "?"},)


def test_throttled_timings_are_counted_and_do_not_count() -> None:
    """One clear timing outweighs nine throttled ones; where there are no others all of them stand, and it says so."""
    timings = (
        *rounds(8, [2.0] * 9, throttled=True),
        Timing(batch_size=8, round=9, seconds=1.0),
        *rounds(16, [4.0] * 5, throttled=True),
    )
    measured = Measured(timings=timings, outcomes=(Outcome(8, "ok"), Outcome(16, "ok")))
    result = answers.answer([Candidate(8), Candidate(16)], measured, goal=Goal(), setting={})
    assert [(m.latency_seconds, m.throttled, len(m.timings_seconds)) for m in result.measurements] == [
        (1.0, 9, 1),
        (4.0, 5, 5),
    ]
    assert any(
        reason.startswith("14 timings were taken under a throttled clock") and "of 16" in reason
        for reason in result.reasons
    )


def test_a_tie_is_what_paired_rounds_cannot_tell_apart() -> None:
    """Rounds that swing by half hide a constant 3 % from intervals, not from pairs; what changes sign is a tie."""
    swing = np.array([1.0, 1.5, 1.1, 1.4, 1.2, 1.3, 1.05, 1.45])
    sign = np.array([1, -1, 1, -1, 1, -1, 1, -1])
    seconds = {100: swing, 103: 1.03**2 * swing, 101: 1.01 * swing * (1 + 0.004 * sign)}
    result = answer_of({n: values.tolist() for n, values in seconds.items()})
    assert result.fastest_batch_size in (100, 101)
    assert set(result.tied_with) == {100, 101} - {result.fastest_batch_size}


def test_few_pairs_tie_only_what_is_within_tolerance() -> None:
    """Two rounds cannot tell 0.5 % from nothing, and are enough for a factor of two."""
    result = answer_of({10: [1.0, 1.0], 20: [2.01, 2.01], 40: [8.0, 8.0]})
    assert (result.fastest_batch_size, result.tied_with) == (10, (20,))
    assert "Paired rounds cannot tell 20 from 10." in result.reasons
    result = answer_of({10: [1.0, 1.0], 20: [1.99, 1.99]})
    assert (result.batch_size, result.fastest_batch_size, result.tied_with) == (10, 20, (10,))
    assert "The best is 10.1 samples/s at 20." in result.reasons
    assert "Paired rounds cannot tell 10 from 20." in result.reasons


def test_sizes_without_a_common_round_are_tied_within_tolerance() -> None:
    """All rounds of the fastest were throttled ones of two others: of those, the one 0.02 % behind is tied."""
    timings = rounds(32, [0.32] * 5)
    for n, seconds in ((64, 0.6401), (128, 1.6)):
        timings += rounds(n, [2 * seconds] * 5, throttled=True)
        timings += [Timing(batch_size=n, round=number, seconds=seconds) for number in range(5, 10)]
    measured = Measured(timings=tuple(timings), outcomes=tuple(Outcome(n, "ok") for n in (32, 64, 128)))
    result = answers.answer([Candidate(n) for n in (32, 64, 128)], measured, goal=Goal(), setting={})
    assert (result.fastest_batch_size, result.tied_with) == (32, (64,))


@pytest.mark.parametrize(
    ("seconds", "statuses", "more", "decided_by"),
    [
        ({1: 1.0, 2: 1.0, 4: 4.0}, {}, {}, "peak"),  # 1, 2, 1 samples/s
        ({1: 1.0, 2: 1.0, 4: 4.0}, {4: "dropped"}, {}, "peak"),
        ({1: 1.0, 2: 1.0, 4: 2.0}, {}, {}, "plateau"),  # 1, 2, 2
        ({1: 1.0, 2: 1.0}, {}, {"largest_batch_size": 2}, "memory"),
        ({1: 1.0, 2: 1.0, 3: None}, {3: "out_of_memory"}, {"largest_batch_size": 8}, "memory"),
        ({1: 1.0, 2: 1.0, 4: None}, {4: "over_limit"}, {"largest_batch_size": 2}, "memory"),
        ({1: 1.0, 2: 1.0, 3: 1.5}, {3: "latency"}, {}, "latency_limit"),
        ({1: 1.0, 2: 1.0, 4: None}, {4: "not_run"}, {}, "budget"),
        ({1: 1.0, 2: 1.0, 4: None, 8: None}, {4: "error", 8: "not_run"}, {}, "budget"),
        ({1: 1.0, 2: 1.0}, {}, {"asked": True, "largest_batch_size": 2}, "batch_sizes"),
        (
            {1: 1.0, 2: 1.0},
            {},
            {"largest_batch_size": 9, "setting": {"limits": {"max_batch_size": 2}}},
            "max_batch_size",
        ),
        ({1: 1.0, 2: 1.0}, {}, {"largest_batch_size": 2, "setting": {"limits": {"max_batch_size": 9}}}, "memory"),
        ({1: 1.0, 2: 1.0}, {}, {}, "max_batch_size"),  # a callable: there is no plan
    ],
)
def test_what_decided_is_what_became_of_the_larger_sizes(
    seconds: dict[int, float | None], statuses: dict[int, str], more: dict[str, Any], decided_by: str
) -> None:
    """Each of the seven words from the smallest history that calls for it."""
    timings = [timing for n, value in seconds.items() if value for timing in rounds(n, [value] * 5)]
    outcomes = []
    for n in seconds:
        status = statuses.get(n, "ok")
        facts = {"limit": "latency" if status == "latency" else "memory"}
        outcomes.append(Outcome(n, "over_limit" if status == "latency" else status, "", facts))
    measured = Measured(timings=tuple(timings), outcomes=tuple(outcomes))
    result = answers.answer([Candidate(n) for n in seconds], measured, goal=Goal(), **{"setting": {}, **more})
    assert (result.batch_size, result.decided_by) == (2, decided_by)
    if decided_by in {"peak", "plateau"}:
        assert any("measured up to 4" in reason for reason in result.reasons)


@pytest.mark.parametrize(
    ("seconds", "answer", "decided_by"), [({1: 1.0, 2: 1.005, 4: 2.0}, 2, "plateau"), ({1: 1.0, 2: 2.0}, 1, "peak")]
)
def test_by_latency_the_largest_flat_size_is_the_answer(
    seconds: dict[int, float], answer: int, decided_by: str
) -> None:
    """A floor that ends at 2 is a plateau; a latency that rises at once has its peak at the smallest."""
    result = answer_of({n: [value] * 5 for n, value in seconds.items()}, goal=Goal(objective="latency"))
    assert (result.batch_size, result.decided_by) == (answer, decided_by)


def test_by_latency_the_lowest_itself_has_nothing_larger_near_it() -> None:
    """As by throughput it has nothing smaller."""
    result = answer_of(steady((8, 1.0), (16, 2.0)), goal=Goal(objective="latency"))
    assert result.reasons[0] == "8 has the lowest latency, 1.00 s, and no larger size is within 1 % of it."
    result = answer_of(steady((4, 1.0), (8, 1.0), (16, 4.0)))
    assert result.reasons[0] == "8 has the best throughput, 8 samples/s, and no smaller size is within 1 % of it."
    result = answer_of(steady((8, 1.0), (16, 4.0)))
    assert result.reasons[0] == "8 has the best throughput, 8 samples/s."  # of nothing smaller anything is known


def test_the_reasons_by_latency_give_the_share_of_the_lowest() -> None:
    """1.25 s are 80 % as fast as 1 s, which no larger size is near."""
    result = answer_of(steady((8, 1.0), (16, 1.25), (32, 2.0)), goal=Goal(objective="latency", tolerance=0.3))
    assert result.reasons[:2] == (
        "16 is the largest batch size whose latency is within 30 % of the lowest: 1.25 s, 80.0 % of it.",
        "The lowest is 1.00 s at 8.",
    )


def test_by_energy_samples_per_joule_decide() -> None:
    """16 is faster and 8 takes less energy per sample."""
    timings = (*rounds(8, [1.0] * 5, joules=8.0), *rounds(16, [1.0] * 5, joules=32.0))
    measured = Measured(timings=timings, outcomes=(Outcome(8, "ok"), Outcome(16, "ok")))
    result = answers.answer([Candidate(8), Candidate(16)], measured, goal=Goal(objective="energy"), setting={})
    assert (result.batch_size, result.fastest_batch_size) == (8, 8)
    assert "1 samples/J" in result.reasons[0]


def test_energy_without_a_reading_is_an_error_that_names_the_device() -> None:
    """Seconds are no stand-in for joules."""
    measured = Measured(timings=tuple(rounds(8, [1.0] * 5)), outcomes=(Outcome(8, "ok"),))
    with pytest.raises(EnergyNotAvailable) as caught:
        answers.answer([Candidate(8)], measured, goal=Goal(objective="energy"), setting={"device": {"name": "a CPU"}})
    assert caught.value.device == "a CPU"


def test_nothing_to_choose_from_says_how_every_size_ended() -> None:
    """The reason holds each status with its sizes and first reason, the remedy what may be done about each."""
    outcomes = (
        Outcome(8, "error", "ValueError: no"),
        Outcome(16, "not_run", "too slow"),
        Outcome(32, "not_run", "slower"),
    )
    with pytest.raises(NothingMeasured) as caught:
        answers.answer([Candidate(n) for n in (8, 16, 32)], Measured(outcomes=outcomes), goal=Goal(), setting={})
    assert caught.value.reason == "error: 8 (ValueError: no); not run: 16 and 32 (16: too slow)"
    assert "Raise budget." in caught.value.remedy


def test_a_partial_result_has_no_answer_and_all_measurements() -> None:
    """After Ctrl-C there is a table to print, with what was measured and no answer."""
    measured = Measured(timings=tuple(rounds(8, [1.0])), outcomes=(Outcome(8, "interrupted"),))
    result = answers.answer([Candidate(8), Candidate(16)], measured, goal=Goal(), setting={}, partial=True)
    assert (result.batch_size, result.decided_by, result.largest_measured) == (None, None, 8)
    assert [m.status for m in result.measurements] == ["interrupted", "interrupted"]
    assert TuningResult.from_json(result.to_json()) == result


@pytest.mark.parametrize("after", ["ok", "over_limit", "interrupted"])
def test_an_interruption_is_not_called_a_limit(after: str) -> None:
    """Ctrl-C came before 12 was known: whatever became of 14, nothing says what kept the answer from being larger."""
    statuses = {8: "ok", 12: "interrupted", 14: after}
    result = answer_of({8: [1.0] * 5, 12: [1.6] * 5, 14: [1.9] * 5}, statuses, partial=True, largest_batch_size=99)
    assert (result.batch_size, result.decided_by) == (8, None)
    assert any("interruption" in reason for reason in result.reasons)
    assert not any("Memory" in reason for reason in result.reasons)
    assert TuningResult.from_json(result.to_json()) == result
    assert result.table()


@pytest.mark.case("small-batch-floor")
def test_the_reasons_name_the_answer_the_fastest_and_the_limit() -> None:
    """A person reads why 32 and not 64 without looking at the table."""
    result = answer_of({1: [1.0] * 5, 16: [1.0] * 5, 32: [1.0] * 5, 33: [1.2] * 5, 64: [1.99] * 5}, notes=["a note"])
    assert result.reasons == (
        "32 is the smallest batch size whose throughput is within 1 % of the best: 32 samples/s, 99.5 % of it.",
        "The best is 32.2 samples/s at 64.",
        "Larger batches, measured up to 64, gain no more than 1 %: a plateau.",
        "Up to 32 samples a batch costs about the same time (1.00 s): less leaves the device idle.",
        "Powers of two against their neighbours: 32 is 16.4 % faster per sample than 33.",
        "a note",
    )


@pytest.mark.case("power-of-two")
def test_powers_of_two_are_called_tied_when_they_are() -> None:
    """64 and 63 cost the same per sample within a noise of either sign."""
    sign = np.array([1, -1, 1, -1, 1, -1])
    result = answer_of({63: (63 * (1 + 0.002 * sign)).tolist(), 64: (64 * (1 - 0.002 * sign)).tolist()})
    assert "Powers of two against their neighbours: 64 and 63 are tied." in result.reasons
    failed = answer_of(steady((63, 63.0), (64, 64.0)), {63: "error"})
    assert not any("neighbours" in reason for reason in failed.reasons)


@pytest.mark.parametrize(("factor", "said"), [(0.8, "22.0 % to 28.1 % faster"), (1.25, "22.0 % to 28.1 % slower")])
def test_a_comparison_of_powers_of_two_gives_its_interval(factor: float, said: str) -> None:
    """64 takes 0.8 or 1.25 times as long per sample as 63, with pairs 2.5 % to either side, the smaller end first."""
    noise = [1.025, 1 / 1.025, 1.025, 1 / 1.025, 1.025, 1 / 1.025]
    result = answer_of({63: [63.0] * 6, 64: [64 * factor * one for one in noise]})
    assert any(f"64 is {said} per sample than 63" in reason for reason in result.reasons)


def test_sizes_that_did_not_run_are_named_in_the_reasons() -> None:
    """What could not take part is said with its status."""
    result = answer_of({8: [1.0] * 5, 16: []}, {16: "timeout"})
    assert result.reasons[-1] == "No answer could come from: timeout: 16."
    result = answer_of({8: [1.0] * 5, 16: [], 32: []}, {16: "timeout", 32: "not_run"})
    assert result.reasons[-2:] == (
        "Not tried, for lack of time: 32. A larger budget tries them.",
        "No answer could come from: timeout: 16.",
    )
    failed = dict.fromkeys(range(2, 10), "timeout")
    result = answer_of({1: [1.0] * 5, **{n: [] for n in failed}}, failed)
    assert result.reasons[-1] == "No answer could come from: timeout: 2, 3, 4, 5, 6, 7 and 2 more."


def test_intervals_are_finite_numbers() -> None:
    """However far timings spread, throughput's interval is the latency's turned over."""
    (m,) = answer_of({7: [1e-6, 1e3, 1.0, 2.0, 3.0]}).measurements
    low, high = m.latency_interval or (math.nan, math.nan)
    assert 1e-6 <= low < 2.0 < high <= 1e3
    assert m.throughput_interval == (7 / high, 7 / low)


def steady(*pairs: tuple[int, float]) -> dict[int, list[float]]:
    """Give six rounds of the same seconds to each size."""
    return {n: [seconds] * 6 for n, seconds in pairs}


@pytest.mark.parametrize(("top", "decided_by"), [(100, "max_batch_size"), (191, "max_batch_size"), (192, "peak")])
def test_a_peak_needs_sizes_up_to_twice_the_answer(top: int, decided_by: str) -> None:
    """A slower size a little above the answer may be a tooth of a saw; one at twice the answer shows the other side."""
    result = answer_of(steady((48, 0.5), (96, 0.96), (top, top / 80)))
    assert (result.batch_size, result.decided_by) == (96, decided_by)


def test_a_tie_far_above_is_a_plateau_and_no_peak() -> None:
    """A size whose median is 5 % worse but that paired rounds cannot tell from the fastest shows no fall."""
    noisy = [4.2, 2.0, 4.2, 2.0, 4.2, 2.0, 4.2]
    result = answer_of({64: [1.0] * 7, 256: noisy})
    assert result.batch_size == 64
    assert 256 in result.tied_with
    assert result.decided_by == "plateau"


def test_sizes_with_too_few_timings_are_named_if_they_might_be_the_answer() -> None:
    """Four are too few for an interval; a size that was dropped needs none, and five are enough."""
    result = answer_of({8: [1.0] * 5, 16: [1.5] * 4, 32: [3.0] * 5, 64: [9.0] * 2}, {64: "dropped"})
    (few,) = (reason for reason in result.reasons if "fewer than 5 timings" in reason)
    assert few == "Sizes with fewer than 5 timings, too few for an interval: 16."
    cut_short = {**steady((8, 1.0)), 16: [1.5] * 4, 32: []}
    (few,) = (reason for reason in answer_of(cut_short, {32: "not_run"}).reasons if "fewer than 5" in reason)
    assert few.endswith("a larger budget makes them certain: 16.")


@pytest.mark.parametrize(("l2", "said"), [("cold", "L2 cache is cold"), ("warm", "back to back"), (None, None)])
def test_what_the_cache_held_is_said(l2: str | None, said: str | None) -> None:
    """One sentence of the two, or none where nobody knows."""
    measured = Measured(timings=tuple(rounds(8, [1.0] * 5)), outcomes=(Outcome(8, "ok"),))
    result = answers.answer([Candidate(8)], measured, goal=Goal(), setting={"l2": l2})
    assert [words for words in ("L2 cache is cold", "back to back") if words in " ".join(result.reasons)] == (
        [said] if said else []
    )


def test_a_busy_machine_is_said() -> None:
    """A median that lies anywhere within a fifth of itself is no ground for a confident answer."""
    quiet = answer_of({8: [1.0, 1.01, 1.0, 1.01, 1.0, 1.01]})
    busy = answer_of({8: [1.0, 1.6, 1.0, 1.6, 1.3, 1.3]})
    assert not any("spread widely" in reason for reason in quiet.reasons)
    assert any("spread widely (± 24.4 % at" in reason for reason in busy.reasons)  # 8 / 1.6 to 8 / 1.0 about 8 / 1.3
    assert "± 24.4 %" in busy.table().split("spread widely")[0]  # the same measure as in the table


def test_batches_that_cost_the_same_time_are_said_from_twice_the_smallest_on() -> None:
    """Of 1 and 2 it is worth a sentence; of 3 and 4 every size differs somehow."""
    for sizes, said in (((1, 2), True), ((3, 4), False)):
        result = answer_of(steady(*((n, 1.0) for n in sizes), (64, 100.0)))
        assert any("costs about the same time" in reason for reason in result.reasons) == said


def test_the_three_powers_of_two_nearest_the_answer_are_compared_with_their_nearest_neighbours() -> None:
    """Within an eighth, 72 for 64 included; of two as near, the smaller; 16, the fourth, is left out."""
    cheap = {64: 0.5}  # the fastest per sample
    sizes = (16, 17, 32, 33, 36, 64, 72, 127, 128, 129)
    result = answer_of(steady(*((n, n * cheap.get(n, 1.0)) for n in sizes)))
    assert result.batch_size == 64
    said = "64 is 100 % faster per sample than 72; 32 and 33 are tied; 128 and 127 are tied."
    assert f"Powers of two against their neighbours: {said}" in result.reasons


def test_a_disturbed_smallest_size_gives_no_floor() -> None:
    """Where batch 1 took longer than batch 2, nothing is said of sizes that cost the same time."""
    result = answer_of(steady((1, 112.0), (2, 7.48), (4, 15.0)))
    assert not any("about the same time" in reason for reason in result.reasons)


def test_larger_sizes_that_failed_are_named() -> None:
    """Where everything larger raised an error or hung, memory is not blamed for it."""
    for more in ({"largest_batch_size": 1000}, {"largest_batch_size": 1000, "asked": True}, {}):
        result = answer_of({**steady((8, 1.0)), 16: [], 32: []}, {16: "error", 32: "timeout"}, **more)
        said = [reason for reason in result.reasons if reason.startswith("No limit decided but a failure: ")]
        assert len(said) == 1
        assert "the largest that ran is 8; 16 fails" in said[0]
        assert result.decided_by is None


def test_what_lies_above_a_size_that_failed_was_not_looked_at() -> None:
    """48 ran, 64 fails, and 96 to 512 are dropped for that: no readings judged them, and nothing is a plateau."""
    timings = {**steady((48, 1.0)), 64: [], 96: [], 512: []}
    for status, decided_by in (("error", None), ("timeout", None), ("out_of_memory", None)):
        result = answer_of(timings, {64: status, 96: "dropped", 512: "dropped"})
        assert result.decided_by == decided_by
        assert not any("judged up to 512" in reason for reason in result.reasons)


def test_the_size_that_met_a_limit_is_named() -> None:
    """300 ran and 306 did not: both are in the sentence, and so is what 36 takes beside the latency limit."""
    result = answer_of({**steady((300, 1.0)), 306: []}, {306: "out_of_memory"})
    assert result.decided_by == "memory"
    assert any("the largest that ran is 300; 306 runs out of memory" in reason for reason in result.reasons)
    slow = decide({35: rate(35, 35), 36: too_slow(1.2)}, Goal(latency_limit=1.1))
    assert slow.decided_by == "latency_limit"
    assert any("the largest that keeps it is 35; 36 already takes 1.20 s" in reason for reason in slow.reasons)


def test_smaller_sizes_that_failed_are_not_what_ended_the_ladder() -> None:
    """An error below the largest timing leaves the decision to memory, and so does none at all."""
    for failed in ({16: "error"}, {}):
        seconds = {**steady((8, 1.0)), **{n: [] for n in failed}, **steady((32, 2.0))}
        result = answer_of(seconds, failed, largest_batch_size=32)
        assert (result.batch_size, result.decided_by) == (32, "memory")
        assert any(reason.startswith("Memory decided: nothing larger than 32 fits") for reason in result.reasons)


@attrs.frozen
class Ended:
    """How a size ended: its seconds by round, its status, and which limit it broke."""

    seconds: float | None = None
    status: str = "ok"
    limit: str | None = None
    times: int = 5
    could_gain: float | None = None


DROPPED, NOT_RUN, ERROR = Ended(status="dropped"), Ended(status="not_run"), Ended(status="error")
NO_MEMORY, PLANNED = Ended(status="out_of_memory"), Ended(status="over_limit", limit="memory")


def too_slow(seconds: float, times: int = 5) -> Ended:
    """End above the latency limit."""
    return Ended(seconds, "over_limit", "latency", times)


def decide(ended: Mapping[int, Ended], goal: Goal | None = None, **more: Any) -> TuningResult:
    """Choose among sizes that ended in these ways."""
    timings = [
        timing for n, how in ended.items() if how.seconds is not None for timing in rounds(n, [how.seconds] * how.times)
    ]
    outcomes = []
    for n, how in ended.items():
        facts = {"limit": how.limit, "could_gain": how.could_gain}
        kept = {name: value for name, value in facts.items() if value is not None}
        outcomes.append(Outcome(n, how.status, f"why of {n}", kept))
    measured = Measured(timings=tuple(timings), outcomes=tuple(outcomes))
    options = {"setting": {"budget_seconds": 60.0}} | more
    return answers.answer([Candidate(n) for n in ended], measured, goal=goal or Goal(), **options)


def rate(value: float, batch_size: int, status: str = "ok", times: int = 5) -> Ended:
    """End with so many samples per second."""
    return Ended(batch_size / value, status, times=times)


def test_the_budget_decided_wherever_a_larger_size_was_not_tried() -> None:
    """A size that might be better was left out: that the others show a peak does not say it is the peak."""
    ended = {8: rate(80, 8), 16: rate(100, 16), 32: rate(60, 32, "dropped"), 64: NOT_RUN}
    assert decide(ended).decided_by == "budget"
    assert decide({**ended, 64: DROPPED}).decided_by == "peak"
    assert decide({4: NOT_RUN, **ended, 64: DROPPED}).decided_by == "peak"  # a smaller one keeps nothing from growing


@pytest.mark.parametrize(
    ("ran", "failed", "decided_by"),
    [
        (100, {102: NO_MEMORY}, "memory"),
        (100, {103: NO_MEMORY}, None),
        (3, {4: NO_MEMORY}, "memory"),
        (3, {5: NO_MEMORY}, None),
        (100, {102: too_slow(1.2)}, "latency_limit"),
        (100, {103: too_slow(1.2)}, None),
        (100, {102: too_slow(1.2), 103: NO_MEMORY}, "latency_limit"),
        (100, {101: ERROR, 102: NO_MEMORY}, "memory"),
        (100, {103: NO_MEMORY, 200: NO_MEMORY}, None),
        (100, {101: DROPPED, 102: NO_MEMORY}, "memory"),
    ],
)
def test_a_limit_decided_only_where_it_was_met_within_2_percent_or_1(
    ran: int, failed: dict[int, Ended], decided_by: str | None
) -> None:
    """Between 100 that ran and 103 that failed there may be a better one, so neither memory nor latency is blamed."""
    result = decide({ran // 2: rate(50, ran // 2), ran: rate(100, ran), **failed}, Goal(latency_limit=1.1))
    assert (result.batch_size, result.decided_by) == (ran, decided_by)
    if decided_by is None:
        said = f"no size between {ran}, which ran, and {min(failed)}, which did not, gave a timing"
        assert said in " ".join(result.reasons)


@pytest.mark.parametrize(
    ("ended", "largest", "decided_by"),
    [
        ({500: rate(100, 500), 4096: PLANNED}, 510, "memory"),
        ({500: rate(100, 500), 4096: PLANNED}, 511, None),
        ({500: rate(100, 500)}, 510, "memory"),
        ({500: rate(100, 500)}, 511, None),
        ({3: rate(100, 3), 4: ERROR}, 4, "memory"),
        ({500: rate(100, 500), 600: DROPPED}, 600, "plateau"),
    ],
)
def test_the_plans_limit_is_met_within_2_percent_or_1_of_the_largest_by_plan(
    ended: dict[int, Ended], largest: int, decided_by: str | None
) -> None:
    """However far above it the refused size lies: what counts is how near to the limit a size ran."""
    assert decide(ended, largest_batch_size=largest).decided_by == decided_by


def test_a_size_that_failed_below_one_that_ran_is_no_limit() -> None:
    """101 ran out of memory and 110 did not: the end of the ladder decided."""
    ended = {50: rate(50, 50), 100: rate(100, 100), 101: NO_MEMORY, 110: rate(90, 110, "dropped")}
    assert decide(ended).decided_by == "max_batch_size"


def test_a_limit_met_does_not_decide_where_twice_the_answer_was_measured() -> None:
    """Memory ends at 401, and the curve is flat from 200 on: the plateau kept the answer from being larger."""
    flat = {100: rate(50, 100), 200: rate(100, 200), 400: rate(100, 400), 401: NO_MEMORY}
    assert (decide(flat).batch_size, decide(flat).decided_by) == (200, "plateau")


@pytest.mark.parametrize(
    ("beyond", "decided_by"),
    [
        ({150: rate(100, 150, "dropped"), 180: DROPPED, 190: NO_MEMORY}, "plateau"),
        ({150: rate(90, 150, "dropped"), 180: DROPPED, 190: NO_MEMORY}, "peak"),
        ({150: rate(90, 150, "dropped"), 190: NO_MEMORY}, "peak"),
        ({150: rate(90, 150, "dropped"), 180: ERROR, 190: NO_MEMORY}, None),
        ({150: DROPPED, 190: NO_MEMORY}, "plateau"),
        ({150: rate(90, 150, "dropped"), 180: DROPPED, 190: too_slow(2.2)}, "peak"),
    ],
)
def test_a_far_limit_with_all_between_dropped_is_judged_by_what_was_timed(
    beyond: dict[int, Ended], decided_by: str | None
) -> None:
    """Where the curve does not rise nobody looks for the limit: the curve decided, even short of twice the answer."""
    result = decide({50: rate(50, 50), 100: rate(100, 100), **beyond}, Goal(latency_limit=2.0))
    assert (result.batch_size, result.decided_by) == (100, decided_by)


def test_sizes_dropped_without_a_timing_count_as_looked_at() -> None:
    """Their neighbours' readings rule out 512 and more: up to there the curve gains nothing, which is a plateau."""
    result = decide({64: rate(80, 64), 128: rate(100, 128), 256: DROPPED, 512: DROPPED}, largest_batch_size=10_000)
    assert (result.batch_size, result.decided_by) == (128, "plateau")
    said = "Larger batches, judged up to 512 by the readings of smaller ones, gain no more than 1 %: a plateau."
    assert said in result.reasons
    assert decide({64: rate(80, 64), 128: rate(100, 128), 256: DROPPED, 300: ERROR}).decided_by == "plateau"
    result = decide({64: rate(100, 64), 128: rate(100, 128), 512: DROPPED}, largest_batch_size=10_000)
    assert "measured up to 128 and by these readings up to 512" in " ".join(result.reasons)


@pytest.mark.parametrize(
    ("far", "decided_by"),
    [
        ([1.05, 1.06, 1.05, 1.06, 1.05], "peak"),  # worse by 5 % throughout
        ([1.05, 1.06, 0.97, 1.06, 1.05], "plateau"),  # its interval reaches the fastest's
        ([1.005] * 5, "plateau"),  # worse throughout, and within the tolerance
        ([1.05, 1.06, 1.05], "peak"),  # too few for an interval: all of them are worse
        ([1.05, 1.06, 0.99], "plateau"),
        ([1.05], "peak"),
    ],
)
def test_a_peak_needs_intervals_apart_or_with_few_timings_all_of_them(far: list[float], decided_by: str) -> None:
    """A median 5 % behind is no fall while the timings of the two overlap."""
    result = answer_of({64: [0.64] * 7, 256: [2.56 * one for one in far]}, {256: "dropped"})
    assert (result.batch_size, result.decided_by) == (64, decided_by)


@pytest.mark.parametrize(("next_size", "decided_by"), [(102, "latency_limit"), (103, "plateau")])
def test_a_size_dropped_for_the_latency_limit_ends_the_sizes(next_size: int, decided_by: str) -> None:
    """It was never read, and by its neighbours it takes too long: nothing else kept the answer from being larger."""
    outcomes = (Outcome(100, "ok"), Outcome(next_size, "dropped", "too slow", {"limit": "latency"}))
    measured = Measured(timings=tuple(rounds(100, [0.5] * 5)), outcomes=outcomes)
    ladder, setting = [Candidate(100), Candidate(next_size)], {"limits": {"max_batch_size": next_size}}
    result = answers.answer(ladder, measured, goal=Goal(latency_limit=0.505), setting=setting)
    assert result.decided_by == decided_by


def test_a_tie_is_no_fall_even_where_intervals_lie_apart() -> None:
    """Each was disturbed in a quarter of the rounds, in different ones: half of the pairs call 256 the faster."""
    best, far = [1.0] * 15 + [2.0] * 5, [0.5] * 5 + [1.1] * 15
    result = answer_of({64: [0.64 * one for one in best], 256: [2.56 * one for one in far]})
    near, last = (m.throughput_interval for m in result.measurements)
    assert near is not None
    assert last is not None
    assert last[1] < 0.95 * near[0]
    assert (result.batch_size, result.tied_with, result.decided_by) == (64, (256,), "plateau")


def test_a_list_decided_where_it_holds_nothing_up_to_the_size_that_failed() -> None:
    """Nothing between 16 and 1000 was asked for, so that 1000 does not fit says little about 16."""
    for failed in (NO_MEMORY, PLANNED, too_slow(1.5)):
        result = decide({16: rate(100, 16), 1000: failed}, Goal(latency_limit=1.0), asked=True, largest_batch_size=900)
        assert result.decided_by == "batch_sizes"
        said = "The list of batch sizes decided: it holds nothing between 16 and 1000, which might be better."
        assert said in result.reasons
    slower = {50: rate(100, 50), 75: rate(60, 75, "dropped"), 200: NO_MEMORY}
    assert decide(slower, asked=True).decided_by == "batch_sizes"
    assert decide(slower).decided_by == "peak"
    assert decide({16: rate(100, 16), 17: NO_MEMORY}, asked=True).decided_by == "memory"


def test_errors_above_the_answer_are_no_limit() -> None:
    """Neither the list, nor max_batch_size, nor memory kept the answer from sizes that raised an error."""
    for more in ({}, {"asked": True}, {"largest_batch_size": 99}):
        assert decide({8: rate(100, 8), 32: ERROR}, **more).decided_by is None


def test_max_batch_size_decided_where_the_sizes_looked_at_reach_it() -> None:
    """Also where the last was dropped by its neighbours' readings."""
    for last in (rate(100, 12), DROPPED):
        result = decide({4: rate(50, 4), 8: rate(100, 8), 12: last})
        assert (result.batch_size, result.decided_by) == (8, "max_batch_size")
        assert "max_batch_size decided: nothing larger than 12 was allowed, which might be better." in result.reasons


def test_by_latency_a_larger_size_that_was_looked_at_shows_the_rise() -> None:
    """Timed or ruled out, and whatever else the budget left open."""
    goal = Goal(objective="latency")
    assert decide({1: Ended(1.0), 2: DROPPED, 4: NOT_RUN}, goal).decided_by == "peak"
    assert decide({1: Ended(1.0), 2: Ended(1.005), 4: Ended(2.0), 8: NOT_RUN}, goal).decided_by == "plateau"
    assert decide({1: Ended(1.0), 4: NOT_RUN}, goal).decided_by == "budget"


def test_a_tie_larger_than_the_answer_moves_where_the_peak_ends() -> None:
    """384 is the answer, 1024 ties with it: the fall is said of what lies beyond 1024."""
    swing = [1.0, 1.5, 1.1, 1.4, 1.2, 1.3, 1.05]
    sign = [1, -1, 1, -1, 1, -1, 1]
    result = answer_of({
        384: [3.84 * one for one in swing],
        1024: [10.24 * 1.02 * one * (1 + 0.05 * s) for one, s in zip(swing, sign, strict=True)],
        4096: [40.96 * 3 * one for one in swing],
    })  # fmt: skip
    assert (result.batch_size, result.tied_with, result.decided_by) == (384, (1024,), "peak")
    assert any(reason.startswith("Beyond 1024, the largest tie, the throughput falls") for reason in result.reasons)


def test_by_latency_a_larger_tie_is_named_where_larger_batches_take_longer() -> None:
    """2 takes 30 % longer by its median, and paired rounds cannot tell it from 1."""
    result = answer_of({1: [1.0] * 7, 2: [1.3, 0.9, 1.3, 0.9, 1.3, 0.9, 1.3]}, goal=Goal(objective="latency"))
    assert "Larger batches take longer than 1, as far as paired rounds tell: 2 is tied." in result.reasons


def test_a_plateau_under_noise_is_said_to_be_one_as_far_as_can_be_told() -> None:
    """At ± 24.4 % nobody knows whether larger batches gain 1 %."""
    busy = [1.0, 1.6, 1.0, 1.6, 1.3, 1.3]
    result = answer_of({8: busy, 16: [2 * one for one in busy]})
    assert any(
        reason.endswith("a plateau, as far as timings that spread by ± 24.4 % tell.") for reason in result.reasons
    )


def test_a_tie_far_behind_with_a_wide_interval_is_called_too_noisy_to_tell() -> None:
    """Paired rounds hold 128 possible, its median is 40 % behind: it stays in tied_with, and is no equal in words."""
    noise = [1.0, 3.0, 1.0, 3.0, 1.6, 1.7, 1.0]
    result = answer_of({64: [0.64] * 7, 96: [0.96 * 1.005] * 7, 128: [1.28 * one for one in noise]}, {96: "ok"})
    assert result.tied_with == (128,)
    said = [reason for reason in result.reasons if reason.startswith("Too noisy to tell from 64: 128 (")]
    assert said == ["Too noisy to tell from 64: 128 (62.5 % of it, ± 53.3 %)."]
    assert not any("Paired rounds" in reason for reason in result.reasons)


def test_a_sole_measured_size_is_compared_with_nothing() -> None:
    """Of the best and of smaller sizes nothing is said where nothing else was measured."""
    result = decide({1: Ended(11.5, times=1), 2: NOT_RUN, 4: NOT_RUN})
    assert result.reasons[0] == "Only 1 was measured, so there is nothing to compare it with."
    assert not any("best" in reason for reason in result.reasons)


def test_few_timings_are_said_beside_the_best() -> None:
    """No sentence that claims the best leaves out that two timings are no interval."""
    result = answer_of({8: [1.0] * 2, 16: [1.0] * 2, 32: [8.0] * 5})
    assert result.reasons[0] == "16 has the best throughput, 16 samples/s, on 2 timings: too few for an interval."
    result = answer_of({16: [1.0] * 2, 32: [1.995] * 5})
    assert result.reasons[0].endswith("99.8 % of it, on 2 timings: too few for an interval.")


def test_what_untried_sizes_might_gain_is_said() -> None:
    """The most that any of them could; without the fact nothing is guessed."""
    result = decide({1: Ended(1.0), 2: Ended(1.0), 8: Ended(status="not_run", could_gain=0.08),
                     16: Ended(status="not_run", could_gain=0.034), 32: NOT_RUN})  # fmt: skip
    assert (
        "Not tried, for lack of time, with up to 8 % to gain: 8, 16 and 32. A larger budget tries them."
        in result.reasons
    )
    assert (
        "The budget decided: 3 larger sizes were not tried, since it held no visit to them, and might be better."
        in result.reasons
    )
    result = decide({1: Ended(1.0), 2: Ended(1.0), 8: NOT_RUN})
    assert "Not tried, for lack of time: 8. A larger budget tries them." in result.reasons


def test_refusals_are_told_apart_by_their_limit() -> None:
    """64 took too long and 4096 does not fit: each with its sizes, and whose median it is."""
    result = decide({1: Ended(0.01), 64: too_slow(0.0605, 3), 96: too_slow(0.09, 3), 4096: PLANNED},
                    Goal(latency_limit=0.05), largest_batch_size=4000)  # fmt: skip
    assert result.reasons[-1] == (
        "No answer could come from: above the latency limit: 64 and 96 (64 already takes 60.5 ms (median of 3 "
        "timings), above the latency limit of 50.0 ms); over the memory limit: 4096 (why of 4096)."
    )


def test_a_long_message_is_cut_in_a_sentence_and_kept_in_the_measurement() -> None:
    """Foreign libraries write paragraphs."""
    outcomes = (Outcome(8, "ok"), Outcome(16, "error", "RuntimeError: " + "no " * 200))
    measured = Measured(timings=tuple(rounds(8, [1.0] * 5)), outcomes=outcomes)
    result = answers.answer([Candidate(8), Candidate(16)], measured, goal=Goal(), setting={})
    assert len(result.reasons[-1]) < 220
    assert result.reasons[-1].endswith("no no …).")
    assert len(result.measurements[1].stop_reason) > 600


def test_a_latency_limit_that_the_smallest_size_breaks_is_the_only_thing_to_raise() -> None:
    """Whatever became of larger sizes, which take longer still: no budget and no memory helps."""
    ended = {1: too_slow(0.0576, 3), 2: NOT_RUN, 4: NO_MEMORY, 4096: PLANNED}
    with pytest.raises(NothingMeasured) as caught:
        decide(ended, Goal(latency_limit=1e-6))
    assert str(caught.value) == (
        "no batch size can be the answer: batch size 1 already takes 57.6 ms (median of 3 timings), above the latency "
        "limit of 1.00 µs. Raise latency_limit."
    )
    with pytest.raises(NothingMeasured, match=r"\(1 timing\).*Raise latency_limit or allow smaller batch sizes\.$"):
        decide({64: too_slow(0.0576, 1)}, Goal(latency_limit=1e-6))


def test_a_remedy_is_given_for_each_limit_that_was_broken_and_no_other() -> None:
    """Memory refuses 4096, latency 2, and 1 raised an error."""
    goal = Goal(latency_limit=1e-6)
    with pytest.raises(NothingMeasured) as caught:
        decide({1: ERROR, 2: too_slow(0.1), 4096: PLANNED}, goal)
    assert caught.value.remedy.endswith("batch_sizes. Raise memory_limit. Raise latency_limit.")
    assert "could be measured" not in str(caught.value)
    with pytest.raises(NothingMeasured) as caught:
        decide({1: ERROR, 2: too_slow(0.1)}, goal)
    assert caught.value.remedy.endswith("batch_sizes. Raise latency_limit.")
    with pytest.raises(NothingMeasured) as caught:
        decide({1: ERROR, 4096: PLANNED}, goal)
    assert caught.value.remedy.endswith("batch_sizes. Raise memory_limit.")
    assert "could be measured" in str(caught.value)


def test_the_budget_decided_with_what_a_visit_would_have_taken() -> None:
    """24 would have taken 34 s where 3.5 s were left, or 25 s of 50 s by a guess; a gain above 100 % is no bound."""

    def said(needed: float, left: float) -> list[str]:
        facts = {"limit": "budget", "could_gain": 2.3, "needed_seconds": needed, "left_seconds": left}
        measured = Measured(
            timings=tuple(timing for n in (8, 16) for timing in rounds(n, [1.0] * 6)),
            outcomes=(Outcome(8, "ok"), Outcome(16, "ok"), Outcome(24, "not_run", "", facts)),
        )
        return answers.answer([Candidate(n) for n in (8, 16, 24)], measured, goal=Goal(), setting={}).reasons

    short, guess = said(34.1, 3.5), said(25.0, 50.0)
    assert any("since a visit to 24 would take about 34.1 s and 3.50 s were left, " in reason for reason in short)
    assert any("50.0 s were left, too little for a guess that far" in reason for reason in guess)
    assert not any("to gain" in reason for reason in short)


def test_only_a_budget_that_stopped_it_is_said_to_help_against_noise() -> None:
    """Where the search ended by itself, measuring longer changes nothing."""
    noisy = [1.0, 1.6, 1.0, 1.6, 1.0, 1.6, 1.0]
    result = answer_of({8: noisy, 16: noisy})
    assert result.decided_by != "budget"
    text = " ".join(result.reasons)
    assert "Measure again on a quiet one." in text
    assert "larger budget" not in text


@pytest.mark.parametrize(("kind", "said"), [("cpu", False), ("cuda", True)])
def test_nothing_is_said_of_the_l2_cache_on_a_cpu(kind: str, *, said: bool) -> None:
    """A callable there may be no work of a GPU at all."""
    measured = Measured(timings=tuple(rounds(8, [1.0] * 5)), outcomes=(Outcome(8, "ok"),))
    setting = {"l2": "warm", "device": {"kind": kind}}
    result = answers.answer([Candidate(8)], measured, goal=Goal(), setting=setting)
    assert any("L2 cache" in reason for reason in result.reasons) is said


def test_an_answer_at_the_edge_has_no_optimum_inside() -> None:
    """Of 1, 2 and 4 the smallest is the best: nothing lies on its other side."""
    result = answer_of(steady((1, 1.0), (2, 2.5), (4, 6.0)))
    assert result.decided_by == "peak"
    text = " ".join(result.reasons)
    assert "the throughput falls (measured up to 4), and nothing is smaller than 1." in text
    assert "inside" not in text

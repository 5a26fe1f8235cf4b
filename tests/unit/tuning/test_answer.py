"""The answer is the contract's rule, read literally; ties, limits and words follow from the same numbers."""

from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import given, strategies as st

from cubatch.errors import EnergyNotAvailable, InvalidArgument, NothingMeasured
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Outcome, Timing
from cubatch.tuning import answer as answers
from cubatch.tuning.accumulation import cut
from cubatch.tuning.notes import note, sentence
from cubatch.tuning.results import TuningResult
from cubatch.tuning.subject import SubjectFacts
from tests.unit.tuning.ends import answer_of, rounds

SECONDS = st.floats(min_value=1e-6, max_value=1e3)
ROUNDING = 1e-9  # of logarithms and back
NOT_OK = ("dropped", "over_limit", "out_of_memory", "timeout", "error", "interrupted")


@pytest.mark.case("titan-x-test-batch")
@given(
    seconds=st.dictionaries(st.integers(1, 4096), st.lists(SECONDS, min_size=2, max_size=6), min_size=1, max_size=8),
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
    """
    Going through the ok sizes one by one, the smallest (latency: largest) that the sentence admits is the answer.

    No answer is right only where the interval of some size is wider than its rate.
    """
    statuses = {n: data.draw(st.sampled_from(("ok", "ok", *NOT_OK))) for n in seconds}
    ok = sorted(n for n, status in statuses.items() if status == "ok")
    goal = Goal(objective="latency" if latency else "throughput", tolerance=tolerance)
    if not ok:
        with pytest.raises(NothingMeasured):
            answer_of(seconds, statuses, goal)
        return
    result = answer_of(seconds, statuses, goal, is_listed=True)
    by_size = {m.batch_size: m for m in result.measurements}
    took = {n: by_size[n].latency_seconds or math.nan for n in ok}
    costs = took if latency else {n: took[n] / n for n in ok}
    allowed = min(costs.values()) * ((1 + tolerance) if latency else 1 / (1 - tolerance))
    chosen, fastest = result.batch_size, result.fastest_batch_size
    if chosen is None:
        assert max(by_size[n].half_width or 0.0 for n in ok) > 0.5
        return
    assert costs[chosen] <= allowed * (1 + ROUNDING)
    assert all(costs[n] > allowed * (1 - ROUNDING) for n in ok if (n > chosen if latency else n < chosen))
    assert fastest is not None
    assert costs[fastest] <= min(costs.values()) * (1 + ROUNDING)
    assert result.fastest_batch_size not in result.tied_with
    assert set(result.tied_with) <= set(ok)
    assert TuningResult.from_json(result.to_json()) == result


@pytest.mark.parametrize(("timings", "recommended"), [([1.0], None), ([1.0, 1.0], 64)])
def test_one_timing_is_no_recommendation(timings: list[float], recommended: int | None) -> None:
    """It may be a lucky one: the first sentence says so, and what to do."""
    result = answer_of({8: [1.0, 1.0, 1.0], 64: timings}, is_listed=True)
    assert (result.batch_size, result.recommended, result.fastest_batch_size) == (recommended, bool(recommended), 64)
    assert ("Raise budget" in result.reasons[0]) == (recommended is None)


def test_timings_that_scatter_by_a_factor_of_ten_are_no_recommendation() -> None:
    """A step of 64 took 1 and 10 s: by these, its rate may be any in a range wider than the rate itself."""
    result = answer_of({8: [1.0, 10.0, 1.0, 10.0], 64: [1.0, 10.0, 1.0, 10.0]}, is_listed=True)
    assert (result.batch_size, result.recommended, result.fastest_batch_size) == (None, False, 64)
    assert "raise budget" in result.reasons[0]


def test_a_size_timed_once_leaves_the_recommendation_to_an_equal_one() -> None:
    """256 took 3 % less a sample than 64 once, timings scatter by 5 %: 64 is recommended, as equal and not as best."""
    result = answer_of({8: [0.2, 0.21, 0.19], 64: [1.0, 1.05, 0.95, 1.0], 256: [3.88]}, is_listed=True)
    assert (result.batch_size, result.fastest_batch_size) == (64, 256)
    assert 64 in result.tied_with
    assert "within 1 % of the best" not in result.reasons[0]


@pytest.mark.parametrize("seconds", [3.88, 3.95])
def test_a_current_size_timed_once_is_not_left_for_an_equal_one(seconds: float) -> None:
    """No other size is better beyond the noise, and one timing is too few to keep 256: more budget decides."""
    timings = {8: [0.2, 0.21, 0.19], 64: [1.0, 1.05, 0.95, 1.0], 256: [seconds]}
    result = answer_of(timings, is_listed=True, current=256)
    assert result.batch_size is None
    assert "256" in result.reasons[0]
    assert "Raise budget" in result.reasons[0]


def test_a_measurement_holds_what_its_timings_say() -> None:
    """Of 64 samples in 1 to 5 s: 3 s, 64/3 samples/s, 64 x 6 FLOP / 3 s, half the roofline, and wide intervals."""
    timings = rounds(64, [5.0, 1.0, 3.0, 2.0, 4.0], joules=12.8, sm_clock_mhz=1500.0, peak_bytes=7, peak_device_bytes=9)
    measured = Measured(timings=tuple(timings), outcomes=(Outcome(64, "ok", "enough"),), seconds_spent=15.0)
    candidate = Candidate(64, ("power of two",), predicted_peak_bytes=8, predicted_seconds=2.5)
    result = answers.answer(
        [candidate],
        measured,
        goal=Goal(),
        setting={"seed": 3},
        facts=SubjectFacts(flops_per_sample=6.0, roofline_seconds={64: 1.5}),
    )
    m = result.measurements[0]
    assert (m.latency_seconds, m.samples_per_second) == (
        pytest.approx(3.0, rel=0.02),
        pytest.approx(64 / 3.0, rel=0.02),
    )
    low, high = m.latency_interval or (math.nan, math.nan)
    assert low < 2.5
    assert high > 3.5
    assert m.throughput_interval == (64 / high, 64 / low)
    assert (m.flops_per_second, m.roofline_fraction) == (pytest.approx(128.0, rel=0.02), pytest.approx(0.5, rel=0.02))
    assert m.joules_per_sample == pytest.approx(0.2)
    assert (m.sm_clock_mhz, m.peak_bytes, m.peak_device_bytes) == (1500.0, 7, 9)
    assert (m.predicted_peak_bytes, m.predicted_seconds) == (8, 2.5)
    assert (m.timings_seconds, m.stop_reason, m.reasons) == ((5.0, 1.0, 3.0, 2.0, 4.0), "enough", ("power of two",))
    assert (result.seconds_spent, result.seed, result.spec, result.l2) == (15.0, 3, None, None)


def test_heat_and_memory_are_the_most_and_power_and_load_are_means_of_what_counts() -> None:
    """A throttled timing is as hot as any, and says nothing of the power that the others drew."""
    timings = [
        Timing(batch_size=8, round=number, seconds=1.0, temperature_celsius=heat, power_watts=watts,
               utilization_percent=load, used_bytes=used, throttled=throttled)
        for number, (heat, watts, load, used, throttled) in enumerate(
            [(60.0, 300.0, 90.0, 5, False), (62.0, 400.0, None, 7, False), (91.0, 100.0, 10.0, None, True)]
        )
    ]  # fmt: skip
    measured = Measured(timings=tuple(timings), outcomes=(Outcome(8, "ok"),))
    (m,) = answers.answer([Candidate(8)], measured, goal=Goal(), setting={}).measurements
    assert (m.temperature_celsius, m.power_watts, m.utilization_percent, m.used_bytes) == (91.0, 350.0, 90.0, 7)


def test_what_was_not_measured_is_none() -> None:
    """A size that ran out of memory has no number at all."""
    result = answer_of({8: [1.0] * 5, 16: []}, {16: "out_of_memory"})
    m = result.measurements[1]
    assert (m.latency_seconds, m.latency_interval, m.samples_per_second, m.throughput_interval) == (None,) * 4
    assert (m.flops_per_second, m.roofline_fraction, m.sm_clock_mhz, m.peak_bytes, m.occupancy) == (None,) * 5
    assert (m.temperature_celsius, m.power_watts, m.utilization_percent, m.used_bytes) == (None,) * 4
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
    result = answer_of({8: [1.0], 16: [1.0], 32: [1.0]}, facts=SubjectFacts(layers=layers))
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
    assert [(m.throttled, len(m.timings_seconds)) for m in result.measurements] == [(9, 1), (5, 5)]
    assert [m.latency_seconds for m in result.measurements] == pytest.approx([1.0, 4.0], rel=0.02)  # of one timing
    assert any(reason.startswith("14 timings at a throttled clock") and "of 16" in reason for reason in result.reasons)


def test_a_tie_is_what_the_noise_does_not_tell_apart() -> None:
    """Two sizes whose timings swing by a tenth in turns are tied; one that takes half as long again is not."""
    result = answer_of({10: [1.0, 1.1, 1.0, 1.1, 1.0], 20: [2.0, 2.2, 2.1, 2.0, 2.2], 40: [6.0, 6.1, 6.0, 6.1, 6.0]})
    assert set(result.tied_with) | {result.fastest_batch_size} == {10, 20}
    assert "Sizes 10 and 20 are equally fast" in result.reasons[0]


def test_the_result_keeps_raw_timings_and_the_reference_beside_them() -> None:
    """Times are normalized to the median reference of the run; JSON has both as they were read."""
    timings = [
        Timing(batch_size=n, round=number, seconds=seconds * slow, reference_batch_size=4,
               reference_before_seconds=0.01 * slow, reference_after_seconds=0.01 * slow)
        for n, seconds in ((8, 0.1), (64, 0.5))
        for number, slow in enumerate((1.0, 1.0, 1.0, 1.5, 1.5))
    ]  # fmt: skip
    measured = Measured(timings=tuple(timings), outcomes=(Outcome(8, "ok"), Outcome(64, "ok")))
    result = answers.answer([Candidate(8), Candidate(64)], measured, goal=Goal(), setting={})
    assert result.reference == {"batch_size": 4, "seconds": pytest.approx(0.01)}
    m = result.measurements[0]
    assert m.timings_seconds == pytest.approx((0.1, 0.1, 0.1, 0.15, 0.15))
    assert m.reference_seconds == pytest.approx((0.01, 0.01, 0.01, 0.015, 0.015))
    assert m.latency_seconds == pytest.approx(0.1, rel=0.03)  # not 0.12, the mean, nor drawn to the slow timings
    assert TuningResult.from_json(result.to_json()) == result


def test_by_energy_samples_per_joule_decide() -> None:
    """16 is faster and 8 takes less energy per sample."""
    timings = (*rounds(8, [1.0] * 5, joules=8.0), *rounds(16, [1.0] * 5, joules=32.0))
    measured = Measured(timings=timings, outcomes=(Outcome(8, "ok"), Outcome(16, "ok")))
    result = answers.answer([Candidate(8), Candidate(16)], measured, goal=Goal(objective="energy"), setting={})
    assert (result.batch_size, result.fastest_batch_size) == (8, 8)
    rates = [1 / (m.joules_per_sample or math.nan) for m in result.measurements]
    assert rates == pytest.approx([1.0, 0.5], rel=0.005)


def test_energy_without_a_reading_is_an_error_that_names_the_device() -> None:
    """Seconds are no stand-in for joules."""
    measured = Measured(timings=tuple(rounds(8, [1.0] * 5)), outcomes=(Outcome(8, "ok"),))
    with pytest.raises(EnergyNotAvailable) as caught:
        answers.answer([Candidate(8)], measured, goal=Goal(objective="energy"), setting={"device": {"name": "a CPU"}})
    assert caught.value.device == "a CPU"


def test_a_partial_result_has_no_answer_and_all_measurements() -> None:
    """After Ctrl-C there is a table to print, with what was measured and no answer."""
    measured = Measured(timings=tuple(rounds(8, [1.0])), outcomes=(Outcome(8, "interrupted"),))
    result = answers.answer([Candidate(8), Candidate(16)], measured, goal=Goal(), setting={}, partial=True)
    assert (result.batch_size, result.decided_by, result.largest_measured) == (None, None, 8)
    assert [m.status for m in result.measurements] == ["interrupted", "interrupted"]
    assert TuningResult.from_json(result.to_json()) == result


def test_a_result_whose_inputs_do_not_grow_names_no_limit_and_divides_no_batch() -> None:
    """Its timings are of the same work at every size, so nothing may be concluded from comparing them."""
    seconds = {8: [1.0] * 5, 16: [1.0] * 5, 32: [1.0] * 5}
    grows = answer_of(seconds, largest_batch_size=32)
    assert (grows.batch_size, grows.decided_by) == (32, "memory")
    stays = note("step_does_not_grow")
    result = attrs.evolve(answer_of(seconds, largest_batch_size=32, notes=[stays]), mode="training")
    assert (result.batch_size, result.fastest_batch_size, result.decided_by, result.tied_with) == (None, None, None, ())
    assert result.reasons[0] == sentence(stays)
    assert not set(result.reasons) & set(grows.reasons[:2])
    assert result.choices() == {}
    asked = note("step_time_stays", small=8, first_seconds=1.0, large=32, last_seconds=1.0)
    once = answer_of({8: [1.0], 16: [1.0]}, notes=[asked])
    assert once.batch_size is None
    assert not once.reasons[0].startswith("Check")  # a condition of no recommendation
    with pytest.raises(InvalidArgument, match="without a recommendation"):
        cut(result, 64)
    assert result.table()
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


def test_intervals_are_finite_numbers() -> None:
    """However far timings spread, throughput's interval is the latency's turned over."""
    (m,) = answer_of({7: [1e-6, 1e3, 1.0, 2.0, 3.0]}).measurements
    low, high = m.latency_interval or (math.nan, math.nan)
    assert 0.0 < low < 2.0 < high < math.inf
    assert m.throughput_interval == (7 / high, 7 / low)

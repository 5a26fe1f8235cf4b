"""What the picture of a result shows."""

from __future__ import annotations

import math

from hypothesis import given, strategies as st

from cubatch.report.curve import RULED_OUT, Curve
from cubatch.report.plots.style import ticks
from tests.unit.tuned import measurement, result_of, tuned

SIZES = st.lists(st.integers(1, 2**20), min_size=1, max_size=12, unique=True)


@given(SIZES)
def test_every_size_lies_inside_the_axis_and_ticks_are_few(sizes):
    """Whatever was measured can be seen, and at most a dozen or so numbers stand beneath."""
    shown = Curve(result_of(measurements=[measurement(n, n * 1e-3) for n in sizes], largest_batch_size=None))

    low, high = shown.x_range
    assert low < min(sizes)
    assert high > max(sizes)
    marked = ticks(sizes, low, high)
    assert 1 <= len(marked) <= 13
    assert all(low <= tick <= high for tick in marked)


@given(SIZES)
def test_ticks_are_powers_of_two_or_measured_sizes(sizes):
    """A batch axis shows sizes that mean something."""
    shown = ticks(sizes, min(sizes) / 1.2, max(sizes) * 1.2)

    assert set(shown) <= set(sizes) or all(tick & (tick - 1) == 0 for tick in shown)
    assert list(shown) == sorted(set(shown))


def test_the_band_is_the_tolerance_below_the_fastest_and_above_the_lowest_latency():
    """1 % below 3020 samples/s; 1 % above 16 ms."""
    throughput = Curve(result_of()).band
    latency = Curve(result_of(objective="latency", fastest_batch_size=16)).band

    assert math.isclose(throughput[0], 0.99 * 3020)
    assert math.isclose(throughput[1], 3020)
    assert math.isclose(latency[0], 0.016)
    assert math.isclose(latency[1], 1.01 * 0.016)


def test_a_peak_is_labelled_with_its_crest_and_a_fall_with_what_it_is_past():
    """A label must explain the step it stands at: "power of two" and "asked for" explain nothing."""
    rates = {8: 100, 32: 900, 48: 300, 128: 1000, 512: 200, 1024: 800, 4096: 1100}
    reasons = {
        32: ["power of two", "tensor-core multiple of 8", "crest 1 of conv1"],
        48: ["crest 2 of conv9"],
        128: ["power of two"],
        512: ["asked for", "past crest 4 of conv1"],
    }
    shown = Curve(
        result_of(
            measurements=[measurement(n, n / rate, reasons=reasons.get(n, [])) for n, rate in rates.items()],
            batch_size=4096, fastest_batch_size=4096, tied_with=[],
        )
    )  # fmt: skip
    labels = {point.batch_size: text for point, text in shown.labels}

    assert labels == {32: "crest 1 of conv1", 512: "past crest 4 of conv1"}


def test_the_label_of_the_answer_clears_the_intervals_beside_it():
    """The interval of 32, a neighbour of the answer, reaches higher than the answer's own."""
    wide = measurement(32, 32 / 2000, throughput_interval=[1000, 9000])

    assert Curve(result_of(measurements=[wide, measurement(64, 64 / 3000), measurement(2**20, 1)])).label_above == 9000


def test_no_limit_is_drawn_where_a_size_below_it_ran_out_of_memory():
    """256 did, of the 300 that the plan allows: it says nothing of what fits."""
    assert Curve(result_of(largest_batch_size=300)).limit is None


def test_a_limit_far_to_the_right_is_left_out():
    """A hundred-fold room of memory would squeeze the curve into a corner."""
    ran = [m for m in tuned()["measurements"] if m["status"] != "out_of_memory"]
    found = Curve(result_of(largest_batch_size=300, measurements=ran))
    assert found.limit == (300, "largest that fits in 1.00 GiB: 300")
    assert Curve(result_of(largest_batch_size=30_000)).limit is None


def test_a_size_dropped_without_a_timing_is_ruled_out_and_not_called_slow():
    """Nothing was measured of it."""
    shown = Curve(result_of(measurements=[measurement(32, status="dropped"), measurement(64, 0.02)]))

    assert shown.absent == [(32, RULED_OUT)]

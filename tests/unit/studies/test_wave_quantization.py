"""`waves`: the full waves on GPUs and CPUs, and the conclusions from timings whose truth is known."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, strategies as st

from cubatch.errors import InvalidArgument
from cubatch.hardware import probe
from cubatch.measure.records import PER_TRIAL
from cubatch.studies import wave_quantization as waves
from cubatch.studies.size_comparison import compare
from cubatch.studies.sweep import Sweep
from cubatch.tuning.results import Measurement
from cubatch.workload import Workload
from tests.unit.tuned import result_of

CONVOLUTION = {
    "name": "board",
    "input_shape": [19, 19, 64],
    "layers": [{"type": "conv2d", "k": 64, "r": 3, "s": 3, "pad": 1}],
}


def work(spec="go-net", device="v100-sxm2-16gb"):
    return Workload.of(spec, device, mode="inference", dtype="float32", library="im2col")


def on_threads(count, spec=CONVOLUTION):
    return work(spec, attrs.evolve(probe.device("cpu"), threads=count))


def measured(size, seconds_per_sample):
    """One timing per round, each a thousandth slower than the one before."""
    rate = 1 / seconds_per_sample
    return Measurement(
        batch_size=size,
        status="ok",
        timings_rounds=[number * PER_TRIAL for number in range(7)],
        timings_seconds=[size * seconds_per_sample * (1 + k / 1000) for k in range(7)],
        samples_per_second=rate,
        throughput_interval=(rate, rate),
    )


@pytest.mark.case("coulom-rule")
@pytest.mark.parametrize(("device", "num_sms"), [("v100-sxm2-16gb", 80), ("rtx-2080-ti", 68)])
def test_full_waves_of_the_founding_example_are_coulombs(device, num_sms):
    """
    Go boards of 19 x 19 with 128 channels: 128 filters are one tile wide, so 16384 outputs are a block.

    int(n * 16384 * SM / (19 * 19 * 128)) for the first two n, with the published numbers of SMs.
    """
    distribution = waves.distribute(work(device=device), 1000)
    by_rule = [n * (1 << 14) * num_sms // (19 * 19 * 128) for n in (1, 2)]
    assert list(distribution.full_waves) == by_rule == [distribution.coulom[n] for n in (1, 2)]
    assert distribution.count == num_sms


@given(st.integers(2, 64))
def test_on_a_cpu_full_waves_are_multiples_of_the_threads(threads):
    """All threads have as many samples there, and one has one more just past it."""
    distribution = waves.distribute(on_threads(threads), 10_000)
    assert distribution.full_waves == (2 * threads, 4 * threads)
    for full in distribution.full_waves:
        assert distribution.busiest(full) == full // threads
        assert distribution.busiest(full + 1) == full // threads + 1
    assert distribution.coulom == {}


@pytest.mark.parametrize(
    ("workload", "limit", "field"),
    [(on_threads(1), 64, "device"), (on_threads(2, "mlp"), 64, "model"), (work(), 4, "model")],
)
def test_a_workload_without_full_waves_is_rejected(workload, limit, field):
    """One thread; steps so short that one thread runs them; a limit below the first full wave."""
    with pytest.raises(InvalidArgument) as caught:
        waves.distribute(workload, limit)
    assert caught.value.field == field


@given(st.integers(4, 3000), st.integers(1, 16))
def test_windows_have_both_sides(full, around):
    """The full, the size just past it, and sizes of at least half of it."""
    sizes = waves.window(full, around, 5000)
    assert {full - 1, full, full + 1} <= set(sizes)
    assert sizes[0] >= full / 2
    assert len(sizes) <= 2 * around + 1
    assert max(waves.window(full, around, full + 1)) == full + 1


@pytest.mark.parametrize(
    ("size", "marks"),
    [
        (28, ["full wave", "Coulom n=1"]),
        (29, ["past full wave"]),
        (64, ["power of two"]),
        (24, ["multiple of 8"]),
        (85, ["Coulom n=3"]),
        (30, []),
    ],
)
def test_marks_name_the_rules_of_a_size(size, marks):
    """A power of two is not also listed as a multiple of 8."""
    assert waves.marks(size, waves.distribute(work(), 1000)) == marks


@pytest.mark.parametrize(("slowdown", "word"), [(1.4, "Yes"), (1.0, "No"), (0.9, "No")])
def test_the_conclusion_follows_the_size_just_past_the_crest(slowdown, word):
    """A sample takes `slowdown` times as long above 28; the rule's curve passes through the first full wave."""
    distribution = attrs.evolve(waves.distribute(work(), 1000), full_waves=(28,))
    sizes = range(20, 37)
    by_size = {n: measured(n, 1e-3 * (slowdown if n > 28 else 1.0)) for n in sizes}
    pairs = waves._pairs(sizes, distribution)
    assert set(pairs) == {
        (29, 28, "past full wave"), (24, 28, "multiple of 8"), (32, 28, "power of two"),
    }  # fmt: skip
    comparisons = [compare(by_size[size], by_size[reference], rule=rule) for size, reference, rule in pairs]
    result = result_of(measurements=[])
    swept = Sweep(
        result=attrs.evolve(result, measurements=by_size.values()), comparisons=comparisons, missing=[], rounds=7
    )
    conclusion = waves.conclude(distribution, sizes, swept)
    assert conclusion.answer.startswith(word)
    assert conclusion.details["full_waves"][0]["rule_ratio"] == pytest.approx(29 / 28 / 2)
    rule = {row["batch_size"]: row["rule"] for row in conclusion.details["sizes"]}
    assert rule[28] == pytest.approx(1000)
    assert rule[29] == pytest.approx(1000 * 29 / 28 / 2)

"""Anchors against a model of known parts: planted scales come back, little evidence moves little, intervals hold."""

from __future__ import annotations

import itertools
import math
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.estimate import expected
from cubatch.estimate.expected import step_of
from cubatch.estimate.predictions import PassPrediction, Scales, StepPrediction
from cubatch.hardware.facts import Device
from cubatch.network.layers import Linear
from cubatch.network.passes import Pass
from cubatch.tuning import sharpen as sharpening
from cubatch.tuning.anchors import Anchor
from cubatch.tuning.sharpen import sharpen
from cubatch.workload import Workload
from tests.building import workload
from tests.thorough import examples

HERE, THERE = Device(name="here", slug="here"), Device(name="there", slug="there")
MODEL_SD, SCALE_SD = 0.1, 0.2
MIXTURES = [(1, 9), (9, 1), (2, 8), (8, 2), (3, 7), (7, 3), (4, 6), (6, 4), (5, 5), (10, 1)]


def model(spec: Linear, sizes: Any, _: Device, *, scales: Scales, **__: Any) -> StepPrediction:
    """Take c µs of arithmetic and k µs of bytes a sample, with an interval of MODEL_SD and the scales' own."""
    n, whole = np.array(list(sizes), float), math.hypot(MODEL_SD, SCALE_SD)
    seconds = 1e-6 * n * (scales.compute * spec.c + scales.memory * spec.k)
    half = np.exp(1.6448536269514722 * whole)
    one = PassPrediction(spec.type, Pass.FPROP, seconds, ("bytes",) * len(n), 0 * n)
    return StepPrediction(tuple(sizes), seconds, seconds / half, seconds * half, (one,), (), SCALE_SD)


@pytest.fixture(autouse=True)
def _model(monkeypatch):
    monkeypatch.setattr(expected, "predict_step", model)


def asked(c: int = 5, k: int = 5, device: Device = HERE, dtype: str = "float32", library: str = "vendor") -> Workload:
    return workload(Linear(c=c, k=k), device, dtype=dtype, library=library)


def anchor(work: Workload, seconds: dict[int, float], sd: float = 0.02) -> Anchor:
    return Anchor("file.json", work, seconds, dict.fromkeys(seconds, sd))


def truth(work: Workload, compute: float, memory: float, sizes: Any = (64,)) -> Anchor:
    """What would be measured of it on a GPU of these scales, if the model were right otherwise."""
    step = step_of(work, sizes, Scales(compute, memory))
    return anchor(work, dict(zip(sizes, map(float, step.seconds), strict=True)))


def test_without_anchors_it_is_the_model():
    """Seconds and interval are the model's own, and sizes err alike but for what is wrong nearby only."""
    found, own = sharpen(asked(), [1, 8, 64], []), step_of(asked(), [1, 8, 64])
    assert found.step.seconds.tolist() == own.seconds.tolist()
    assert found.step.high.tolist() == own.high.tolist()
    for (a, m), (b, n) in itertools.product(enumerate((1, 8, 64)), repeat=2):
        nearby = 0.8 + 0.2 * math.exp(-abs(math.log2(m / n)))  # a fifth of the network's error fades by octaves
        assert found.covariance[a, b] == pytest.approx(MODEL_SD**2 * nearby + 0.2**2)
    assert (found.compute, found.memory, found.ratios) == (1.0, 1.0, ())


def test_no_network_is_surer_than_a_measurement(monkeypatch):
    """Of an interval that is all the GPU's, 0.02 are the network's own all the same."""
    monkeypatch.setitem(globals(), "MODEL_SD", 0.0)
    assert np.diag(sharpen(asked(), [1, 64], []).covariance) == pytest.approx(0.2**2 + 0.02**2)


@pytest.mark.parametrize("sd", [0.05, 0.2])
def test_one_anchor_moves_both_scales_by_the_formula(monkeypatch, sd):
    """
    Arithmetic alone, 1.5 times as slow: log 1.5 x sd^2 / (sd^2 + 0.01 + 0.0004), and bytes follow by 0.8 of that.

    A GPU that the model knows (0.05) moves less than one that it has never seen (0.2).
    """
    monkeypatch.setitem(globals(), "SCALE_SD", sd)
    sole = asked(c=5 * 10**6, k=1)
    found = sharpen(asked(c=5, k=1), [64], [truth(sole, 1.5, 1.0)])
    expected = math.log(1.5) * sd**2 / (sd**2 + MODEL_SD**2 + 0.02**2)
    assert math.log(found.compute) == pytest.approx(expected, rel=1e-4)
    assert math.log(found.memory) == pytest.approx(0.8 * expected, rel=1e-4)
    assert found.ratios == (pytest.approx(1.5, rel=1e-5),)


@pytest.mark.parametrize(("compute", "memory"), [(1.3, 0.8), (0.7, 1.4), (1.5, 1.5)])
def test_planted_scales_come_back(monkeypatch, compute, memory):
    """Ten networks of other mixtures tell arithmetic from bytes: a third of the way or more, all of it where sure."""
    known = [truth(asked(c, k), compute, memory) for c, k in MIXTURES]
    found = sharpen(asked(), [64], known)
    for got, planted in ((found.compute, compute), (found.memory, memory)):
        assert 1 / 3 < math.log(got) / math.log(planted) < 1
    monkeypatch.setitem(globals(), "MODEL_SD", 0.005)
    sure = sharpen(asked(), [64], known)
    assert (sure.compute, sure.memory) == (pytest.approx(compute, rel=0.03), pytest.approx(memory, rel=0.03))


def test_a_step_with_experimental_kernels_is_not_the_step_that_was_measured():
    """Its measurement corrects the GPU, but the error of such a step stays."""
    usual = asked(library="cubatch")
    spread = [
        sharpen(attrs.evolve(usual, experimental=names), [64], [truth(usual, 1.4, 1.4)]).covariance[0, 0]
        for names in ((), ("norm_sums",))
    ]
    assert spread[0] < 0.03**2 < MODEL_SD**2 < spread[1]


def test_forty_sizes_of_one_network_are_not_forty_anchors():
    """What is wrong with a network is wrong at all its sizes, so that they move the scales hardly more than one."""
    other = asked(c=4, k=6)
    one, forty = (sharpen(asked(), [64], [truth(other, 1.4, 1.4, sizes)]).compute for sizes in ((64,), range(1, 41)))
    assert 1 < one < forty < one**1.1


@settings(max_examples=examples(50), deadline=None)
@given(
    scale=st.floats(0.5, 2.0),
    mixtures=st.lists(st.sampled_from(MIXTURES), min_size=1, max_size=5, unique=True),
    device=st.sampled_from([HERE, THERE]),
)
def test_right_anchors_never_make_it_worse(scale, mixtures, device):
    """A GPU that is slower or faster in everything: the prediction comes nearer, from that GPU or another like it."""
    known = [truth(asked(c, k, device), scale, scale) for c, k in mixtures]
    found, right = sharpen(asked(), [64], known), step_of(asked(), [64], Scales(scale, scale)).seconds[0]
    before = abs(math.log(step_of(asked(), [64]).seconds[0] / right))
    assert abs(math.log(found.step.seconds[0] / right)) <= before + 1e-12


def test_the_scales_are_sought_until_they_hardly_move(monkeypatch):
    """Networks of both kinds on a GPU of which bytes take three times as long: ten more rounds change under 1 %."""
    known = [truth(asked(c, k), 1.0, 3.0) for c, k in MIXTURES]
    found = sharpen(asked(), [64], known)
    monkeypatch.setattr(sharpening, "_ROUNDS", 12)
    settled = sharpen(asked(), [64], known)
    assert (found.compute, found.memory) == pytest.approx((settled.compute, settled.memory), rel=0.01)
    assert found.step.seconds == pytest.approx(settled.step.seconds, rel=0.01)


def test_an_anchors_ratio_is_the_median_over_its_sizes():
    """Of three sizes, twice, three times and ten times as slow as the model had said."""
    own = asked()
    before = dict(zip((1, 8, 64), step_of(own, [1, 8, 64]).seconds, strict=True))
    slow = {n: factor * before[n] for n, factor in ((1, 3.0), (8, 10.0), (64, 2.0))}
    assert sharpen(own, [4], [anchor(own, slow)]).ratios == (pytest.approx(3.0),)


def test_a_size_that_was_measured_is_given_as_measured():
    """The same network on the same GPU with the same source: within the noise at its size, wider further away."""
    own = asked()
    measured = 1.8 * step_of(own, [64]).seconds[0]
    found = sharpen(own, [1, 16, 64, 128], [anchor(own, {64: measured})])
    ratio = found.step.seconds / step_of(own, [1, 16, 64, 128]).seconds
    width = found.step.high / found.step.seconds
    assert found.step.low == pytest.approx(found.step.seconds / width)
    assert ratio[2] == pytest.approx(1.8, rel=0.01)
    assert 1 < ratio[0] < ratio[1] < ratio[3] < ratio[2]
    assert (
        width[2] < math.exp(1.645 * 0.02) < width[3] < width[1] < width[0] < math.exp(1.645 * math.hypot(0.2, MODEL_SD))
    )


def test_the_wider_a_measurements_own_interval_the_less_it_pulls():
    """
    The same step, 1.8 times as slow, known to 0.02 and to 0.2: as measured, and a part of the way.

    Of log 1.8 it takes 0.05 / (0.05 + sd^2), and sd^2 times that is the variance that remains.
    """
    own = asked()
    for sd in (0.02, 0.2):
        found = sharpen(own, [64], [anchor(own, {64: 1.8 * step_of(own, [64]).seconds[0]}, sd)])
        share = 0.05 / (0.05 + sd**2)
        ratio = found.step.seconds[0] / step_of(own, [64]).seconds[0]
        assert math.log(ratio) == pytest.approx(math.log(1.8) * share, rel=0.01)
        assert found.covariance[0, 0] == pytest.approx(sd**2 * share)


def test_medians_of_one_step_that_differ_make_it_unsure():
    """
    Thrice the same step, 0.3 below the model, as it says, and 0.3 above it, each sure to 0.02: far beyond chance.

    Around their mean they have the variance 0.09, of which 0.0004 were stated: the rest is added to what the network
    errs, 0.05, and to each measurement, so that of the three remains 0.09 / 3 beside it.
    """
    own = asked()
    seconds = step_of(own, [64]).seconds[0]
    found = sharpen(own, [64], [anchor(own, {64: seconds * math.exp(by)}) for by in (-0.3, 0.0, 0.3)])
    assert found.step.seconds[0] == pytest.approx(seconds)
    assert found.covariance[0, 0] == pytest.approx(1 / (1 / (0.05 + 0.09 - 0.0004) + 3 / 0.09))


def test_scatter_elsewhere_makes_nothing_less_sure_than_without_it():
    """Of another dtype on the GPU: it says less of the scales, and nothing of how far this one errs."""
    there, alone = asked(dtype="float16"), sharpen(asked(), [64], []).covariance[0, 0]
    seconds = dict(zip((16, 32, 64, 128), step_of(there, [16, 32, 64, 128]).seconds, strict=True))
    smooth = sharpen(asked(), [64], [anchor(there, seconds)]).covariance[0, 0]
    rough = {n: value * math.exp(by) for (n, value), by in zip(seconds.items(), (-0.5, 0.5, 0.5, -0.5), strict=True)}
    assert smooth < sharpen(asked(), [64], [anchor(there, rough)]).covariance[0, 0] < alone


@pytest.mark.parametrize(
    ("stated", "by_size", "by_timing"), [(0.2, 0.0, 0.2), (0.02, 0.0, 0.2), (0.02, 0.2, 0.02), (0.02, 0.14, 0.14)]
)
def test_intervals_hold_where_measurements_scatter(stated, by_size, by_timing):
    """
    Worlds whose five medians scatter by 0.2, of which their own intervals say all or nothing: nine of ten at least.

    Be it that the network takes longer at some sizes than the model can know, that the timings err, or both.
    """
    rng, trials, inside, own, sizes = np.random.default_rng(7), 200, 0, asked(), [16, 32, 64, 128, 256]
    covariance = sharpen(own, sizes, []).covariance + by_size**2 * np.eye(len(sizes))
    for _ in range(trials):
        right = step_of(own, sizes).seconds * np.exp(rng.multivariate_normal(np.zeros(len(sizes)), covariance))
        seen = right * np.exp(by_timing * rng.standard_normal(len(sizes)))
        found = sharpen(own, [64], [anchor(own, dict(zip(sizes, seen, strict=True)), stated)]).step
        inside += found.low[0] <= right[2] <= found.high[0]
    assert inside / trials > 0.9 - 3 * math.sqrt(0.9 * 0.1 / trials)


def test_the_covariance_left_is_that_of_the_formula_step_by_step():
    """
    Networks, GPUs and sources in all pairings: C - C S^-1 C', written out for each pair of steps, an explicit inverse.

    The measurements are what the model says, so that they scatter by nothing; 1e-9 is far above the rounding of an
    inverse whose condition is under 1e4.
    """
    works = [
        asked(c, k, device, dtype)
        for c, k in ((2, 8), (9, 1)) for device in (HERE, THERE) for dtype in ("float32", "float16")
    ]  # fmt: skip
    target, sizes = works[0], (16, 64)
    steps = [(target, n) for n in sizes] + [(work, n) for work in works for n in (8, 64, 100)]

    def slopes(work):
        c, k = work.spec.c, work.spec.k
        return [math.log((c * grown[0] + k * grown[1]) / (c + k)) / 0.05 for grown in np.exp(0.05 * np.eye(2))]

    def scales(a, b):
        return sum(
            x * y * (0.04 if i == j else 0.032) for i, x in enumerate(slopes(a)) for j, y in enumerate(slopes(b))
        )

    def covariance(a, m, b, n):
        gpu, source = a.device == b.device, a.dtype == b.dtype
        shared = 0.5 * gpu + 0.25 * source + 0.25 * (gpu and source)
        rest = math.sqrt((0.04 - scales(a, a)) * (0.04 - scales(b, b)))
        error = 0.01 * (1.0 if gpu else 0.5) * (0.8 + 0.2 * math.exp(-abs(math.log2(m / n))))
        return shared * (scales(a, b) + rest) + (error if a.spec == b.spec and source else 0.0)

    whole = np.array([[covariance(*one, *other) for other in steps] for one in steps])
    cross, doubt = whole[:2, 2:], whole[2:, 2:] + 0.02**2 * np.eye(len(steps) - 2)
    want = whole[:2, :2] - cross @ np.linalg.inv(doubt) @ cross.T
    found = sharpen(target, sizes, [truth(work, 1, 1, (8, 64, 100)) for work in works])
    np.testing.assert_allclose(found.covariance, want, rtol=1e-9)


def test_passes_still_add_up():
    """What pulls at the step pulls at its passes."""
    own = asked()
    found = sharpen(own, [1, 64], [anchor(own, {64: 1e-3})])
    assert np.sum([one.seconds for one in found.step.passes], axis=0) == pytest.approx(found.step.seconds, rel=1e-12)


def test_derivatives_at_a_few_sizes_stand_for_those_at_all(monkeypatch):
    """Of a step whose bytes do not grow: from bound by memory to bound by arithmetic over ten octaves."""

    def turning(spec: Linear, sizes: Any, _: Device, *, scales: Scales, **__: Any) -> StepPrediction:
        n = np.array(list(sizes), float)
        seconds = 1e-6 * (scales.compute * n + scales.memory * 32)
        one = PassPrediction(spec.type, Pass.FPROP, seconds, ("bytes",) * len(n), 0 * n)
        return StepPrediction(tuple(sizes), seconds, seconds / 1.5, seconds * 1.5, (one,), (), SCALE_SD)

    monkeypatch.setattr(expected, "predict_step", turning)
    sizes = [1024, 512, 256, 192, 128, 96, 64, 48, *range(32, 0, -1)]
    few = sharpen(asked(), sizes, []).covariance
    monkeypatch.setattr(sharpening, "_MOST_SLOPES", 10_000)
    every = sharpen(asked(), sizes[::-1], []).covariance[::-1, ::-1]
    assert few == pytest.approx(every, rel=0.02)
    assert every[0, -1] < 0.95 * every[0, 0]

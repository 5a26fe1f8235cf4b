"""The devices of the search benchmark are what their classes say, and what is called the best is the best."""

from __future__ import annotations

import math
import statistics

import attrs
import pytest

import cubatch as cb
from benchmarks.search import networks
from benchmarks.search.cases import Case
from benchmarks.search.fake_devices import KINDS, make, numbers
from benchmarks.search.sessions import Noise, SearchDevice
from benchmarks.search.waves import convolution_seconds
from cubatch.hardware import catalogue
from tests.fakes import ColdStart, Drift, affine

V100 = catalogue.find("v100-sxm2-16gb")
TURNS = 3


def of_kind(kind: str, turns: int = TURNS) -> list[Case]:
    """Make the first devices of one class."""
    return [make(0, number) for number in numbers(turns, [kind])]


def same_padded(extent: int, channels: int) -> cb.Conv2d:
    """Give a 3x3 convolution that keeps the extent."""
    return cb.Conv2d(h=extent, w=extent, c=channels, k=channels, r=3, s=3, pad=1)


@pytest.mark.parametrize(
    ("num_sms", "extent", "channels", "tile", "crests"),
    [
        (80, 19, 128, (128, 128), (28, 56, 85, 113)),  # V100: identical to the Coulom rule's numbers
        (80, 19, 128, (256, 128), (56, 113, 170, 226)),  # the kernel that V100 really used
        (24, 19, 256, (128, 128), (4, 8, 12, 17, 21)),  # Titan X (Maxwell)
        (28, 19, 256, (128, 128), (4, 9, 14, 19, 24)),  # Titan X (Pascal)
        (48, 8, 128, (128, 128), (96, 192)),  # 2080 Super: the published cliffs at 97 and 193
        (48, 8, 320, (128, 128), (32, 64, 96)),  # its 320 filters are three columns of tiles, the third half empty
    ],
)
def test_the_truth_has_its_cliffs_where_they_were_published(
    num_sms: int, extent: int, channels: int, tile: tuple[int, int], crests: tuple[int, ...]
) -> None:
    """The i-th crest takes i full waves and one sample more takes another whole one, where tails cost a wave."""
    gpu = attrs.evolve(V100, num_sms=num_sms)
    seconds = convolution_seconds(same_padded(extent, channels), gpu, tile=tile, tail=1.0)
    wave = seconds(1)
    for i, crest in enumerate(crests, start=1):
        assert seconds(crest) == pytest.approx(i * wave)
        assert seconds(crest + 1) == pytest.approx((i + 1) * wave)


def test_devices_come_from_the_seed_and_cover_every_class() -> None:
    """The same seed and number make the same device, another seed another one, and the classes take turns."""
    first = [make(3, index) for index in range(len(KINDS))]
    again = [make(3, index) for index in range(len(KINDS))]
    other = [make(4, index) for index in range(len(KINDS))]
    assert [case.kind for case in first] == list(KINDS)
    truths = [[(case.best_cost, case.device.seed) for case in cases] for cases in (first, again, other)]
    assert truths[0] == truths[1]
    assert truths[0] != truths[2]


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_is_the_best_of_all_integers(kind: str) -> None:
    """No size that fits and keeps the limit costs less, and none on the other side of the knee is within 1 %."""
    for case in of_kind(kind):
        limit = case.goal.latency_limit or math.inf
        seconds = {n: case.device.curve(n) for n in range(1, case.task.max_batch_size + 1) if case.device.fits(n)}
        by_latency = case.goal.objective == "latency"
        costs = {n: s if by_latency else s / n for n, s in seconds.items() if s <= limit}
        assert costs[case.best_batch_size] == case.best_cost == min(costs.values())
        bound = case.best_cost * 1.01 if by_latency else case.best_cost / 0.99
        good = [n for n, cost in costs.items() if cost <= bound]
        assert case.knee == (max(good) if by_latency else min(good))
        assert case.largest == max(costs)
        assert case.regret(case.best_batch_size) == case.regret(case.knee) == 0.0


def test_regret_is_the_share_that_is_lost_beyond_the_tolerance() -> None:
    """A size at x of the best throughput loses 1 - x / 0.99, one within the tolerance nothing, no answer all of it."""
    (case,) = of_kind("plateau", turns=1)
    share = case.best_cost / case.cost(1)
    assert case.regret(1) == pytest.approx(1.0 - share / 0.99)
    assert case.regret(1, tolerance=0.0) == pytest.approx(1.0 - share)
    assert case.regret(None) == case.regret(10**6) == 1.0


def test_regret_of_latency_is_how_much_longer_it_takes() -> None:
    """A step x times as long as the shortest has a regret of x / 1.01 - 1, and never more than no answer at all."""
    (case,) = of_kind("latency", turns=1)
    for size in range(case.knee, case.task.max_batch_size + 1):
        times = case.device.curve(size) / case.best_cost
        assert case.regret(size) == pytest.approx(min(1.0, max(0.0, times / 1.01 - 1.0)))


@pytest.mark.parametrize(
    "noise",
    [
        Noise(),
        Noise(0.01, outliers=0.02),
        Noise(0.10, outliers=0.05),
        Noise(0.03, freedom=1.5),
        Noise(0.03, late=2.0),
    ],
    ids=str,
)
def test_half_of_the_readings_lie_above_the_true_median(noise: Noise) -> None:
    """Of 4000 readings a half lies above, within four standard errors of sqrt(1/4 / 4000); all are positive."""
    session = SearchDevice(affine(1e-3, 1e-5), noise_of_timings=noise, seed=7)()
    session.prepare(32)
    readings = [session.clock.time(session.step, 3).seconds for _ in range(4000)]
    above = statistics.fmean(reading > session.true_median(32) for reading in readings)
    assert min(readings) > 0
    if noise.spread:
        assert abs(above - 0.5) < 4 * math.sqrt(0.25 / 4000)
    else:
        assert readings == pytest.approx([session.true_median(32)] * 4000)


def test_leaping_takes_as_long_as_walking() -> None:
    """A reading of a thousand steps that drift and start cold takes what a thousand steps take, within 0.1 %."""
    habits = (ColdStart(), Drift(0.1, seconds=2.0))
    device = SearchDevice(affine(1e-3, 1e-5), behaviours=habits, is_stationary=False)
    walked, leapt = device(), device()
    for session in (walked, leapt):
        session.prepare(10)
    for _ in range(1000):
        walked.step()
    leapt.clock.time(leapt.step, 1000)
    assert leapt.steps == walked.steps == 1000
    assert leapt.clock.now() == pytest.approx(walked.clock.now(), rel=1e-3)


def test_real_networks_are_judged_by_the_model_of_time() -> None:
    """The truth is the prediction at every size, the guess that the search is given is none, or wrong by far."""
    blind, misled = (networks.make(kind, 0, 8) for kind in (networks.NO_PRIOR, networks.WRONG_PRIOR))
    predicted = {c.batch_size: c.predicted_seconds for c in networks.model_of(8).candidates}
    sizes = [candidate.batch_size for candidate in blind.candidates()]
    assert len(networks.NETWORKS) == 24
    assert sizes == sorted(predicted)
    assert all(blind.device.curve(n) == seconds for n, seconds in predicted.items())
    assert blind.device.curve(sizes[-1] - 1) < blind.device.curve(sizes[-1]) * 1.2
    assert blind.best_batch_size in sizes
    assert all(candidate.predicted_seconds is None for candidate in blind.candidates())
    assert all(c.predicted_seconds > 1.5 * predicted[c.batch_size] for c in misled.candidates()[-3:])
    assert not blind.device.fits(sizes[-1] + 1)

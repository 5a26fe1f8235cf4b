"""The fakes tell the truth when asked for it, and misbehave exactly as they say."""

from __future__ import annotations

import statistics

import pytest

from tests.fakes import (
    ColdStart,
    Drift,
    FakeDevice,
    FakeRunner,
    affine,
    sawtooth,
)


def read(runner: FakeRunner, repeats: int = 1) -> float:
    """Take one reading."""
    return runner.clock.time(runner.step, repeats).seconds


@pytest.mark.parametrize("noise", [0.002, 0.05])
def test_noise_has_the_spread_that_was_asked_for(noise: float) -> None:
    """The standard deviation of 4000 log readings is the noise to 5 %, however many steps a reading takes."""
    runner = FakeDevice(affine(1.0, 0.0), noise=noise, seed=5)()
    runner.prepare(1)
    for repeats in (1, 10):
        seconds = [read(runner, repeats) for _ in range(4000)]
        assert statistics.stdev(seconds) / statistics.fmean(seconds) == pytest.approx(noise, rel=0.05)
        assert statistics.median(seconds) == pytest.approx(1.0, rel=0.005)


def test_outliers_come_as_often_as_asked_and_only_slow_down() -> None:
    """A tenth of the readings is 5 % to 100 % too long and none is too short."""
    runner = FakeDevice(affine(1.0, 0.0), outliers=0.1, seed=2)()
    runner.prepare(1)
    seconds = [read(runner) for _ in range(4000)]
    disturbed = [second for second in seconds if second > 1.01]
    assert 0.08 < len(disturbed) / len(seconds) < 0.12
    assert min(seconds) == pytest.approx(1.0)
    assert min(disturbed) >= 1.05
    assert max(disturbed) <= 2.0


def test_a_cold_start_wears_off_with_work() -> None:
    """The first step takes 50 times its 1.28, later ones 1.28 shrinking to 1 after two seconds of work."""
    runner = FakeDevice(affine(0.01, 0.0), behaviours=(ColdStart(slower=0.28, seconds=2.0, first_step=50.0),))()
    runner.prepare(1)
    assert read(runner) == pytest.approx(0.01 * 50 * 1.28)
    second = read(runner)
    assert 0.01 * 1.15 < second < 0.01 * 1.28
    for _ in range(300):
        runner.step()
    assert read(runner) == pytest.approx(0.01)


def test_drift_is_slow_and_bounded() -> None:
    """A drift of 5 % leaves the start alone and ends at 5 %, and the SM clock shows it."""
    runner = FakeDevice(affine(0.01, 0.0), prepare_seconds=0.0, behaviours=(Drift(0.05, seconds=20.0),))()
    runner.prepare(1)
    assert read(runner) == pytest.approx(0.01, rel=1e-6)
    runner.clock.sleep(20.0)
    assert read(runner) == pytest.approx(0.01 * (1 + 0.05 * (1 - 0.3679)), rel=1e-3)
    runner.clock.sleep(1e4)
    assert read(runner) == pytest.approx(0.0105, rel=1e-9)
    assert runner.clock.time(runner.step, 1).sm_clock_mhz == pytest.approx(1500.0 / 1.05)


def test_the_true_best_is_over_every_integer_that_fits() -> None:
    """With waves of 7 samples and room for 40 the best is 35, which no power of two finds; on a tie the smallest."""
    device = FakeDevice(sawtooth(1e-3, 1e-2, 7), memory_bytes=40 * 1024)
    best, samples_per_second = device.true_best(1000)
    assert best == 35
    assert samples_per_second == pytest.approx(35 / 0.051)
    assert FakeDevice(sawtooth(0.0, 1e-2, 7)).true_best(100)[0] == 7

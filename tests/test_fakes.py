"""The fakes tell the truth when asked for it, and misbehave exactly as they say."""

from __future__ import annotations

import statistics

import pytest

from cubatch.errors import TimedOut
from tests.fakes import (
    ColdStart,
    Drift,
    Fails,
    FakeDevice,
    FakeOutOfMemoryError,
    FakeRunner,
    Hangs,
    ImpatientFakeRunner,
    Throttling,
    affine,
    sawtooth,
)


def read(runner: FakeRunner, repeats: int = 1) -> float:
    """Take one reading."""
    return runner.clock.time(runner.step, repeats).seconds


def prepare_and_step(runner: FakeRunner, batch_size: int) -> None:
    """Try one size."""
    runner.prepare(batch_size)
    runner.step()


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


def test_throttling_slows_down_says_so_and_recovers_by_rest() -> None:
    """Four seconds of work make it throttle: slower by half, a third off the clock, told; a second of rest cures it."""
    runner = FakeDevice(affine(0.1, 0.0), behaviours=(Throttling(slower=0.5, hot_after=4.0),))()
    runner.prepare(1)
    cool = runner.clock.time(runner.step, 1)
    for _ in range(45):
        runner.step()
    hot = runner.clock.time(runner.step, 1)
    runner.clock.sleep(1.0)
    rested = runner.clock.time(runner.step, 1)
    assert [cool.seconds, hot.seconds, rested.seconds] == pytest.approx([0.1, 0.15, 0.1])
    assert [cool.throttled, hot.throttled, rested.throttled] == [False, True, False]
    assert hot.sm_clock_mhz == pytest.approx(1000.0)
    assert rested.sm_clock_mhz == pytest.approx(1500.0)


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


@pytest.mark.parametrize("fails_at", ["prepare", "step"])
def test_too_large_a_size_raises_what_cupy_raises(fails_at: str) -> None:
    """A size above the memory raises a MemoryError that is none of ours, and the size below still runs afterwards."""
    device = FakeDevice(affine(1e-3, 1e-5), memory_bytes=64 * 1024, memory_fails_at=fails_at)
    runner = device()
    with pytest.raises(FakeOutOfMemoryError) as caught:
        prepare_and_step(runner, 65)
    assert isinstance(caught.value, MemoryError)
    runner.prepare(64)
    runner.step()
    assert runner.prepared == [65, 64]
    assert runner.ran == {64}


@pytest.mark.parametrize("when", ["prepare", "step"])
def test_a_failing_size_fails_alone(when: str) -> None:
    """A size that raises does so every time, and its neighbours do not."""
    runner = FakeDevice(affine(1e-3, 1e-5), behaviours=(Fails([3], when=when),))()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal"):
            prepare_and_step(runner, 3)
        runner.prepare(4)
        runner.step()


def test_a_hanging_size_jumps_past_every_deadline() -> None:
    """A step of a hanging size costs a million virtual seconds, that of another its own time."""
    runner = FakeDevice(affine(1e-3, 0.0), prepare_seconds=0.0, behaviours=(Hangs([3]),))()
    runner.prepare(2)
    runner.step()
    assert runner.clock.now() == pytest.approx(1e-3)
    runner.prepare(3)
    runner.step()
    assert runner.clock.now() > 1e6


def test_an_impatient_session_cuts_a_reading_off() -> None:
    """With a limit of 5 s a reading of 4 s comes back, one of 6 s ends after 5 s; mere steps have no limit."""
    runner = FakeDevice(affine(2.0, 0.0), prepare_seconds=0.0, gives_up=True)()
    assert isinstance(runner, ImpatientFakeRunner)
    runner.prepare(1)
    assert read(runner, 3) == 2.0
    runner.step_seconds = 5.0
    assert read(runner, 2) == 2.0
    before = runner.clock.now()
    with pytest.raises(TimedOut):
        read(runner, 3)
    assert runner.clock.now() - before == pytest.approx(5.0)
    for _ in range(3):
        runner.step()


def test_the_true_best_is_over_every_integer_that_fits() -> None:
    """With waves of 7 samples and room for 40 the best is 35, which no power of two finds; on a tie the smallest."""
    device = FakeDevice(sawtooth(1e-3, 1e-2, 7), memory_bytes=40 * 1024)
    best, samples_per_second = device.true_best(1000)
    assert best == 35
    assert samples_per_second == pytest.approx(35 / 0.051)
    assert FakeDevice(sawtooth(0.0, 1e-2, 7)).true_best(100)[0] == 7

"""Throttling, other processes and what visits cost: which timings of the walk count."""

from __future__ import annotations

import errno

import attrs
import numpy as np
import pytest

from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_TRIAL, Measured, Timing
from cubatch.measure.stopwatch import MAX_REST_SHARE
from cubatch.search import loop
from cubatch.tuning import answer
from cubatch.tuning.results import TuningResult
from tests.fakes import Behaviour, ColdStart, FakeDevice, Throttling, affine
from tests.unit.search.walking import FLAT, RISES, given, go, seek, statuses


def test_throttled_timings_are_kept_flagged_and_the_device_rests() -> None:
    """A device that heats up gives flagged timings, it rests after each, and what is clear is right."""
    rests: list[float] = []

    @attrs.define
    class Rests(Behaviour):
        def spend(self, seconds: float, *, busy: bool) -> None:
            if not busy and seconds != pytest.approx(0.02):  # what preparing takes
                rests.append(seconds)

    device = FakeDevice(FLAT, noise=0.01, behaviours=(Throttling(hot_after=0.8, rest_cools=1.0), Rests()))
    measured = go(device, given())
    flagged = [timing for timing in measured.timings if timing.throttled]
    assert flagged
    assert 0 < len(rests) <= len(flagged)
    clear = [timing.seconds for timing in measured.timings if not timing.throttled]
    assert all(value == pytest.approx(0.02, rel=0.1) for value in clear)


def test_a_fallen_clock_is_throttling_even_if_the_device_does_not_say_so() -> None:
    """Below three quarters of the highest clock of the run, those of earlier runs included, a timing is flagged."""

    @attrs.define
    class Falls(Behaviour):
        passed: float = 0.0

        def clock(self) -> float:
            return 0.5 if self.passed > 0.6 else 1.0

        def spend(self, seconds: float, *, busy: bool) -> None:
            self.passed += seconds

    measured = go(FakeDevice(FLAT, noise=0.05, behaviours=(Falls(),)), given(8, 16))
    assert {t.throttled for t in measured.timings if t.sm_clock_mhz == 750.0} == {True}
    assert {t.throttled for t in measured.timings if t.sm_clock_mhz == 1500.0} <= {False}
    kept = Measured(timings=(Timing(batch_size=8, round=0, seconds=0.02, sm_clock_mhz=3000.0),))
    again = go(FakeDevice(FLAT, noise=0.05), given(8, 16), earlier=kept)
    assert {timing.throttled for timing in again.timings[1:]} == {True}


def test_a_device_that_always_throttles_is_measured_all_the_same() -> None:
    """If every timing would be thrown away all are used, and rests stay within their share."""

    class Always(Throttling):
        def factor(self) -> float:
            self.throttled = True
            return 1.5

    measured = go(FakeDevice(FLAT, behaviours=(Always(),)), given(8))
    result = answer.answer(given(8), measured, goal=Goal(), setting={})
    assert statuses(measured) == {8: "ok"}
    assert result.measurements[0].throttled == len(result.measurements[0].timings_seconds) > 0
    assert measured.seconds_spent < MAX_REST_SHARE * 60 + 3


def test_what_visits_took_is_in_the_result() -> None:
    """20 ms of preparing and at least a step of warming a visit; visits that had to prepare nothing count too."""
    device = FakeDevice(affine(0.0, 1e-3), noise=0.003)
    measured = go(device, given(32, 48))
    result = answer.answer(given(32, 48), measured, goal=Goal(), setting={})
    for m in result.measurements:
        visits = len({timing.round // PER_TRIAL for timing in measured.of(m.batch_size)})
        assert m.visits == visits
        assert m.prepare_seconds == pytest.approx(0.02 * round(m.prepare_seconds / 0.02))
        assert 0.02 - 1e-9 <= m.prepare_seconds <= 0.02 * visits + 1e-9
        assert m.warmup_seconds >= 0.9e-3 * m.batch_size * visits
        assert m.query_seconds == 0.0
    assert TuningResult.from_json(result.to_json()) == result


def test_the_first_step_of_each_size_is_in_the_result() -> None:
    """The very first step takes 50 times as long as later ones, the first step of each other size 3 times."""
    cold = ColdStart(slower=0.0, first_step=50.0, first_step_of_size=3.0)
    measured = go(FakeDevice(affine(0.0, 1e-3), behaviours=(cold,)), given(32, 48, 64))
    result = answer.answer(given(32, 48, 64), measured, goal=Goal(), setting={})
    ratios = sorted(m.first_seconds / m.latency_seconds for m in result.measurements)
    assert ratios == pytest.approx([3.0, 3.0, 50.0], rel=0.02)


@attrs.define
class RaisesOnUnderflow(Behaviour):
    """Steps set NumPy's error handling to raise."""

    def step(self, batch_size: int) -> None:
        """Set it."""
        np.seterr(all="raise")


def test_numpy_errors_that_a_step_lets_raise_do_not_end_the_search() -> None:
    """Probabilities of the search underflow to 0, which is right: the result is that of an ordinary device."""
    before = np.geterr()
    try:
        _, changed = seek(FakeDevice(RISES, behaviours=(RaisesOnUnderflow(),)))
    finally:
        np.seterr(**before)
    assert changed.batch_size == seek(FakeDevice(RISES))[1].batch_size


def test_a_process_without_file_descriptors_still_gets_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLAS libraries are listed by opening a file; without it their threads are not limited."""

    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(loop, "ThreadpoolController", fail)
    assert seek(FakeDevice(RISES))[1].batch_size == 512

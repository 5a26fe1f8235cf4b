"""The batch size that a user has now: always measured, kept unless another is better, and named first."""

from __future__ import annotations

import pytest

from cubatch.errors import InvalidArgument
from cubatch.hardware import probe
from cubatch.hardware.memory_limit import MemoryLimit
from cubatch.tuning import session
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from tests.fakes import FakeDevice, affine
from tests.unit.tuning.sheets import KIB, Sheet

pytestmark = pytest.mark.usefixtures("quiet")

RISING = affine(0.01, 1e-4)  # samples/s: 100 n / (1 + 0.01 n)
FLAT = affine(1e-5, 1e-3)  # all sizes within 1 %


def tune(curve, current, *, sizes=None, samples=512, objective="throughput", noise=0.0):
    fake = FakeDevice(curve, noise=noise, seed=3)
    room = MemoryLimit(samples * KIB, samples * KIB, "all there is")
    subject = Sheet(device=probe.device("cpu"), memory=room, fake=fake)
    return session.tune(subject, Request.of(objective=objective, batch_sizes=sizes, current=current))


def throughput(n):
    return n / RISING(n)


@pytest.mark.parametrize("current", [50, 64, 77])
def test_a_worse_current_size_is_measured_and_compared(current):
    """It has timings in two trials, and the first sentence has the ratio of the true rates within 1 %."""
    result = tune(RISING, current)
    present = next(m for m in result.measurements if m.batch_size == current)
    assert len(present.timings_seconds) >= 5
    assert result.current_batch_size == current
    assert result.batch_size > current
    ratio = float(result.reasons[0].split(" times (")[0].rsplit(" ", 1)[1])
    true_ratio = throughput(result.batch_size) / throughput(current)
    assert ratio == pytest.approx(true_ratio, rel=0.01)
    assert result.comparison == pytest.approx(true_ratio, rel=0.01)
    assert result.reasons[0].endswith(f"as fast as {current}.")
    assert TuningResult.from_json(result.to_json()) == result


@pytest.mark.parametrize("current", [60, 128, 500])
def test_a_current_size_that_loses_nothing_is_kept(current):
    """Where all sizes are within the tolerance the answer is the user's size, and another without it."""
    result = tune(FLAT, current)
    assert result.batch_size == current
    assert result.recommended
    assert result.reasons[0].startswith(f"Keep batch size {current}: ")
    assert result.comparison == 1
    alone = tune(FLAT, None)
    assert alone.batch_size != current
    assert alone.comparison is None


def test_noise_alone_moves_nobody():
    """With noise of 10 % a size that is truly 0.5 % behind is kept."""
    assert tune(affine(1e-4, 1e-3), 20, noise=0.1).batch_size == 20


def test_a_current_size_that_does_not_fit_is_named():
    """It is not tried; the best that fits is recommended, and the first reason says that the other exceeds a limit."""
    result = tune(RISING, 1000)
    assert {m.batch_size: m.status for m in result.measurements}[1000] == "over_limit"
    assert result.batch_size <= 512
    assert "1000 exceeds a limit" in result.reasons[0]


def test_a_current_size_far_beyond_those_that_fit_is_listed():
    """More than 40 sizes are proposed, and no size lies within a factor of two of the current one: the cut ends."""
    result = tune(RISING, 2**30, samples=2**22)
    assert {m.batch_size: m.status for m in result.measurements}[2**30] == "over_limit"
    assert result.recommended


def test_a_current_size_joins_a_list():
    """It is measured with the listed sizes."""
    result = tune(RISING, 24, sizes=[8, 64])
    assert [m.batch_size for m in result.measurements] == [8, 24, 64]
    assert result.batch_size == 64


def test_by_latency_a_current_size_is_kept_within_the_tolerance_only():
    """A batch of 2 takes 10.2 ms, one of 100 takes 20 ms."""
    result = tune(RISING, 100, objective="latency")
    assert result.batch_size == 2
    assert "times the latency of 100" in result.reasons[0]
    assert result.comparison == pytest.approx(20 / 10.2, rel=0.02)


@pytest.mark.parametrize(("current", "top"), [(0, None), (1.5, None), ("64", None), (True, None), (64, 32)])
def test_a_current_size_is_checked(current, top):
    """It is a whole number of at least 1, and not above the maximum."""
    with pytest.raises(InvalidArgument) as caught:
        Request.of(max_batch_size=top, current=current)
    assert caught.value.field == "current"

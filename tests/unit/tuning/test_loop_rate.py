"""A result for a loop with a data loader: the recommendation, its rate, and what the loader allows."""

from __future__ import annotations

import json

import pytest

from cubatch.frameworks.loader_rate import LoaderRate
from cubatch.tuning.loop_rate import with_loader
from cubatch.tuning.results import TuningResult
from tests.unit.tuned import about

STEPS = {2: 300.0, 8: 1000.0, 64: 5000.0, 256: 9000.0}  # samples/s of the step alone


def result():
    return TuningResult.from_json(json.dumps(about(STEPS)))


def rate(samples_per_second, workers=2):
    return LoaderRate(
        batch_size=16, num_workers=workers, samples_per_second=samples_per_second, num_samples=1000, drop_last=False
    )


@pytest.mark.parametrize(
    ("loader", "workers", "size", "loop"),
    [
        (250.0, 2, 2, 250.0),  # slower than every step: the smallest size does as well
        (1000.0, 2, 8, 1000.0),
        (1005.0, 2, 8, 1000.0),  # within the tolerance of 1 %
        (2000.0, 2, 64, 2000.0),
        (20_000.0, 2, 256, 9000.0),  # faster than every step: nothing changes
        (1000.0, 0, 256, 900.0),  # in turns, every gain of the step counts: 1 / (1/9000 + 1/1000)
        (10.0, 0, 8, 1 / (1 / 1000 + 1 / 10)),  # 9.9; the best is 9.99
    ],
)
def test_the_smallest_size_that_loses_nothing_in_the_loop_is_recommended(loader, workers, size, loop):
    """By the arithmetic of a loader and a step that overlap, or take turns without worker processes."""
    found = with_loader(result(), rate(loader, workers))
    assert found.batch_size == size
    assert found.samples_per_second == pytest.approx(loop)
    assert found.step_samples_per_second == STEPS[size]
    assert found.loader_samples_per_second == loader
    assert found.sizes[size].status == "ok"
    assert (found.decided_by == "loader") == (size != 256)
    assert TuningResult.from_json(found.to_json()) == found


def test_the_reasons_have_both_rates_and_the_epoch(monkeypatch):
    """The loader's 250 samples/s, the workers that would feed the step, and the last incomplete batch."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    first, second, third, *_ = with_loader(result(), rate(250.0)).reasons
    assert "250 samples/s" in first
    assert "with 3 workers it would deliver about 375 samples/s" in second
    assert "500 steps of 2" in third
    assert "16 steps of 64, the last of 40 samples" in with_loader(result(), rate(2000.0)).reasons[2]


def test_a_result_without_a_loader_has_the_rate_of_its_step():
    """And none where nothing is recommended."""
    found = result()
    assert found.samples_per_second == found.step_samples_per_second == 9000.0
    assert found.loader_samples_per_second is None

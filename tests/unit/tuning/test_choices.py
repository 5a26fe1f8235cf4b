"""Which sizes of a result are worth trying as a hyperparameter."""

from __future__ import annotations

import json

import pytest

from cubatch.errors import InvalidArgument
from cubatch.tuning.results import TuningResult
from tests.unit.tuned import about, measurement, tuned


def result(rates, **more):
    """Of sizes with these samples per second."""
    return TuningResult.from_json(json.dumps(about(rates, **more)))


def test_choices_are_the_sizes_within_and_what_each_costs():
    """Of 1000 samples/s, 5 % are 950: what is below costs too much; ascending, the fastest costs nothing."""
    found = result({16: 949.0, 32: 950.0, 64: 1000.0, 128: 990.0}).choices(within=0.05)
    assert list(found) == [32, 64, 128]
    assert found == {32: pytest.approx(0.05), 64: 0.0, 128: pytest.approx(0.01)}
    assert list(result({16: 949.0, 64: 1000.0}).choices(0)) == [64]


def test_an_octave_gives_its_answer_else_its_power_of_two_else_its_fastest():
    """90.5 = 64 x sqrt(2) parts two octaves: 48 to 90 are around 64, 91 to 181 around 128."""
    rates = {48: 999.0, 61: 1000.0, 64: 998.0, 90: 997.0, 96: 990.0, 128: 980.0, 192: 985.0, 300: 991.0}
    assert list(result(rates, batch_size=48).choices()) == [48, 128, 300]
    assert list(result(rates, batch_size=96).choices()) == [64, 96, 300]


def test_only_sizes_that_ran_and_keep_every_limit_are_chosen():
    """One above the latency limit has a reading too; one that was dropped has few, which are enough to try it."""
    sizes = [
        measurement(16, 0.016, "dropped"),
        measurement(32, 0.0321),
        measurement(64, 0.04, "over_limit"),
        measurement(128, status="out_of_memory"),
    ]
    told = TuningResult.from_json(json.dumps(tuned(measurements=sizes, batch_size=32, fastest_batch_size=32)))
    assert list(told.choices()) == [16, 32]
    assert TuningResult.from_json(json.dumps(tuned(measurements=[]))).choices() == {}


@pytest.mark.parametrize("within", [-0.01, 1, 5, "5 %", True, None])
def test_what_is_no_share_is_refused(within):
    """5 is not taken for 5 %."""
    with pytest.raises(InvalidArgument, match="within must be a share"):
        result({64: 1.0}).choices(within)

"""A batch that is shared by unequal workers: who is faster does more, and nobody more than has run there."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given, strategies as st

from cubatch.errors import InvalidArgument
from cubatch.fleet.fleet_result import FleetDevice, FleetResult
from cubatch.tuning.results import TuningResult
from tests.unit.tuned import about

WORKERS = st.lists(st.tuples(st.floats(1.0, 1e4), st.integers(1, 500)), min_size=1, max_size=6)


def device(number: int, rate: float, most: int) -> FleetDevice:
    """A device whose answer is the largest size that ran."""
    mapping = about({most: rate}, largest_measured=most)
    return FleetDevice(
        name=f"device {number}", workers=(f"tcp://{number}",), result=TuningResult.from_json(json.dumps(mapping))
    )


@given(WORKERS, st.data())
def test_shares_add_up_within_what_ran_and_finish_together(workers, data):
    """
    Every sample is somebody's, no share exceeds what ran, and whoever is not full ends within a sample of the others.

    The time of a share is its samples by the rate; rounding moves a share by less than one sample.
    """
    fleet = FleetResult(devices=[device(i, rate, most) for i, (rate, most) in enumerate(workers)])
    batch_size = data.draw(st.integers(1, sum(most for _, most in workers)))
    shares = fleet.shares(batch_size)
    assert sum(shares.values()) == batch_size
    facts = {f"tcp://{i}": fact for i, fact in enumerate(workers)}
    assert all(shares[name] <= most for name, (_, most) in facts.items())
    loose = [(shares[name], rate) for name, (rate, most) in facts.items() if shares[name] < most]
    for share, rate in loose:
        for other, others_rate in loose:
            assert (share - 1) / rate <= (other + 1) / others_rate * (1 + 1e-9)


def test_more_than_all_can_hold_is_refused_with_what_they_can():
    """And so is a fleet of which nothing was measured."""
    fleet = FleetResult(devices=[device(0, 10.0, 64), device(1, 5.0, 32)])
    with pytest.raises(InvalidArgument, match="at most 96"):
        fleet.shares(97)
    failed = [attrs.evolve(each, result=None, error="gone") for each in fleet.devices]
    with pytest.raises(InvalidArgument, match=r"at most 0.*No device was measured"):
        FleetResult(devices=failed).shares(1)

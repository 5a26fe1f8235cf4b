"""`autotune_fleet` without a cluster: what is refused before one is asked, and what is handed out all the same."""

from __future__ import annotations

import contextlib
import json
import math

import pytest

from cubatch.errors import InvalidArgument
from cubatch.fleet import tune_fleet
from cubatch.fleet.fleet_result import FleetDevice
from cubatch.tuning.results import TuningResult
from tests.unit.tuned import about

ASKED = {"layer_spec": "mlp", "client": "tcp://127.0.0.1:9", "store": False}


@pytest.fixture
def clients(monkeypatch):
    """Put a fleet of one GPU of 100 samples/s in the place of a cluster's, and list the clients that were asked."""
    asked = []

    @contextlib.contextmanager
    def connected(client):
        asked.append(client)
        yield client

    measured = TuningResult.from_json(json.dumps(about({32: 100.0})))
    device = FleetDevice(name="Test GPU", workers=("tcp://a",), result=measured)
    monkeypatch.setattr(tune_fleet, "_connected", connected)
    monkeypatch.setattr(tune_fleet._Fleet, "measured", lambda _: [device])
    return asked


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"budget": 0.0}, "budget"),
        ({"tolerance": 5.0}, "tolerance"),
        ({"latency_limit": -1.0}, "latency_limit"),
        ({"objective": "speed"}, "objective"),
        ({"batch_sizes": [0]}, "batch_sizes"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"seed": -1}, "seed"),
        ({"memory_limit": "x"}, "memory_limit"),
        ({"prices": {"t4": 0}}, "prices['t4']"),
        ({"prices": {"t4": math.nan}}, "prices['t4']"),
        ({"prices": {"t4": math.inf}}, "prices['t4']"),
        ({"prices": {"t4": "1"}}, "prices['t4']"),
    ],
)
def test_what_each_worker_would_refuse_is_refused_before_one_is_asked(clients, wrong, field):
    """By its name; a whole fleet that measures nothing would be no answer."""
    with pytest.raises(InvalidArgument) as caught:
        tune_fleet.autotune_fleet(**ASKED | wrong)
    assert caught.value.field == field
    assert clients == []


@pytest.mark.parametrize("memory_limit", ["80%", "8GiB", 1000])
def test_any_size_of_memory_is_asked_of_the_workers(clients, memory_limit):
    """What is free counts there and not here."""
    assert tune_fleet.autotune_fleet(**ASKED, memory_limit=memory_limit).devices[0].batch_size == 32
    assert clients == [ASKED["client"]]


@pytest.mark.usefixtures("clients")
def test_a_price_of_no_device_is_refused_with_what_was_measured():
    """The result is on the error, with the prices that are right: 3.6 an hour at 100 samples/s is 10 a million."""
    with pytest.raises(InvalidArgument, match="Test GPU") as caught:
        tune_fleet.autotune_fleet(**ASKED, prices={"Tset GPU": 1.0, "Test GPU": 3.6})
    assert (caught.value.field, caught.value.value) == ("prices", "Tset GPU")
    (device,) = caught.value.partial.devices
    assert device.cost_per_million_samples == pytest.approx(10.0)

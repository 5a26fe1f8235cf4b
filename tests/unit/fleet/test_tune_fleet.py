"""`autotune_fleet` without a cluster: what is refused before one is asked, and what is handed out all the same."""

from __future__ import annotations

import contextlib
import json

import pytest

from cubatch.errors import InvalidArgument, WorkerFailed
from cubatch.fleet import on_worker, tune_fleet
from cubatch.fleet.fleet_result import FleetDevice, FleetResult
from cubatch.network import models
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
    monkeypatch.setattr(tune_fleet, "_measure", lambda *_: [device])
    return asked


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"budget": 0.0}, "budget"),
        ({"batch_sizes": [0]}, "batch_sizes"),
        ({"max_batch_size": 8, "current": 9}, "current"),
        ({"divides": 12, "multiple_of": 5}, "multiple_of"),
        ({"memory_limit": "x"}, "memory_limit"),
        ({"prices": {"t4": 0}}, "prices['t4']"),
        ({"layer_spec": "model.onnx", "library": "onnxruntime"}, "library"),
        ({"library": "torch"}, "library"),
        ({"predict": "t4"}, "predict"),
        ({"predict": ["t4", 4]}, "predict"),
        ({"predict": ["cpu"]}, "predict"),
        ({"predict": ["t4", "t44"]}, "device"),
        ({"store": 5}, "store"),
        ({"batch_sizes": 5}, "batch_sizes"),
        ({"batch_sizes": "32"}, "batch_sizes"),
        ({"prices": ["t4"]}, "prices"),
        ({"budgett": 5}, "argument"),
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


def test_the_folder_of_a_store_is_not_looked_up_at_the_caller(clients):
    """The path is a path on the workers."""
    tune_fleet.autotune_fleet(**ASKED | {"store": "/only/on/the/workers/store.sqlite3"})
    assert clients == [ASKED["client"]]


@pytest.mark.usefixtures("clients")
def test_gpus_to_predict_are_any_iterable_of_names():
    """Also one that can be read only once: it is checked first and predicted last."""
    result = tune_fleet.autotune_fleet(**ASKED, predict=iter(["t4", "a40"]))
    assert {device.name for device in result.devices[1:]} == {"t4", "a40"}


@pytest.mark.usefixtures("clients")
def test_a_price_of_no_device_is_refused_with_what_was_measured():
    """The result is on the error, with the prices that are right: 3.6 an hour at 100 samples/s is 10 a million."""
    with pytest.raises(InvalidArgument, match="Test GPU") as caught:
        tune_fleet.autotune_fleet(**ASKED, prices={"Tset GPU": 1.0, "Test GPU": 3.6})
    assert (caught.value.field, caught.value.value) == ("prices", "Tset GPU")
    (device,) = caught.value.partial.devices
    assert device.cost_per_million_samples == pytest.approx(10.0)


# --- workers that fail and leave ----------------------------------------------------------------------------------


class Cluster:
    """
    A client of a cluster whose workers change by a script.

    Each look at the cluster takes the next entry of `looks`, the workers that are there; the last one stays.  Tasks of
    the workers in `answering` end.
    """

    def __init__(self, looks, described, answering=()):
        self.looks, self.described, self.answering = list(looks), described, answering
        self.cancelled = 0

    def wait_for_workers(self, count, timeout):
        """The first look has a worker."""

    def nthreads(self):
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def run(self, _function, workers, on_error):
        assert on_error == "return"
        return {address: self.described[address] for address in workers}

    def submit(self, _function, _spec, _options, *, workers, pure, resources):
        assert not pure
        assert resources is None
        return Task(self, workers)

    def cancel(self, futures, *, force):
        assert force
        self.cancelled += len(futures)


class Task:
    """The future of a task that may run on these workers."""

    status = "finished"

    def __init__(self, cluster, workers):
        self.cluster, self.workers = cluster, workers

    def done(self):
        return any(worker in self.cluster.answering for worker in self.workers)

    def result(self):
        return {"result": json.dumps(about({32: 100.0}))}


def described(**device):
    """What a worker with the caller's versions replies."""
    return facts(**device) | {"versions": on_worker.versions()}


def measured(cluster):
    return tune_fleet._measure(cluster, MLP, {}, lambda _name, _sentence: None)


def test_a_device_whose_workers_leave_fails_and_the_others_do_not():
    """Its task is cancelled; a worker that cannot describe its device is left out."""
    replies = {"a": described(), "b": described(name="EPYC"), "c": ImportError("cubatch")}
    cluster = Cluster([["a", "b", "c"], ["b"]], answering="b", described=replies)
    lost, other = measured(cluster)
    assert lost.result is None
    assert "left the cluster" in lost.error
    assert (other.name, other.batch_size, cluster.cancelled) == ("EPYC", 32, 1)


def test_a_cluster_that_describes_no_device_is_an_error_with_the_reason():
    """Workers without cubatch: a result without devices would explain nothing."""
    with pytest.raises(WorkerFailed, match="No module named 'cubatch'"):
        measured(Cluster([["a"]], described={"a": ModuleNotFoundError("No module named 'cubatch'")}))


# --- distinct devices ----------------------------------------------------------------------------------------------


def facts(limit=2**34, **device):
    """The facts of a worker on a host, or of one with these facts of a device."""
    host = {"kind": "cpu", "name": "Xeon", "memory_bytes": 2**37, "mig": None, "power_limit_watts": None}
    return {"device": host | device, "memory_bytes": limit, "blas_threads": 2, "resources": None}


def test_workers_with_the_same_device_are_one_entry():
    """Memory limits of equal hosts differ by pages; devices of the same name are told apart by what differs."""
    gpu = {"kind": "cuda", "name": "V100", "memory_bytes": 2**34}
    workers = {
        "a": facts(), "b": facts(2**34 + 8192), "c": facts(2**33),
        "d": facts(**gpu, power_limit_watts=300.0), "e": facts(**gpu, power_limit_watts=150.0), "f": facts(name="EPYC"),
    }  # fmt: skip
    assert {device.name: device.workers for device in tune_fleet.distinct(workers)} == {
        "Xeon, 2 threads, 16.00 GiB": ("a", "b"),
        "Xeon, 2 threads, 8.00 GiB": ("c",),
        "V100, 16.00 GiB, 300 W": ("d",),
        "V100, 16.00 GiB, 150 W": ("e",),
        "EPYC": ("f",),
    }


# --- what is predicted ---------------------------------------------------------------------------------------


MLP = json.loads(json.dumps(models.resolve("mlp").to_mapping()))


def gpu(name, **more):
    """A GPU of the fleet on which our kernels ran, as `library="auto"` has it on every GPU."""
    facts = {"kind": "cuda", "compute_capability": [7, 0], "num_sms": 80, "slug": "v100-sxm2-16gb"}
    asked = {"spec": MLP, "mode": "inference", "library": "cubatch", "device": facts | {"name": name} | more}
    return FleetDevice(name=name, result=TuningResult.from_json(json.dumps(about({32: 1e5, 64: 2e5}, **asked))))


def test_a_gpu_that_is_not_there_is_predicted_with_the_library_of_the_fleet():
    """A V100 on which our kernels ran anchors a T4: it was refused as of another library than the vendor's."""
    (found,) = tune_fleet._predicted(MLP, ["t4"], [gpu("V100")], {})
    assert found.error == ""
    assert (found.forecast.library, found.forecast.anchors) == ("cubatch", ("anchors[0]",))


def test_a_gpu_that_says_nothing_of_another_is_left_out_with_a_note():
    """A slice of 14 of a V100's 80 SMs, and a GPU of which nobody knows the rates, beside a whole V100."""
    others = [gpu("V100 MIG", num_sms=14), gpu("Nobody's GPU", slug="")]
    (found,) = tune_fleet._predicted(MLP, ["t4"], [*others, gpu("V100")], {})
    assert len(found.forecast.anchors) == 1
    told = [note for note in found.forecast.notes if "is not used" in note]
    assert [note.partition(" is ")[0] for note in told] == [f"The measurement on {one.name}" for one in others]
    assert "measured on 14" in told[0]
    (alone,) = tune_fleet._predicted(MLP, ["t4"], others, {})
    assert (alone.error, alone.forecast.library, alone.forecast.anchors) == ("", "cubatch", ())


@pytest.mark.parametrize("memory_limit", ["64MiB", 64 * 2**20])
def test_a_prediction_keeps_the_memory_limit_and_says_what_it_takes(memory_limit):
    """A batch of the mlp takes more than its input, 1000 numbers of 4 bytes a sample: 64 MiB hold fewer than 16 800."""
    (free,), (found,) = (tune_fleet._predicted(MLP, ["t4"], [], more) for more in ({}, {"memory_limit": memory_limit}))
    assert free.forecast.largest_batch_size > found.forecast.largest_batch_size
    assert found.forecast.largest_batch_size < 2**26 // (1000 * 4)
    assert 1000 * 4 * found.batch_size < found.peak_bytes <= 2**26
    assert FleetResult(devices=[found]).to_mapping()["devices"][0]["peak_bytes"] == found.peak_bytes

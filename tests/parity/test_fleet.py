"""`autotune_fleet` on clusters of one machine: a result per distinct device, and the workers' stores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

distributed = pytest.importorskip("distributed")
dask = pytest.importorskip("dask")

import cubatch as cb  # noqa: E402
from cubatch.errors import InvalidArgument, StoreError, WorkerFailed  # noqa: E402
from cubatch.fleet import on_worker  # noqa: E402
from cubatch.tuning import store  # noqa: E402

MIB = 2**20
ASKED = {"mode": "training", "batch_sizes": [4, 8], "budget": 120.0}
WORKERS = [{"memory_limit": (600 + 200 * i) * MIB, "env": {"OMP_NUM_THREADS": str(1 + i % 2)}} for i in range(4)]


@pytest.fixture(scope="module")
def cluster():
    """Four workers of one thread each, with four memory limits and one or two threads of BLAS."""
    spec = {i: {"cls": distributed.Nanny, "options": {"nthreads": 1, **options}} for i, options in enumerate(WORKERS)}
    scheduler = {"cls": distributed.Scheduler, "options": {"dashboard_address": ":0", "host": "127.0.0.1"}}
    with distributed.SpecCluster(workers=spec, scheduler=scheduler, silence_logs=50) as found:
        yield found


@pytest.fixture(scope="module")
def client(cluster):
    with distributed.Client(cluster, set_as_default=False) as found:
        yield found


@pytest.fixture(scope="module")
def answered(client, tmp_path_factory):
    """The result of the fleet, the workers' store, and the progress."""
    path = tmp_path_factory.mktemp("workers") / "store.sqlite3"
    progress = []
    result = cb.autotune_fleet("mlp", client, store=path, progress=lambda *words: progress.append(words), **ASKED)
    return result, path, progress


def test_workers_that_differ_are_devices_of_their_own(answered):
    """Four devices, each measured on its worker, distinguished by threads and memory in one table."""
    result, _, progress = answered
    assert len(result.devices) == 4
    assert {len(device.workers) for device in result.devices} == {1}
    assert all(device.result is not None and device.batch_size in {4, 8} for device in result.devices)
    assert len({device.name for device in result.devices}) == 4
    assert all(device.name in result.table() for device in result.devices)
    for device in result.devices:
        own = [sentence for name, sentence in progress if name == device.name]
        assert own == ["measuring", f"the answer is {device.batch_size}"]


def test_the_same_call_again_is_answered_from_the_workers_store(answered, client):
    """Nothing is measured: rows and results stay."""
    before, path, _ = answered
    rows = [store.show(path, run.id)[1].timings for run in store.list_runs(path)]
    assert any(rows)
    again = cb.autotune_fleet("mlp", client, store=path, **ASKED)
    assert [store.show(path, run.id)[1].timings for run in store.list_runs(path)] == rows
    assert {d.name: d.batch_size for d in again.devices} == {d.name: d.batch_size for d in before.devices}


def num_timings(path):
    try:
        return sum(run.num_timings for run in store.list_runs(path)) if path.exists() else 0
    except StoreError:  # the worker creates the tables
        return 0


def test_another_worker_with_the_same_device_measures_for_a_killed_one(tmp_path):
    """The first is killed after its first timing: the other continues from that timing."""
    path = tmp_path / "store.sqlite3"
    options = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": 600 * MIB, "dashboard_address": ":0"}
    settings = {
        "distributed.scheduler.locks": {"lease-timeout": "6s", "lease-validation-interval": "1s"},  # of the dead
        "distributed.scheduler.allowed-failures": 3,
    }
    with (
        dask.config.set(settings),
        distributed.LocalCluster(**options, silence_logs=50) as cluster,
        cluster.get_client() as client,
    ):
        pids = client.run(os.getpid)
        killed, addresses = [], []

        def kill():
            while not num_timings(path):
                time.sleep(0.05)
            (address,) = [one for one, keys in client.processing().items() if keys]
            killed.extend(t.seconds for run in store.list_runs(path) for t in store.show(path, run.id)[1].timings)
            addresses.append(address)
            os.kill(pids[address], signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        result = cb.autotune_fleet("mlp", client, store=path, **ASKED)
        thread.join()
    (device,) = result.devices
    assert device.batch_size in {4, 8}
    assert device.workers
    assert not set(device.workers) & set(addresses)
    assert killed
    assert set(killed) <= {t.seconds for run in store.list_runs(path) for t in store.show(path, run.id)[1].timings}


@pytest.mark.parametrize("by_address", [False, True])
def test_workers_with_other_versions_are_refused_by_name(client, cluster, monkeypatch, by_address):
    """Timings of two versions of an engine are not timings of two devices, and the scheduler is not to blame."""
    here = on_worker.versions()
    monkeypatch.setattr(on_worker, "versions", lambda: {**here, "numpy": "0.1"})
    with pytest.raises(InvalidArgument, match=r"^client must be a worker with .*'tcp://.*numpy .*, here 0\.1"):
        cb.autotune_fleet("mlp", cluster.scheduler_address if by_address else client, store=False, **ASKED)


def test_a_device_on_which_nothing_fits_is_named_with_the_reason(client):
    """The others still answer."""
    result = cb.autotune_fleet("mlp", client, store=False, **{**ASKED, "memory_limit": 1000})
    assert all("does not fit" in device.error or "fit" in device.error for device in result.devices)
    assert all(
        device.error in result.table().replace("\n", " ") or device.name in result.table() for device in result.devices
    )


@pytest.mark.parametrize("wrong", [7, "127.0.0.1", "tcp://127.0.0.1:x", "pigeon://127.0.0.1:9"])
def test_what_is_no_cluster_is_refused(wrong):
    """By its name."""
    with pytest.raises(InvalidArgument, match="client"):
        cb.autotune_fleet("mlp", wrong, **ASKED)


def test_a_scheduler_that_does_not_answer_is_an_error():
    """The address makes sense, but nothing listens there."""
    with pytest.raises(WorkerFailed, match=r"no scheduler answers at tcp://127\.0\.0\.1:9: Connection refused"):
        cb.autotune_fleet("mlp", "tcp://127.0.0.1:9", **ASKED)


CONNECTING = """
import socket, sys, time
from cubatch.cli import app
def wait(*place, **options):
    print("connects", flush=True)
    time.sleep(60)
socket.create_connection = wait
sys.argv = ["cubatch", "fleet", "tune", "mlp", "--scheduler", "tcp://127.0.0.1:9", "--no-store"]
app.main()
"""


def test_ctrl_c_ends_the_wait_for_a_scheduler_at_once():
    """With the documented exit code and without a traceback."""
    command = [sys.executable, "-c", CONNECTING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout.readline() == "connects\n"
        waiting.send_signal(signal.SIGINT)
        _, errors = waiting.communicate(timeout=20)
    assert (waiting.returncode, errors) == (130, "cubatch: interrupted\n")


def test_gpus_that_are_not_there_are_predicted_and_say_so(answered, client):
    """After those that were measured, with the price given."""
    _, path, _ = answered
    result = cb.autotune_fleet("mlp", client, store=path, predict=["t4"], prices={"t4": 0.36}, **ASKED)
    last = result.devices[-1]
    assert (last.name, last.workers) == ("t4", ())
    assert last.forecast.batch_size == last.batch_size
    assert last.cost_per_million_samples == pytest.approx(0.36 / 3600 * 1e6 / last.samples_per_second)
    mapping = json.loads(json.dumps(result.to_mapping()))
    assert [device["predicted"] for device in mapping["devices"]] == [False] * 4 + [True]


def test_the_command_line_says_the_same(cluster, answered):
    """A table on a terminal, or JSON with the shares."""
    _, path, _ = answered
    command = [
        sys.executable, "-m", "cubatch", "fleet", "tune", "mlp", "--scheduler", cluster.scheduler_address, "--mode",
        "training", "--batch-sizes", "4,8", "--budget", "120", "--store", str(path), "--share", "16", "--json", "-",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found["devices"]) == 4
    assert sum(found["shares"].values()) == 16

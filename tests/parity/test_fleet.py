"""`autotune_fleet` on clusters of one machine: one answer a kind of device, and whatever was timed is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

distributed = pytest.importorskip("distributed")
dask = pytest.importorskip("dask")

import cubatch as cb  # noqa: E402
from cubatch.errors import InvalidArgument, WorkerFailed  # noqa: E402
from cubatch.fleet import on_worker, tune_fleet  # noqa: E402
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
    """The fleet's answer, and the caller's store."""
    path = tmp_path_factory.mktemp("caller") / "store.sqlite3"
    said = []
    result = cb.autotune_fleet("mlp", client, store=path, progress=lambda *words: said.append(words), **ASKED)
    return result, path, said


def test_workers_that_differ_are_devices_of_their_own(answered):
    """Four kinds, each measured on its worker, told apart by threads and memory in one table."""
    result, _, _ = answered
    assert len(result.devices) == 4
    assert {len(device.workers) for device in result.devices} == {1}
    assert all(device.result is not None and device.batch_size in {4, 8} for device in result.devices)
    assert len({device.name for device in result.devices}) == 4
    assert all(device.name in result.table() for device in result.devices)


def test_every_timing_is_in_the_callers_store(answered):
    """The rows that a result is made of, for each kind, under the conditions of its worker."""
    result, path, _ = answered
    kept = [store.show(path, run.id)[1].timings for run in store.list_runs(path)]
    for device in result.devices:
        for measurement in device.result.measurements:
            rows = [[t.seconds for t in timings if t.batch_size == measurement.batch_size] for timings in kept]
            assert any(set(measurement.timings_seconds) <= set(row) for row in rows)


def test_the_same_question_again_is_answered_from_the_store(answered, client):
    """Nothing is measured: the rows stay, and the answers too."""
    before, path, _ = answered
    rows = [store.show(path, run.id)[1].timings for run in store.list_runs(path)]
    again = cb.autotune_fleet("mlp", client, store=path, **ASKED)
    assert [store.show(path, run.id)[1].timings for run in store.list_runs(path)] == rows
    assert {d.name: d.batch_size for d in again.devices} == {d.name: d.batch_size for d in before.devices}


def test_who_measures_is_told(answered):
    """A sentence when a worker begins, and one with its answer."""
    result, _, said = answered
    for device in result.devices:
        own = [sentence for name, sentence in said if name == device.name]
        assert own[0] == f"measuring on {device.workers[0]}"
        assert own[-1] == f"the answer is {device.batch_size}"


def test_a_worker_killed_while_it_measures_costs_no_timing(tmp_path):
    """Of two of a kind one is killed after its third timing: the other goes on from there, and the answer comes."""
    killed: dict[str, int] = {}
    options = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": 600 * MIB, "dashboard_address": ":0"}
    path = tmp_path / "store.sqlite3"
    leases = {"distributed.scheduler.locks": {"lease-timeout": "6s", "lease-validation-interval": "1s"}}  # of the dead
    with (
        dask.config.set(leases),
        distributed.LocalCluster(**options, silence_logs=50) as cluster,
        cluster.get_client() as client,
    ):
        pids = client.run(os.getpid)

        def watch(_: str, sentence: str) -> None:
            if sentence.startswith("measuring on "):
                killed.setdefault("first", pids.get(sentence.removeprefix("measuring on ")))

        taken = tune_fleet._Keep.take

        def take(keep, message):
            taken(keep, message)
            if message["timings"] and "done" not in killed:
                killed["done"] = len(message["timings"])
                killed["rows"] = [timing["seconds"] for timing in message["timings"]]
                os.kill(killed["first"], signal.SIGKILL)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tune_fleet._Keep, "take", take)
            result = cb.autotune_fleet("mlp", client, store=path, progress=watch, **ASKED)
    (device,) = result.devices
    assert device.batch_size in {4, 8}
    (run,) = store.list_runs(path)
    kept = [timing.seconds for timing in store.show(path, run.id)[1].timings]
    assert kept[: len(killed["rows"])] == killed["rows"]


def test_a_caller_killed_goes_on_from_what_it_has(client, cluster, tmp_path):
    """SIGKILL after the first timings: the next call keeps their rows and adds the others."""
    path = tmp_path / "store.sqlite3"
    asked = {**ASKED, "batch_sizes": [4, 8, 16], "budget": 120.0}
    script = f"""
        import cubatch as cb
        cb.autotune_fleet("mlp", {cluster.scheduler_address!r}, store={str(path)!r}, **{asked!r})
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    while not (path.exists() and any(run.num_timings for run in store.list_runs(path))):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    before = {(run.id, t.batch_size, t.round): t.seconds
              for run in store.list_runs(path) for t in store.show(path, run.id)[1].timings}  # fmt: skip
    assert before
    result = cb.autotune_fleet("mlp", client, store=path, **asked)
    assert all(device.batch_size for device in result.devices)
    after = {(run.id, t.batch_size, t.round): t.seconds
             for run in store.list_runs(path) for t in store.show(path, run.id)[1].timings}  # fmt: skip
    assert before.items() <= after.items()


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


def test_a_scheduler_that_does_not_answer_is_told_in_time(monkeypatch):
    """The address makes sense, and whoever has it is not there: within the time that connecting may take."""
    monkeypatch.setattr(tune_fleet, "_CONNECT_SECONDS", 1)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"no scheduler answers at tcp://127\.0\.0\.1:9: Connection refused"):
        cb.autotune_fleet("mlp", "tcp://127.0.0.1:9", **ASKED)
    assert 1 <= time.monotonic() - began < 5


KNOCKING = """
import socket, sys
from cubatch.cli import app
knock = socket.create_connection
def told(*place, **options):
    print("knocks", flush=True)
    return knock(*place, **options)
socket.create_connection = told
sys.argv = ["cubatch", "fleet", "tune", "mlp", "--scheduler", "tcp://127.0.0.1:9", "--no-store"]
app.main()
"""


def test_ctrl_c_ends_the_wait_for_a_scheduler_at_once():
    """With the exit code of the contract and no traceback; it takes no half a minute."""
    command = [sys.executable, "-c", KNOCKING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout.readline() == "knocks\n"
        waiting.send_signal(signal.SIGINT)
        _, said = waiting.communicate(timeout=20)
    assert (waiting.returncode, said) == (130, "cubatch: interrupted\n")


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


def test_shares_are_in_proportion_to_what_was_measured(answered):
    """They add up, none exceeds what ran there, and more than all hold is refused."""
    result, _, _ = answered
    rates = {device.workers[0]: device.samples_per_second for device in result.devices}
    shares = result.shares(16)
    assert sum(shares.values()) == 16
    total = sum(rates.values())
    for address, share in shares.items():
        assert share <= 8
        if max(16 * rate / total for rate in rates.values()) < 8:
            assert abs(share - 16 * rates[address] / total) < 1
    with pytest.raises(InvalidArgument, match="at most 32"):
        result.shares(33)


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

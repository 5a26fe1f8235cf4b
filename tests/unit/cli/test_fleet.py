"""`cubatch fleet tune`: options in, a table or JSON out; clusters are in tests/parity/test_fleet.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cubatch.errors import InvalidArgument
from cubatch.fleet import tune_fleet
from cubatch.fleet.fleet_result import FleetDevice, FleetResult
from cubatch.tuning.prediction import predict
from cubatch.tuning.results import TuningResult
from tests.unit.tuned import about

ASKED = ("fleet", "tune", "mlp", "--scheduler", "tcp://10.0.0.1:8786")
MEASURED = TuningResult.from_json(json.dumps(about({32: 100.0, 64: 200.0}, largest_measured=64)))
ANSWER = FleetResult(devices=[FleetDevice(name="Test GPU", workers=("tcp://a", "tcp://b"), result=MEASURED)])


@pytest.fixture
def fleet(monkeypatch):
    """Put an answer in the place of a cluster's, and keep what was asked."""
    asked = {}

    def autotune_fleet(spec, client, **options):
        asked.update(options, client=client, layers=len(spec.to_mapping()["layers"]))
        return ANSWER

    monkeypatch.setattr(tune_fleet, "autotune_fleet", autotune_fleet)
    return asked


def test_a_kind_of_device_is_a_line(run, fleet):
    """Its name, its workers, the answer, and the share of each worker where a batch is to be shared."""
    code, out, err = run(*ASKED, "--share", 100)
    assert (code, err) == (0, "")
    assert "Test GPU" in out
    assert [line.split() for line in out.splitlines() if "tcp://" in line] == [["tcp://a", "50"], ["tcp://b", "50"]]


def test_options_are_those_of_autotune(run, fleet):
    """As they are spelled elsewhere; predicted GPUs and prices by name, the store as `tune` has it."""
    code, out, _ = run(
        *ASKED, "--mode", "training", "--batch-sizes", "32,64", "--budget", 5, "--predict-missing", "t4,a40",
        "--prices", "t4=0.35,AMD EPYC, 2 threads=1", "--no-store", "--json", "-",
    )  # fmt: skip
    assert code == 2, "a price's name holds a comma"
    code, out, _ = run(
        *ASKED, "--mode", "training", "--batch-sizes", "32,64", "--budget", 5, "--predict-missing", "t4, a40",
        "--prices", "t4=0.35", "--no-store", "--json", "-",
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["devices"][0]["batch_size"] == 64
    assert (fleet["client"], fleet["mode"], fleet["batch_sizes"]) == ("tcp://10.0.0.1:8786", "training", [32, 64])
    assert (fleet["budget"], fleet["predict"], fleet["prices"]) == (5.0, ["t4", "a40"], {"t4": 0.35})
    assert fleet["store"] is False


def test_what_a_cluster_refuses_is_a_line(run, monkeypatch):
    """On stderr, with the exit code of an argument that makes no sense."""

    def autotune_fleet(*_, **__):
        raise InvalidArgument("client", "tcp://10.0.0.1:8786", "the address of a scheduler that answers")

    monkeypatch.setattr(tune_fleet, "autotune_fleet", autotune_fleet)
    code, out, err = run(*ASKED)
    assert (code, out) == (2, "")
    assert "--scheduler must be the address of a scheduler that answers" in err
    assert "Traceback" not in err


def test_a_share_that_the_fleet_does_not_hold_is_refused_after_the_result(run, fleet, tmp_path):
    """Two workers on which 64 has run hold 128: the table and the file are there all the same, without shares."""
    file = tmp_path / "fleet.json"
    code, out, err = run(*ASKED, "--share", 129, "--json", file)
    assert code == 2
    assert "Test GPU" in out
    assert (
        err == "cubatch: --share must be at most 128, the sum of the largest batches that ran on the workers, got 129\n"
    )
    found = json.loads(file.read_text())
    assert found["devices"][0]["batch_size"] == 64
    assert "shares" not in found


def test_a_price_of_no_device_is_refused_after_the_result(run, monkeypatch):
    """Which names there are is known last: what the whole fleet measured is shown first."""

    def autotune_fleet(*_, **__):
        error = InvalidArgument("prices", "Tset GPU", "one of Test GPU")
        error.partial = ANSWER
        raise error

    monkeypatch.setattr(tune_fleet, "autotune_fleet", autotune_fleet)
    code, out, err = run(*ASKED, "--prices", "Tset GPU=1")
    assert code == 2
    assert "Test GPU" in out
    assert err == "cubatch: --prices must be one of Test GPU, got 'Tset GPU'\n"


def test_a_fleet_of_which_all_is_predicted_is_a_failure(run, monkeypatch):
    """Exit code 1 where each kind failed, also beside a GPU that is not there and was predicted."""
    predicted = FleetDevice(name="t4", forecast=predict("lenet5", device="t4", batch_sizes=[64]))
    devices = [predicted, FleetDevice(name="Test GPU", workers=("tcp://a",), error="it is gone")]
    monkeypatch.setattr(tune_fleet, "autotune_fleet", lambda *_, **__: FleetResult(devices=devices))
    code, out, err = run(*ASKED, "--predict-missing", "t4")
    assert (code, err.count("\n")) == (1, 1)
    assert "every device failed" in err
    assert "predicted" in out


@pytest.mark.parametrize("more", [(), ("--share", 8)])
def test_a_fleet_that_has_no_answer_is_a_failure(run, monkeypatch, more):
    """Exit code 1 as of any command that could not do what was asked; the table and the JSON say why of each kind."""
    failed = FleetDevice(name="Test GPU", workers=("tcp://a",), error="it is gone")
    monkeypatch.setattr(tune_fleet, "autotune_fleet", lambda *_, **__: FleetResult(devices=[failed]))
    code, out, err = run(*ASKED, *more)
    assert (code, err.count("\n")) == (1, 1)
    assert "every device failed" in err
    assert "Test GPU: it is gone" in out
    code, out, _ = run(*ASKED, *more, "--json", "-")
    assert (code, json.loads(out)["devices"][0]["error"]) == (1, "it is gone")


def test_a_store_of_any_name_is_a_file(run, fleet):
    """`refresh` too, which is a word only where it is no path."""
    run(*ASKED, "--store", "refresh")
    assert fleet["store"] == Path("refresh")

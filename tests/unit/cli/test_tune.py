"""`cubatch tune`: options through to the library, results out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cubatch.errors import NothingMeasured
from cubatch.tuning.results import TuningResult
from tests.unit.tuned import tuned


def test_tune_passes_every_option_on_under_the_name_that_autotune_knows(run, autotune):
    """The options mirror the keyword arguments of the contract, one to one."""
    code, _, err = run(
        "tune", "lenet5", "--device", "cpu", "--devices", "cpu,cpu", "--mode", "training", "--dtype", "float16",
        "--objective", "latency", "--tolerance", "0.05", "--batch-sizes", "32,64", "--max-batch-size", "512",
        "--memory-limit", "8GiB", "--latency-limit", "0.5", "--optimizer", "a:adam", "--library", "im2col",
        "--recompute", "--current", "48", "--budget", "7", "--no-isolate", "--no-store", "--seed", "3",
    )  # fmt: skip

    assert (code, err) == (0, "")
    assert autotune.spec.name == "lenet5"
    assert callable(autotune.options.pop("progress"))
    assert autotune.options == {
        "device": "cpu", "devices": ["cpu", "cpu"], "mode": "training", "dtype": "float16", "objective": "latency",
        "tolerance": 0.05,
        "batch_sizes": [32, 64], "max_batch_size": 512, "current": 48,
        "multiple_of": 1, "divides": None, "memory_limit": "8GiB", "latency_limit": 0.5,
        "optimizer": "a:adam", "library": "im2col", "recompute": True, "budget": 7.0, "isolate": False, "store": False,
        "seed": 3, "dims": None,
    }  # fmt: skip


def test_tune_without_options_asks_for_the_defaults_of_the_contract(run, autotune):
    """The table of defaults is that of autotune's signature in the contract."""
    code, _, _ = run("tune", "mlp")

    assert code == 0
    assert callable(autotune.options.pop("progress"))
    assert autotune.options == {
        "device": None, "devices": None, "mode": "inference", "dtype": "float32", "objective": "throughput",
        "tolerance": 0.01,
        "batch_sizes": None, "max_batch_size": None, "current": None,
        "multiple_of": 1, "divides": None, "memory_limit": None, "latency_limit": None,
        "optimizer": "sgd", "library": "auto", "recompute": False, "budget": 60.0, "isolate": "auto", "store": True,
        "seed": 0, "dims": None,
    }  # fmt: skip


def test_quick_is_a_budget_of_ten_seconds(run, autotune):
    """A name for what people ask for first; --help says what it stands for."""
    assert run("tune", "mlp", "--quick")[0] == 0
    assert autotune.options["budget"] == 10.0
    assert "--budget 10" in " ".join(run("tune", "--help")[1].split())


@pytest.mark.parametrize(
    ("options", "store"),
    [
        (["--fresh"], "refresh"), (["--store", "here.db"], Path("here.db")), (["--store", "refresh"], Path("refresh")),
        (["--no-store"], False), ([], True),
    ],
)  # fmt: skip
def test_the_store_options_become_the_one_store_argument(run, autotune, options, store):
    """--fresh is store="refresh", a path is a path, of whatever name."""
    run("tune", "mlp", *options)

    assert autotune.options["store"] == store


@pytest.mark.usefixtures("autotune")
def test_tune_prints_the_table_and_the_answer(run):
    """Without --json a person reads it."""
    code, out, err = run("tune", "mlp")

    assert (code, err) == (0, "")
    assert "The curve is flat from batch 64 on." in out
    assert "3 000" in out


@pytest.mark.usefixtures("autotune")
def test_json_on_stdout_is_the_whole_of_stdout_and_reads_back(run):
    """A pipe into a JSON reader must not stumble over a table."""
    code, out, err = run("tune", "mlp", "--json", "-")

    assert (code, err) == (0, "")
    assert json.loads(out)["schema"] == 1
    assert TuningResult.from_json(out).batch_size == 64


@pytest.mark.usefixtures("autotune")
def test_json_plot_and_report_go_to_their_files_and_the_table_stays(run, tmp_path):
    """All three can be had from one run."""
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("r.json", "c.png", "p.html")]

    code, out, err = run("tune", "mlp", "--json", files[0], "--plot", files[1], "--report", files[2])

    assert code == 0
    assert "The curve is flat from batch 64 on." in out
    assert json.loads(files[0].read_text())["batch_size"] == 64
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert "The curve is flat from batch 64 on." in files[2].read_text()
    assert all(f"wrote {path}" in err for path in files[1:])


def test_an_error_while_tuning_exits_with_one(run, autotune):
    """Errors from the depths take the same way out."""
    autotune.error = NothingMeasured("every size ran out of memory", "Free some.")

    code, out, err = run("tune", "mlp")

    assert (code, out) == (1, "")
    assert err == "cubatch: no batch size could be measured: every size ran out of memory. Free some.\n"


def test_interrupted_tuning_shows_what_there_is_and_exits_with_130(run, autotune):
    """The partial result travels on the KeyboardInterrupt."""
    stop = KeyboardInterrupt()
    stop.partial = TuningResult.from_json(json.dumps(tuned(batch_size=None, fastest_batch_size=None, decided_by=None)))
    autotune.error = stop

    code, out, err = run("tune", "mlp")

    assert code == 130
    assert "3 000" in out
    assert "The curve is flat from batch 64 on." in out
    assert err == "cubatch: interrupted; the timings are cached; repeat the command to continue\n"


def test_no_timing_is_called_cached_where_none_was_taken(run, autotune):
    """Interrupted before the first one, with the table of what was planned."""
    stop = KeyboardInterrupt()
    untimed = tuned(batch_size=None, fastest_batch_size=None, decided_by=None, largest_measured=None)
    stop.partial, stop.is_kept = TuningResult.from_json(json.dumps(untimed)), True
    autotune.error = stop

    assert run("tune", "mlp")[2] == "cubatch: interrupted before the first timing\n"


@pytest.mark.parametrize(
    ("options", "facts", "told"),
    [
        ((), {"is_kept": True}, "cached; repeat the command to continue"),
        (("--fresh",), {"is_kept": True}, "cached; repeat the command without --fresh to continue"),
        (("--fresh",), {"is_kept": False}, "not cached"),
        (("--no-store",), {}, "not cached"),
    ],
)
def test_what_goes_on_with_an_interrupted_tuning_is_said_as_it_is(run, autotune, options, facts, told):
    """With --fresh the same command would delete it, and where the run had no store that it could write, it is lost."""
    autotune.error = KeyboardInterrupt()
    vars(autotune.error).update(facts)

    assert run("tune", "mlp", *options) == (130, "", f"cubatch: interrupted; any timings are {told}\n")


def test_interrupted_before_anything_was_measured_exits_with_130(run, autotune):
    """No partial result, nothing on stdout."""
    autotune.error = KeyboardInterrupt()

    assert run("tune", "mlp")[:2] == (130, "")

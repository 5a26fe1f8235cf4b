"""`cubatch predict`: tables, JSON, pictures and what it refuses, for GPUs that are not here."""

from __future__ import annotations

import inspect
import json
import re

import pytest

from cubatch.network import models
from cubatch.tuning import prediction as forecast
from cubatch.units import format_percent, format_seconds, format_value
from tests.unit.commands import in_process
from tests.unit.predictions import lines_of

V100 = ("--device", "v100-sxm2-16gb")
BARE = "rtx-pro-6000-blackwell-server"  # its bandwidth and rates are not known
FEW = ("--batch-sizes", "1,8,64")
PREDICT = forecast.predict


@pytest.fixture
def run(monkeypatch, capfd):
    """Run the command in this process and give (exit code, stdout, stderr)."""
    return in_process(monkeypatch, capfd, "predict")


@pytest.fixture
def asked(monkeypatch):
    """Put a stand-in for predict in place that remembers what it was asked, and answers another question."""
    calls = []

    def recorded(spec, **options):
        calls.append((spec, options))
        return PREDICT("lenet5", device=options["device"], batch_sizes=[1, 2])

    monkeypatch.setattr(forecast, "predict", recorded)
    return calls


def between(low, high):
    """An interval of samples/s as it is printed."""
    return f"{format_value(low, 'throughput')} to {format_value(high, 'throughput')}"


# --- options through, errors out ----------------------------------------------------------------------------------


def test_every_option_goes_to_predict_under_the_name_it_knows(run, asked):
    """The options mirror the keyword arguments of the contract, one to one."""
    code, _, err = run(
        "mlp", *V100, "--mode", "training", "--dtype", "float16", "--objective", "latency", "--tolerance", "0.05",
        "--batch-sizes", "32,64", "--max-batch-size", "512", "--memory-limit", "8GiB", "--latency-limit", "0.5",
        "--optimizer", "a:adam", "--library", "cubatch", "--recompute", "--anchors", "a.json", "--anchors", "b.json",
        "--experimental", "norm_sums, space_to_depth",
    )  # fmt: skip
    assert (code, err) == (0, "")
    ((spec, options),) = asked
    assert spec.name == "mlp"
    assert options == {
        "device": "v100-sxm2-16gb", "mode": "training", "dtype": "float16", "objective": "latency", "tolerance": 0.05,
        "batch_sizes": [32, 64], "max_batch_size": 512, "memory_limit": "8GiB", "latency_limit": 0.5,
        "optimizer": "a:adam", "library": "cubatch", "recompute": True, "anchors": ["a.json", "b.json"],
        "experimental": ["norm_sums", "space_to_depth"],
    }  # fmt: skip


def test_without_options_the_defaults_are_those_of_predict(run, asked):
    """Who leaves an option out on the command line gets what Python gives."""
    assert run("mlp", *V100)[0] == 0
    known = inspect.signature(PREDICT).parameters
    of_modules = ("batches", "loss", "autocast", "accumulate", "constant_inputs", "opaque")
    defaults = {name: known[name].default for name in known if name not in ("spec", "device", *of_modules)}
    assert asked[0][1] == {"device": "v100-sxm2-16gb", **defaults}


def test_input_shape_and_classes_make_the_network(run):
    """A named model takes another input, as in every command."""
    code, out, _ = run("mnist-cnn", *V100, *FEW, "--input-shape", "64,64,3", "--classes", "7", "--json", "-")
    assert (code, json.loads(out)["input_shape"]) == (0, [64, 64, 3])
    assert json.loads(out)["spec"] == models.build("mnist-cnn", input_shape=(64, 64, 3), classes=7).to_mapping()


# --- one GPU ------------------------------------------------------------------------------------------------------


def test_json_is_the_forecast_that_python_gives(run, tmp_path):
    """The file holds `predict(...).to_mapping()`, and stdout the table all the same."""
    code, out, _ = run("lenet5", *V100, *FEW, "--json", tmp_path / "a.json")
    assert (code, "→" in out) == (0, True)
    assert json.loads((tmp_path / "a.json").read_text()) == PREDICT(
        "lenet5", device="v100-sxm2-16gb", batch_sizes=[1, 8, 64]
    ).to_mapping()  # fmt: skip


def test_every_line_with_a_figure_says_predicted(run):
    """Nobody may take a predicted figure for a measured one, whichever line is copied elsewhere."""
    asked = ("resnet18", *V100, "--mode", "training", *FEW, "--explain")
    for arguments in (asked, ("lenet5", "--devices", "t4,p4,v100-sxm2-16gb")):
        _, out, _ = run(*arguments)
        for block in out.strip().split("\n\n"):
            lines = block.splitlines()
            is_table = len(lines) > 1 and set(lines[1]) == {"-", " "}
            for told in lines[2:] if is_table else [" ".join(lines)]:
                if re.search(r"\d (ms|µs|samples|%)", told):
                    assert "redicted" in told


def test_a_size_over_a_limit_says_which(run):
    """What does not fit has no time; what is too slow keeps its predicted time."""
    _, out, _ = run("lenet5", *V100, "--batch-sizes", "1,1000000000")
    assert "does not fit" in lines_of(out)[1]
    _, out, _ = run("lenet5", *V100, "--batch-sizes", "1,65536", "--json", "-")
    times = [m["latency_seconds"] for m in json.loads(out)["measurements"]]
    _, out, _ = run("lenet5", *V100, "--batch-sizes", "1,65536", "--latency-limit", sum(times) / 2)
    assert format_seconds(times[1]) in lines_of(out)[1]
    assert "predicted too slow" in lines_of(out)[1]
    assert "too slow" not in lines_of(out)[0]


# --- several GPUs -------------------------------------------------------------------------------------------------


def test_gpus_are_compared_fastest_first(run):
    """A line each with its answer, time, rate, share of the fastest and largest batch, as each would be alone."""
    names = ("p4", "h200-sxm", "t4")
    code, out, err = run("lenet5", "--devices", ",".join(names))
    assert (code, err) == (0, "")
    alone = [PREDICT("lenet5", device=name) for name in names]
    alone.sort(key=lambda found: -found.samples_per_second[found.batch_size])
    best = alone[0].samples_per_second[alone[0].batch_size]
    for line, found in zip(lines_of(out), alone, strict=True):
        n = found.batch_size
        rate, (low, high) = found.samples_per_second[n], found.throughput_interval[n]
        shown = (
            found.device.slug, n, format_seconds(found.seconds[n]), format_value(rate, "throughput"),
            between(low, high), format_percent(rate / best), found.largest_batch_size,
        )  # fmt: skip
        assert re.match(r"\s+".join(map(str, shown)), line)
    assert f"{alone[0].device.slug} is the fastest" in out


def test_gpus_that_cannot_are_named_with_the_reason(run):
    """tf32 needs sm_80, and one GPU's bandwidth is not known: the third is answered for all the same."""
    code, out, _ = run("lenet5", "--devices", f"v100-sxm2-16gb,a40,{BARE}", "--dtype", "tf32", "--json", "-")
    found = json.loads(out)
    assert (code, found["schema"], found["predicted"]) == (0, 1, True)
    assert [one["device"]["slug"] for one in found["forecasts"]] == ["a40"]
    assert set(found["failed"]) == {"v100-sxm2-16gb", BARE}
    assert "tf32" in found["failed"]["v100-sxm2-16gb"]
    _, out, _ = run("lenet5", "--devices", f"v100-sxm2-16gb,a40,{BARE}", "--dtype", "tf32")
    assert [line.split()[0] for line in lines_of(out)] == ["a40", "v100-sxm2-16gb", BARE]
    assert all("failed" in line for line in lines_of(out)[1:])
    text = " ".join(out.split())
    assert all(f"- {name}: {reason}" in text for name, reason in found["failed"].items())


def test_prices_give_what_a_million_samples_cost(run):
    """In the table and the JSON, for the GPUs that have one."""
    arguments = ("lenet5", "--devices", "t4,a40", *FEW, "--prices", "t4=0.35")
    _, text, _ = run(*arguments, "--json", "-")
    code, out, _ = run(*arguments)
    assert code == 0
    assert set(json.loads(text)["cost_per_million_samples"]) == {"t4"}
    assert "per million" in out
    _, both, _ = run(*arguments, "--prices", "a40=0.7", "--json", "-")  # given again for more, as files of --anchors
    assert set(json.loads(both)["cost_per_million_samples"]) == {"t4", "a40"}


# --- pictures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "name"), [(("--device", "t4"), "a.png"), (("--devices", "t4,p4"), "b.svg")])
def test_a_picture_is_drawn_where_it_was_asked_for(run, tmp_path, devices, name):
    """Of one GPU and of two, with the file named."""
    pytest.importorskip("matplotlib")
    code, _, err = run("lenet5", *devices, "--plot", tmp_path / name)
    assert (code, err.strip()) == (0, f"wrote {tmp_path / name}")
    assert (tmp_path / name).stat().st_size > 5000

"""`cubatch profile`: where a step's time goes, on this CPU."""

from __future__ import annotations

import json

import pytest

from cubatch.errors import OutOfMemory
from cubatch.measure import step_profile
from cubatch.network import models
from cubatch.network.passes import Pass

QUICK = ("--device", "cpu", "--budget", 0.01)


def test_a_row_for_each_pass_of_each_layer(run):
    """The linear layers of the mlp, forward and backward, with FLOP of both products of a gradient, and the rest."""
    code, out, err = run("profile", "mlp", "--mode", "training", "--batch-size", 8, *QUICK, "--json", "-")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["schema"], found["mode"], found["library"], found["kind"]) == (1, "training", "im2col", "cpu")
    (profile,) = found["profiles"]
    nodes = {node.name: node.layer for node in models.build("mlp").nodes}
    flops = {(row["layer"], row["pass"]): row["flops"] for row in profile["layers"] if row["flops"]}
    wanted = {(name, each.value): layer.pass_flops(each, 8) for name, layer in nodes.items() for each in Pass}
    first = next(iter(nodes))
    assert {key: flop for key, flop in wanted.items() if flop and key != (first, "dgrad")} == flops
    assert {"loss", "update", "meeting"} <= {row["pass"] for row in profile["layers"]}


def test_several_sizes_stand_side_by_side(run):
    """The table of the last, then what a sample takes at each; a size that stands twice is profiled once."""
    code, out, _ = run("profile", "mlp", "--batch-size", "1,8,1", *QUICK)
    assert code == 0
    head, _, sizes = out.partition("Time for each sample")
    assert "batch 8" in head
    assert [line.split()[0] for line in sizes.splitlines() if line[:5].strip().isdigit()] == ["1", "8"]


def test_the_trace_opens_in_a_viewer(run, tmp_path):
    """Chrome's format: complete events in microseconds on named threads, each call inside of its operation."""
    path = tmp_path / "trace.json"
    code, _, err = run("profile", "mlp", "--batch-size", 64, *QUICK, "--trace", path)
    events = json.loads(path.read_text())["traceEvents"]
    assert code == 0
    assert "perfetto" in err
    named = {event["tid"] for event in events if event["ph"] == "M"}
    done = [event for event in events if event["ph"] == "X"]
    spans = [event for event in done if event["cat"] == "operation"]
    calls = [event for event in done if event["cat"] != "operation"]
    assert calls
    for event in calls:
        assert event["tid"] in named
        inside = [
            span for span in spans
            if span["tid"] == event["tid"] and span["name"] == event["args"]["layer"] and span["ts"] <= event["ts"]
            and event["ts"] + event["dur"] <= span["ts"] + span["dur"] + 1e-6
        ]  # fmt: skip
        assert len(inside) == 1


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OutOfMemory("8 samples"), 1, "8 samples"),
    ],
)
def test_what_was_profiled_before_the_end_is_shown(run, monkeypatch, tmp_path, end, code, told):
    """Ctrl-C, or a size that fails, loses nothing of the sizes before it, and the exit code is that of the end."""
    real, path = step_profile.profile, tmp_path / "profile.json"

    def profile(spec, size, **options):
        if size == 8:
            raise end
        return real(spec, size, **options)

    monkeypatch.setattr(step_profile, "profile", profile)
    found, out, err = run("profile", "mlp", "--batch-size", "4,8,16", *QUICK, "--json", path)
    assert found == code
    assert "mlp, inference, float32, batch 4" in out
    assert told in err
    kept = json.loads(path.read_text())
    assert [one["batch_size"] for one in kept["profiles"]] == [4]
    assert told in kept["failure"]


@pytest.mark.parametrize("sizes", ["4", "1,4"])
def test_it_is_drawn(run, tmp_path, sizes):
    """Of one size its layers, of several what a sample takes at each."""
    path = tmp_path / "profile.svg"
    assert run("profile", "mlp", "--batch-size", sizes, *QUICK, "--plot", path)[0] == 0
    text = path.read_text()
    assert text.lstrip().startswith("<?xml")
    assert len(text) > 5000

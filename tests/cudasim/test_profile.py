"""The profile of a step on a GPU: events of the stream around launches, by real CuPy."""

from __future__ import annotations

import json

import pytest

from tests.cudasim.simulation import NEEDS, cubatch

pytestmark = NEEDS


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("library", ["cubatch", "im2col"])
def test_each_launch_of_a_step_is_somebodys(library, late, tmp_path):
    """Gradients of filters and inputs have rows of their own; what is no kernel's is the launches' overhead."""
    trace = tmp_path / "trace.json"
    done = cubatch(
        "profile", "mnist-cnn", "--mode", "training", "--batch-size", "4", "--device", "cuda", "--library", library,
        "--budget", "0.01", "--json", "-", "--trace", str(trace), devices="a100", late=late,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (profile,) = found["profiles"]
    assert (found["kind"], found["library"], profile["threads"], profile["steps"]) == ("cuda", library, 1, 3)
    rows = {(row["layer"], row["pass"]): row for row in profile["layers"]}
    for pass_ in ("fprop", "dgrad", "wgrad"):
        row = rows["conv2", pass_]
        assert row["calls"] >= 1
        assert row["causes"]["products"] > 0
    assert rows["step", "launches"]["causes"]["overhead"] >= 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"}
    assert any(name.startswith("conv2d_wgrad") for name in names) == (library == "cubatch")

"""`cubatch memory`."""

from __future__ import annotations

import json

import pytest

import cubatch
import cubatch.engine
import cubatch.tuning


def test_memory_shows_the_textbook_numbers_of_the_mlp(run):
    """1410 elements per sample forward, 1820 with gradients, 465 920 at batch 256: the figures of the question."""
    code, out, _ = run("memory", "mlp", "--batch-size", "256", "--device", "cpu", "--memory", "12GiB")

    assert code == 0
    assert "1 410 elements per sample forward, 1 820 with gradients; times 256 is 465 920 elements" in " ".join(
        out.split()
    )


@pytest.mark.parametrize("options", [["--recompute"], ["--library", "im2col"]])
def test_memory_gives_one_plan_whatever_is_asked(run, options):
    """The rules of thumb stand beside the very plan and the largest batch that are shown above them."""
    _, out, _ = run(
        "memory", "vgg16", "--batch-size", "8", "--device", "t4", "--memory", "8GiB", *options, "--json", "-"
    )
    found = json.loads(out)
    computed = {rule["unit"]: rule["computed"] for rule in found["rules_of_thumb"]}
    assert (computed["bytes"], computed["samples"]) == (found["footprint"]["total"], found["max_batch_size"])


def test_memory_json_agrees_with_the_library(run):
    """A program gets the same numbers."""
    code, out, _ = run("memory", "mlp", "--batch-size", "8", "--device", "cpu", "--memory", "1GiB", "--json", "-")
    found = json.loads(out)

    assert code == 0
    assert found["footprint"] == json.loads(
        json.dumps(cubatch.footprint("mlp", batch_size=8, mode="training", device="cpu").to_mapping())
    )
    assert found["max_batch_size"] == cubatch.max_batch_size("mlp", "1GiB", mode="training", device="cpu")

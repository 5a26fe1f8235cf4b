"""`cubatch memory`."""

from __future__ import annotations

import inspect
import json

import pytest

import cubatch
import cubatch.engine
import cubatch.tuning
from cubatch.hardware import probe
from cubatch.hardware.facts import Device


def test_memory_shows_the_textbook_numbers_of_the_mlp(run):
    """1410 elements per sample forward, 1820 with gradients, 465 920 at batch 256: the figures of the question."""
    code, out, _ = run("memory", "mlp", "--batch-size", "256", "--device", "cpu", "--memory", "12GiB")

    assert code == 0
    assert "1 410 elements per sample forward, 1 820 with gradients; times 256 is 465 920 elements" in " ".join(
        out.split()
    )


def test_memory_says_of_which_device_it_is_and_what_does_not_fit(run, monkeypatch):
    """A GPU that is not here by its name; on a CPU gradients are once for each thread, and that is said."""
    code, out, _ = run("memory", "resnet50", "--batch-size", "256", "--device", "t4")
    assert code == 0
    assert out.startswith("resnet50 on Tesla T4, float32, batch 256, optimizer sgd: memory of a step")
    above, layers, _ = " ".join(out.split()).partition("By layer")
    assert "for the CUDA context and libraries), by the plan: " in above
    assert layers
    assert above.count("; 256 does not fit in training.") == 1
    assert "gradients of its own" not in out
    cpu = Device(name="A CPU", kind="cpu", threads=3, memory_bytes=2**30)
    monkeypatch.setattr(probe, "resolve", lambda *_, **__: cpu)
    _, out, _ = run("memory", "resnet18", "--batch-size", "8", "--memory", "1GiB")
    assert out.startswith("resnet18 on A CPU, ")
    assert "Each of 3 threads has its own gradients." in out
    _, out, _ = run("memory", "mlp", "--batch-size", "8", "--memory", "1GiB")  # too short for threads to share it
    assert "gradients of its own" not in out


@pytest.mark.parametrize("options", [["--recompute"], ["--library", "im2col"]])
def test_memory_gives_one_plan_whatever_is_asked(run, options):
    """The rules of thumb stand beside the very plan and the largest batch that are shown above them."""
    _, out, _ = run(
        "memory", "vgg16", "--batch-size", "8", "--device", "t4", "--memory", "8GiB", *options, "--json", "-"
    )
    found = json.loads(out)
    assert found["schema"] == 2
    assert set(found["modes"]) == {"inference", "training"}
    for facts in found["modes"].values():
        computed = {rule["unit"]: rule["computed"] for rule in facts["rules_of_thumb"]}
        assert (computed["bytes"], computed["samples"]) == (facts["footprint"]["total"], facts["max_batch_size"])


def test_memory_json_agrees_with_the_library(run):
    """A program gets the same numbers."""
    code, out, _ = run("memory", "mlp", "--batch-size", "8", "--device", "cpu", "--memory", "1GiB", "--json", "-")
    found = json.loads(out)["modes"]

    assert code == 0
    for mode, facts in found.items():
        assert facts["footprint"] == json.loads(
            json.dumps(cubatch.footprint("mlp", batch_size=8, mode=mode, device="cpu").to_mapping())
        )
        assert facts["max_batch_size"] == cubatch.max_batch_size("mlp", "1GiB", mode=mode, device="cpu")


def test_memory_of_a_target_is_that_of_training_beside_the_sum(run):
    """The footprint and the largest batch are the library's for the same target; inference has none to show."""
    arguments = ["memory", "mlp", "--batch-size", "8", "--device", "cpu", "--memory", "1GiB"]
    code, out, _ = run(*arguments, "--target-batch-size", "32", "--json", "-")
    found = json.loads(out)["modes"]
    options = {"mode": "training", "device": "cpu", "target_batch_size": 32}
    assert code == 0
    assert set(found) == {"training"}
    assert found["training"]["footprint"]["total"] == cubatch.footprint("mlp", batch_size=8, **options).total
    assert found["training"]["max_batch_size"] == cubatch.max_batch_size("mlp", "1GiB", **options) == 32
    out = " ".join(run(*arguments, "--target-batch-size", "32")[1].split())
    assert "batch 8 of 32" in out
    # A formula of memory knows nothing of what divides 32: beside it the plan's 32 would tell of no error.
    assert "The largest batch that divides 32 whose step fits in 1.00 GiB, by the plan: 32." in out
    assert "max batch formula" not in out
    code, _, err = run(*arguments, "--target-batch-size", "30")
    assert code == 2
    assert "--target-batch-size must be a multiple of batches of 8" in err


def test_a_mode_that_is_asked_for_stands_alone(run):
    """Without it both stand side by side; with it the other is not worked out."""
    arguments = ["memory", "mlp", "--device", "cpu", "--memory", "1GiB"]
    code, out, _ = run(*arguments, "--mode", "training")
    _, both, _ = run(*arguments)
    assert code == 0
    assert "inference" not in out
    assert "inference" in both
    assert "training" in both


def test_functions_and_commands_have_one_default_mode():
    """Inference everywhere: who tunes and then asks for the memory asks about one thing."""
    functions = (
        cubatch.autotune, cubatch.predict, cubatch.candidates, cubatch.footprint, cubatch.max_batch_size,
        cubatch.rules_of_thumb, cubatch.autotune_module,
    )  # fmt: skip
    assert {inspect.signature(function).parameters["mode"].default for function in functions} == {"inference"}


def test_where_only_inference_fits_it_is_still_shown(run):
    """A training step of resnet50 needs more than 200 MiB: no batch of it fits, and the columns stand all the same."""
    arguments = ["memory", "resnet50", "--device", "cpu", "--memory", "200MiB"]
    code, text, _ = run(*arguments, "--json", "-")
    found = json.loads(text)["modes"]
    assert code == 0
    assert found["training"]["max_batch_size"] == 0
    assert found["inference"]["max_batch_size"] > 0
    assert "no batch" in run(*arguments)[1]
    assert run(*arguments, "--mode", "training")[0] == 1

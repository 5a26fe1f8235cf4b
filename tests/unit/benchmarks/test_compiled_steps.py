"""Whole steps against PyTorch eager and `torch.compile`: the list of items, the comparison and its table."""

from __future__ import annotations

import json
import types

import pytest

from benchmarks.gpu import form, training
from benchmarks.gpu import stages as gpu_stages
from benchmarks.gpu.steps import Step
from benchmarks.pages import gpu
from tests.unit.bench_fakes import World, enter
from tests.unit.benchmarks.passes import H200, result_of

STAGE = gpu_stages.stage_named("training")


def listed(only="compile|max-autotune"):
    """Return the items that an expression selects."""
    return gpu_stages.chosen(STAGE, H200, only)


# --- the list --------------------------------------------------------------------------------------------------------


def test_compiled_steps_run_on_request_only():
    """Compiling takes minutes: the default pass, or a selection by type, runs the steps against eager alone."""
    usual = ["resnet50, batch 256, float16", "resnet50, batch 256, bfloat16", "resnet50, batch 32, float16"]
    assert [item.name for item in listed("")] == usual
    assert [item.name for item in listed(", float16")] == [usual[0], usual[2]]
    assert {item.run.args[-1] for item in listed("compile")} == {("eager", "compile")}
    assert {item.run.args[-1] for item in listed("max-autotune$")} == {("compile max-autotune",)}
    assert [item.run.args[0] for item in listed("^vit-base, tr.*compile$")] == [Step("vit-base", "training", 128)]


# --- the comparison --------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Return a clock on which our step takes 0.1 s, eager 0.2 s and the compiled step 0.08 s."""
    world = enter(World(), monkeypatch)
    world.seconds = {"ours": 0.1, "eager": 0.2, "compile": 0.08}
    return world


def step(world, name, log=None):
    """Return a step that takes the seconds of a name."""
    if log is not None:
        log.append(name)
    return lambda: world.launched.append(name)


def compare(world, **binders):
    """Compare our step with rivals at a batch size of 256."""
    return training.compared_with_rivals(step(world, "ours"), binders, 256, world, world.target())


def test_rivals_are_timed_in_our_rounds(clock):
    """Medians, images per second, confidence intervals and ratios; a slow rival stays in as many rounds as ours."""
    found = compare(clock, eager=lambda: step(clock, "eager"), compile=lambda: step(clock, "compile"))
    assert found["cubatch"]["seconds"] == pytest.approx(0.1)
    assert found["cubatch"]["seconds_interval"] == pytest.approx([0.1, 0.1])
    for name, ratio, speed in (("eager", 2.0, 1280), ("compile", 0.8, 3200)):
        rival = found["rivals"][name]
        assert (rival["failure"], rival["images_per_second"]) == (None, pytest.approx(speed))
        assert (rival["ratio"], rival["ratio_interval"]) == (pytest.approx(ratio), pytest.approx([ratio, ratio]))
        rounds = [[timing["round"] for timing in each["timings"]] for each in (rival, found["cubatch"])]
        assert rounds[0] == rounds[1]
        assert len(rounds[0]) >= 5
    json.dumps(found, allow_nan=False)
    assert '"round":[0,1,2' in form.text_of({"stages": [{"items": [found]}]})


@pytest.mark.parametrize("fails_at", ["bind", "third step"])
def test_a_rival_that_fails_names_the_error(clock, fails_at):
    """While it compiles or later: the others are compared."""
    calls = []

    def failing():
        calls.append(1)
        if fails_at == "bind" or len(calls) == 3:
            raise RuntimeError("no Triton")

    found = compare(clock, compile=lambda: failing, eager=lambda: step(clock, "eager"))["rivals"]
    assert found["compile"].keys() == {"warm_up_seconds", "failure"}
    assert found["compile"]["failure"] == "RuntimeError: no Triton"
    assert found["eager"]["ratio"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (None, "PyTorch with CUDA is not installed"),
        ("torch", "torchvision is not installed; there is no module for tokens"),
    ],
)
def test_a_missing_package_makes_the_item_unavailable(clock, monkeypatch, torch, reason):
    """The item gives the reason and builds nothing: it has not failed."""

    def no_module(_):
        raise ValueError("there is no module for tokens")

    monkeypatch.setattr(training.rivals, "torch_of", lambda _: torch)
    monkeypatch.setattr(training, "_builder", no_module)
    session = types.SimpleNamespace(target=clock.target(), small=False)
    found = training.whole_step(Step("vit-base", "inference", 128), ("eager",), session)
    assert found == {
        "network": "vit-base", "mode": "inference", "dtype": "float16", "batch_size": 128, "status": "unavailable",
        "message": reason,
    }  # fmt: skip
    assert "1 unavailable" in gpu.compiled(result_of(training=([{"name": "a"} | found], 0)))

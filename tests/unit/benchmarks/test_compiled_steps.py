"""Whole steps against PyTorch eager and `torch.compile`: the comparison."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu import training
from tests.unit.bench_fakes import World, enter


@pytest.fixture
def clock(monkeypatch):
    """Return a clock on which our step takes 0.1 s, eager 0.2 s and the compiled step 0.08 s."""
    world = enter(World(), monkeypatch)
    world.seconds = {"ours": 0.1, "eager": 0.2, "compile": 0.08}
    return world


def step(world, name):
    """Return a step that takes the seconds of a name."""
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

"""Rivals of `cubatch bench`: checked before they are timed; one that fails leaves the others as they are."""

from __future__ import annotations

import types

import attrs
import numpy as np
import pytest

from cubatch.bench import cases, measure, rivals
from cubatch.bench.contest import Contest
from cubatch.bench.rivals import Rival
from cubatch.errors import DeviceFailed
from tests.unit.bench.building import EVERY, GEMM


def raise_(error):
    raise error


def right(arrays):
    np.matmul(arrays["x"], arrays["w"].T, out=arrays["out"])


def nearly(arrays):
    """The product with its last element off by a thousandth."""
    right(arrays)
    arrays["out"].reshape(-1)[-1] *= 1.001


def bound(step):
    """Return a rival whose step is a function of the arrays."""
    return Rival("library", lambda arrays: lambda: step(arrays))


def timed(world, monkeypatch, *ways, case=GEMM, **parts):
    """Return the result of a case with these ways of the vendor."""
    monkeypatch.setattr(measure, "rivals", lambda *_, **__: list(ways))
    target_ = attrs.evolve(world.target(), **parts)
    contest = Contest(world, synchronize=target_.synchronize)
    return measure.time_case(case, target_, contest, seconds=10.0)


# --- rivals that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (bound(lambda _: None), "library is wrong, inf"),
        (bound(nearly), "the rounding bound at out["),
        (bound(lambda arrays: np.matmul(arrays["x"], arrays["w"][::-1].T, out=arrays["out"])), "library is wrong"),
        (bound(lambda _: raise_(RuntimeError("no algorithm"))), "library failed with RuntimeError: no algorithm"),
        (bound(lambda _: raise_(MemoryError())), "library failed with MemoryError"),
        (bound(lambda _: raise_(DeviceFailed.by_driver("a launch", 701))), "DeviceFailed: a launch failed"),
        (Rival("library", lambda _: raise_(TypeError("no such type"))), "TypeError: no such type"),
    ],
)
def test_a_rival_that_fails_or_is_wrong_is_missing_and_the_others_are_timed(way, reason, world, monkeypatch):
    """It has no entry; the reason is in the result, unless another way of the vendor is compared."""
    alone = timed(world, monkeypatch, way)
    assert [entry.side for entry in alone.entries] == ["ours"]
    assert reason in alone.no_rival
    assert alone.wrong == ()
    world.seconds = {"gemm_nt_a": 1e-3, "vendor": 0.9e-3}
    result = timed(world, monkeypatch, way, bound(right))
    assert [entry.side for entry in result.entries] == ["ours", "vendor"]
    assert result.no_rival == ""
    assert result.best.ratio == pytest.approx(0.9)


def test_a_library_that_cannot_be_asked_is_missing(monkeypatch):
    """The reason is the error that it raised."""
    monkeypatch.setattr(rivals, "torch_of", lambda _: raise_(ImportError("no module")))
    assert rivals.rivals(GEMM, np) == "ImportError: no module"


def test_a_rival_that_fails_while_it_is_timed_ends_alone(world, monkeypatch):
    """It is not run again; cubatch has all its timings and no ratio."""
    calls = []

    def step(arrays):
        calls.append(1)
        if len(calls) > 7:  # five sets are bound
            raise RuntimeError("no workspace")
        right(arrays)

    ours, vendor = timed(world, monkeypatch, bound(step)).entries
    assert (ours.status, ours.ratio, len(ours.timings)) == ("ok", None, 5)
    assert (vendor.status, vendor.reason, vendor.timings) == ("error", "RuntimeError: no workspace", ())
    assert len(calls) == 8


@pytest.mark.parametrize("when", ["before", "bound", "timed"])
def test_a_broken_context_ends_the_process(world, monkeypatch, when):
    """An error of a cubatch kernel before the rival begins, or one that the rival causes."""
    broken, calls = ["an illegal address"] if when == "before" else [], []

    def synchronize():
        if broken and (when != "before" or world.launched):
            raise RuntimeError(broken[0])

    def step(arrays):
        calls.append(1)
        if when == "bound" or len(calls) > 7:
            broken.append("an illegal address")
            raise RuntimeError("launch failed")
        right(arrays)

    with pytest.raises(RuntimeError, match="an illegal address"):
        timed(world, monkeypatch, bound(step), synchronize=synchronize)
    assert when != "before" or calls == []


def test_unused_memory_is_freed_once_for_a_rival(world):
    """Neither library can make the other free its memory; a second shortage is an error, as is any other."""
    freed, tries = [], []
    here = attrs.evolve(world.target(), free_pools=lambda: freed.append(1))

    def make():
        tries.append(len(freed))
        return "made" if freed else raise_(MemoryError())

    assert here.attempt(make) == "made"
    assert tries == [0, 1]
    assert here.attempt(lambda: raise_(MemoryError("pool"))) == "MemoryError: pool"
    assert here.attempt(lambda: raise_(RuntimeError("refused"))) == "RuntimeError: refused"
    assert len(freed) == 2


def test_a_cudnn_without_the_gpu_costs_its_version_alone(monkeypatch):
    """From 9.11 on it raises on GPUs before Turing."""

    def version():
        raise RuntimeError("not compatible with devices with SM < 7.5")

    cudnn = types.SimpleNamespace(version=version)
    torch = types.SimpleNamespace(__version__="2.11.0", backends=types.SimpleNamespace(cudnn=cudnn))
    monkeypatch.setattr(rivals, "_torch", lambda: torch)
    assert rivals.versions() == {"torch": "2.11.0", "cudnn": None}


# --- rivals that are right -----------------------------------------------------------------------------------------


def test_results_may_be_returned(world, monkeypatch):
    """Libraries that allocate their results return them, and the check reads them instead of the arrays."""
    for factor in (1, 2):
        way = Rival(
            "library", lambda a, factor=factor: lambda: factor * (a["x"] @ a["w"].T), lambda y: {"out": y}
        )  # fmt: skip
        assert ("vendor" in timed(world, monkeypatch, way).times) == (factor == 1)


def test_the_vendor_is_right_in_every_case_that_it_takes(world):
    """On NumPy's arrays, and PyTorch's where it is installed."""
    taken = 0
    for case in [*EVERY, GEMM, *(cases.gemm(9, 8, 7, layout=layout) for layout in ("nn", "tn"))]:
        ways = rivals.rivals(case, np)
        result = measure.time_case(case, world.target(), Contest(world), seconds=0.0)
        if isinstance(ways, str):
            assert result.no_rival == ways
            assert "Error" not in ways, case.name
        else:
            done = {entry.name for entry in result.entries if entry.side == "vendor"}
            assert done == {way.library for way in ways}, (case.name, result.no_rival)
            taken += 1
    assert taken


def test_the_fastest_way_of_a_rival_counts(world, monkeypatch):
    """The others are listed with their times."""
    world.seconds = {"vendor a": 2e-3, "vendor b": 0.5e-3, "vendor c": 3e-3}

    def way(name):
        def bind(arrays):
            def step():
                world.launched.append(f"vendor {name}")
                right(arrays)

            return step

        return Rival(name, bind)

    result = timed(world, monkeypatch, way("a"), way("b"), way("c"))
    ours, *others = result.entries
    assert [(entry.name, entry.status) for entry in others] == [("a", "dropped"), ("b", "ok"), ("c", "dropped")]
    assert ours.ratio == pytest.approx(0.5)
    assert result.times["vendor"].name == "b"

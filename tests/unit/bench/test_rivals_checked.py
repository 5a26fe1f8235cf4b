"""A rival is checked before it is timed, as ours are: what it raises or gets wrong is why it is missing."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.bench import cases, check, measure, rivals, target
from cubatch.bench.contest import Contest
from cubatch.bench.rivals import Missing, Rival
from cubatch.errors import DeviceFailed
from cubatch.network import layers
from cubatch.network.passes import Pass
from tests.unit.bench.building import EVERY, GEMM
from tests.unit.bench.conftest import EVERYBODY

# Winograd's F(4 x 4, 3 x 3): Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, section 4.3.
A = np.array([[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]], np.float32)
B = np.array(
    [[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0], [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0],
     [0, 4, 0, -5, 0, 1]], np.float32,
)  # fmt: skip
G = np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]], np.float32) / np.float32(24)


def raise_(error):
    """Raise in an expression."""
    raise error


def right(arrays):
    """The product of GEMM."""
    np.matmul(arrays["x"], arrays["w"].T, out=arrays["out"])


def bound(step):
    """A rival whose step is a function of the arrays."""
    return lambda *_, **__: Rival("library", lambda arrays: lambda: step(arrays))


def timed(world, monkeypatch, find, case=GEMM):
    """The result of a case with one more rival."""
    monkeypatch.setitem(rivals.RIVALS, "other", find)
    return measure.time_case(case, world.target(), Contest(world), seconds=10.0)


def nearly(arrays):
    """The product with its last element off by a thousandth."""
    right(arrays)
    arrays["out"].reshape(-1)[-1] *= 1.001


def transposed(arrays):
    """Another product of the same shapes."""
    arrays["out"][...] = arrays["x"] @ arrays["w"][::-1].T


@pytest.mark.parametrize(
    ("find", "reason"),
    [
        (bound(lambda _: None), "library is wrong, inf"),
        (bound(nearly), "the rounding bound at out["),
        (bound(transposed), "library is wrong"),
        (bound(lambda _: raise_(RuntimeError("no algorithm"))), "library failed with RuntimeError: no algorithm"),
        (bound(lambda _: raise_(NotImplementedError("none"))), "library failed with NotImplementedError: none"),
        (bound(lambda _: raise_(MemoryError())), "library failed with MemoryError"),
        (bound(lambda _: raise_(DeviceFailed.by_driver("a launch", 701))), "DeviceFailed: a launch failed"),
        (lambda *_, **__: raise_(ImportError("no module")), "ImportError: no module"),
        (lambda *_, **__: Rival("library", lambda _: raise_(TypeError("no such type"))), "TypeError: no such type"),
    ],
)
def test_a_rival_that_fails_or_is_wrong_is_missing_and_ends_nobody_elses_timing(find, reason, world, monkeypatch):
    """It has no entry, the reason is told, and ours and the vendor are timed and compared."""
    world.seconds = {"gemm_nt_a": 1e-3, "vendor": 0.9e-3}
    result = timed(world, monkeypatch, find)
    assert [entry.side for entry in result.entries] == ["ours", "vendor"]
    assert reason in result.missing["other"]
    assert result.best.ratio == pytest.approx(0.9)
    assert result.wrong == ()


@pytest.mark.parametrize("find", [bound, lambda step: lambda *_, **__: step(None)])
def test_an_error_after_which_nothing_runs_is_nobodys_answer(find, world, monkeypatch):
    """The driver's status 700 ends the process's measuring, wherever it shows."""
    error = DeviceFailed.by_driver("a launch", 700)
    with pytest.raises(DeviceFailed, match="status 700"):
        timed(world, monkeypatch, find(lambda _: raise_(error)))


def test_results_may_be_returned(world, monkeypatch):
    """Libraries that write where they like hand out what a step returned, which is checked in the arrays' place."""
    for factor in (1, 2):

        def find(*_, factor=factor, **__):
            return Rival("library", lambda a: lambda: factor * (a["x"] @ a["w"].T), lambda found: {"out": found})

        result = timed(world, monkeypatch, find)
        assert ("other" in result.times) == (factor == 1)
        assert ("other" in result.missing) == (factor == 2)


def test_what_a_rival_writes_over_is_put_back(world, monkeypatch):
    """Its check begins with the data that ours began with, though ours changed it."""
    from cubatch.bench import training_calls
    from cubatch.engine import functional

    case = training_calls.optimizer_step("adam", 500)
    result = timed(world, monkeypatch, bound(lambda arrays: case.call(functional, arrays)), case)
    assert "other" in result.times


@pytest.mark.parametrize("name", EVERYBODY)
def test_every_rival_is_right_in_every_case_that_it_takes(name, world, monkeypatch):
    """On NumPy's arrays, and PyTorch's where it is installed; each takes one at least."""
    monkeypatch.setitem(rivals.RIVALS, name, EVERYBODY[name])
    taken = 0
    for case in [*EVERY, GEMM, *(cases.gemm(9, 8, 7, layout=layout) for layout in ("nn", "tn"))]:
        (asked,) = (found for found in rivals.rivals(case, np) if found.name == name)
        result = measure.time_case(case, world.target(), Contest(world), seconds=0.0)
        if isinstance(asked, Missing):
            assert result.missing[name] == asked.reason
            assert "Error" not in asked.reason, case.name
        else:
            assert name in result.times, (case.name, result.missing.get(name))
            taken += 1
    assert taken


def winograd(x, w):
    """Convolve by tiles of 4 x 4, in float32 throughout."""
    n, h, width, _ = x.shape
    padded, out = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), np.zeros((n, h, width, len(w)), np.float32)
    filters = np.einsum("ia,kabc,jb->ijkc", G, w, G)
    for i in range(0, h, 4):
        for j in range(0, width, 4):
            tile = np.einsum("ia,nabc,jb->ijnc", B, padded[:, i : i + 6, j : j + 6], B)
            product = np.einsum("ijnc,ijkc->ijnk", tile, filters)
            out[:, i : i + 4, j : j + 4] = np.einsum("ai,ijnk,bj->nabk", A, product, A)
    return out


def test_a_librarys_fast_convolution_is_right_and_one_of_other_padding_is_not():
    """Winograd's rounds more than a sum of products does; its slack is what A, B and G make of random errors."""
    variance = A**2 @ ((G**2).sum(axis=1) * (B**2).sum(axis=1)) / 3
    assert variance.max() == pytest.approx(rivals._WINOGRAD, rel=0.03)
    case = cases.of_layer(layers.Conv2d(h=16, w=16, c=4, k=32, r=3, s=3, pad=1), Pass.FPROP, 4)
    arrays = target.fill(np, case, 1)
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    y = winograd(arrays["x"], arrays["w"])
    assert 1 < expected.check({**arrays, "out": y}).worst < rivals._WINOGRAD / 4
    assert expected.check({**arrays, "out": np.roll(y, 1, axis=1)}).worst > 100 * rivals._WINOGRAD

"""Rivals of `cubatch bench`: checked before they are timed; one that fails leaves the others as they are."""

from __future__ import annotations

import types

import attrs
import numpy as np
import pytest

from cubatch.bench import cases, check, measure, rivals, target
from cubatch.bench.contest import Contest
from cubatch.bench.rivals import Rival
from cubatch.engine import functional
from cubatch.engine.native import arrays
from cubatch.errors import DeviceFailed
from cubatch.network.layers import Conv2d
from cubatch.network.passes import Pass
from tests.unit.bench.building import EVERY, GEMM
from tests.unit.bench_fakes import DEVICE

# Winograd's F(4 x 4, 3 x 3): Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, section 4.3.
A = np.array([[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]], np.float32)
B = np.array(
    [[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0], [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0],
     [0, 4, 0, -5, 0, 1]], np.float32,
)  # fmt: skip
G = np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]], np.float32) / np.float32(24)


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


def test_an_error_after_which_nothing_runs_ends_the_process(world, monkeypatch):
    """The status 700 of the driver."""
    error = DeviceFailed.by_driver("a launch", 700)
    with pytest.raises(DeviceFailed, match="status 700"):
        timed(world, monkeypatch, bound(lambda _: raise_(error)))


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


def test_unused_memory_is_freed_before_each_case(world, monkeypatch):
    """Memory that one library keeps of a case would be missing in the next."""
    freed = []
    for number in (1, 2):
        timed(world, monkeypatch, bound(right), free_pools=lambda: freed.append(1))
        assert len(freed) == number


def test_a_rival_runs_every_set_once_before_it_is_timed(world, monkeypatch):
    """Allocating the results of each set is no part of a timing."""
    sets, done = [], []

    def bind(arrays):
        sets.append(id(arrays["out"]))
        number = len(sets)

        def step():
            done.append((number, len(world.readings)))
            right(arrays)

        return step

    device = attrs.evolve(DEVICE, l2_bytes=GEMM.num_bytes * 2)
    timed(world, monkeypatch, Rival("library", bind), device=device)
    assert len(set(sets)) == 4
    assert [number for number, readings in done if not readings] == [1, 2, 3, 4]


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


def test_arrays_that_are_overwritten_are_restored(world, monkeypatch):
    """The check of a rival begins with the data that cubatch's began with."""
    case = cases.optimizer_step("adam", 500)
    assert "vendor" in timed(world, monkeypatch, bound(lambda arrays: case.call(functional, arrays)), case=case).times


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


def test_a_fast_convolution_is_within_its_factor_and_other_padding_is_not():
    """Winograd's algorithm rounds more than a sum of products; a result without a row of padding is wrong."""
    case = cases.of_layer(Conv2d(h=12, w=12, c=64, k=16, r=3, s=3, pad=1), Pass.FPROP, 2)
    given = target.fill(np, case, 1)
    expected = check.Expected(case, given, np.random.default_rng(0), images=None, channels=None)
    fast = winograd(given["x"], given["w"])
    assert expected.check({**given, "out": fast}, factor=check.WINOGRAD).passed
    shifted = np.roll(fast, 1, axis=1)
    assert expected.check({**given, "out": shifted}, factor=check.WINOGRAD).worst > 10


# --- cuDNN, through a made-up PyTorch on NumPy's arrays -------------------------------------------------------------

LAYER = Conv2d(h=6, w=5, c=4, k=3, r=3, s=3, pad=1, bias=False)


class Tensor(np.ndarray):
    """An array with the methods of PyTorch's tensors that are called."""

    def contiguous(self):
        return np.ascontiguousarray(self).view(Tensor)

    def add_(self, _):
        return self


def fake_torch(calls):
    """A PyTorch that records its calls, with the layout of the input, and returns ones."""

    def operation(name):
        def call(x, *others, **_):
            calls.append((name, "NCHW" if x.flags.c_contiguous else "channels last", others))
            return np.ones((1, 1), np.float32).view(Tensor)

        return call

    def gradients(*given):
        return operation("convolution_backward")(*given), None, None

    space = types.SimpleNamespace
    return space(
        cuda=space(is_available=lambda: True),
        nn=space(functional=space(conv2d=operation("conv2d"), batch_norm=operation("batch_norm"))),
        zeros_like=np.zeros_like,
        full_like=np.full_like,
        relu_=lambda y: calls.append(("relu_", None, ())),
        cudnn_convolution_relu=operation("cudnn_convolution_relu"),
        cudnn_convolution_add_relu=operation("cudnn_convolution_add_relu"),
        ops=space(aten=space(convolution_backward=gradients, threshold_backward=operation("threshold_backward"))),
    )


def tensors_of(case):
    """Return arrays of a case as tensors, seen as NCHW with the channels last."""
    made = {name: np.ones(each.shape, np.float32).view(Tensor) for name, each in case.operands.items()}
    return {name: each.transpose(0, 3, 1, 2) if each.ndim == 4 else each for name, each in made.items()}


def calls_of(case):
    """Return what each way calls for one step."""
    calls, by_way = [], {}
    for name, way in rivals._ways(fake_torch(calls), case, {}).items():
        way.make(tensors_of(case))()
        by_way[name] = [call[:2] for call in calls]
        calls.clear()
    return by_way


@pytest.mark.parametrize(("pass_", "called"), [(Pass.FPROP, "conv2d"), (Pass.DGRAD, "convolution_backward")])
def test_float32_is_convolved_in_both_layouts(pass_, called):
    """Many of cuDNN's float32 algorithms support NCHW alone."""
    assert calls_of(cases.of_layer(LAYER, pass_, 2)) == {
        "cuDNN (torch)": [(called, "channels last")],
        "cuDNN (torch, NCHW)": [(called, "NCHW")],
    }
    assert list(calls_of(cases.of_layer(LAYER, Pass.WGRAD, 2, "float16"))) == ["cuDNN (torch)"]


def test_bias_residual_and_relu_are_fused_by_cudnn_too():
    """In one call, with the residual, its factor, the bias and the geometry; in addition to three kernels."""
    biased = attrs.evolve(LAYER, bias=True)
    plain = cases.of_layer(biased, Pass.FPROP, 2, "float16", with_bias=True, relu=True)
    assert calls_of(plain) == {
        "cuDNN (torch)": [("conv2d", "channels last"), ("relu_", None)],
        "cuDNN (torch, fused)": [("cudnn_convolution_relu", "channels last")],
    }
    case = cases.of_layer(biased, Pass.FPROP, 2, "float16", with_bias=True, ending=["residual"], relu=True)
    given = tensors_of(case)
    rivals._ways(fake_torch(calls := []), case, {})["cuDNN (torch, fused)"].make(given)()
    ((name, _, (w, residual, alpha, b, *geometry)),) = calls
    assert (name, alpha, geometry) == ("cudnn_convolution_add_relu", 1.0, [[1, 1], [1, 1], [1, 1], 1])
    for tensor, of in ((w, "w"), (residual, "residual"), (b, "b")):
        assert np.shares_memory(tensor, given[of])


def test_other_terms_of_networks_are_kernels_of_pytorch():
    """A folded norm is a norm in inference; the mask of a ReLU is that of its gradient. cuDNN fuses neither."""
    norm = cases.of_layer(LAYER, Pass.FPROP, 2, "float16", ending=["folded"], relu=True)
    assert [name for name, _ in calls_of(norm)["cuDNN (torch)"]] == ["conv2d", "batch_norm", "relu_"]
    mask = cases.of_layer(LAYER, Pass.DGRAD, 2, "float16", ending=["residual", "positive"])
    assert [name for name, _ in calls_of(mask)["cuDNN (torch)"]] == ["convolution_backward", "threshold_backward"]
    assert set(calls_of(norm)) == set(calls_of(mask)) == {"cuDNN (torch)"}


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


def test_the_results_of_sets_lie_in_as_many_places():
    """PyTorch's allocator would return the block that was just freed, which is still in the L2."""
    blocks, taken = list("abcdef"), []

    class Block:
        def __init__(self):
            self.name = blocks.pop(0)
            taken.append(self.name)

        def __del__(self):
            blocks.insert(0, self.name)

    steps = [rivals.keeping(Block) for _ in range(3)]
    for step in steps * 3:
        step()
    assert taken == list("abc") * 3


def test_the_sets_of_a_variant_share_a_workspace(world, monkeypatch):
    """128 sets of a product that is split along k would take gigabytes; each variant has its own."""
    taken, bind, alive = [], world.bind, []

    def with_workspace(_, kernel, grid, arguments):
        workspace = arrays.take_workspace(None, np.zeros(1), 1 << 16)
        alive.append(workspace)
        taken.append((kernel.name, id(workspace)))
        return bind(kernel, grid, arguments)

    monkeypatch.setattr(type(world), "bind", with_workspace)
    device = attrs.evolve(DEVICE, l2_bytes=GEMM.num_bytes * 2)
    measure.time_case(GEMM, world.target(device), Contest(world), variants="ranked", with_rivals=False)
    assert len(taken) == 8
    assert {name: len({where for n, where in taken if n == name}) for name, _ in taken} == {
        "gemm_nt_a": 1, "gemm_nt_b": 1,
    }  # fmt: skip

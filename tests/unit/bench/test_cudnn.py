"""cuDNN's ways to do a convolution, through a made-up PyTorch on NumPy's arrays."""

from __future__ import annotations

import types

import attrs
import numpy as np
import pytest

from cubatch.bench import cases, cudnn, measure, records, rivals
from cubatch.bench.contest import Contest
from cubatch.bench.fused import with_epilogue
from cubatch.bench.rivals import Rival
from cubatch.engine.native import arrays
from cubatch.network.layers import Conv2d
from cubatch.network.passes import Pass
from tests.unit.bench.building import GEMM


def conv_relu(batch_size, dtype="float32", *, residual=False):
    """A convolution with a bias and ReLU, and another branch between them."""
    plain = cases.of_layer(attrs.evolve(LAYER, bias=True), Pass.FPROP, batch_size, dtype, with_bias=True)
    return with_epilogue(plain, residual=residual, relu=True)


LAYER = Conv2d(h=6, w=5, c=4, k=3, r=3, s=3, pad=1, bias=False)


class Tensor(np.ndarray):
    """An array with the methods of PyTorch's tensors that are called."""

    def permute(self, *axes):
        return self.transpose(axes)

    def contiguous(self):
        return np.ascontiguousarray(self).view(Tensor)

    def add_(self, other):
        return self


def fake_torch(calls, *, has_cuda=True):
    """A PyTorch that notes what it is asked, with the layout of the input, and gives new arrays of ones."""

    def operation(name):
        def call(x, *others, **_):
            layout = "NCHW" if x.flags.c_contiguous else "channels last"
            calls.append((name, layout, others))
            return np.ones((1, 1), np.float32).view(Tensor)

        return call

    def gradients(*given):
        return operation("convolution_backward")(*given), None, None

    aten = types.SimpleNamespace(
        convolution_backward=gradients, threshold_backward=operation("threshold_backward")
    )  # fmt: skip
    return types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_available=lambda: has_cuda),
        nn=types.SimpleNamespace(
            functional=types.SimpleNamespace(conv2d=operation("conv2d"), batch_norm=operation("batch_norm"))
        ),
        zeros_like=np.zeros_like,
        full_like=np.full_like,
        relu_=lambda y: calls.append(("relu_", None, ())),
        cudnn_convolution_relu=operation("cudnn_convolution_relu"),
        cudnn_convolution_add_relu=operation("cudnn_convolution_add_relu"),
        ops=types.SimpleNamespace(aten=aten),
    )


def tensors_of(case):
    """A set of arrays as tensors."""
    return {name: np.ones(each.shape, np.float32).view(Tensor) for name, each in case.operands.items()}


def done(case):
    """What each way asks of PyTorch for one step."""
    found = {}
    for name, bind in cudnn.steps(fake_torch(calls := []), case, case.layer).items():
        bind(tensors_of(case))()
        found[name] = [call[:2] for call in calls]
        calls.clear()
    return found


@pytest.mark.parametrize(("pass_", "asked"), [(Pass.FPROP, "conv2d"), (Pass.DGRAD, "convolution_backward")])
def test_float32_is_asked_in_both_layouts(pass_, asked):
    """Many of cuDNN's float32 algorithms know NCHW alone; its best is the faster of the two."""
    assert done(cases.of_layer(LAYER, pass_, 2)) == {
        "cuDNN (torch)": [(asked, "channels last")],
        "cuDNN (torch, NCHW)": [(asked, "NCHW")],
    }


def test_sixteen_bits_are_asked_channels_last():
    """Which tensor cores want."""
    assert list(done(cases.of_layer(LAYER, Pass.WGRAD, 2, "float16"))) == ["cuDNN (torch)"]


def test_what_is_fused_is_asked_fused_too():
    """In one call of cuDNN's beside three kernels, with the residual, its factor, the bias and the geometry."""
    plain = conv_relu(2, "float16")
    assert done(plain)["cuDNN (torch)"] == [("conv2d", "channels last"), ("relu_", None)]
    assert done(plain)["cuDNN (torch, fused)"] == [("cudnn_convolution_relu", "channels last")]
    case = conv_relu(2, "float16", residual=True)
    given = tensors_of(case)
    cudnn.steps(fake_torch(calls := []), case, case.layer)["cuDNN (torch, fused)"](given)()
    ((name, _, (w, residual, alpha, b, *geometry)),) = calls
    assert (name, alpha, geometry) == ("cudnn_convolution_add_relu", 1.0, [[1, 1], [1, 1], [1, 1], 1])
    for tensor, of in ((w, "w"), (residual, "residual"), (b, "b")):
        assert np.shares_memory(tensor, given[of])


def test_what_networks_end_with_are_kernels_of_pytorchs():
    """A folded norm is a norm in inference; the mask of a ReLU is that of its gradient. cuDNN has neither fused."""
    norm = with_epilogue(cases.of_layer(LAYER, Pass.FPROP, 2, "float16"), folded=True, relu=True)
    assert [name for name, _ in done(norm)["cuDNN (torch)"]] == ["conv2d", "batch_norm", "relu_"]
    mask = with_epilogue(cases.of_layer(LAYER, Pass.DGRAD, 2, "float16"), residual=True, positive=True)
    assert [name for name, _ in done(mask)["cuDNN (torch)"]] == ["convolution_backward", "threshold_backward"]
    assert set(done(norm)) == set(done(mask)) == {"cuDNN (torch)"}


def test_on_a_cpu_there_is_one_way():
    """The others are cuDNN's."""
    case = conv_relu(2)
    assert list(cudnn.steps(fake_torch([], has_cuda=False), case, case.layer)) == ["torch"]


def test_results_of_sets_lie_in_as_many_places():
    """PyTorch's allocator would give the block that was just freed, which is still in the L2."""
    case, blocks, given = cases.of_layer(LAYER, Pass.FPROP, 2, "float16"), list("abcdef"), []

    class Block:
        def __init__(self):
            self.name = blocks.pop(0)
            given.append(self.name)

        def __del__(self):
            blocks.insert(0, self.name)

    torch = fake_torch([])
    torch.nn.functional.conv2d = lambda *_: Block()
    bind = cudnn.steps(torch, case, case.layer)["cuDNN (torch)"]
    steps = [bind(tensors_of(case)) for _ in range(3)]
    for step in steps * 3:
        step()
    assert given == list("abc") * 3


# --- the fastest of a rival's ways -------------------------------------------------------------------------------


def test_ours_are_compared_with_the_fastest_way_of_a_rival(world, monkeypatch):
    """Which is named; the others are listed with their times."""
    world.seconds = {"vendor a": 2e-3, "vendor b": 0.5e-3, "vendor c": 3e-3}

    def way(name):
        def bind(arrays):
            def step():
                world.launched.append(f"vendor {name}")
                np.matmul(arrays["x"], arrays["w"].T, out=arrays["out"])

            return step

        return Rival(name, bind)

    def find(*_, **__):
        return attrs.evolve(way("a"), alternatives=(way("b"), way("c")))

    monkeypatch.setitem(rivals.RIVALS, "vendor", find)
    result = measure.time_case(GEMM, world.target(), Contest(world), seconds=10.0)
    ours, *others = result.entries
    assert [(entry.name, entry.status) for entry in others] == [("a", "dropped"), ("b", "ok"), ("c", "dropped")]
    assert ours.ratio == pytest.approx(0.5)
    assert result.times["vendor"].name == "b"
    assert records.compared(result.entries[:1] + result.entries[:0:-1])[0].ratio == pytest.approx(0.5)


# --- one workspace -----------------------------------------------------------------------------------------------


def test_a_workspace_is_shared_where_no_two_operations_run_at_a_time():
    """One for all, as large as the largest so far; outside each has its own."""
    like = np.zeros(1, np.float32)
    with arrays.sharing_workspace():
        first, second, larger, third = (arrays.take_workspace(None, like, size) for size in (64, 32, 128, 100))
    assert first is second
    assert larger is third
    assert larger is not first
    assert arrays.take_workspace(None, like, 64) is not arrays.take_workspace(None, like, 64)
    own = np.zeros(64, np.uint8)
    with arrays.sharing_workspace():
        assert arrays.take_workspace(own, like, 64) is own


def test_the_sets_of_a_variant_share_a_workspace(world, monkeypatch):
    """128 sets of a product that is split along k would else take gigabytes; each variant has its own."""
    taken, bind = [], world.bind

    def with_workspace(found, grid, arguments):
        taken.append((found.name, id(arrays.take_workspace(None, np.zeros(1), 1 << 16))))
        kept.append(arrays._shared.get())
        return bind(found, grid, arguments)

    kept = []
    monkeypatch.setattr(type(world), "bind", lambda _, *given: with_workspace(*given))
    device = measure.attrs.evolve(world.target().device, l2_bytes=GEMM.num_bytes * 2)
    measure.time_case(GEMM, world.target(device), Contest(world), variants="ranked", with_rivals=False)
    assert len(taken) == 8
    assert {name: len({where for n, where in taken if n == name}) for name, _ in taken} == {
        "gemm_nt_a": 1,
        "gemm_nt_b": 1,
    }

"""The vendor's side of `cubatch bench` where PyTorch has no GPU: the same calls, on the same memory."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu import eager
from cubatch.bench import cases, check, rivals, target
from cubatch.bench.cases import of_step
from cubatch.network.graph import Network
from cubatch.network.layers import (
    GELU,
    Add,
    Attention,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    HardSigmoid,
    HardSwish,
    LayerNorm,
    Linear,
    MaxPool2d,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
)  # fmt: skip
from cubatch.network.passes import Pass

torch = pytest.importorskip("torch")

LAYERS = [
    Conv2d(h=9, w=7, c=6, k=10, r=3, s=2, stride=2, pad=[1, 1, 0, 0]),
    Conv2d(h=9, w=8, c=6, k=12, r=3, s=3, groups=3, pad=1, dilation=2),
    Conv2d(h=9, w=7, c=6, k=6, r=3, s=3, groups=6, pad=1, stride=2),
]


DTYPES = ["float32", "tf32", "float16", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_pytorchs_convolution_is_given_the_same_convolution(layer, pass_, dtype):
    """
    What its functions return is what the case asks for, within the bound that our kernels are held to.

    On some CPUs PyTorch sums the gradients of 16 bits in 16 bits: of halves every type holds the sums.
    """
    case = cases.of_layer(layer, pass_, 3, dtype)
    arrays = {name: halves(array) for name, array in target.fill(np, case, 1).items()}
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)

    found = rivals.rivals(case, np)[0]
    returned = found.bind(arrays)()

    assert found.library == "torch"
    assert_right(found, returned, case, arrays, expected)


def assert_right(found, returned, case, arrays, expected):
    """What a step returned, read as a timing's check reads it: a result laid out and stored as the case's."""
    check.poison(case, arrays)
    (name,) = case.results
    result = found.results(returned)[name]
    assert (result.dtype, result.flags.c_contiguous) == (arrays[name].dtype, True)
    assert expected.check({**arrays, name: result}, stored_between=found.stored_between).passed


def halves(array):
    """Round to halves, whose sums every type holds: PyTorch stores what it has before each of its kernels."""
    if array.dtype == np.uint16:
        return (halves(check._values(array).astype(np.float32)).view(np.uint32) >> 16).astype(np.uint16)
    return np.round(2 * array) / 2


ENDINGS = {
    Pass.FPROP: [([], True), (["residual"], True), (["folded"], False), (["folded", "residual"], False)],
    Pass.DGRAD: [(["positive"], False), (["residual", "positive"], False)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [LAYERS[0], Linear(c=13, k=7)], ids=["convolution", "linear"])
@pytest.mark.parametrize(("pass_", "ending"), [(pass_, ending) for pass_ in ENDINGS for ending in ENDINGS[pass_]])
def test_what_is_fused_in_ours_are_kernels_of_their_own_in_pytorch(pass_, ending, layer, dtype):
    """A product with its bias, then a norm, an addition, a mask and a ReLU, on the result that the case asks for."""
    terms, relu = ending
    folded = "folded" in terms
    with_bias = pass_ is Pass.FPROP and not folded
    case = cases.of_layer(layer, pass_, 3, dtype, with_bias=with_bias, ending=terms, relu=relu)
    arrays = {name: halves(array) for name, array in target.fill(np, case, 1).items()}
    if folded:  # PyTorch stores what it multiplies by
        arrays["scale"][...] = 1.0
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    found = rivals.rivals(case, np)[0]
    assert_right(found, found.bind(arrays)(), case, arrays, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [LAYERS[0], Linear(c=13, k=7)], ids=["convolution", "linear"])
def test_pytorch_gives_the_gradient_of_a_bias_too(layer, dtype):
    """As a result of its own, by name."""
    case = cases.of_layer(layer, Pass.WGRAD, 3, dtype, with_bias=True)
    arrays = {name: halves(array) for name, array in target.fill(np, case, 1).items()}
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    found = rivals.rivals(case, np)[0]
    results = found.results(found.bind(arrays)())
    assert set(results) == {"dw", "db"}
    assert expected.check({**arrays, **results}).passed


def test_pytorch_is_not_given_channels_that_are_only_stored():
    """A batch of three colours is stored with four for our kernels: PyTorch convolves three."""
    network = Network(input_shape=(9, 8, 3), layers=[Conv2d(k=4, r=3, s=3), Flatten(), Linear(k=5)])
    found = [case for case in of_step(network, "training", 2) if case.operation.startswith("conv2d")]
    assert [case.operands["x"].padded for case in found] == [1, 1]
    for case in found:
        arrays = target.fill(np, case, 1)
        assert not arrays["x"][..., 3].any()
        rival = rivals.rivals(case, np)[0]
        results = rival.results(rival.bind(arrays)())
        for sample in ({}, {"images": None, "channels": None}, {"images": 1, "channels": 1}):
            expected = check.Expected(case, arrays, np.random.default_rng(0), **sample)
            assert expected.check({**arrays, **results}).passed


@pytest.mark.parametrize("dtype", ["tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("pass_", list(Pass))
def test_pytorch_multiplies_what_runs_on_tensor_cores(pass_, dtype):
    """On the very arrays, into the case's result."""
    case = cases.of_layer(Linear(c=13, k=7), pass_, 9, dtype)
    arrays = target.fill(np, case, 1)
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    check.poison(case, arrays)
    found = rivals.rivals(case, np)[0]
    found.bind(arrays)()
    assert found.library == "torch"
    assert expected.check(arrays).passed


@pytest.mark.parametrize("layer", [LAYERS[0], Linear(c=13, k=7)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [False, True])
def test_precision_is_that_of_the_case_whatever_was_set_before(before, dtype, layer):
    """TF32 only where the case is tf32, sums of 16 bits never."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    cudnn.allow_tf32 = matmul.allow_tf32 = before
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = True
    case = cases.of_layer(layer, Pass.FPROP, 3, dtype)
    arrays = target.fill(np, case, 1)
    rivals.rivals(case, np)[0].bind(arrays)
    if layer is LAYERS[0] or dtype != "float32":  # float32 products are CuPy's
        assert cudnn.allow_tf32 == matmul.allow_tf32 == (dtype == "tf32")
        assert not matmul.allow_fp16_reduced_precision_reduction
        assert not matmul.allow_bf16_reduced_precision_reduction
    if layer is LAYERS[0]:
        assert cudnn.benchmark


def test_one_sided_pads_have_no_rival():
    """PyTorch's convolution pads both sides of an axis alike."""
    layer = Conv2d(h=9, w=7, c=6, k=10, r=3, s=3, pad=[1, 0, 1, 1])
    assert "both sides" in rivals.rivals(cases.of_layer(layer, Pass.FPROP, 3), np)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("pass_", "mode", "with_bias"),
    [
        (Pass.FPROP, "", False), (Pass.FPROP, "", True), (Pass.FPROP, "training", True),
        (Pass.DGRAD, "", False), (Pass.DGRAD, "", True),
    ],
)  # fmt: skip
def test_pytorchs_attention_is_given_the_same_attention(pass_, mode, with_bias, dtype):
    """Its output, or all its gradients, by name; within our bounds, but where it reads what it rounded itself."""
    layer = Attention(h=35, w=2, c=64, heads=4)
    case = cases.of_layer(layer, pass_, 3, dtype, with_bias=with_bias, mode=mode)
    arrays = target.fill(np, case, 1)
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    found = rivals.rivals(case, np)[0]
    step = found.bind(arrays)
    check.poison(case, arrays)
    for _ in range(2):  # the graph is kept from step to step
        results = found.results(step())
        assert set(results) == ({"out"} if mode else set(case.results))
        assert all(results[name].dtype == arrays[name].dtype for name in results)
        assert expected.check({**arrays, **results}, names=results, stored_between=found.stored_between).passed


def test_attention_without_pytorch_has_no_rival(monkeypatch):
    """And says so."""
    monkeypatch.setattr(rivals, "_torch", lambda: None)
    for mode in ("training", "inference"):
        case = cases.of_layer(Attention(h=7, w=1, c=8, heads=2), Pass.FPROP, 3, mode=mode)
        assert "not installed" in rivals.rivals(case, np)


POOLS = [
    MaxPool2d(h=9, w=8, c=6, r=3, s=2, stride=2, pad=[1, 1, 0, 0]),
    MaxPool2d(h=9, w=8, c=6, r=3, s=3, stride=2, pad=1, ceil=True),
    AvgPool2d(h=9, w=8, c=6, r=3, s=2, stride=2, pad=[1, 1, 0, 0]),
    AvgPool2d(h=9, w=8, c=6, r=3, s=3, stride=2, pad=1, count_pad=False),
    GlobalAvgPool(h=9, w=8, c=6),
]
OTHERS = [
    *(
        cases.of_layer(layer, pass_, 3, dtype, mode=mode)
        for dtype in DTYPES
        for layer in (
            *POOLS, BatchNorm2d(h=9, w=8, c=6), LayerNorm(h=9, w=8, c=6), Add(h=9, w=8, c=6),
            *(kind(h=9, w=8, c=6) for kind in (ReLU, ReLU6, Sigmoid, SiLU, HardSigmoid, HardSwish, GELU)),
        )
        for pass_ in (Pass.FPROP, Pass.DGRAD) if cases.has_case(layer, pass_)
        for mode in cases.modes_of(layer, pass_)
    ),
    *(
        cases.of_layer(BatchNorm2d(h=9, w=8, c=6), Pass.FPROP, 3, dtype, mode=mode, ending=["residual"], relu=True)
        for dtype in DTYPES for mode in ("training", "inference")
    ),
    *(
        cases.of_layer(layer, Pass.DGRAD, 3, dtype, with_bias=True, ending=[term])
        for dtype in DTYPES
        for layer, term in ((POOLS[-1], "residual"), (BatchNorm2d(h=9, w=8, c=6), "pooled"))
    ),
    *(cases.optimizer_step(name, 5000, dtype) for dtype in DTYPES for name in ("sgd", "momentum", "adam")),
]  # fmt: skip


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_pytorch_computes_what_norms_activations_pooling_and_optimizers_do(case):
    """Every way is within the bound of the case; the second step too, of what does not change its own operands."""
    arrays = target.fill(np, case, 1)
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    initial = {name: array.copy() for name, array in arrays.items()}
    ways = rivals.rivals(case, np, others=eager.WAYS)
    assert ways
    for way in ways:
        for name, array in initial.items():
            arrays[name][...] = array
        check.poison(case, arrays)
        returned = way.bind(arrays)()
        results = way.results(returned) if way.results else arrays
        found = expected.check(
            {**arrays, **results}, names=results if way.results else None, stored_between=way.stored_between
        )  # fmt: skip
        assert found.passed, (way.library, found)
        assert found.compared

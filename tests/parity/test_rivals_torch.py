"""The vendor's side of `cubatch bench` where PyTorch has no GPU: the same calls, on the same memory."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.bench import cases, check, fused, rivals, target, training_calls
from cubatch.network.layers import Attention, Conv2d, Linear
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

    if pass_ is not Pass.FPROP:
        assert [part is not None for part in returned] == [pass_ is Pass.DGRAD, pass_ is Pass.WGRAD, False]
    assert found.library == "torch"
    assert_right(found, returned, case, arrays, expected)


def assert_right(found, returned, case, arrays, expected):
    """What a step returned, read as a timing's check reads it: a result laid out and stored as the case's."""
    check.poison(case, arrays)
    (name,) = case.results
    result = found.results(returned)[name]
    assert (result.dtype, result.flags.c_contiguous) == (arrays[name].dtype, True)
    assert expected.check({**arrays, name: result}).passed


def halves(array):
    """Round to halves, whose sums every type holds: PyTorch stores what it has before each of its kernels."""
    if array.dtype == np.uint16:
        return (halves(check._values(array).astype(np.float32)).view(np.uint32) >> 16).astype(np.uint16)
    return np.round(2 * array) / 2


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_fused_in_ours_are_kernels_of_their_own_in_pytorch(dtype, residual):
    """A convolution with its bias, then an addition and a ReLU in place, on the result that the case asks for."""
    case = fused.conv_relu(LAYERS[0], 3, dtype, residual=residual)
    arrays = {name: halves(array) for name, array in target.fill(np, case, 1).items()}
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    found = rivals.rivals(case, np)[0]
    assert_right(found, found.bind(arrays)(), case, arrays, expected)


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
    """TF32 only where the case is tf32, sums of 16 bits never; in a sweep cuDNN chooses without timing."""
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
        assert cudnn.benchmark is True
        rivals.rivals(case, np, benchmark=False)[0].bind(arrays)
        assert cudnn.benchmark is False


def test_one_sided_pads_have_no_rival():
    """PyTorch's convolution pads both sides of an axis alike."""
    layer = Conv2d(h=9, w=7, c=6, k=10, r=3, s=3, pad=[1, 0, 1, 1])
    assert "both sides" in rivals.rivals(cases.of_layer(layer, Pass.FPROP, 3), np)[0].reason


def test_versions_are_those_of_pytorch():
    """The CPU build has no cuDNN."""
    assert rivals.versions()["torch"] == torch.__version__


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pass_", "with_bias"), [(Pass.FPROP, False), (Pass.FPROP, True), (Pass.DGRAD, False)])
def test_pytorchs_attention_is_given_the_same_attention(pass_, with_bias, dtype):
    """Its output, or all its gradients, by name; within our bounds, but where it reads what it rounded itself."""
    case = cases.of_layer(Attention(h=35, w=2, c=64, heads=4), pass_, 3, dtype, with_bias=with_bias)
    arrays = target.fill(np, case, 1)
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    found = rivals.rivals(case, np)[0]
    step = found.bind(arrays)
    check.poison(case, arrays)
    for _ in range(2):  # the graph is kept from step to step
        results = found.results(step())
        assert set(results) == set(case.results)
        assert all(results[name].dtype == arrays[name].dtype for name in results)
        assert expected.check({**arrays, **results}).worst <= found.slack


@pytest.mark.parametrize("has_torch", [True, False])
def test_attention_without_a_rival_says_why(monkeypatch, has_torch):
    """What is kept is PyTorch's affair, biases' gradients are kernels of its own, and without PyTorch there is none."""
    layer = Attention(h=7, w=1, c=8, heads=2)
    if not has_torch:
        monkeypatch.setattr(rivals, "_torch", lambda: None)
    keeping, biased = training_calls.attention(layer, 3), cases.of_layer(layer, Pass.DGRAD, 3, with_bias=True)
    for case in (keeping, biased):
        assert ("keeps what it likes" if has_torch else "not installed") in rivals.rivals(case, np)[0].reason

"""Steps on experimental kernels against PyTorch in float64, on the simulator of a Hopper GPU."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.engine import loss_scale
from cubatch.engine.network import Model
from cubatch.kernels.ranking import SplitKernel, ranked
from cubatch.network.graph import Network
from cubatch.network.layers import Add, BatchNorm2d, Conv2d, GlobalAvgPool, Linear, ReLU
from tests.kernels import hopper_cases
from tests.kernels.cases import decoded
from tests.parity.blocks import walk
from tests.parity.small_deit import deit, deit_forward

torch = pytest.importorskip("torch")
F = torch.nn.functional

launcher = hopper_cases.launcher

NET = Network(
    input_shape=(11, 9, 8),
    layers=[
        Conv2d(name="c1", k=64, r=3, s=3, pad=1, bias=False),
        BatchNorm2d(name="n1"),
        ReLU(name="r1"),
        Conv2d(name="c2", k=64, r=3, s=3, pad=1, bias=False),
        BatchNorm2d(name="n2", momentum=0.3, eps=1e-3),
        ReLU(name="r2"),
        Conv2d(name="c3", k=136, r=1, s=1),
        BatchNorm2d(name="n3"),
        Conv2d(name="short", inputs=["r1"], k=136, r=1, s=1, bias=False),
        BatchNorm2d(name="n4"),
        Add(name="sum", inputs=["n3", "n4"]),
        ReLU(name="r4"),
        Conv2d(name="c5", k=64, r=1, s=1, bias=False),
        BatchNorm2d(name="n5"),
        Conv2d(name="c6", k=72, r=3, s=3, stride=2, pad=1, bias=False),
        BatchNorm2d(name="n6"),
        ReLU(name="r6"),
        GlobalAvgPool(name="pool"),
        Linear(name="fc", k=10),
    ],
)  # fmt: skip
IMAGES = Network(
    input_shape=(21, 18, 3),
    layers=[
        Conv2d(name="c1", k=64, r=7, s=7, stride=2, pad=3, bias=False),
        BatchNorm2d(name="n1"),
        ReLU(name="r1"),
        Conv2d(name="c2", k=64, r=3, s=3, pad=1, bias=False),
        BatchNorm2d(name="n2"),
        ReLU(name="r2"),
        GlobalAvgPool(name="pool"),
        Linear(name="fc", k=10),
    ],
)  # fmt: skip
BATCH = 7


def hopper_first(problem, device, prepare=None):
    """Choose a whole product of kernels/hopper where there is one."""
    kernels = ranked(problem, device)
    return SplitKernel(next((one for one in kernels if one.family == "hopper"), kernels[0]))


def by_name(launcher, of):
    """Values of arrays in float64, by layer and name."""
    return {
        (layer, name): decoded(launcher.get(array)) for layer, arrays in of.items() for name, array in arrays.items()
    }


def step_of(launcher, dtype, *, network=NET, experimental=(), recompute=False):
    """One step: parameters, gradients and running statistics by layer and name, and the operations launched."""
    recording = hopper_cases.Recording(launcher.launcher)
    context = launcher.context(chooser=hopper_first, launcher=recording)
    random = np.random.default_rng(6)
    options = {"mode": "training", "dtype": dtype, "seed": 4, "learning_rate": 0.0, "recompute": recompute}
    with Model(network, device=launcher.device, context=context, experimental=experimental, **options) as model:
        model.prepare(BATCH)
        for arrays in model.parameters.values():  # other factors than 1 and shifts than 0, some of them negative
            for name in [name for name in ("beta", "gamma") if name in arrays]:  # in one order: a set has none
                drawn = random.normal(0.5, 0.5, arrays[name].shape).astype(np.float32)
                arrays[name][...] = hopper_cases.cases.encoded(drawn, dtype).view(arrays[name].dtype)
        images = random.normal(size=(BATCH, *network.input_shape))
        labels = random.integers(0, 10, BATCH)
        model.load(images, labels)
        parameters = by_name(launcher, model.parameters)  # before the step writes back those that the optimizer has
        model.step()
        scale = model.loss_scale if dtype == "float16" else 1.0
        gradients = {key: array / scale for key, array in by_name(launcher, model.gradients).items()}
        states = by_name(launcher, model.states)
        return images, labels, parameters, gradients, states, recording.operations


def reference(images, labels, parameters, dtype, network=NET, forward=None):
    """The same step by PyTorch in float64, from the stored parameters."""
    images = decoded(hopper_cases.cases.encoded(images, dtype))
    tensors, states = {}, {}
    for (layer, name), array in parameters.items():
        turned = array.transpose(0, 3, 1, 2) if array.ndim == 4 else array
        tensors[layer, name] = torch.tensor(np.ascontiguousarray(turned), requires_grad=True)

    def norm(layer, x, *, momentum, eps):
        states[layer, "mean"] = torch.zeros(x.shape[1], dtype=torch.float64)
        states[layer, "var"] = torch.ones(x.shape[1], dtype=torch.float64)
        running = states[layer, "mean"], states[layer, "var"]
        return F.batch_norm(x, *running, tensors[layer, "gamma"], tensors[layer, "beta"], True, momentum, eps)

    pixels = torch.tensor(images.transpose(0, 3, 1, 2))
    output = forward(pixels, tensors) if forward else walk(network, pixels, tensors, norm)
    F.cross_entropy(output, torch.tensor(labels)).backward()
    gradients = {
        key: (tensor.grad.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor.grad).numpy()
        for key, tensor in tensors.items()
    }
    return gradients, {key: tensor.numpy() for key, tensor in states.items()}


def errors(found, wanted):
    """Root of the mean square of a gradient's error, relative to the gradient, by layer and name."""
    return {
        key: float(np.linalg.norm(found[key].reshape(want.shape) - want) / np.linalg.norm(want))
        for key, want in wanted.items()
    }


def check_errors(found, usual, dtype):
    """Errors of gradients are below a tenth, and half as large again at most as those of the usual kernels."""
    for key, error in found.items():
        assert error < 0.1, key
        assert error < 1.5 * usual[key] + 2 * {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype], key


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_step_is_as_near_to_pytorch_as_without_sums_in_products(launcher, dtype):
    """Gradients of filters, scales, shifts and, through them, of norms' inputs; and the running statistics."""
    images, labels, parameters, gradients, states, launched = step_of(launcher, dtype, experimental=["norm_sums"])
    _, _, plain_parameters, plain, plain_states, usual = step_of(launcher, dtype)
    assert all(np.array_equal(parameters[key], plain_parameters[key]) for key in parameters)
    wanted, running = reference(images, labels, parameters, dtype)
    # The bias before a norm has no gradient but rounding.
    wanted = {key: want for key, want in wanted.items() if key != ("c3", "b")}
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    with_sums, without = errors(gradients, wanted), errors(plain, wanted)
    for key, error in with_sums.items():
        assert error < 64 * unit, key
        assert error < 1.5 * without[key] + 2 * unit, key
    for key, want in running.items():
        near = {"rtol": 8 * unit, "atol": 8 * unit}
        np.testing.assert_allclose(states[key], want, **near, err_msg=str(key))
        np.testing.assert_allclose(states[key], plain_states[key], rtol=unit, atol=unit, err_msg=str(key))
    # Of 6 norms all forward, n1 by kernels/mma; back n1, n2 and n4.  n3 shares a gradient with n4, c6 is strided, and
    # r6 is undone by n6.
    count = launched.count
    assert count("gemm_nt_sums") + count("conv2d_fprop_sums") == 5
    assert count("gemm_nn_sums") + count("conv2d_dgrad_sums") == 3
    assert (count("batch_norm_statistics"), usual.count("batch_norm_statistics")) == (0, 6)
    assert (count("batch_norm_backward_sums"), usual.count("batch_norm_backward_sums")) == (2, 5)
    assert len(usual) - len(launched) == 6 + 3


def test_sums_that_start_at_the_last_row_are_as_near_to_pytorch(launcher):
    """Statistics and gradients of scales, shifts and a bias, each by the kernel that reads the rows backwards."""
    images, labels, parameters, gradients, _, launched = step_of(launcher, "float16", experimental=["reversed_sums"])
    *_, plain, _, usual = step_of(launcher, "float16")
    wanted, _ = reference(images, labels, parameters, "float16")
    backwards, without = (errors(found, wanted) for found in (gradients, plain))
    for key in wanted.keys() - {("c3", "b")}:
        assert backwards[key] < 1.5 * without[key] + 2.0**-10, key
    names = {"batch_norm_statistics", "batch_norm_backward_sums", "batch_norm_slope_sums", "column_sums"}
    assert names <= set(usual)
    assert [f"{name}_reversed" if name in names else name for name in usual] == launched


def test_recomputed_activations_have_the_same_gradients(launcher):
    """Running statistics are updated once, though the statistics are computed again."""
    kept, again = (
        step_of(launcher, "float16", experimental=["norm_sums"], recompute=recompute) for recompute in (False, True)
    )
    for one, other in zip(kept[3:5], again[3:5], strict=True):
        apart = errors(one, {key: array for key, array in other.items() if key != ("c3", "b")})
        assert max(apart.values()) < 2.0**-9  # where a product cannot sum for a norm, the order of additions differs


@pytest.mark.parametrize(
    ("dtype", "experimental"), [("float16", ["space_to_depth"]), ("bfloat16", ["norm_sums", "space_to_depth"])]
)
def test_a_step_on_a_batch_in_patches_is_as_near_to_pytorch_as_on_pixels(launcher, dtype, experimental):
    """The first convolution runs on tensor copies, forward and for its filter; all gradients stay within rounding."""
    how = {"network": IMAGES, "experimental": experimental}
    images, labels, parameters, gradients, states, launched = step_of(launcher, dtype, **how)
    *_, plain, plain_states, usual = step_of(launcher, dtype, network=IMAGES)
    wanted, running = reference(images, labels, parameters, dtype, IMAGES)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    in_patches, on_pixels = errors(gradients, wanted), errors(plain, wanted)
    for key, error in in_patches.items():
        assert error < 0.1, key
        assert error < 1.5 * on_pixels[key] + 2 * unit, key
    for key, want in running.items():
        np.testing.assert_allclose(states[key], want, rtol=8 * unit, atol=8 * unit, err_msg=str(key))
        np.testing.assert_allclose(states[key], plain_states[key], rtol=unit, atol=unit, err_msg=str(key))
    assert (launched.count("copy_filter"), usual.count("copy_filter")) == (2, 2)


@pytest.mark.parametrize(("dtype", "recompute"), [("float16", False), ("bfloat16", True)])
def test_a_step_without_stored_attention_weights_is_as_near_to_pytorch_as_with_them(
    launcher, monkeypatch, dtype, recompute
):
    """A vision transformer of 2 blocks and 82 tokens: of each attention 3 launches instead of 8 between projections."""
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**8)  # the gradients of the first scale are infinite
    how = {"network": deit(144), "recompute": recompute}
    images, labels, parameters, gradients, _, launched = step_of(
        launcher, dtype, experimental=["flash_attention"], **how
    )
    *_, plain, _, usual = step_of(launcher, dtype, **how)
    wanted, _ = reference(images, labels, parameters, dtype, forward=deit_forward)
    check_errors(errors(gradients, wanted), errors(plain, wanted), dtype)
    again = launched.count("attend_sums") - 2
    assert again == recompute  # of the first of two segments
    assert (launched.count("attend_queries"), launched.count("attend_keys")) == (2, 2)
    assert len(usual) - len(launched) == 2 * (8 - 3) + 2 * again


@pytest.mark.parametrize(("dtype", "recompute"), [("float16", False), ("bfloat16", True)])
def test_a_step_with_slopes_in_products_is_as_near_to_pytorch_as_with_kernels_of_their_own(
    launcher, monkeypatch, dtype, recompute
):
    """A vision transformer of 2 blocks: each has a launch less for a slope, and one less for the sums of a bias."""
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**8)  # the gradients of the first scale are infinite
    how = {"network": deit(144), "recompute": recompute}
    images, labels, parameters, gradients, _, launched = step_of(launcher, dtype, experimental=["gelu_products"], **how)
    *_, plain, _, usual = step_of(launcher, dtype, **how)
    wanted, _ = reference(images, labels, parameters, dtype, forward=deit_forward)
    check_errors(errors(gradients, wanted), errors(plain, wanted), dtype)
    count, before = launched.count, usual.count
    assert (count("gemm_nn_gelu"), count("activation_backward"), before("activation_backward")) == (2, 0, 2)
    assert before("column_sums") - count("column_sums") == 2
    assert len(usual) - len(launched) == 2 * 2

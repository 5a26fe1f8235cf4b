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


WORDS = deit(144)
# Of 6 norms all forward, n1 by kernels/mma; back n1, n2 and n4.  n3 shares a gradient with n4, c6 is strided, and r6 is
# undone by n6.
SUMS = {
    "gemm_nt_sums+conv2d_fprop_sums": (5, 0), "gemm_nn_sums+conv2d_dgrad_sums": (3, 0), "batch_norm_statistics": (0, 6),
    "batch_norm_backward_sums": (2, 5),
}  # fmt: skip
PATCHES = {"copy_filter": (2, 2)}
# Of each of 2 blocks 3 launches instead of 8 between the projections; of the first of two segments once more.
ATTENTION = {"attend_queries": (2, 0), "attend_keys": (2, 0)}
# Of each of 2 blocks a launch less for a slope, and one less for the sums of a bias.
SLOPES = {"gemm_nn_gelu": (2, 0), "activation_backward": (0, 2)}


@pytest.mark.parametrize(
    ("network", "experimental", "dtype", "recompute", "launches", "fewer"),
    [
        (NET, ["norm_sums"], "float16", False, SUMS, 9),
        (NET, ["norm_sums"], "bfloat16", False, SUMS, 9),
        (NET, ["norm_sums"], "float16", True, {}, None),
        (IMAGES, ["space_to_depth"], "float16", False, PATCHES, None),
        (IMAGES, ["norm_sums", "space_to_depth"], "bfloat16", False, PATCHES, None),
        (WORDS, ["flash_attention"], "float16", False, ATTENTION | {"attend_sums": (2, 0)}, 10),
        (WORDS, ["flash_attention"], "bfloat16", True, ATTENTION | {"attend_sums": (3, 0)}, 12),
        (WORDS, ["gelu_products"], "float16", False, SLOPES, 4),
        (WORDS, ["gelu_products"], "bfloat16", True, SLOPES, 4),
    ],
)
def test_a_step_is_as_near_to_pytorch_as_on_the_usual_kernels(
    launcher, monkeypatch, network, experimental, dtype, recompute, launches, fewer
):
    """Every gradient and running statistic, by as many launches of each kind and in all as it is to take."""
    if network is WORDS:
        monkeypatch.setattr(loss_scale, "INITIAL", 2.0**8)  # the gradients of the first scale are infinite
    how = {"network": network, "recompute": recompute}
    images, labels, parameters, gradients, states, launched = step_of(launcher, dtype, experimental=experimental, **how)
    *_, plain, plain_states, usual = step_of(launcher, dtype, **how)
    forward = deit_forward if network is WORDS else None
    wanted, running = reference(images, labels, parameters, dtype, network, forward)
    wanted.pop(("c3", "b"), None)  # the bias before a norm has no gradient but rounding
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    without = errors(plain, wanted)
    for key, error in errors(gradients, wanted).items():
        assert error < max(0.1, 64 * unit), key
        assert error < 1.5 * without[key] + 2 * unit, key
    for key, want in running.items():
        np.testing.assert_allclose(states[key], want, rtol=8 * unit, atol=8 * unit, err_msg=str(key))
        np.testing.assert_allclose(states[key], plain_states[key], rtol=unit, atol=unit, err_msg=str(key))
    for names, counts in launches.items():
        assert tuple(sum(map(one.count, names.split("+"))) for one in (launched, usual)) == counts, names
    assert fewer in {None, len(usual) - len(launched)}

"""Steps of PyTorch rivals: compiled and eager steps compute the same, and torchvision's networks are cubatch's."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks import torch_network  # noqa: E402
from benchmarks.gpu import training  # noqa: E402
from benchmarks.gpu.steps import Step  # noqa: E402
from cubatch.network import models  # noqa: E402
from tests.parity.beside_torchvision import registering_nothing  # noqa: E402

with registering_nothing():
    torchvision = pytest.importorskip("torchvision")

# PyTorch's own modules warn about each other while they compile.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def tiny():
    """Return a small CNN, images and labels; the same at each call."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 5),
    )
    return module, torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_compiled_training_step_has_the_loss_of_an_eager_one(dtype):
    """In three steps, and equal gradients after them: a learning rate of 0 keeps the parameters."""
    losses, gradients = {}, {}
    for rival in ("eager", "compile"):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        module, x, labels = tiny()
        step = torch_network.torch_step(module, x, labels, dtype, training.COMPILE_MODES[rival])
        losses[rival] = [step().item() for _ in range(3)]
        gradients[rival] = [parameter.grad.numpy() for parameter in module.parameters()]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (rival == "compile")
    limit = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    assert losses["compile"] == pytest.approx(losses["eager"], rel=limit)
    assert losses["eager"][0] > 0
    for eager, compiled in zip(gradients["eager"], gradients["compile"], strict=True):
        np.testing.assert_allclose(compiled, eager, atol=limit)


def test_a_compiled_inference_step_has_the_output_of_an_eager_one():
    """In evaluation mode, which the step sets: batch norm uses its running statistics."""
    outputs = {}
    for rival in ("eager", "compile"):
        torch.compiler.reset()
        module, x, _ = tiny()
        outputs[rival] = torch_network.torch_step(module, x, None, "float32", training.COMPILE_MODES[rival])().numpy()
        assert not module.training
    np.testing.assert_allclose(outputs["compile"], outputs["eager"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", training.TORCHVISION)
def test_a_rival_is_the_network_that_cubatch_times(name):
    """It has as many parameters, no stochastic depth and no head of zeros."""
    module = training.torchvision_module(name)
    assert sum(parameter.numel() for parameter in module.parameters()) == models.build(name).parameters
    depths = [part.p for part in module.modules() if isinstance(part, torchvision.ops.StochasticDepth)]
    assert set(depths) <= {0.0}
    *_, head = (part for part in module.modules() if isinstance(part, torch.nn.Linear))
    assert head.weight.any()


def test_without_torchvision_convolutional_networks_are_built_of_pytorchs_modules(monkeypatch):
    """Layer by layer as cubatch has them; of a transformer the reason is given."""
    monkeypatch.setattr(training, "_torchvision", lambda: None)
    module = training._builder("resnet50")()
    assert sum(parameter.numel() for parameter in module.parameters()) == models.build("resnet50").parameters
    with pytest.raises(ValueError, match="tokens"):
        training._builder("deit-tiny")


@pytest.mark.parametrize(("name", "mode"), [("mobilenet-v3-large", "inference"), ("deit-tiny", "training")])
def test_a_step_of_a_rival_is_built_and_warmed_up(name, mode, monkeypatch):
    """Three steps run before timing. CNNs are channels last; only inference stores parameters in 16 bits."""
    made, calls = [], []
    torch_step = torch_network.torch_step

    def built(module, x, labels, dtype, compile_mode):
        made.append((module, x, labels))
        step = torch_step(module, x, labels, dtype, compile_mode)
        return lambda: calls.append(step())

    def small():
        return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 1000))

    monkeypatch.setattr(torch_network, "torch_step", built)
    monkeypatch.setattr(training.rivals, "set_precision", lambda *_, **__: None)
    training._binder(torch, small, Step(name, mode, 2, "bfloat16"), "eager", device="cpu")()
    ((module, x, labels),) = made
    stored = torch.bfloat16 if mode == "inference" else torch.float32
    assert {parameter.dtype for parameter in module.parameters()} == {x.dtype} == {stored}
    assert (x.shape, labels is None) == ((2, 3, 224, 224), mode == "inference")
    assert x.is_contiguous(memory_format=torch.channels_last) == (name != "deit-tiny")
    assert [tuple(result.shape) for result in calls] == 3 * [(2, 1000) if mode == "inference" else ()]
    assert all(result.isfinite().all() for result in calls)

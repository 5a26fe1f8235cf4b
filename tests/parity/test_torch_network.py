"""PyTorch's side of a training step: the same network as ours, and a step that trains it."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")  # first: a module that was skipped before is there in part only

from benchmarks import torch_network  # noqa: E402
from cubatch.network import models  # noqa: E402
from cubatch.network.layers import Conv2d, Linear  # noqa: E402
from tests.parity.blocks import BLOCK, block  # noqa: E402

F = torch.nn.functional


def layer_of(network, name):
    """The module of a layer."""
    found = network.layers[name.replace(".", "_")]
    return found[1] if isinstance(found, torch.nn.Sequential) else found


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "googlenet", "mobilenet-v3-large", "alexnet", "vgg16"])
def test_a_network_has_our_parameters_and_shapes(name):
    """Every layer puts out what ours does, and all have as many parameters as ours."""
    extent = 224 if name in {"alexnet", "vgg16"} else 64
    ours = models.build(name, input_shape=(extent, extent, 3), classes=10)
    found = torch_network.module(ours)
    assert sum(parameter.numel() for parameter in found.parameters()) == ours.parameters
    shapes = {}
    for node in ours.nodes:
        if node.name.replace(".", "_") in found.layers:
            layer = found.layers[node.name.replace(".", "_")]
            layer.register_forward_hook(lambda _, __, y, node=node: shapes.update({node: tuple(y.shape[1:])}))
    with torch.no_grad():
        found(torch.zeros(2, 3, extent, extent))
    assert len(shapes) >= 20
    for node, (c, *pixels) in shapes.items():
        assert (*(pixels or (1, 1)), c) == node.layer.output_shape, node.name


def test_outputs_are_those_of_the_network_written_out():
    """A residual block by functions alone on the same parameters, which other tests hold to our engine."""
    torch.manual_seed(0)
    found = torch_network.module(BLOCK).double().train()
    parameters = {}
    for node in BLOCK.nodes:
        if isinstance(node.layer, Conv2d | Linear):
            own = layer_of(found, node.name)
            parameters[node.name, "w"], parameters[node.name, "b"] = own.weight, own.bias

    def norm(name, x, momentum=0.1, eps=1e-5):
        own = layer_of(found, name)
        assert (own.momentum, own.eps) == (momentum, eps)
        return F.batch_norm(x, None, None, own.weight, own.bias, training=True, eps=eps)

    h, w, c = BLOCK.input_shape
    x = torch.randn(3, c, h, w, dtype=torch.float64)
    with torch.no_grad():
        np.testing.assert_allclose(found(x).numpy(), block(x, parameters, norm).numpy(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("dtype", "inside"), [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_a_step_computes_in_the_precision_that_is_asked_for(dtype, inside, monkeypatch):
    """Convolutions in 16 bits, channels last; loss, parameters and their gradients, which all have, in float32."""
    made, seen, losses = [], [], []
    build, loss = torch_network.module, F.cross_entropy

    def module(network):
        made.append(build(network))
        for layer in made[0].layers.values():
            if isinstance(layer, torch.nn.Conv2d):
                layer.register_forward_hook(lambda _, __, y: seen.append(y))
        return made[0]

    monkeypatch.setattr(torch_network, "module", module)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda *a: losses.append(loss(*a)) or losses[-1])
    step = torch_network.training_step(BLOCK, 4, dtype, device="cpu")
    step()
    step()
    assert len(losses) == 2
    assert len(seen) == 2 * sum(isinstance(node.layer, Conv2d) for node in BLOCK.nodes)
    assert {y.dtype for y in seen} == {inside}
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in seen)
    assert {loss.dtype for loss in losses} == {torch.float32}
    parameters = list(made[0].parameters())
    assert {p.dtype for p in parameters} == {p.grad.dtype for p in parameters} == {torch.float32}
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in parameters if p.ndim == 4)
    assert losses[0].item() == losses[1].item()  # every step does the same work on the same parameters

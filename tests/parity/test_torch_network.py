"""PyTorch's side of a training step: the same network as ours, and a step that trains it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")  # first: a module that was skipped before is there in part only

from benchmarks import torch_network  # noqa: E402
from cubatch.network import models  # noqa: E402


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

"""The named networks against torchvision's: with its weights, its numbers."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from cubatch import from_torch
from cubatch.network import models
from tests.parity import torchvision_models as zoo

torch = zoo.torch
# Both compute in float64 on float32 weights: rounding of a hundred layers, each of sums of some thousand products.
BOUND = 1e-10


def with_weights_of(module, name, extent):
    """Give a named network the weights of torchvision's, layer by layer in the order in which they stand."""
    shape = (extent, extent, 3)
    known = models.build(name, input_shape=shape, classes=10)
    found = from_torch(module, (3, extent, extent))
    ours = [node for node in known.nodes if node.layer.parameter_shapes]
    theirs = [node for node in found.nodes if node.layer.parameter_shapes]
    pairs = list(zip(ours, theirs, strict=True))
    assert [(a.layer.type, a.layer.parameter_shapes) for a, _ in pairs] == [
        (b.layer.type, b.layer.parameter_shapes) for _, b in pairs
    ]
    return attrs.evolve(known, weights={a.name: found.weights[b.name] for a, b in pairs})


def assert_computes(network, module, extent):
    """The network's logits are the module's, and those of different images differ."""
    x = zoo.images((3, extent, extent))
    with torch.no_grad():
        want = module.double()(torch.tensor(x)).numpy()
    assert np.abs(want[0] - want[1]).max() > 0
    np.testing.assert_allclose(
        zoo.outputs(network, x).reshape(want.shape), want, rtol=0, atol=BOUND * np.abs(want).max()
    )


@pytest.mark.parametrize(
    ("name", "theirs", "extent"),
    [
        ("resnet34", "resnet34", 32), ("resnet101", "resnet101", 32), ("densenet121", "densenet121", 32),
        ("efficientnet-b0", "efficientnet_b0", 64),
    ],
)  # fmt: skip
def test_a_named_network_computes_what_torchvisions_does(name, theirs, extent):
    """With the same strides, borders and constants; `test_weights_torch` has googlenet, mobilenet and others."""
    module = zoo.build(theirs)
    assert_computes(with_weights_of(module, name, extent), module, extent)


def test_convnext_computes_what_torchvisions_does():
    """Layer norms, linear layers on pixels, scaled branches."""
    module = zoo.build("convnext_tiny")
    for block in (part for part in module.modules() if hasattr(part, "layer_scale")):
        torch.nn.init.normal_(block.layer_scale)  # it begins at 1e-6, which hides the block
    assert_computes(with_weights_of(module, "convnext-tiny", 64), module, 64)


@pytest.mark.parametrize(("name", "width", "heads"), [("deit-tiny", 192, 3), ("vit-small", 384, 6)])
def test_vision_transformers_compute_what_torchvisions_do(name, width, heads):
    """torchvision has no model of these widths, but the class that makes one."""
    torch.manual_seed(4)
    module = zoo.models.VisionTransformer(
        image_size=32, patch_size=16, num_layers=12, num_heads=heads, hidden_dim=width, mlp_dim=4 * width,
        num_classes=10,
    ).eval()  # fmt: skip
    torch.nn.init.normal_(module.heads.head.weight)
    torch.nn.init.normal_(module.class_token)
    assert_computes(with_weights_of(module, name, 32), module, 32)

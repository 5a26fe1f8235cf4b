"""Networks of the catalogue with the widths and extents of `torchvision_models.build`, and torchvision's modules."""

from __future__ import annotations

import attrs

from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import Dropout
from tests.parity import torchvision_models as zoo

torch, nn = zoo.torch, zoo.torch.nn
NARROW = {"fc1": 64, "fc2": 32, "fc3": 10}  # instead of 4096, 4096, 1000


def network(name, extent):
    """One of ours for 10 classes, without dropout, whose draws differ."""
    if name in {"alexnet", "vgg16"}:  # laid out for 224, so that nothing is averaged before the flatten
        layers = models.build(name).layers
    else:
        layers = models.build(name, input_shape=(extent, extent, 3), classes=10).layers
    narrow = NARROW if name in {"alexnet", "vgg16"} else {}
    layers = [attrs.evolve(layer, k=narrow[layer.name]) if layer.name in narrow else layer for layer in layers]
    layers = [attrs.evolve(layer, p=0.0) if isinstance(layer, Dropout) else layer for layer in layers]
    return Network(input_shape=(extent, extent, 3), layers=layers, name=name)


class ExactHardSigmoid(nn.Module):
    """PyTorch's, whose gradient has 1 / 6 in float32 alone."""

    def forward(self, x):
        return nn.functional.relu6(x + 3) / 6


def module(name):
    """torchvision's module of a network's name, with the same freedom from dropout."""
    found = zoo.build(name.replace("-", "_"))
    for parent in list(found.modules()):
        for key, part in list(parent.named_children()):
            if isinstance(part, nn.Hardsigmoid):
                setattr(parent, key, ExactHardSigmoid())
            if isinstance(part, nn.Dropout):
                part.p = 0.0
    return found

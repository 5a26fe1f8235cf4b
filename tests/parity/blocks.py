"""A stem and a block of a residual network, and networks layer by layer: ours, and as PyTorch has them."""

from __future__ import annotations

from cubatch.network.graph import Network
from cubatch.network.layers import (
    Add,
    BatchNorm2d,
    Conv2d,
    Dropout,
    GlobalAvgPool,
    HardSigmoid,
    HardSwish,
    Linear,
    MaxPool2d,
    ReLU,
    Scale,
)

BLOCK = Network(
    input_shape=(9, 8, 3),
    layers=[
        Conv2d(name="stem", k=8, r=3, s=3, pad=1, bias=False),
        BatchNorm2d(name="norm1"),
        ReLU(),
        MaxPool2d(name="pool", r=3, s=3, stride=2, pad=1),
        Conv2d(name="first", k=16, r=3, s=3, stride=2, pad=1, bias=False),
        BatchNorm2d(name="norm2", momentum=0.3, eps=1e-3),
        ReLU(),
        Conv2d(name="second", k=16, r=3, s=3, pad=1, bias=False),
        BatchNorm2d(name="norm3"),
        Conv2d(name="short", inputs=["pool"], k=16, r=1, s=1, stride=2, bias=False),
        BatchNorm2d(name="norm4"),
        Add(inputs=["norm3", "norm4"]),
        ReLU(),
        GlobalAvgPool(),
        Linear(name="head", k=5),
    ],
)


def block(x, p, norm):
    """Run a stem and a block of a residual network as PyTorch has them."""
    from torch.nn import functional as F  # noqa: N812 - its usual name

    x = F.max_pool2d(F.relu(norm("norm1", F.conv2d(x, p["stem", "w"], padding=1))), 3, 2, 1)
    y = F.relu(norm("norm2", F.conv2d(x, p["first", "w"], stride=2, padding=1), momentum=0.3, eps=1e-3))
    y = norm("norm3", F.conv2d(y, p["second", "w"], padding=1))
    y = F.relu(y + norm("norm4", F.conv2d(x, p["short", "w"], stride=2)))
    return F.linear(y.mean((2, 3)), p["head", "w"], p["head", "b"])


def walk(network, x, p, norm):
    """Run a network layer by layer as PyTorch has them."""
    import torch
    from torch.nn import functional as F  # noqa: N812 - its usual name

    alike = {
        ReLU: F.relu,
        HardSwish: F.hardswish,
        HardSigmoid: lambda x: F.relu6(x + 3) / 6,  # F.hardsigmoid's gradient has 1 / 6 in float32 alone
        Add: torch.add,
        Scale: torch.mul,
        Dropout: lambda x: x,
        GlobalAvgPool: lambda x: x.mean((2, 3), keepdim=True),
    }
    values = {"input": x}
    for node in network.nodes:
        name, layer, read = node.name, node.layer, [values[name] for name in node.inputs]
        if isinstance(layer, Conv2d):
            options = {"stride": layer.stride, "padding": layer.pad[0], "groups": layer.groups}
            values[name] = F.conv2d(*read, p[name, "w"], p.get((name, "b")), **options)
        elif isinstance(layer, BatchNorm2d):
            values[name] = norm(name, *read, momentum=layer.momentum, eps=layer.eps)
        elif isinstance(layer, Linear):
            values[name] = F.linear(read[0].flatten(1), p[name, "w"], p[name, "b"])
        else:
            values[name] = alike[type(layer)](*read)
    return values[network.nodes[-1].name]

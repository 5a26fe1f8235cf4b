"""Layers by their definitions, in float64 on PyTorch's functions: for those that the engine cannot run yet."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional


def attention(layer, weights, x):
    """Each head's softmax of queries times keys, times values, then projected; x is (n, tokens, c)."""
    n, _, c = x.shape
    width = c // layer.heads
    q, k, v = F.linear(x, weights["w_in"], weights.get("b_in")).split(c, dim=-1)
    found = torch.empty_like(x)
    for sample in range(n):
        for head in range(layer.heads):
            part = slice(head * width, (head + 1) * width)
            scores = q[sample, :, part] @ k[sample, :, part].T / np.sqrt(width)
            found[sample, :, part] = torch.exp(scores) / torch.exp(scores).sum(1, keepdim=True) @ v[sample, :, part]
    return F.linear(found, weights["w_out"], weights.get("b_out"))


def tokens(weights, x):
    """A class token in front, and a position added to each."""
    return torch.cat([weights["token"].expand(len(x), 1, -1), x], 1) + weights["position"]


def computed(layer, weights, *read):
    """Give a layer's output, (n, h, w, c), of its inputs."""
    x = read[0]
    n, c = len(x), layer.input_shape[2]
    if layer.type == "conv2d":
        y = F.conv2d(
            F.pad(x.permute(0, 3, 1, 2), (*layer.pad[2:], *layer.pad[:2])), weights["w"].permute(0, 3, 1, 2),
            weights.get("b"), layer.stride, 0, layer.dilation, layer.groups,
        ).permute(0, 2, 3, 1)  # fmt: skip
    else:
        y = {
            "linear": lambda: F.linear(x, weights["w"], weights.get("b")),
            "layer_norm": lambda: F.layer_norm(x, (c,), weights["gamma"], weights["beta"], layer.eps),
            "layer_scale": lambda: x * weights["gamma"],
            "gelu": lambda: x * (1 + torch.erf(x / np.sqrt(2))) / 2,
            "add": lambda: sum(read),
            "dropout": lambda: x,
            "global_avg_pool": lambda: x.mean((1, 2)),
            "tokens": lambda: (
                torch.cat([weights["token"].expand(n, 1, c), x.reshape(n, -1, c)], 1) + weights["position"]
            ),
            "class_token": lambda: x[:, 0],
            "attention": lambda: attention(layer, weights, x.reshape(n, -1, c)),
        }[layer.type]()
    return y.reshape(n, *layer.output_shape)


def outputs(network, x):
    """Run a network on images, (n, c, h, w), in float64: (n, h, w, c)."""
    values = {"input": torch.tensor(x.transpose(0, 2, 3, 1) if x.ndim == 4 else x[:, :, None])}
    for node in network.nodes:
        weights = {name: torch.tensor(array).double() for name, array in network.weights.get(node.name, {}).items()}
        values[node.name] = computed(node.layer, weights, *(values[name] for name in node.inputs))
    return values[network.nodes[-1].name].numpy()

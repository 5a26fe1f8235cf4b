"""A small vision transformer: ours, and as PyTorch has it."""

from __future__ import annotations

from cubatch.network.graph import Network
from cubatch.network.sketches.sketch import Sketch
from cubatch.network.sketches.transformers import vision_transformer

HEADS, DEPTH = 3, 2


def deit(size=48):
    """`deit-tiny` with 2 blocks instead of 12, 16 channels a head, on images of 48 x 48: 10 tokens."""
    net = Sketch((size, size, 3), "small-deit", 10)
    vision_transformer(net, HEADS * 16, HEADS, DEPTH)
    return Network(input_shape=net.shape, layers=net.layers, name=net.name)


def deit_forward(x, p):
    """A vision transformer as DeiT has it, by PyTorch's functions; x is (n, c, h, w)."""
    import torch
    from torch.nn import functional as F  # noqa: N812 - its usual name

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], p[name, "gamma"], p[name, "beta"], 1e-6)

    def linear(name, x, kind=""):
        suffix = f"_{kind}" if kind else ""
        return F.linear(x, p[name, f"w{suffix}"], p[name, f"b{suffix}"])

    x = F.conv2d(x, p["patch_embed", "w"], p["patch_embed", "b"], stride=16).flatten(2).transpose(1, 2)
    x = torch.cat([p["tokens", "token"].expand(len(x), 1, -1), x], 1) + p["tokens", "position"]
    for i in range(DEPTH):
        block = f"blocks.{i}"
        qkv = linear(f"{block}.attn", norm(f"{block}.norm1", x), "in")
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + linear(f"{block}.attn", mixed, "out")
        x = x + linear(f"{block}.mlp.fc2", F.gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x))))
    return linear("head", norm("norm", x)[:, 0])

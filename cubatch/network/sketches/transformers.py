"""Vision transformers."""

from __future__ import annotations

from cubatch.network.layers import GELU, Add, Attention, ClassToken, LayerNorm, Linear, Tokens
from cubatch.network.sketches.sketch import Sketch


def vision_transformer(net: Sketch, width: int, heads: int, depth: int = 12) -> None:
    """
    Add a vision transformer of patch 16 as in timm, DeiT or ViT, without distillation token or dropout.

    It has `depth` blocks of `width` channels.
    """
    net.conv("patch_embed", width, 16, stride=16, pad=0)
    last = net.add("tokens", Tokens)
    for i in range(depth):
        block = f"blocks.{i}"
        net.add(f"{block}.norm1", LayerNorm)
        path = net.add(f"{block}.attn", Attention, heads=heads)
        last = net.add(f"{block}.add1", Add, path, last)
        net.add(f"{block}.norm2", LayerNorm)
        net.add(f"{block}.mlp.fc1", Linear, k=4 * width)
        net.add(f"{block}.mlp.act", GELU)
        path = net.add(f"{block}.mlp.fc2", Linear, k=width)
        last = net.add(f"{block}.add2", Add, path, last)
    net.add("norm", LayerNorm)
    net.add("cls", ClassToken)
    net.add("head", Linear, k=net.classes)

"""Networks of depthwise convolutions between pointwise ones, with squeeze-and-excite: MobileNetV3, EfficientNet."""

from __future__ import annotations

from typing import Any

from cubatch.network.layer import Layer
from cubatch.network.layers import (
    Add,
    Dropout,
    GlobalAvgPool,
    HardSigmoid,
    HardSwish,
    Linear,
    ReLU,
    Sigmoid,
    SiLU,
)
from cubatch.network.sketches.sketch import Sketch

_MOBILENET_V3_LARGE: tuple[tuple[int, int, int, bool, type[Layer], int], ...] = (
    (3, 16, 16, False, ReLU, 1),
    (3, 64, 24, False, ReLU, 2),
    (3, 72, 24, False, ReLU, 1),
    (5, 72, 40, True, ReLU, 2),
    (5, 120, 40, True, ReLU, 1),
    (5, 120, 40, True, ReLU, 1),
    (3, 240, 80, False, HardSwish, 2),
    (3, 200, 80, False, HardSwish, 1),
    (3, 184, 80, False, HardSwish, 1),
    (3, 184, 80, False, HardSwish, 1),
    (3, 480, 112, True, HardSwish, 1),
    (3, 672, 112, True, HardSwish, 1),
    (5, 672, 160, True, HardSwish, 2),
    (5, 960, 160, True, HardSwish, 1),
    (5, 960, 160, True, HardSwish, 1),
)
"""Filter size, expanded width, width, squeeze-and-excite, activation and stride of each block (paper, table 1)."""


def mobilenet_v3_large(net: Sketch) -> None:
    """Add MobileNetV3-Large as in torchvision."""
    norm = {"eps": 0.001, "momentum": 0.01}

    def conv(name: str, k: int, size: int, act: type[Layer], **values: Any) -> str:
        net.conv_norm(name, k, size, norm=norm, **values)
        return net.add(f"{name}.act", act)

    last, width_in = conv("features.0", 16, 3, HardSwish, stride=2), 16
    for i, (size, expanded, width, squeezed, act, stride) in enumerate(_MOBILENET_V3_LARGE, start=1):
        block = f"features.{i}"
        if expanded != width_in:
            conv(f"{block}.expand", expanded, 1, act)
        path = conv(f"{block}.depthwise", expanded, size, act, stride=stride, groups=expanded)
        if squeezed:
            net.squeeze_excite(
                f"{block}.se", path, width=expanded, squeezed=_to_eighths(expanded / 4), act=ReLU, gate=HardSigmoid
            )
        path = net.conv_norm(f"{block}.project", width, 1, norm=norm)
        last = net.add(f"{block}.add", Add, path, last) if stride == 1 and width == width_in else path
        width_in = width
    conv("features.16", 6 * width_in, 1, HardSwish)
    net.add("avgpool", GlobalAvgPool)
    net.add("fc1", Linear, k=1280)
    net.add("fc1.act", HardSwish)
    net.add("dropout", Dropout, p=0.2)
    net.add("fc2", Linear, k=net.classes)


def _to_eighths(channels: float) -> int:
    """Return a width rounded to the nearest multiple of 8, at least 8, without losing more than a tenth."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


_EFFICIENTNET_B0: tuple[tuple[int, int, int, int, int], ...] = (
    (3, 1, 16, 1, 1),
    (3, 6, 24, 2, 2),
    (5, 6, 40, 2, 2),
    (3, 6, 80, 2, 3),
    (5, 6, 112, 1, 3),
    (5, 6, 192, 2, 4),
    (3, 6, 320, 1, 1),
)
"""Filter size, expansion, width, stride and repeats of each stage (Tan and Le, 2019, arXiv:1905.11946, table 1)."""


def efficientnet_b0(net: Sketch) -> None:
    """Add EfficientNet-B0 as in torchvision, without stochastic depth."""

    def conv(name: str, k: int, size: int, **values: Any) -> str:
        net.conv_norm(name, k, size, norm={}, **values)
        return net.add(f"{name}.act", SiLU)

    last, width_in = conv("features.0", 32, 3, stride=2), 32
    for stage, (size, expansion, width, first_stride, count) in enumerate(_EFFICIENTNET_B0, start=1):
        for i in range(count):
            block, stride = f"features.{stage}.{i}", first_stride if i == 0 else 1
            expanded = expansion * width_in
            if expansion > 1:
                conv(f"{block}.expand", expanded, 1)
            path = conv(f"{block}.depthwise", expanded, size, stride=stride, groups=expanded)
            net.squeeze_excite(f"{block}.se", path, width=expanded, squeezed=width_in // 4, act=SiLU, gate=Sigmoid)
            path = net.conv_norm(f"{block}.project", width, 1, norm={})
            last = net.add(f"{block}.add", Add, path, last) if stride == 1 and width == width_in else path
            width_in = width
    conv("features.8", 4 * width_in, 1)
    net.add("avgpool", GlobalAvgPool)
    net.add("dropout", Dropout, p=0.2)
    net.add("classifier", Linear, k=net.classes)

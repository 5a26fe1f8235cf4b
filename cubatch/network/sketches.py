"""
How the named networks are drawn up.

Definitions are torchvision's and timm's, without auxiliary heads, so that their published counts
of parameters and multiply-adds can be checked against ours; layer names follow theirs.  Every
network ends in its logits: training adds the loss, and inference needs no softmax to be timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cubatch.errors import InvalidSpec
from cubatch.network.extents import Extents
from cubatch.network.graph import Network
from cubatch.network.layer import Layer
from cubatch.network.layers import (
    GELU,
    Add,
    Attention,
    AvgPool2d,
    BatchNorm2d,
    ClassToken,
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool,
    HardSigmoid,
    HardSwish,
    LayerNorm,
    Linear,
    MaxPool2d,
    ReLU,
    Scale,
    Tokens,
)


class Sketch:
    """A network while it is drawn up; each method adds layers and returns the name of the last."""

    def __init__(self, shape: Extents, name: str, classes: int) -> None:
        self.shape, self.name, self.classes = shape, name, classes
        self.layers: list[Layer] = []

    def add(self, name: str, kind: type[Layer], *inputs: str, **values: Any) -> str:
        """Add a layer that reads the named ones, or the one before."""
        self.layers.append(kind(name=name, inputs=inputs or None, **values))
        return name

    def conv(self, name: str, k: int, size: int, *inputs: str, **values: Any) -> str:
        """Add a square convolution that keeps the extents unless told otherwise."""
        return self.add(name, Conv2d, *inputs, **{"k": k, "r": size, "s": size, "pad": size // 2, **values})

    def conv_norm(self, name: str, k: int, size: int, *inputs: str, norm: dict[str, float], **values: Any) -> str:
        """Add a convolution without bias, and the batch normalisation that makes one superfluous."""
        self.conv(f"{name}.conv", k, size, *inputs, bias=False, **values)
        return self.add(f"{name}.bn", BatchNorm2d, **norm)

    @property
    def output_shape(self) -> Extents:
        """(h, w, c) behind the layers so far."""
        return Network(input_shape=self.shape, layers=self.layers).output_shape

    def pool_to(self, extent: int) -> None:
        """Average to extent x extent, as an adaptive pool does where its windows come out equal."""
        h, w, _ = self.output_shape
        if h % extent or w % extent:
            raise InvalidSpec("features", (h, w), f"multiples of {extent} in front of the classifier")
        if (h, w) != (extent, extent):
            self.add("avgpool", AvgPool2d, r=h // extent, s=w // extent)

    def dense(self, *widths: int) -> None:
        """Add linear layers with ReLU between them, the last with as many outputs as classes."""
        for i, width in enumerate(widths, start=1):
            self.add(f"fc{i}", Linear, k=width)
            self.add(f"fc{i}.relu", ReLU)
        self.add(f"fc{len(widths) + 1}", Linear, k=self.classes)


def _mlp(net: Sketch) -> None:
    if net.shape[:2] != (1, 1):
        net.add("flatten", Flatten)
    net.dense(100, 100, 100, 100)


def _mnist_cnn(net: Sketch) -> None:
    for i, k in enumerate((32, 64), start=1):
        net.conv(f"conv{i}", k, 3)
        net.add(f"conv{i}.relu", ReLU)
        net.add(f"pool{i}", MaxPool2d, r=2, s=2)
    net.add("flatten", Flatten)
    net.dense(128)


def _lenet5(net: Sketch) -> None:
    """LeNet-5 as it is taught today: 28 x 28 padded to 32 x 32, all maps connected, ReLU and largest-value pools."""
    for i, (k, pad) in enumerate(((6, 2), (16, 0)), start=1):
        net.conv(f"conv{i}", k, 5, pad=pad)
        net.add(f"conv{i}.relu", ReLU)
        net.add(f"pool{i}", MaxPool2d, r=2, s=2)
    net.add("flatten", Flatten)
    net.dense(120, 84)


def _alexnet(net: Sketch) -> None:
    """AlexNet of "One weird trick for parallelizing convolutional neural networks", as in torchvision."""
    plan = ((64, 11, 4, 2), (192, 5, 1, 2), (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1))
    for i, (k, size, stride, pad) in enumerate(plan, start=1):
        net.conv(f"conv{i}", k, size, stride=stride, pad=pad)
        net.add(f"conv{i}.relu", ReLU)
        if i in {1, 2, 5}:
            net.add(f"pool{i}", MaxPool2d, r=3, s=3, stride=2)
    net.pool_to(6)
    net.add("flatten", Flatten)
    net.add("dropout1", Dropout)
    net.add("fc1", Linear, k=4096)
    net.add("fc1.relu", ReLU)
    net.add("dropout2", Dropout)
    net.add("fc2", Linear, k=4096)
    net.add("fc2.relu", ReLU)
    net.add("fc3", Linear, k=net.classes)


def _vgg16(net: Sketch) -> None:
    for i, (k, repeats) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), start=1):
        for j in range(1, repeats + 1):
            net.conv(f"conv{i}_{j}", k, 3)
            net.add(f"conv{i}_{j}.relu", ReLU)
        net.add(f"pool{i}", MaxPool2d, r=2, s=2)
    net.pool_to(7)
    net.add("flatten", Flatten)
    for i in (1, 2):
        net.add(f"fc{i}", Linear, k=4096)
        net.add(f"fc{i}.relu", ReLU)
        net.add(f"dropout{i}", Dropout)
    net.add("fc3", Linear, k=net.classes)


_INCEPTIONS: tuple[tuple[str, tuple[int, int, int, int, int, int]], ...] = (
    ("3a", (64, 96, 128, 16, 32, 32)),
    ("3b", (128, 128, 192, 32, 96, 64)),
    ("4a", (192, 96, 208, 16, 48, 64)),
    ("4b", (160, 112, 224, 24, 64, 64)),
    ("4c", (128, 128, 256, 24, 64, 64)),
    ("4d", (112, 144, 288, 32, 64, 64)),
    ("4e", (256, 160, 320, 32, 128, 128)),
    ("5a", (256, 160, 320, 32, 128, 128)),
    ("5b", (384, 192, 384, 48, 128, 128)),
)


def _googlenet(net: Sketch) -> None:
    """GoogLeNet as in torchvision: batch normalised, and 3 x 3 filters where the paper has 5 x 5."""

    def conv(name: str, k: int, size: int, *inputs: str, **values: Any) -> str:
        net.conv_norm(name, k, size, *inputs, norm={"eps": 0.001}, **values)
        return net.add(f"{name}.relu", ReLU)

    def pool(name: str, size: int, stride: int, *inputs: str, pad: int = 0) -> str:
        return net.add(name, MaxPool2d, *inputs, r=size, s=size, stride=stride, pad=pad, ceil=True)

    conv("conv1", 64, 7, stride=2)
    pool("maxpool1", 3, 2)
    conv("conv2", 64, 1)
    conv("conv3", 192, 3)
    last = pool("maxpool2", 3, 2)
    for name, (k1, k2_in, k2, k3_in, k3, k4) in _INCEPTIONS:
        block = f"inception{name}"
        branches = [conv(f"{block}.branch1", k1, 1, last)]
        conv(f"{block}.branch2.0", k2_in, 1, last)
        branches.append(conv(f"{block}.branch2.1", k2, 3))
        conv(f"{block}.branch3.0", k3_in, 1, last)
        branches.append(conv(f"{block}.branch3.1", k3, 3))
        pool(f"{block}.branch4.0", 3, 1, last, pad=1)
        branches.append(conv(f"{block}.branch4.1", k4, 1))
        last = net.add(block, Concat, *branches)
        if name == "3b":
            last = pool("maxpool3", 3, 2)
        elif name == "4e":
            last = pool("maxpool4", 2, 2)
    net.add("avgpool", GlobalAvgPool)
    net.add("dropout", Dropout, p=0.2)
    net.add("fc", Linear, k=net.classes)


def _resnet(net: Sketch, repeats: tuple[int, int, int, int], *, bottleneck: bool) -> None:
    """ResNet as in torchvision: a bottleneck's stride is on its 3 x 3 convolution."""
    net.conv("conv1", 64, 7, stride=2, bias=False)
    net.add("bn1", BatchNorm2d)
    net.add("relu", ReLU)
    last = net.add("maxpool", MaxPool2d, r=3, s=3, stride=2, pad=1)
    width_in = 64
    for stage, count in enumerate(repeats, start=1):
        width = 64 * 2 ** (stage - 1)
        width_out = width * (4 if bottleneck else 1)
        for i in range(count):
            stride = 2 if stage > 1 and i == 0 else 1
            block = f"layer{stage}.{i}"
            plan = [(width, 3, stride), (width, 3, 1)]
            if bottleneck:
                plan = [(width, 1, 1), (width, 3, stride), (width_out, 1, 1)]
            path = last
            for j, (k, size, step) in enumerate(plan, start=1):
                net.conv(f"{block}.conv{j}", k, size, path, stride=step, bias=False)
                path = net.add(f"{block}.bn{j}", BatchNorm2d)
                if j < len(plan):
                    path = net.add(f"{block}.relu{j}", ReLU)
            if stride != 1 or width_in != width_out:
                last = net.conv_norm(f"{block}.downsample", width_out, 1, last, stride=stride, norm={})
            net.add(f"{block}.add", Add, path, last)
            last = net.add(f"{block}.relu", ReLU)
            width_in = width_out
    net.add("avgpool", GlobalAvgPool)
    net.add("fc", Linear, k=net.classes)


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


def _mobilenet_v3_large(net: Sketch) -> None:
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
            net.add(f"{block}.se.avgpool", GlobalAvgPool)
            net.conv(f"{block}.se.fc1", _to_eighths(expanded / 4), 1)
            net.add(f"{block}.se.relu", ReLU)
            net.conv(f"{block}.se.fc2", expanded, 1)
            factor = net.add(f"{block}.se.gate", HardSigmoid)
            net.add(f"{block}.se", Scale, path, factor)
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
    """Round to the nearest multiple of 8, never losing more than a tenth: how the MobileNets round widths."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _deit_tiny(net: Sketch) -> None:
    """DeiT-Ti of patch 16 as in timm: 12 blocks of width 192 with 3 heads, without distillation token or dropout."""
    width, heads, depth = 192, 3, 12
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


def _go_net(net: Sketch) -> None:
    for i in range(1, 81):
        net.conv(f"conv{i}", 128, 3)
        net.add(f"conv{i}.relu", ReLU)


_IMAGENET = (224, 224, 3)
SKETCHES: dict[str, tuple[Callable[[Sketch], None], Extents, int | None]] = {
    "mlp": (_mlp, (1, 1, 1000), 10),
    "mnist-cnn": (_mnist_cnn, (28, 28, 1), 10),
    "lenet5": (_lenet5, (28, 28, 1), 10),
    "alexnet": (_alexnet, _IMAGENET, 1000),
    "vgg16": (_vgg16, _IMAGENET, 1000),
    "googlenet": (_googlenet, _IMAGENET, 1000),
    "resnet18": (functools.partial(_resnet, repeats=(2, 2, 2, 2), bottleneck=False), _IMAGENET, 1000),
    "resnet50": (functools.partial(_resnet, repeats=(3, 4, 6, 3), bottleneck=True), _IMAGENET, 1000),
    "mobilenet-v3-large": (_mobilenet_v3_large, _IMAGENET, 1000),
    "deit-tiny": (_deit_tiny, _IMAGENET, 1000),
    "go-net": (_go_net, (19, 19, 128), None),
}
"""How each network is drawn up, the input it was made for, and its usual number of classes."""

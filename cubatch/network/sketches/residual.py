"""Networks of convolutions with skip connections: ResNet, DenseNet, ConvNeXt."""

from __future__ import annotations

from cubatch.network.layers import (
    GELU,
    Add,
    AvgPool2d,
    BatchNorm2d,
    Concat,
    GlobalAvgPool,
    LayerNorm,
    LayerScale,
    Linear,
    MaxPool2d,
    ReLU,
)
from cubatch.network.sketches.sketch import Sketch


def resnet(net: Sketch, repeats: tuple[int, int, int, int], *, bottleneck: bool) -> None:
    """
    Add ResNet as in torchvision; a bottleneck's stride is on its 3 x 3 convolution.

    `repeats` has the number of blocks of each stage.
    """
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


def densenet(net: Sketch, repeats: tuple[int, int, int, int], growth: int = 32) -> None:
    """
    Add DenseNet-BC as in torchvision: each layer reads all before it in its block, and adds `growth` channels.

    `repeats` has the number of layers of each block.
    """
    net.conv("conv0", 64, 7, stride=2, bias=False)
    net.add("norm0", BatchNorm2d)
    net.add("relu0", ReLU)
    last, width = net.add("pool0", MaxPool2d, r=3, s=3, stride=2, pad=1), 64
    for stage, count in enumerate(repeats, start=1):
        if stage > 1:
            between = f"transition{stage - 1}"
            width //= 2
            net.add(f"{between}.norm", BatchNorm2d)
            net.add(f"{between}.relu", ReLU)
            net.conv(f"{between}.conv", width, 1, bias=False)
            last = net.add(f"{between}.pool", AvgPool2d, r=2, s=2)
        made = [last]
        for i in range(1, count + 1):
            layer = f"denseblock{stage}.denselayer{i}"
            if i > 1:
                net.add(f"{layer}.concat", Concat, *made)
            net.add(f"{layer}.norm1", BatchNorm2d)
            net.add(f"{layer}.relu1", ReLU)
            net.conv(f"{layer}.conv1", 4 * growth, 1, bias=False)
            net.add(f"{layer}.norm2", BatchNorm2d)
            net.add(f"{layer}.relu2", ReLU)
            made.append(net.conv(f"{layer}.conv2", growth, 3, bias=False))
        net.add(f"denseblock{stage}", Concat, *made)
        width += count * growth
    net.add("norm5", BatchNorm2d)
    net.add("relu5", ReLU)
    net.add("avgpool", GlobalAvgPool)
    net.add("classifier", Linear, k=net.classes)


def convnext(net: Sketch, repeats: tuple[int, int, int, int], widths: tuple[int, int, int, int]) -> None:
    """
    Add ConvNeXt as in torchvision, without stochastic depth: depthwise 7 x 7, then two linear layers on each pixel.

    `repeats` and `widths` have the number of blocks and the channels of each stage.
    """
    for stage, (count, width) in enumerate(zip(repeats, widths, strict=True), start=1):
        if stage == 1:
            net.conv("stem.conv", width, 4, stride=4, pad=0)
            last = net.add("stem.norm", LayerNorm)
        else:
            net.add(f"downsample{stage}.norm", LayerNorm)
            last = net.conv(f"downsample{stage}.conv", width, 2, stride=2, pad=0)
        for i in range(count):
            block = f"stage{stage}.{i}"
            net.conv(f"{block}.depthwise", width, 7, groups=width)
            net.add(f"{block}.norm", LayerNorm)
            net.add(f"{block}.fc1", Linear, k=4 * width)
            net.add(f"{block}.act", GELU)
            net.add(f"{block}.fc2", Linear, k=width)
            path = net.add(f"{block}.layer_scale", LayerScale)
            last = net.add(f"{block}.add", Add, path, last)
    net.add("avgpool", GlobalAvgPool)
    net.add("norm", LayerNorm)
    net.add("classifier", Linear, k=net.classes)

"""Networks without skip connections: MLP, small networks for digits, AlexNet, VGG, GoogLeNet, and a Go network."""

from __future__ import annotations

from typing import Any

from cubatch.network.layers import Concat, Dropout, Flatten, GlobalAvgPool, Linear, MaxPool2d, ReLU
from cubatch.network.sketches.sketch import Sketch


def mlp(net: Sketch) -> None:
    """Add five linear layers, after a flatten where the input has height or width."""
    if net.shape[:2] != (1, 1):
        net.add("flatten", Flatten)
    net.dense(100, 100, 100, 100)


def mnist_cnn(net: Sketch) -> None:
    """Add two convolutions with pools and two linear layers: the first network of many tutorials."""
    for i, k in enumerate((32, 64), start=1):
        net.conv(f"conv{i}", k, 3)
        net.add(f"conv{i}.relu", ReLU)
        net.add(f"pool{i}", MaxPool2d, r=2, s=2)
    net.add("flatten", Flatten)
    net.dense(128)


def lenet5(net: Sketch) -> None:
    """Add LeNet-5 as it is taught today: 28 x 28 padded to 32 x 32, all maps connected, ReLU and max pools."""
    for i, (k, pad) in enumerate(((6, 2), (16, 0)), start=1):
        net.conv(f"conv{i}", k, 5, pad=pad)
        net.add(f"conv{i}.relu", ReLU)
        net.add(f"pool{i}", MaxPool2d, r=2, s=2)
    net.add("flatten", Flatten)
    net.dense(120, 84)


def alexnet(net: Sketch) -> None:
    """Add AlexNet of "One weird trick for parallelizing convolutional neural networks", as in torchvision."""
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


def vgg(net: Sketch, repeats: tuple[int, ...]) -> None:
    """Add VGG as in torchvision, without batch norms: 3 x 3 convolutions, `repeats` of them in each stage."""
    for i, (k, count) in enumerate(zip((64, 128, 256, 512, 512), repeats, strict=True), start=1):
        for j in range(1, count + 1):
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


def googlenet(net: Sketch) -> None:
    """Add GoogLeNet as in torchvision: with batch norms, and 3 x 3 filters instead of the paper's 5 x 5."""

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


def go_net(net: Sketch) -> None:
    """Add 80 convolutions on a Go board, as Coulom timed them."""
    for i in range(1, 81):
        net.conv(f"conv{i}", 128, 3)
        net.add(f"conv{i}.relu", ReLU)

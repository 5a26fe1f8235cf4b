"""What the GPU pass measures on tensor cores, in float16, bfloat16 and tf32: cases, the most valuable first."""

from __future__ import annotations

import itertools
import random

import attrs

from benchmarks.gpu_cases import BATCH_SIZES, NETWORKS, SEED, merged, of_network
from cubatch.bench import cases, fused
from cubatch.bench.cases import Case
from cubatch.network import layers as kinds
from cubatch.network import models
from cubatch.network.passes import Pass

DTYPES = ("float16", "bfloat16", "tf32")
SQUARES = (4096, 8192, 2048, 6144, 3072)
CHANNELS = (8, 24, 64, 100, 512)
"""Of the odd shapes: whole vectors of 8 and of 4, none and several whole tiles."""

_WINDOWS = (
    (3, 3, 1, 1), (3, 2, 1, 2), (1, 1, 1, 1), (3, 3, 2, 1), (1, 3, 1, 2), (1, 1, 2, 1), (3, 3, 2, 2), (2, 3, 3, 1),
)  # fmt: skip
"""Filter, stride and dilation of the odd shapes."""

_NETWORK = "resnet50"
_FEW = (
    kinds.Conv2d(h=56, w=56, c=64, k=64, r=3, s=3, pad=1, bias=False),
    kinds.Conv2d(h=14, w=14, c=1024, k=256, r=1, s=1, bias=False),
    kinds.Conv2d(h=14, w=14, c=256, k=256, r=3, s=3, pad=1, bias=False),
    kinds.Conv2d(h=28, w=28, c=256, k=256, r=3, s=3, stride=2, pad=1, bias=False),
    kinds.Conv2d(h=7, w=7, c=512, k=2048, r=1, s=1, bias=False),
)
"""Layers of ResNet-50 that stand for all: a small and two deep ones, a strided one, a large and a small grid."""


def gemms() -> list[Case]:
    """Squares as a forward pass has them, the networks' linear layers, the other layouts."""
    found = [cases.gemm(size, size, size, dtype=dtype) for dtype in DTYPES for size in SQUARES]
    found += _linear_layers("float16")
    for dtype in DTYPES:
        found += [
            cases.gemm(size, size, size, layout=layout, dtype=dtype) for layout in ("nn", "tn") for size in SQUARES
        ]
    return merged([*found, *_linear_layers("bfloat16"), *_linear_layers("tf32")])


def convolutions() -> list[Case]:
    """Every convolution of ResNet-50 in float16; a few in the other types."""
    found = [case for batch_size in reversed(BATCH_SIZES) for case in _convolutions_of(batch_size)]
    found += [
        attrs.evolve(cases.of_layer(layer, pass_, batch_size, dtype), layers=(f"{_NETWORK}/{layer.input_shape}",))
        for batch_size in reversed(BATCH_SIZES)
        for dtype in ("bfloat16", "tf32")
        for layer in _FEW
        for pass_ in Pass
    ]
    return merged(found)


def fused_convolutions() -> list[Case]:
    """Forward passes of ResNet-50 in float16 with what follows them: bias and ReLU, at a block's end the shortcut."""
    network = models.build(_NETWORK)
    layers = {node.name: node for node in network.nodes}
    readers: dict[str, list[str]] = {}
    for node in network.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node.name)
    found = []
    for batch_size in reversed(BATCH_SIZES):
        for node in network.nodes:
            if not isinstance(node.layer, kinds.Conv2d):
                continue
            (norm,) = readers[node.name]
            (after,) = readers[norm]
            is_sum = isinstance(layers[after].layer, kinds.Add)
            if is_sum and layers[after].inputs[0] != norm:
                continue  # of the two that meet here one is the other's residual
            case = fused.conv_relu(node.layer, batch_size, "float16", residual=is_sum)
            found.append(attrs.evolve(case, layers=(f"{_NETWORK}/{node.name}",)))
    return merged(found)


def odd_shapes(seed: int = SEED) -> list[Case]:
    """
    Small products and convolutions for every variant on tensor cores, of extents that leave residues.

    Args:
        seed: Draws the shapes.
    """
    draw, found = random.Random(seed), []
    for dtype in DTYPES:
        windows = draw.sample(_WINDOWS, len(_WINDOWS))
        for (c, k), window in zip(_pairs(), windows, strict=True):
            found += _of_extents(draw, c, k, window, dtype)
    # Several tiles along both axes, and sums so long that they are cut into slices.
    large = kinds.Conv2d(h=29, w=26, c=64, k=136, r=3, s=3, stride=2, pad=1)
    for dtype, pass_ in itertools.product(DTYPES, Pass):
        found.append(cases.of_layer(large, pass_, 3, dtype, with_bias=True))
        found.append(cases.of_layer(kinds.Linear(c=328, k=520), pass_, 700, dtype))
        found.append(cases.of_layer(kinds.Linear(c=72, k=56), pass_, 5003, dtype))
    return list({case.name: case for case in found}.values())


def _pairs() -> list[tuple[int, int]]:
    """Each number of channels coming in and going out, beside one that differs."""
    return [*zip(CHANNELS, (*CHANNELS[1:], CHANNELS[0]), strict=True), (64, 64), (512, 24), (100, 8)]


def _of_extents(draw: random.Random, c: int, k: int, window: tuple[int, int, int, int], dtype: str) -> list[Case]:
    """Every pass of a convolution and of a linear layer, some with a bias, and a forward pass with everything fused."""
    r, s, stride, dilation = window
    h = draw.randint(6, 13)
    pad = [1, 0, *(draw.randint(0, 1) for _ in range(2))]
    convolution = kinds.Conv2d(
        h=h, w=h + draw.choice((-1, 1, 2)), c=c, k=k, r=r, s=s, stride=stride, pad=pad, dilation=dilation
    )  # fmt: skip
    found = []
    for pass_, bias in zip(Pass, draw.sample((False, True, True), 3), strict=True):
        found.append(cases.of_layer(convolution, pass_, draw.choice((1, 2, 3, 5)), dtype, with_bias=bias))
        found.append(cases.of_layer(kinds.Linear(c=c, k=k), pass_, draw.randint(3, 300), dtype, with_bias=not bias))
    return [*found, fused.conv_relu(convolution, draw.choice((1, 2, 3)), dtype, residual=draw.choice((False, True)))]


def _linear_layers(dtype: str) -> list[Case]:
    return [
        case
        for batch_size in reversed(BATCH_SIZES)
        for name in NETWORKS
        for case in of_network(name, batch_size, dtype)
        if isinstance(case.layer, kinds.Linear)
    ]


def _convolutions_of(batch_size: int) -> list[Case]:
    return [case for case in of_network(_NETWORK, batch_size, "float16") if isinstance(case.layer, kinds.Conv2d)]

"""Cases of the GPU pass in addition to the steps of networks: square products, odd shapes, sweeps, memory plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from cubatch.bench import cases, training_calls
from cubatch.bench.cases import Case
from cubatch.bench.fused import with_epilogue
from cubatch.network import layers as kinds
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layer import Layer
from cubatch.network.passes import Pass

SQUARES = (1024, 2048, 4096, 8192, 1536, 3072, 6144)
SEED = 20261121
SHAPES_PER_OPERATION = 6
LARGEST_SWEPT = 256
STORED = ("float32", "float16", "bfloat16")
ELSEWHERE = {("batch_norm_merge", dtype) for dtype in STORED}
"""Operations that no case calls, of moments that only fused products leave: tests/kernels checks them."""


_PLAIN_3X3 = (
    kinds.Conv2d(h=13, w=9, c=36, k=28, r=3, s=3, pad=1),
    kinds.Conv2d(h=7, w=11, c=25, k=38, r=3, s=3, pad=(0, 1, 2, 0)),
)
"""What Winograd's algorithm computes: of enough channels for both of its sizes, whole vectors of them and not."""


def gemms() -> list[Case]:
    """Square products in every layout."""
    return [cases.gemm(size, size, size, layout=layout) for layout in ("nt", "nn", "tn") for size in SQUARES]


def swept() -> list[tuple[Layer, Pass]]:
    """Layer passes that are run at every batch size: small and large grids, every pass, what the networks spend on."""
    conv, linear = kinds.Conv2d, kinds.Linear
    return [
        (conv(h=14, w=14, c=256, k=256, r=3, s=3, pad=1), Pass.FPROP),
        (conv(h=7, w=7, c=512, k=512, r=3, s=3, pad=1), Pass.FPROP),
        (conv(h=19, w=19, c=128, k=128, r=3, s=3, pad=1), Pass.FPROP),
        (conv(h=14, w=14, c=1024, k=256, r=1, s=1), Pass.FPROP),
        (conv(h=14, w=14, c=256, k=256, r=3, s=3, pad=1), Pass.DGRAD),
        (conv(h=14, w=14, c=256, k=256, r=3, s=3, pad=1), Pass.WGRAD),
        (conv(h=8, w=8, c=256, k=256, r=3, s=3, pad=1), Pass.FPROP),
        (conv(h=28, w=28, c=128, k=128, r=3, s=3, pad=1), Pass.FPROP),
        (conv(h=7, w=7, c=512, k=2048, r=1, s=1), Pass.FPROP),
        (conv(h=28, w=28, c=512, k=1024, r=1, s=1, stride=2), Pass.DGRAD),
        (linear(c=4096, k=4096), Pass.FPROP),
        (linear(c=1024, k=1024), Pass.FPROP),
        (conv(h=14, w=14, c=1024, k=256, r=1, s=1), Pass.WGRAD),
        (conv(h=14, w=14, c=672, k=672, r=5, s=5, pad=2, groups=672), Pass.FPROP),
        (conv(h=56, w=56, c=64, k=64, r=3, s=3, pad=1), Pass.FPROP),
        (conv(h=28, w=28, c=512, k=128, r=1, s=1), Pass.FPROP),
        (conv(h=28, w=28, c=1, k=32, r=3, s=3, pad=1), Pass.FPROP),
        (conv(h=14, w=14, c=32, k=64, r=3, s=3, pad=1), Pass.WGRAD),
        (conv(h=32, w=32, c=64, k=128, r=3, s=3, stride=2, pad=1), Pass.FPROP),
        (conv(h=56, w=56, c=256, k=128, r=1, s=1, stride=2), Pass.DGRAD),
    ]


def odd_shapes(seed: int = SEED) -> list[Case]:
    """
    Small cases for every operation and storage type that kernels have, of extents that divide nothing.

    Args:
        seed: Draws the shapes.
    """
    draw = random.Random(seed)
    found: list[Case] = []
    for dtype in STORED:
        for _ in range(SHAPES_PER_OPERATION):
            found += _passes(_drawn_layers(draw), draw, dtype)
            found += _with_endings(draw, dtype)
        found.append(training_calls.fold([draw.randint(1, 300) for _ in range(35)], [True, False, *[True] * 33], dtype))
        found += _passes(_depthwise_layers(draw), draw, dtype)
        found += [
            cases.of_layer(layer, pass_, batch_size, dtype, with_bias=True)
            for layer, pass_, batch_size in (
                # Sums so long that they are cut into slices, whose partial sums are added or merged.
                (kinds.Linear(c=37, k=29), Pass.WGRAD, 5003),
                (kinds.Conv2d(h=29, w=31, c=12, k=8, r=3, s=3, pad=1), Pass.WGRAD, 7),
                (kinds.BatchNorm2d(h=63, w=65, c=4), Pass.FPROP, 17),
            )
        ]
        attentions = [
            kinds.Attention(h=draw.randint(3, 99), w=1, c=width * heads, heads=heads, bias=draw.random() < 0.5)
            for width, heads in ((12, 3), (64, 2), (72, 1))  # the last too wide to go without stored weights
        ]
        found += _passes(attentions, draw, dtype)
        found += [training_calls.cross_entropy(37, 11, dtype), training_calls.cross_entropy(5, 1000, dtype)]
        for name in ("sgd", "momentum", "adam"):
            found += [training_calls.optimizer_step(name, draw.randint(900, 9000), dtype) for _ in range(2)]
    found.append(training_calls.loss_scale(draw.randint(900, 9000)))
    for layer in _PLAIN_3X3:
        forward, backward = (cases.of_layer(layer, pass_, 3) for pass_ in (Pass.FPROP, Pass.DGRAD))
        found += [forward, backward, with_epilogue(forward, folded=True, residual=True, relu=True)]
        found.append(with_epilogue(backward, residual=True, positive=True))
    return list({case.name: case for case in found}.values())


def _passes(layers: Sequence[Layer], draw: random.Random, dtype: str) -> list[Case]:
    """Every pass of layers, and the forward passes that differ by mode."""
    return [
        cases.of_layer(layer, pass_, draw.choice((1, 2, 3, 5)), dtype, with_bias=draw.random() < 0.5, mode=mode)
        for layer in layers
        for pass_ in Pass
        for mode in ("", "training", "inference")
        if cases.has_case(layer, pass_, mode)
    ]


def _with_endings(draw: random.Random, dtype: str) -> list[Case]:
    """A norm and a sum with what else they do to their results, as networks have them."""
    norm = kinds.BatchNorm2d(h=draw.randint(5, 13), w=draw.randint(5, 13), c=draw.randint(1, 40))
    found = [cases.of_layer(norm, Pass.FPROP, 3, dtype, mode=mode) for mode in ("training", "inference")]
    residual = draw.random() < 0.5
    return [with_epilogue(case, residual=residual, relu=True) for case in found]


def _depthwise_layers(draw: random.Random) -> list[Layer]:
    """Every filter and stride that has kernels of its own, with whole vectors of channels and without."""
    found = []
    for side, stride, channels in itertools.product(
        (3, 5, 7), (1, 2), (8 * draw.randint(1, 4), 8 * draw.randint(1, 4) + 3)
    ):
        h, w = draw.randint(6, 13), draw.randint(6, 13)
        found.append(
            kinds.Conv2d(
                h=h, w=w, c=channels, k=channels, r=side, s=side, stride=stride, pad=side // 2, groups=channels
            )
        )
    return found


def _drawn_layers(draw: random.Random) -> list[Layer]:
    """Draw one layer of each kind: some with whole vectors of channels, some without."""
    h, w = draw.randint(5, 13), draw.randint(5, 13)
    c, k = (draw.choice((4, 12, 36, draw.randint(1, 40))) for _ in range(2))
    r, s = draw.choice((1, 2, 3)), draw.choice((1, 3, 4))
    conv = {
        "h": h, "w": w, "c": c, "k": k, "r": r, "s": s, "stride": draw.choice((1, 1, 2, 3)),
        "pad": [draw.randint(0, 2) for _ in range(4)], "dilation": draw.choice((1, 1, 2)),
    }  # fmt: skip
    groups = draw.choice((2, 3))
    pool = {"h": h, "w": w, "c": c, "r": 3, "s": 2, "stride": draw.choice((1, 2)), "pad": [1, 0, 0, 1]}
    plain = {"h": h, "w": w, "c": c}
    return [
        kinds.Conv2d(**conv),
        kinds.Conv2d(**conv | {"c": groups * 8, "k": groups * draw.choice((4, 5)), "groups": groups}),
        kinds.Linear(c=draw.randint(1, 200), k=draw.randint(1, 200)),
        kinds.Linear(c=4 * draw.randint(1, 50), k=4 * draw.randint(1, 50)),
        kinds.MaxPool2d(**pool),
        kinds.AvgPool2d(**pool),
        kinds.AvgPool2d(**pool | {"count_pad": False}),
        kinds.Concat(h=h, w=w, c=c + k, channels=[c, k]),
        kinds.Slice(h=h, w=w, c=c + k, start=c, end=c + k),
        kinds.Dropout(**plain, p=0.3),
        *(kind(**plain) for kind in (
            kinds.GlobalAvgPool, kinds.BatchNorm2d, kinds.LayerNorm, kinds.LayerScale, kinds.Add,
            kinds.Scale, kinds.ReLU, kinds.ReLU6, kinds.Sigmoid,
            kinds.SiLU, kinds.HardSigmoid, kinds.HardSwish, kinds.GELU, kinds.Softmax, kinds.Tokens, kinds.ClassToken,
        )),
    ]  # fmt: skip


def trained() -> list[tuple[Network, str, int, str, str]]:
    """Networks whose memory plan is compared with what a step takes: network, mode, batch size, dtype, library."""
    float32 = [
        (models.build("resnet50"), "training", 32),
        (models.build("mnist-cnn"), "training", 2048),
        (models.build("mobilenet-v3-large"), "training", 64),
        (models.build("vgg16"), "training", 32),
        (models.build("resnet50"), "inference", 128),
        (models.build("resnet18"), "training", 256),
    ]
    return [
        (models.build("resnet50"), "training", 256, "float16", "cubatch"),
        (models.build("mobilenet-v3-large"), "training", 64, "bfloat16", "cubatch"),
        (models.build("resnet18"), "training", 64, "tf32", "cubatch"),
        *((*each, "float32", library) for library in ("cubatch", "im2col") for each in float32),
    ]

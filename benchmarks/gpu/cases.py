"""What the GPU pass measures but for tensor cores: lists of cases, the most valuable first."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Sequence

import attrs

from cubatch.bench import cases, training_calls
from cubatch.bench.cases import Case
from cubatch.network import layers as kinds
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layer import Layer
from cubatch.network.passes import Pass

NETWORKS = ("resnet50", "mobilenet-v3-large", "vgg16")
BATCH_SIZES = (32, 256)
SQUARES = (1024, 2048, 4096, 8192, 1536, 3072, 6144)
SEED = 20261121
SHAPES_PER_OPERATION = 6
LARGEST_SWEPT = 256
STORED = ("float32", "float16", "bfloat16")
ELSEWHERE = {
    ("dropout", "float32"), ("dropout", "float16"), ("dropout", "bfloat16"),  # random: no right result to compare with
    # Of many tiles' moments, which only fused products leave:
    *(("batch_norm_merge", dtype) for dtype in ("float32", "float16", "bfloat16")),
    # Of whole networks, whose every norm it takes at once:
    *(("batch_norm_fold", dtype) for dtype in ("float32", "float16", "bfloat16")),
    # Of transformers, whose tokens are copies but for one sum:
    *(
        ("tokens", dtype) for dtype in ("float32", "float16", "bfloat16")
    ),
}  # fmt: skip
"""Operations that no case here calls: tests/kernels checks them, on a GPU too."""


_MOVERS: Sequence[Layer] = (
    kinds.ReLU(h=56, w=56, c=64),
    kinds.BatchNorm2d(h=56, w=56, c=64),
    kinds.BatchNorm2d(h=14, w=14, c=1024),
    kinds.Add(h=56, w=56, c=256),
    kinds.MaxPool2d(h=112, w=112, c=64, r=3, s=3, stride=2, pad=1),
    kinds.GlobalAvgPool(h=7, w=7, c=2048),
    kinds.AvgPool2d(h=28, w=28, c=256, r=2, s=2),
    kinds.HardSwish(h=56, w=56, c=64),
    kinds.HardSigmoid(h=28, w=28, c=256),
    kinds.ReLU6(h=56, w=56, c=64),
    kinds.Sigmoid(h=28, w=28, c=256),
    kinds.SiLU(h=56, w=56, c=64),
    kinds.GELU(h=197, w=1, c=768),
    kinds.LayerNorm(h=197, w=1, c=192),
    kinds.LayerNorm(h=56, w=56, c=96),
    kinds.LayerScale(h=56, w=56, c=96),
    kinds.Scale(h=28, w=28, c=120),
)
"""Layers that only move bytes; those of ResNet-50 first."""


_PLAIN_3X3 = (
    kinds.Conv2d(h=13, w=9, c=36, k=28, r=3, s=3, pad=1),
    kinds.Conv2d(h=7, w=11, c=25, k=38, r=3, s=3, pad=(0, 1, 2, 0)),
)
"""What Winograd's algorithm computes: of enough channels for both of its sizes, whole vectors of them and not."""


def gemms() -> list[Case]:
    """Square products in every layout, then the linear layers of the networks."""
    found = [cases.gemm(size, size, size, layout=layout) for layout in ("nt", "nn", "tn") for size in SQUARES]
    for batch_size in BATCH_SIZES:
        for name in NETWORKS:
            found += [case for case in of_network(name, batch_size) if isinstance(case.layer, kinds.Linear)]
    return merged(found)


def convolutions() -> list[Case]:
    """The convolutions of the networks but for the depthwise ones, which only move bytes."""
    order = [(name, batch_size) for batch_size in BATCH_SIZES for name in NETWORKS]
    order.insert(1, order.pop(len(NETWORKS)))  # the goal is stated for resnet50 at both batch sizes
    found = []
    for name, batch_size in order:
        found += [
            case
            for case in of_network(name, batch_size)
            if isinstance(case.layer, kinds.Conv2d) and case.layer.groups == 1
        ]
    return merged(found)


def memory_bound() -> list[Case]:
    """Depthwise convolutions, and the operations that stand against the bandwidth of a copy."""
    found = [
        case
        for batch_size in reversed(BATCH_SIZES)
        for case in of_network("mobilenet-v3-large", batch_size)
        if isinstance(case.layer, kinds.Conv2d) and case.layer.groups > 1
    ]
    found += _moved(_MOVERS, "float32")
    parameters = models.build("resnet50").parameters
    found += [training_calls.optimizer_step(name, parameters) for name in ("momentum", "adam", "sgd")]
    found.append(training_calls.cross_entropy(1024, 1000))
    # What a training step in float16 has besides its products.
    found += _moved(_MOVERS[:6], "float16")
    return [
        *found,
        training_calls.optimizer_step("momentum", parameters, "float16"),
        training_calls.loss_scale(parameters),
    ]


def attentions() -> list[Case]:
    """Attention of the vision transformers: at once in inference, and both passes of training; then longer rows."""
    layers = [kinds.Attention(h=197, w=1, c=64 * heads, heads=heads) for heads in (12, 3, 6)]
    layers.append(kinds.Attention(h=1024, w=1, c=512, heads=8))
    return [
        case
        for dtype in ("float16", "float32", "bfloat16")
        for layer in layers
        for case in training_calls.attention_passes(layer, 32, dtype)
    ]


def _moved(layers: Iterable[Layer], dtype: str) -> list[Case]:
    return [
        cases.of_layer(layer, pass_, LARGEST_SWEPT, dtype)
        for layer in layers
        for pass_ in Pass
        if cases.has_case(layer, pass_)
    ]


@functools.cache
def of_network(name: str, batch_size: int, dtype: str = "float32") -> tuple[Case, ...]:
    """The distinct layer passes of a named network; their layers are named with it, for tables by network."""
    found = cases.of_network(models.build(name), list(Pass), batch_size, dtype)
    return tuple(attrs.evolve(case, layers=tuple(f"{name}/{layer}" for layer in case.layers)) for case in found)


def merged(found: list[Case]) -> list[Case]:
    """Keep what several networks have once, in its first place, with the layers of all."""
    by_name: dict[str, Case] = {}
    for case in found:
        before = by_name.get(case.name)
        layers = (*before.layers, *case.layers) if before else case.layers
        by_name[case.name] = attrs.evolve(case, layers=layers, multiplicity=max(1, len(layers)))
    return list(by_name.values())


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
        found += [
            case
            for width, heads in ((12, 3), (64, 2), (72, 1))  # the last too wide to go without stored weights
            for case in training_calls.attention_passes(
                kinds.Attention(h=draw.randint(3, 99), w=1, c=width * heads, heads=heads),
                2,
                dtype,
                with_bias=draw.random() < 0.5,
            )
        ]
        found += [training_calls.cross_entropy(37, 11, dtype), training_calls.cross_entropy(5, 1000, dtype)]
        for name in ("sgd", "momentum", "adam"):
            found += [training_calls.optimizer_step(name, draw.randint(900, 9000), dtype) for _ in range(2)]
    found.append(training_calls.loss_scale(draw.randint(900, 9000)))
    found += [cases.of_layer(layer, pass_, 3) for layer in _PLAIN_3X3 for pass_ in (Pass.FPROP, Pass.DGRAD)]
    return list({case.name: case for case in found}.values())


def _passes(layers: list[Layer], draw: random.Random, dtype: str) -> list[Case]:
    return [
        cases.of_layer(layer, pass_, draw.choice((1, 2, 3, 5)), dtype, with_bias=draw.random() < 0.5)
        for layer in layers
        for pass_ in Pass
        if cases.has_case(layer, pass_)
    ]


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
            kinds.SiLU, kinds.HardSigmoid, kinds.HardSwish, kinds.GELU, kinds.Softmax,
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

"""Cases of the GPU pass in addition to the steps of networks: products, odd shapes, memory plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import attrs

from cubatch.bench import cases
from cubatch.bench.calls import Case
from cubatch.bench.cases import of_layer
from cubatch.network import layers as kinds, models
from cubatch.network.graph import Network
from cubatch.network.layer import Layer
from cubatch.network.passes import Pass

SEED = 20261121
STORED = ("float32", "float16", "bfloat16")
TENSOR_DTYPES = ("float16", "bfloat16", "tf32")
ELSEWHERE = {
    "batch_norm_merge", "copy_filter", "transpose",
    *("gemm_nn_sums", "gemm_nt_sums", "conv2d_fprop_sums", "conv2d_dgrad_sums"),
    *("gemm_nn_gelu", "layer_norm_backward_add", "scale_add"),
    *("attend_sums", "attend_queries", "attend_keys"),
    *("batch_norm_statistics_reversed", "batch_norm_backward_sums_reversed", "batch_norm_slope_sums_reversed"),
    *("layer_norm_sums_reversed", "column_sums_reversed"),
}  # fmt: skip
"""Operations that no case calls: only fused layers, layouts or experiments need them. tests/kernels checks them."""

NETWORK, BATCH_SIZE = "mnist-cnn", 4
"""Network and batch size of every item in a rehearsal."""

_SQUARES, _TENSOR_SQUARES = (1024, 2048, 4096, 8192, 1536, 3072, 6144), (4096, 8192, 2048, 6144, 3072)
_SHAPES_PER_OPERATION = 6
_PLAIN_3X3 = (
    kinds.Conv2d(h=13, w=9, c=36, k=28, r=3, s=3, pad=1),
    kinds.Conv2d(h=7, w=11, c=25, k=38, r=3, s=3, pad=(0, 1, 2, 0)),
)
"""Convolutions of Winograd's algorithm, with enough channels for both of its sizes: whole vectors of them, and not."""

_CHANNELS = (8, 24, 64, 100, 512)
"""Channels of odd shapes on tensor cores: whole vectors of 8 and of 4, no whole tile and several."""

_WINDOWS = (
    (3, 3, 1, 1), (3, 2, 1, 2), (1, 1, 1, 1), (3, 3, 2, 1), (1, 3, 1, 2), (1, 1, 2, 1), (3, 3, 2, 2), (2, 3, 3, 1),
)  # fmt: skip
"""Filter, stride and dilation of odd shapes on tensor cores."""

_CURVES = ("relu6", "silu", "hard_swish", "gelu")
"""Activations other than ReLU that a batch norm computes."""

_SMALL_EXTENTS = {"h": 8, "w": 8, "c": 16, "k": 16}
_SMALL_ROWS, _SMALL_PARAMETERS = 48, 5000  # of a product: one tile of some variants, several of others


def gemms() -> list[Case]:
    """Return square products; two on tensor cores for each other one, so that a stage that is cut off has both."""
    on_tensor_cores = [
        cases.gemm(size, size, size, layout=layout, dtype=dtype)
        for layouts in (("nt",), ("nn", "tn"))
        for dtype in TENSOR_DTYPES
        for layout in layouts
        for size in _TENSOR_SQUARES
    ]
    others = iter([cases.gemm(size, size, size, layout=layout) for layout in ("nt", "nn", "tn") for size in _SQUARES])
    mixed: list[Case | None] = []
    for pair in itertools.zip_longest(*[iter(on_tensor_cores)] * 2):
        mixed += [*pair, next(others, None)]
    return [case for case in (*mixed, *others) if case is not None]


def odd_shapes(seed: int = SEED) -> list[Case]:
    """Return small cases of every operation and storage type, whose extents divide nothing."""
    draw = random.Random(seed)
    drawn: list[Case] = []
    curves, slopes = itertools.cycle(_CURVES), itertools.cycle(("relu", *_CURVES))
    for dtype in STORED:
        for _ in range(_SHAPES_PER_OPERATION):
            drawn += _passes(_drawn_layers(draw), draw, dtype)
            norm = kinds.BatchNorm2d(h=draw.randint(5, 13), w=draw.randint(5, 13), c=draw.randint(1, 40))
            ending = ["residual"] if draw.random() < 0.5 else []
            for mode in ("training", "inference"):
                drawn.append(of_layer(norm, Pass.FPROP, 3, dtype, mode=mode, ending=ending, relu=True))
                drawn.append(of_layer(norm, Pass.FPROP, 3, dtype, mode=mode, activation=next(curves)))
            drawn.append(of_layer(norm, Pass.DGRAD, 3, dtype, activation=next(slopes)))
        drawn.append(cases.fold([draw.randint(1, 300) for _ in range(35)], [True, False, *[True] * 33], dtype))
        drawn += _passes(_depthwise_layers(draw), draw, dtype)
        drawn += [
            of_layer(layer, pass_, batch_size, dtype, with_bias=True)
            for layer, pass_, batch_size in (
                # Sums so long that they are cut into slices, whose partial sums are added or merged.
                (kinds.Linear(c=37, k=29), Pass.WGRAD, 5003),
                (kinds.Conv2d(h=29, w=31, c=12, k=8, r=3, s=3, pad=1), Pass.WGRAD, 7),
                (kinds.BatchNorm2d(h=63, w=65, c=4), Pass.FPROP, 17),
            )
        ]
        attentions = [
            kinds.Attention(h=draw.randint(3, 99), w=1, c=width * heads, heads=heads, bias=draw.random() < 0.5)
            for width, heads in ((12, 3), (64, 2), (72, 1))  # the last is too wide for kernels without stored weights
        ]
        drawn += _passes(attentions, draw, dtype)
        drawn += [cases.cross_entropy(37, 11, dtype), cases.cross_entropy(5, 1000, dtype)]
        for name in ("sgd", "momentum", "adam"):
            drawn += [cases.optimizer_step(name, draw.randint(900, 9000), dtype) for _ in range(2)]
    drawn.append(cases.loss_scale(draw.randint(900, 9000)))
    for layer in _PLAIN_3X3:
        drawn += [of_layer(layer, Pass.FPROP, 3), of_layer(layer, Pass.DGRAD, 3)]
        drawn.append(of_layer(layer, Pass.FPROP, 3, ending=["folded", "residual"], relu=True))
        drawn.append(of_layer(layer, Pass.DGRAD, 3, ending=["residual", "positive"]))
    return list({case.name: case for case in drawn}.values())


def odd_products(seed: int = SEED) -> list[Case]:
    """Return small products and convolutions for every variant on tensor cores, with extents that leave residues."""
    draw = random.Random(seed)
    drawn: list[Case] = []
    pairs = [*zip(_CHANNELS, (*_CHANNELS[1:], _CHANNELS[0]), strict=True), (64, 64), (512, 24), (100, 8)]
    for dtype in TENSOR_DTYPES:
        for (c, k), window in zip(pairs, draw.sample(_WINDOWS, len(_WINDOWS)), strict=True):
            drawn += _of_extents(draw, c, k, window, dtype)
    # Several tiles along both axes, and sums so long that they are cut into slices.
    large = kinds.Conv2d(h=29, w=26, c=64, k=136, r=3, s=3, stride=2, pad=1)
    for dtype, pass_ in itertools.product(TENSOR_DTYPES, Pass):
        drawn.append(of_layer(large, pass_, 3, dtype, with_bias=True))
        drawn.append(of_layer(kinds.Linear(c=328, k=520), pass_, 700, dtype))
        drawn.append(of_layer(kinds.Linear(c=72, k=56), pass_, 5003, dtype))
    return list({case.name: case for case in drawn}.values())


def _of_extents(draw: random.Random, c: int, k: int, window: tuple[int, int, int, int], dtype: str) -> list[Case]:
    """Return every pass of a convolution and of a linear layer, some with a bias, and with epilogues of networks."""
    r, s, stride, dilation = window
    h = draw.randint(6, 13)
    pad = [1, 0, *(draw.randint(0, 1) for _ in range(2))]
    convolution = kinds.Conv2d(
        h=h, w=h + draw.choice((-1, 1, 2)), c=c, k=k, r=r, s=s, stride=stride, pad=pad, dilation=dilation
    )  # fmt: skip
    linear = kinds.Linear(c=c, k=k)
    drawn = []
    for pass_, bias in zip(Pass, draw.sample((False, True, True), 3), strict=True):
        drawn.append(of_layer(convolution, pass_, draw.choice((1, 2, 3, 5)), dtype, with_bias=bias))
        drawn.append(of_layer(linear, pass_, draw.randint(3, 300), dtype, with_bias=not bias))
    for layer in (convolution, linear):
        folded, residual = draw.random() < 0.5, draw.random() < 0.5
        sizes = [draw.randint(1, 3) for _ in range(3)]
        forward = [name for name, is_given in (("folded", folded), ("residual", residual)) if is_given]
        backward = ["positive", *([] if residual else ["residual"])]
        drawn.append(of_layer(layer, Pass.FPROP, sizes[0], dtype, ending=forward, relu=True))
        drawn.append(of_layer(layer, Pass.DGRAD, sizes[1], dtype, ending=backward))
    return drawn


def _passes(layers: Sequence[Layer], draw: random.Random, dtype: str) -> list[Case]:
    """Return every pass of layers, and forward passes that differ by mode."""
    return [
        of_layer(layer, pass_, draw.choice((1, 2, 3, 5)), dtype, with_bias=draw.random() < 0.5, mode=mode)
        for layer in layers
        for pass_ in Pass
        if cases.has_case(layer, pass_)
        for mode in cases.modes_of(layer, pass_)
    ]


def _depthwise_layers(draw: random.Random) -> list[Layer]:
    """Return every filter and stride that has kernels of its own, with whole vectors of channels and without."""
    drawn: list[Layer] = []
    for side, stride, channels in itertools.product(
        (3, 5, 7), (1, 2), (8 * draw.randint(1, 4), 8 * draw.randint(1, 4) + 3)
    ):
        h, w = draw.randint(6, 13), draw.randint(6, 13)
        extents = {"h": h, "w": w, "c": channels, "k": channels, "groups": channels}
        drawn.append(kinds.Conv2d(**extents, r=side, s=side, stride=stride, pad=side // 2))
    return drawn


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
    """Return networks whose memory plan is compared with a step: network, mode, batch size, dtype, library."""
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


def small(case: Case) -> Case:
    """
    Return the case with small arrays, for a simulated GPU: same operation, pass, type and epilogue.

    Example:
        >>> small(cases.gemm(8192, 8192, 8192, layout="tn", dtype="float16")).name
        'linear 1x1x48 to 48, n=48, wgrad, float16'
    """
    if case.layer is None or case.pass_ is None:
        return {
            "fold_batch_norms": lambda: cases.fold([16, 8], [False, True], case.dtype),
            "softmax_cross_entropy": lambda: cases.cross_entropy(4, 10, case.dtype),
            "update_loss_scale": lambda: cases.loss_scale(_SMALL_PARAMETERS, case.dtype),
        }.get(
            case.operation, lambda: cases.optimizer_step(case.operation, _SMALL_PARAMETERS, case.dtype)
        )()  # fmt: skip
    layer, names = _small_layer(case.layer), {*case.operands}
    ending = [name for name in ("residual", "positive", "pooled", "parts") if name in names | {*case.arrays}]
    padded = case.operands["x"].padded if "x" in names else 0
    is_training = not names.isdisjoint({"argmax", "mask", "mean", "qkv", "statistics"})
    return of_layer(
        layer, case.pass_, min(case.batch_size, _SMALL_ROWS if isinstance(layer, kinds.Linear) else 2), case.dtype,
        with_bias=bool(names & {"b", "db", "b_in", "db_in"}), mode="training" if is_training else "inference",
        ending=[*ending, *(["folded"] if "shift" in names else [])], relu=bool(case.options.get("relu")),
        activation=case.options.get("activation"), channels=layer.input_shape[2] + padded if padded else 0,
    )  # fmt: skip


def _small_layer(layer: Layer) -> Layer:
    given = layer.to_mapping()
    if isinstance(layer, kinds.Linear):
        return kinds.Linear(c=min(given["c"], _SMALL_ROWS), k=min(given["k"], _SMALL_ROWS), bias=layer.bias)
    few = {name: min(given[name], most) for name, most in _SMALL_EXTENTS.items() if isinstance(given.get(name), int)}
    few |= {extent: max(few[extent], given[taps]) for extent, taps in (("h", "r"), ("w", "s")) if taps in given}
    if given.get("groups", 1) == given["c"]:
        few["groups"] = few["c"]
    if isinstance(layer, kinds.Attention):
        few["heads"] = 2
    return attrs.evolve(layer, **few)

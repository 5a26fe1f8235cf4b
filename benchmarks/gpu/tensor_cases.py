"""What the GPU pass measures on tensor cores, in float16, bfloat16 and tf32: cases, the most valuable first."""

from __future__ import annotations

import itertools
import random

from benchmarks.gpu.cases import SEED
from cubatch.bench import cases
from cubatch.bench.cases import Case
from cubatch.bench.fused import with_epilogue
from cubatch.network import layers as kinds
from cubatch.network.passes import Pass

DTYPES = ("float16", "bfloat16", "tf32")
SQUARES = (4096, 8192, 2048, 6144, 3072)
CHANNELS = (8, 24, 64, 100, 512)
"""Of the odd shapes: whole vectors of 8 and of 4, none and several whole tiles."""

_WINDOWS = (
    (3, 3, 1, 1), (3, 2, 1, 2), (1, 1, 1, 1), (3, 3, 2, 1), (1, 3, 1, 2), (1, 1, 2, 1), (3, 3, 2, 2), (2, 3, 3, 1),
)  # fmt: skip
"""Filter, stride and dilation of the odd shapes."""


def gemms() -> list[Case]:
    """Squares as a forward pass has them, then the other layouts."""
    return [
        cases.gemm(size, size, size, layout=layout, dtype=dtype)
        for layouts in (("nt",), ("nn", "tn"))
        for dtype in DTYPES
        for layout in layouts
        for size in SQUARES
    ]


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
    """Every pass of a convolution and of a linear layer, some with a bias, and what networks end them with."""
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
    for layer in (convolution, kinds.Linear(c=c, k=k)):
        folded, residual = draw.random() < 0.5, draw.random() < 0.5
        forward, backward, _ = (cases.of_layer(layer, pass_, draw.randint(1, 3), dtype) for pass_ in Pass)
        found += [
            with_epilogue(forward, folded=folded, residual=residual, relu=True),
            with_epilogue(backward, residual=not residual, positive=True),
        ]
    return found

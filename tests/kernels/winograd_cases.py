"""3x3 convolutions for kernels/winograd, their variants under test, and what bounds their errors."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cubatch.kernels import variant, winograd_plan
from cubatch.kernels.ranking import SplitKernel
from tests.checks import UNIT_ROUNDOFF, gamma
from tests.kernels import cases

TILES = {  # by compute capability; elsewhere 128x128x8, which runs everywhere
    (52, "conv2d_dgrad"): "64x64x16", (80, "conv2d_fprop"): "256x128x8", (80, "conv2d_dgrad"): "128x64x8",
}  # fmt: skip

U = UNIT_ROUNDOFF["float32"]
SIZES = (2, 4)
"""Results along an axis that are computed at a time."""

POINTS = {2: ("0", "1", "-1"), 4: ("0", "11/16", "-11/16", "3/2", "-3/2")}
"""Interpolation points by results along an axis; infinity comes last."""


@lru_cache
def matrices(outputs: int) -> tuple[Any, Any, Any]:
    """Give A^T, G and B^T: y = A^T [(G w) * (B^T d)] are the results of a filter of three taps."""
    points = [Fraction(point) for point in POINTS[outputs]]
    zero, unity = Fraction(0), Fraction(1)
    results = [
        [point**power for point in points] + [unity if power == outputs - 1 else zero] for power in range(outputs)
    ]
    filters, sources = [], []
    for point in points:
        others = [other for other in points if other != point]
        distance = math.prod((point - other for other in others), start=unity)
        filters.append(tuple(point**power / distance for power in range(3)))
        sources.append((*_product(others), zero))
    filters.append((zero, zero, unity))
    sources.append(_product(points))
    return tuple(map(tuple, results)), tuple(filters), tuple(sources)


def _product(roots: list[Fraction]) -> tuple[Fraction, ...]:
    """Give the coefficients of the product of (x - root), the lowest power first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted, same = [Fraction(0), *coefficients], [*coefficients, Fraction(0)]
        coefficients = [up - root * low for up, low in zip(shifted, same, strict=True)]
    return tuple(coefficients)


def growth(outputs: int) -> float:
    """Bound the terms of a result relative to |x| |w|, along both axes."""
    result, filters, sources = matrices(outputs)
    size = [sum(map(abs, row)) for row in sources]
    along = max(
        sum(abs(a) * abs(row[tap]) * most for a, row, most in zip(line, filters, size, strict=True))
        for line in result
        for tap in range(3)
    )
    return float(along) ** 2


def chooser(outputs: int) -> Any:
    """Choose the variant of so many results; its tile is one of those that the family has."""

    def choose(problem: Any, device: Any, *_: object) -> Any:
        arch = 10 * device.compute_capability[0] + device.compute_capability[1]
        tile = TILES.get((arch, problem.operation), "128x128x8")
        return SplitKernel(variant.find(problem.operation, "float32", tile=f"f{outputs}x{outputs}_{tile}"))

    return choose


@st.composite
def convolutions(draw: Any, most_extent: int = 11) -> cases.Conv:
    """Draw 3x3 convolutions of stride 1: pads of 0 to 2 on each side, tiles that are cut, channels of every residue."""
    pad = tuple(draw(st.integers(0, 2)) for _ in range(4))
    h, w = (
        draw(st.integers(max(1, 3 - before - after), most_extent)) for before, after in (pad[:2], pad[2:])
    )  # fmt: skip
    c, k = (draw(st.one_of(st.integers(1, 9), st.sampled_from([8, 12, 20, 36]))) for _ in "ck")
    return cases.Conv(n=draw(st.integers(1, 3)), h=h, w=w, c=c, k=k, r=3, s=3, pad=pad)


def turned(drawn: cases.Conv, w: Any) -> tuple[cases.Conv, Any]:
    """Give the gradient of an input as the forward pass that it is: of dy, by the filter turned around."""
    _, p, q, _ = drawn.y_shape
    around = tuple(2 - one for one in drawn.pad)
    forward = cases.Conv(n=drawn.n, h=p, w=q, c=drawn.k, k=drawn.c, r=3, s=3, pad=around)
    return forward, w[:, ::-1, ::-1].transpose(3, 1, 2, 0)


def size(drawn: cases.Conv, x: Any, w: Any, outputs: int) -> Any:
    """
    Add up the sizes of all terms of each result, tile by tile: |A^T| [sum (|G| |w| |G^T|) * (|B^T| |d| |B|)] |A|.

    By loops over tiles, in float64; x and w as the forward pass has them.
    """
    result, filter_, source = (np.abs(np.array(one, dtype=np.float64)) for one in matrices(outputs))
    x, w, extent = np.abs(x).astype(np.float64), np.abs(w).astype(np.float64), outputs + 2
    _, p, q, _ = drawn.y_shape
    points = np.stack([[filter_ @ w[k, :, :, c] @ filter_.T for c in range(drawn.c)] for k in range(drawn.k)])
    found = np.zeros((drawn.n, p + outputs, q + outputs, drawn.k))
    padded = np.pad(x, ((0, 0), (drawn.pad[0], extent + 2), (drawn.pad[2], extent + 2), (0, 0)))
    for n in range(drawn.n):
        for top in range(0, p, outputs):
            for left in range(0, q, outputs):
                tile = padded[n, top : top + extent, left : left + extent]
                sums = np.zeros((drawn.k, extent, extent))
                for c in range(drawn.c):
                    sums += points[:, c] * (source @ tile[:, :, c] @ source.T)
                for k in range(drawn.k):
                    found[n, top : top + outputs, left : left + outputs, k] = result @ sums[k] @ result.T
    return found[:, :p, :q]


def bound(drawn: cases.Conv, x: Any, w: Any, outputs: int, more: int = 0) -> Any:
    """Bound the errors of a forward pass, with so many more roundings of what is fused."""
    return gamma(winograd_plan.roundings(outputs, drawn.c) + more, U) * size(drawn, x, w, outputs)

"""The tile that each operation of kernels/simt is tested with, and products and convolutions drawn for it."""

from __future__ import annotations

from hypothesis import settings, strategies as st

from cubatch.kernels import ranking, variant
from tests.kernels import cases

# Which tile an operation is tested with: compiling all of them for the CPU takes minutes, so each tile shape and each
# way to load is there for some operation, and each operation has several.
TILES = {
    52: {
        "gemm_nt": "32x128x16", "gemm_nn": "64x64x16", "gemm_tn": "128x32x8",
        "conv2d_fprop": "128x32x8", "conv2d_dgrad": "64x64x16", "conv2d_wgrad": "128x128x8",
    },
    80: {
        "gemm_nt": "256x128x8", "gemm_nn": "32x128x16", "gemm_tn": "256x128x8_s3",
        "conv2d_fprop": "128x64x8", "conv2d_dgrad": "128x128x8", "conv2d_wgrad": "256x128x8_s3",
    },
}  # fmt: skip
HALF_TILES = {"float16": "128x64x8", "bfloat16": "64x64x16"}
SCALAR_TILE = "128x64x8_w8"
SEEDS = st.integers(0, 2**32 - 1)
ACTIVATIONS = st.sampled_from(["none", "relu"])
FEW = settings(max_examples=20, deadline=None)
FEWER = settings(max_examples=8, deadline=None)


def chooser(problem, device, prepare=None):
    """Choose the tile under test; on a GPU, what the cost model puts first."""
    arch = 10 * device.compute_capability[0] + device.compute_capability[1]
    if arch not in TILES:
        return ranking.first_ranked(problem, device)
    wide = HALF_TILES.get(problem.dtype) or TILES[arch][problem.operation]
    tile = SCALAR_TILE if problem.vector == 1 else wide
    found = variant.find(problem.operation, problem.dtype, tile=tile, vector=min(problem.vector, 4))
    return ranking.SplitKernel.modelled(problem, found, device)


def context(launcher):
    return launcher.context(chooser=chooser)


def dtypes(launcher):
    """Storage types of 16 bits run here where there are no tensor cores for them."""
    return ("float32",) if launcher.arch == 80 else cases.DTYPES


@st.composite
def products(draw):
    """Draw layout and extents (m, n, k): odd ones, and multiples of 4, which are loaded 4 at a time."""
    layout = draw(st.sampled_from(["nn", "nt", "tn"]))
    unit = draw(st.sampled_from([1, 4, 4]))
    m, n, k = (unit * draw(st.integers(1, most // unit)) for most in (160, 150, 70))
    return layout, m, n, k


@st.composite
def convolutions(draw):
    """Draw a convolution, half of them with channels that are loaded 4 at a time."""
    drawn = draw(cases.convolutions(most_extent=8))
    return draw(st.sampled_from([drawn, widened(drawn, 4)]))


def widened(drawn, times):
    return cases.attrs.evolve(drawn, c=drawn.c * times, k=drawn.k * times)


def operand(random, rows, columns, dtype, *, turned):
    return cases.drawn(random, (columns, rows) if turned else (rows, columns), dtype)

"""
What a vendor's library could run for a pass of a layer, and how long by arithmetic alone: the analytic model.

Each pass is a matrix product, and a library has several ways to compute it: tiles of several sizes, with the depth
split or not; an input gradient whose products are scattered, each added to the pixel that it belongs to; one output at
a time; Winograd's two forms; transforms of Fourier.
The time of each is a launch, plus the busiest SM's blocks times what a tile costs, plus the bytes moved; the library
is taken to choose the shortest.

Everything is an array with one entry a case, so that forty batch sizes of a network, or thirty thousand published
measurements, are one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from cubatch.estimate.block_counts import FUSED_FILTERS, FUSED_PIXELS, WINOGRAD_OUTPUTS
from cubatch.network.passes import Pass, product_extents

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Index = NDArray[np.int64]

PASSES = (Pass.FPROP, Pass.DGRAD, Pass.WGRAD)
FPROP, DGRAD, WGRAD = range(3)

TILES = ((128, 128), (128, 64), (64, 128), (128, 32), (32, 128), (64, 64), (32, 32))
"""Rows and columns of what a block computes; rows are pixels in a forward pass."""

WINOGRAD_TILES = ((64, 64), (32, 128))
"""Tiles of the 36 products of Winograd's algorithms in several launches, read off the names of the vendor's kernels."""

FAMILIES = ("tiles", "scattered", "direct", "fused", "winograd", "fft")
SLICED = {"tiles": "sliced", "winograd": "winograd sliced"}
"""
What tiles and Winograd's products are in the filter gradient of a convolution, whose depth is the outputs: slices of it
are added into the filter, which costs otherwise than a forward pass of the same extents.
"""

MOST_SLICES = 32
LEAST_SLICE = 64
"""Steps of the depth below which it is not split further."""

_FUSED_STEPS = 4.0  # products of F(2x2, 3x3) for each output and channel, of which a direct convolution has nine
_FUSED_PIXELS = 128
_PRODUCTS = 36  # of F(4x4, 3x3) and F(2x2, 5x5) alike, for each tile and pair of channels
_WINOGRAD = ((WINOGRAD_OUTPUTS, 3, "winograd 4x4"), (2, 5, "winograd 2x2 of 5x5"))
_FFT_SIZES = (16, 32)
_FFT_TILE = 32
_COMPLEX = 4.0  # real products of a complex one


@attrs.frozen(eq=False)
class Work:
    """
    Passes of convolutions and matrix products, one entry of each array a case.

    Attributes:
        pass_: Index into PASSES.
        n, h, w, c, k, r, s, p, q: Extents; a matrix product has h = w = r = s = p = q = 1.
        stride_h, stride_w, dilation, groups: Of the convolution; dilation is the larger of the two.
        m, columns, depth: Extents of the product, of one group.
        convolution: Whether it is one with extents beyond 1; a 1x1 on one pixel is a product.
    """

    pass_: Index
    n: Array
    h: Array
    w: Array
    c: Array
    k: Array
    r: Array
    s: Array
    p: Array
    q: Array
    stride_h: Array
    stride_w: Array
    dilation: Array
    groups: Array
    m: Array
    columns: Array
    depth: Array
    convolution: Mask

    @classmethod
    def of(cls, pass_: Index, **extents: Array | Sequence[float] | float) -> Work:
        """Make a table of cases from the pass and the extents of each."""
        e = {name: np.broadcast_to(np.asarray(value, float), len(pass_)) for name, value in extents.items()}
        channels, filters, taps = e["c"] / e["groups"], e["k"] / e["groups"], e["r"] * e["s"]
        outputs, inputs = e["n"] * e["p"] * e["q"], e["n"] * e["h"] * e["w"]
        # Of a strided input gradient no phases are told apart: m, columns and depth are those of stride 1.
        extents_of = [
            product_extents(one, outputs=outputs, inputs=inputs, c=channels, k=filters, taps=taps) for one in PASSES
        ]
        m, columns, depth = (np.choose(pass_, of) for of in zip(*extents_of, strict=True))
        return cls(
            pass_=pass_,
            m=m,
            columns=columns,
            depth=depth,
            convolution=(e["h"] * e["w"] * e["r"] * e["s"]) > 1,
            **e,
        )

    def take(self, index: Index | Mask) -> Work:
        """Return the cases of an index or a mask."""
        return Work(**{field.name: getattr(self, field.name)[index] for field in attrs.fields(Work)})

    @property
    def flops(self) -> Array:
        """FLOP of the direct computation, a multiply-add counted as two."""
        return 2 * self.output_elements * self.c / self.groups * self.r * self.s

    @property
    def input_elements(self) -> Array:
        """Elements of the layer's input, or of its gradient."""
        return self.n * self.h * self.w * self.c

    @property
    def output_elements(self) -> Array:
        """Elements of the layer's output, or of its gradient."""
        return self.n * self.p * self.q * self.k

    @property
    def filter_elements(self) -> Array:
        """Elements of the filter, or of its gradient."""
        return self.k * self.c / self.groups * self.r * self.s


@attrs.frozen(eq=False)
class Places:
    """
    The GPU of each case.

    Attributes:
        peak: FLOP per second of the arithmetic.
        bandwidth: Bytes per second.
        num_sms: SMs.
        l2_bytes: L2 cache.
        lanes: Lanes of float32 in an SM.
        element_bytes: Bytes of a stored element.
        compute, memory: Factors on the time of arithmetic and of bytes: see `parts.Scales`.
        gpu, kin: The catalogue's name of the GPU, empty if it has none, and of those alike: see `fitted.kin_of`.
    """

    peak: Array
    bandwidth: Array
    num_sms: Array
    l2_bytes: Array
    lanes: Array
    element_bytes: Array
    compute: Array
    memory: Array
    gpu: NDArray[np.str_]
    kin: NDArray[np.str_]

    def take(self, index: Index | Mask) -> Places:
        """Return the places of an index or a mask."""
        return Places(**{field.name: getattr(self, field.name)[index] for field in attrs.fields(Places)})


@attrs.frozen(eq=False)
class Algorithm:
    """
    One way to compute, before any constant of time is applied.

    Attributes:
        name: "128x128", "winograd 2x2", ...
        group: What it is in the features of the residual: "128x128", "split", "winograd 4x4", ...
        cost: Which constant of arithmetic it has.
        family: Which constants of bytes and launches it has: one of FAMILIES; see SLICED.
        blocks: Blocks of the grid.
        tile: Multiply-adds of a block for each step of its depth.
        depth: Steps that a block makes.
        usable: Which cases it can compute.
        partial_elements: Elements of partial sums, written and read; of a scattered gradient, those added to pixels.
        input_factor, filter_factor: How many elements it makes of one of the input and of the filter.
    """

    name: str
    group: str
    cost: str
    family: str
    blocks: Array
    tile: float
    depth: Array
    usable: Mask
    partial_elements: Array | float = 0.0
    input_factor: Array | float = 1.0
    filter_factor: Array | float = 1.0


def algorithms(work: Work, num_sms: Array, *, transforms: bool = True) -> list[Algorithm]:
    """
    List what could run each case.

    Depth is split by powers of two until the blocks are two for each SM, in filter gradients and plain products only:
    published times of small forward convolutions show that the vendor's are not.

    Args:
        work: The cases.
        num_sms: SMs of each case's GPU.
        transforms: Whether there are others than tiles, as in float32; on Tensor Cores there are not.
    """
    tiled = _tiled(work, num_sms)
    return [*tiled, _direct(work, num_sms), _fused(work), *_winograd(work), *_fft(work)] if transforms else tiled


def _tiled(work: Work, num_sms: Array) -> list[Algorithm]:
    found, outputs, channels = [], work.n * work.p * work.q, work.c / work.groups
    splits = (work.pass_ == WGRAD) | ~work.convolution
    for rows, columns in TILES:
        name, tile = f"{rows}x{columns}", float(rows * columns)
        cost = f"{max(rows, columns)}x{min(rows, columns)}"
        across = work.groups * _ceil(work.columns, columns)
        blocks = across * _ceil(work.m, rows)
        found.append(Algorithm(name, name, cost, "tiles", blocks, tile, work.depth, np.ones(len(work.n), bool)))
        most = np.minimum(np.maximum(2 * num_sms / blocks, 1), np.maximum(work.depth / LEAST_SLICE, 1))
        slices = 2.0 ** np.floor(np.log2(np.minimum(most, MOST_SLICES)))
        partial = 2 * slices * work.m * work.columns * work.groups
        found.append(
            Algorithm(
                f"{name} split", "split", cost, "tiles", blocks * slices, tile, work.depth / slices,
                (slices > 1) & splits, partial,
            )
        )  # fmt: skip
        scattered = work.groups * _ceil(outputs, rows) * _ceil(channels * work.r * work.s, columns)
        found.append(
            Algorithm(
                f"{name} scattered", "scattered", cost, "scattered", scattered, tile, work.k / work.groups,
                (work.pass_ == DGRAD) & work.convolution, outputs * work.c * work.r * work.s,
            )
        )  # fmt: skip
    return found


def _direct(work: Work, num_sms: Array) -> Algorithm:
    return Algorithm(
        "direct", "direct", "direct", "direct", num_sms, 1.0, work.flops / 2 / num_sms, work.convolution
    )  # fmt: skip


def image(work: Work) -> tuple[Array, Array, Array, Array, Mask]:
    """Return rows, columns, channels summed over and filters of what is computed, and where it is a plain one."""
    backward = work.pass_ == DGRAD
    unit = work.convolution & (work.groups == 1) & (work.dilation == 1)
    unit &= (work.stride_h == 1) & (work.stride_w == 1)
    rows, columns = np.where(backward, work.h, work.p), np.where(backward, work.w, work.q)
    return rows, columns, np.where(backward, work.k, work.c), np.where(backward, work.c, work.k), unit


def _fused(work: Work) -> Algorithm:
    rows, columns, channels, filters, unit = image(work)
    pieces = np.min([_ceil(work.n, i) * _ceil(rows, r) * _ceil(columns, s) for i, r, s in FUSED_PIXELS], axis=0)
    usable = unit & (work.r == 3) & (work.s == 3) & (work.pass_ != WGRAD)  # noqa: PLR2004
    tile = FUSED_FILTERS * _FUSED_PIXELS * _FUSED_STEPS
    blocks = pieces * _ceil(filters, FUSED_FILTERS)
    return Algorithm("winograd 2x2", "winograd 2x2", "fused", "fused", blocks, tile, channels, usable)


def _winograd(work: Work) -> list[Algorithm]:
    rows, columns, channels, filters, unit = image(work)
    found = []
    for outputs, taps, name in _WINOGRAD:
        pieces = work.n * _ceil(rows, outputs) * _ceil(columns, outputs)
        across, depth = np.where(work.pass_ == WGRAD, [work.c, pieces], [pieces, channels])
        usable = unit & (work.r == taps) & (work.s == taps)
        for high, wide in WINOGRAD_TILES:
            blocks = _PRODUCTS * _ceil(across, high) * _ceil(filters, wide)
            cost, tile = f"winograd {high}x{wide}", float(high * wide)
            found.append(Algorithm(f"{name} {high}x{wide}", name, cost, "winograd", blocks, tile, depth, usable))
    return found


def _fft(work: Work) -> list[Algorithm]:
    rows, columns, channels, filters, unit = image(work)
    found = []
    for size in _FFT_SIZES:
        inside = [np.maximum(size - taps + 1, 1) for taps in (work.r, work.s)]
        pieces = work.n * _ceil(rows, inside[0]) * _ceil(columns, inside[1])
        across, depth = np.where(work.pass_ == WGRAD, [work.c, pieces], [pieces, channels])
        blocks = size * (size // 2 + 1) * _ceil(across, _FFT_TILE) * _ceil(filters, _FFT_TILE)
        usable = unit & (work.r > 1) & (work.s > 1) & (work.r < size) & (work.s < size)
        found.append(
            Algorithm(
                f"fft {size}", "fft", "fft", "fft", blocks, _COMPLEX * _FFT_TILE**2, depth, usable,
                input_factor=pieces * size**2 / (work.n * work.h * work.w), filter_factor=size**2 / (work.r * work.s),
            )
        )  # fmt: skip
    return found


def seconds(work: Work, places: Places, constants: Mapping[str, float], found: Sequence[Algorithm]) -> Array:
    """
    Return the time of each case by each algorithm; infinite where it cannot compute the case.

        t = launch + cost * waves * tile * (depth + extra) / (peak / num_sms / 2) + (x, y and w moved) / bandwidth

    Waves are the busiest SM's blocks, the last partial one for `tail` of a whole and the rest of its fill; a grid of
    less than one wave takes `alone`, since a block by itself cannot hide its waiting.  Bytes are added to the
    arithmetic, not compared with it: that fits published times better.

    Args:
        work: The cases.
        places: Their GPUs.
        constants: Of the model: see `benchmarks/fit_predictor.py`.
        found: `algorithms` of the work.

    Returns:
        Seconds, (algorithms, cases).
    """
    per_sm = places.peak / places.num_sms / 2
    x, y, w = (
        elements * places.element_bytes / places.bandwidth
        for elements in (work.input_elements, work.output_elements, work.filter_elements)
    )
    sliced = work.convolution & (work.pass_ == WGRAD)
    slower = np.select([work.pass_ == FPROP, work.pass_ == DGRAD], [1.0, constants["dgrad"]], constants["wgrad"])
    times = []
    for one in found:

        def of(kind: str, family: str = one.family) -> Array | float:
            value = constants[f"{kind} {family}"]
            own = SLICED.get(family)
            return value if own is None else np.where(sliced, constants[f"{kind} {own}"], value)

        share = one.blocks / places.num_sms
        whole, tail = np.floor(share), of("tail")
        last = np.where(share > whole, tail + (1 - tail) * (share - whole), 0.0)
        waves = np.maximum(whole + last, constants["alone"])
        steps = waves * one.tile * (one.depth + of("extra"))
        slow = np.where(sliced, constants["wgrad winograd"], slower) if one.family == "winograd" else slower
        arithmetic = constants[f"cost {one.cost}"] * slow * steps / per_sm
        partial = constants["scattered" if one.family == "scattered" else "partial"]
        moved = (
            of("x") * one.input_factor * x
            + of("y") * y
            + of("w") * one.filter_factor * w
            + partial * one.partial_elements * 4 / places.bandwidth
        )
        time = of("launch") * 1e-6 + places.compute * arithmetic + places.memory * moved
        times.append(np.where(one.usable, time, np.inf))
    return np.array(times)


def _ceil(extent: Array, tile: float | Array) -> Array:
    return np.ceil(extent / tile)

"""
Algorithms of a vendor's library for a pass of a layer, and their time by arithmetic alone: the analytic model.

Each pass is a matrix product, which a library computes in one of these ways:

- in tiles of several sizes, with or without split-K;
- as a scattered input gradient, whose products are added to their pixels;
- one output at a time;
- by Winograd's two forms, or by Fourier transforms.

The time is a launch, plus the busiest SM's blocks times the cost of a tile, plus the bytes.  The library is assumed to
choose the fastest algorithm.

Everything is an array with one entry per case: forty batch sizes of a network, or thirty thousand published
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
"""Rows and columns of a block's result; rows are pixels in a forward pass."""

WINOGRAD_TILES = ((64, 64), (32, 128))
"""Tiles of the 36 products of Winograd's algorithms in several launches, from the names of the vendor's kernels."""

FAMILIES = ("tiles", "scattered", "direct", "fused", "winograd", "fft")
SLICED = {"tiles": "sliced", "winograd": "winograd sliced"}
"""
Families of tiles and Winograd products in a convolution's filter gradient.

Its depth is the outputs, and slices of it are added into the filter.  So it costs differently from a forward pass.
"""

MOST_SLICES = 32
LEAST_SLICE = 64
"""Smallest depth of a slice."""

_FUSED_STEPS = 4.0  # products of F(2x2, 3x3) per output and channel; a direct convolution has nine
_FUSED_PIXELS = 128
_PRODUCTS = 36  # of F(4x4, 3x3) and F(2x2, 5x5) alike, for each tile and pair of channels
_WINOGRAD = ((WINOGRAD_OUTPUTS, 3, "winograd 4x4"), (2, 5, "winograd 2x2 of 5x5"))
_FFT_SIZES = (16, 32)
_FFT_TILE = 32
_COMPLEX = 4.0  # real products of a complex one


@attrs.frozen(eq=False)
class Work:
    """A table of passes of convolutions and matrix products (cases); each field is an array with one entry per case."""

    pass_: Index  # index into PASSES
    n: Array  # n, h, w, c, k, r, s, p, q: extents; a matrix product has h = w = r = s = p = q = 1
    h: Array
    w: Array
    c: Array
    k: Array
    r: Array
    s: Array
    p: Array
    q: Array
    stride_h: Array  # stride_h, stride_w, dilation, groups: of the convolution; dilation is the larger of the two
    stride_w: Array
    dilation: Array
    groups: Array
    m: Array  # m, columns, depth: extents of the product, per group
    columns: Array
    depth: Array
    convolution: Mask  # whether h, w, r or s exceeds 1; a 1x1 convolution on one pixel is a product

    @classmethod
    def of(cls, pass_: Index, **extents: Array | Sequence[float] | float) -> Work:
        """
        Return the table of the cases with the given extents; the extents of their matrix products are computed.

        Args:
            pass_: Index into PASSES, for each case.
            extents: Each field from `n` to `groups` by name: an entry for each case, or one number for all.
        """
        e = {name: np.broadcast_to(np.asarray(value, float), len(pass_)) for name, value in extents.items()}
        channels, filters, taps = e["c"] / e["groups"], e["k"] / e["groups"], e["r"] * e["s"]
        outputs, inputs = e["n"] * e["p"] * e["q"], e["n"] * e["h"] * e["w"]
        # Phases of a strided input gradient are ignored: m, columns and depth are those of stride 1.
        extents_of = [
            product_extents(pass_kind, outputs=outputs, inputs=inputs, c=channels, k=filters, taps=taps)
            for pass_kind in PASSES
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
        """Return a table of the cases that an index array or a boolean mask selects."""
        return Work(**{field.name: getattr(self, field.name)[index] for field in attrs.fields(Work)})

    @property
    def flops(self) -> Array:
        """FLOP of each case by direct computation; a multiply-add counts as two."""
        return 2 * self.output_elements * self.c / self.groups * self.r * self.s

    @property
    def input_elements(self) -> Array:
        """Number of elements of the layer's input for the whole batch, for each case; its gradient has as many."""
        return self.n * self.h * self.w * self.c

    @property
    def output_elements(self) -> Array:
        """Number of elements of the layer's output for the whole batch, for each case; its gradient has as many."""
        return self.n * self.p * self.q * self.k

    @property
    def filter_elements(self) -> Array:
        """Number of elements of the filter, for each case; its gradient has as many."""
        return self.k * self.c / self.groups * self.r * self.s


@attrs.frozen(eq=False)
class Places:
    """The GPU on which each case runs; each field is an array with one entry per case."""

    peak: Array  # FLOP per second of the arithmetic
    bandwidth: Array  # bytes per second
    num_sms: Array  # SMs
    l2_bytes: Array  # L2 cache
    lanes: Array  # float32 lanes of an SM
    element_bytes: Array  # bytes of a stored element
    compute: Array  # compute, memory: factors on the time of arithmetic and of bytes: see `predictions.Scales`
    memory: Array
    # gpu, kin: the catalogue's name of the GPU, empty without one, and the name of its group of similar GPUs: see
    # `fitted.kin_of`
    gpu: NDArray[np.str_]
    kin: NDArray[np.str_]

    def take(self, index: Index | Mask) -> Places:
        """Return the entries that an index or a mask selects."""
        return Places(**{field.name: getattr(self, field.name)[index] for field in attrs.fields(Places)})


@attrs.frozen(eq=False)
class Algorithm:
    """An algorithm of the vendor's library: its blocks, steps and elements for each case, as `seconds` needs them."""

    name: str  # "128x128", "winograd 2x2", ...
    group: str  # its group in the features of the correction: "128x128", "split", "winograd 4x4", ...
    cost: str  # name of its arithmetic constant
    family: str  # name of its constants of bytes and launches: one of FAMILIES; see SLICED
    blocks: Array  # blocks of the grid
    tile: float  # multiply-adds of a block per step of its depth
    depth: Array  # steps of a block
    usable: Mask  # cases that it can compute
    # elements of partial sums, written and read; for a scattered gradient those added to pixels
    partial_elements: Array | float = 0.0
    # input_factor, filter_factor: elements that it creates per element of the input and of the filter
    input_factor: Array | float = 1.0
    filter_factor: Array | float = 1.0


def algorithms(work: Work, num_sms: Array, *, transforms: bool = True) -> list[Algorithm]:
    """
    Return the vendor's algorithms, each with its counts for all cases and which cases it can compute.

    Split-K doubles until there are two blocks per SM, in filter gradients and plain products only.  The vendor does not
    split small forward convolutions, as published times show. Tensor Cores have no algorithms with `transforms`.
    """
    tiled = _tiled(work, num_sms)
    return [*tiled, _direct(work, num_sms), _fused(work), *_winograd(work), *_fft(work)] if transforms else tiled


def _tiled(work: Work, num_sms: Array) -> list[Algorithm]:
    candidates, outputs, channels = [], work.n * work.p * work.q, work.c / work.groups
    splits = (work.pass_ == WGRAD) | ~work.convolution
    for rows, columns in TILES:
        name, tile = f"{rows}x{columns}", float(rows * columns)
        cost = f"{max(rows, columns)}x{min(rows, columns)}"
        across = work.groups * _ceil(work.columns, columns)
        blocks = across * _ceil(work.m, rows)
        candidates.append(Algorithm(name, name, cost, "tiles", blocks, tile, work.depth, np.ones(len(work.n), bool)))
        most = np.minimum(np.maximum(2 * num_sms / blocks, 1), np.maximum(work.depth / LEAST_SLICE, 1))
        slices = 2.0 ** np.floor(np.log2(np.minimum(most, MOST_SLICES)))
        partial = 2 * slices * work.m * work.columns * work.groups
        candidates.append(
            Algorithm(
                f"{name} split", "split", cost, "tiles", blocks * slices, tile, work.depth / slices,
                (slices > 1) & splits, partial,
            )
        )  # fmt: skip
        scattered = work.groups * _ceil(outputs, rows) * _ceil(channels * work.r * work.s, columns)
        candidates.append(
            Algorithm(
                f"{name} scattered", "scattered", cost, "scattered", scattered, tile, work.k / work.groups,
                (work.pass_ == DGRAD) & work.convolution, outputs * work.c * work.r * work.s,
            )
        )  # fmt: skip
    return candidates


def _direct(work: Work, num_sms: Array) -> Algorithm:
    return Algorithm(
        "direct", "direct", "direct", "direct", num_sms, 1.0, work.flops / 2 / num_sms, work.convolution
    )  # fmt: skip


def image(work: Work) -> tuple[Array, Array, Array, Array, Mask]:
    """
    Return rows and columns of the result, channels of the sum and filters of the result, for the pass of each case.

    The fifth array marks the convolutions without stride, dilation and groups.
    """
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
    candidates = []
    for outputs, taps, name in _WINOGRAD:
        pieces = work.n * _ceil(rows, outputs) * _ceil(columns, outputs)
        across, depth = np.where(work.pass_ == WGRAD, [work.c, pieces], [pieces, channels])
        usable = unit & (work.r == taps) & (work.s == taps)
        for high, wide in WINOGRAD_TILES:
            blocks = _PRODUCTS * _ceil(across, high) * _ceil(filters, wide)
            cost, tile = f"winograd {high}x{wide}", float(high * wide)
            candidates.append(Algorithm(f"{name} {high}x{wide}", name, cost, "winograd", blocks, tile, depth, usable))
    return candidates


def _fft(work: Work) -> list[Algorithm]:
    rows, columns, channels, filters, unit = image(work)
    candidates = []
    for size in _FFT_SIZES:
        inside = [np.maximum(size - taps + 1, 1) for taps in (work.r, work.s)]
        pieces = work.n * _ceil(rows, inside[0]) * _ceil(columns, inside[1])
        across, depth = np.where(work.pass_ == WGRAD, [work.c, pieces], [pieces, channels])
        blocks = size * (size // 2 + 1) * _ceil(across, _FFT_TILE) * _ceil(filters, _FFT_TILE)
        usable = unit & (work.r > 1) & (work.s > 1) & (work.r < size) & (work.s < size)
        candidates.append(
            Algorithm(
                f"fft {size}", "fft", "fft", "fft", blocks, _COMPLEX * _FFT_TILE**2, depth, usable,
                input_factor=pieces * size**2 / (work.n * work.h * work.w), filter_factor=size**2 / (work.r * work.s),
            )
        )  # fmt: skip
    return candidates


def seconds(work: Work, places: Places, constants: Mapping[str, float], candidates: Sequence[Algorithm]) -> Array:
    """
    Return the seconds of each case by each algorithm; infinite if the algorithm cannot compute the case.

        t = launch + cost * waves * tile * (depth + extra) / (peak / num_sms / 2) + (x, y and w moved) / bandwidth

    Waves are the busiest SM's blocks; a partial last wave counts `tail` of a whole one and the rest by its fill.  A
    grid of less than one wave takes `alone`, since a single block cannot hide its latencies.  Bytes are added to the
    arithmetic, not compared with it, which fits published times better.

    Args:
        work: The cases.
        places: The GPU of each case.
        constants: Constants of the model by name: see `benchmarks/fit_predictor.py`.
        candidates: The result of `algorithms` for the cases.

    Returns:
        Seconds, as an array of shape (algorithms, cases).
    """
    per_sm = places.peak / places.num_sms / 2
    x, y, w = (
        elements * places.element_bytes / places.bandwidth
        for elements in (work.input_elements, work.output_elements, work.filter_elements)
    )
    sliced = work.convolution & (work.pass_ == WGRAD)
    slower = np.select([work.pass_ == FPROP, work.pass_ == DGRAD], [1.0, constants["dgrad"]], constants["wgrad"])
    times = []
    for algorithm in candidates:

        def of(kind: str, family: str = algorithm.family) -> Array | float:
            value = constants[f"{kind} {family}"]
            own = SLICED.get(family)
            return value if own is None else np.where(sliced, constants[f"{kind} {own}"], value)

        share = algorithm.blocks / places.num_sms
        whole, tail = np.floor(share), of("tail")
        last = np.where(share > whole, tail + (1 - tail) * (share - whole), 0.0)
        waves = np.maximum(whole + last, constants["alone"])
        steps = waves * algorithm.tile * (algorithm.depth + of("extra"))
        slow = np.where(sliced, constants["wgrad winograd"], slower) if algorithm.family == "winograd" else slower
        arithmetic = constants[f"cost {algorithm.cost}"] * slow * steps / per_sm
        partial = constants["scattered" if algorithm.family == "scattered" else "partial"]
        moved = (
            of("x") * algorithm.input_factor * x
            + of("y") * y
            + of("w") * algorithm.filter_factor * w
            + partial * algorithm.partial_elements * 4 / places.bandwidth
        )
        time = of("launch") * 1e-6 + places.compute * arithmetic + places.memory * moved
        times.append(np.where(algorithm.usable, time, np.inf))
    return np.array(times)


def _ceil(extent: Array, tile: float | Array) -> Array:
    return np.ceil(extent / tile)

"""
Winograd's algorithm for 3x3 convolutions of stride 1: its products, its scratch memory, and its rounding error.

F(2x2, 3x3) computes 2 x 2 results from 16 products, F(4x4, 3x3) 4 x 4 from 36; direct sums have 36 and 144.  The
sources are kernels/winograd/; `cook_toom.cuh` has the formulas.

Transformed inputs and products are in scratch memory of at most MOST_TRANSFORMED_BYTES.  A larger batch is computed in
parts, one after the other.  So the memory plan always includes this scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache

import attrs

from cubatch.hardware.facts import Device
from cubatch.kernels.problem import Problem
from cubatch.kernels.variant import Kernel

TAPS = 3
"""Taps of the filter along each axis."""

PIECE = 4
"""Channels and filters are padded to a multiple of this."""

MOST_TRANSFORMED_BYTES = 1 << 27
"""Scratch memory of the transformed input and the products, and as much again for the transformed filter."""

MOST_LOSS = 32.0
"""
Largest accepted worst-case error in units of the direct sum's: 5 of the 24 bits of float32.

F(2x2) is within 3 units from 14 channels on, F(4x4) within 32 from 24 channels on and within 18.2 for many channels.
"""

POINTS = {2: ("0", "1", "-1"), 4: ("0", "11/16", "-11/16", "3/2", "-3/2")}
"""Interpolation points by results along an axis; infinity comes last."""

_ROUNDINGS = {2: 10, 4: 18}
"""Roundings of a result in addition to one per channel: both axes of the three transforms."""

_MOVED_SHARE = 0.75
"""Share of the data sheet's bandwidth that transforms reach; an assumption."""

_BYTES_PER_CLOCK = 10.0
"""An SM's share of the bandwidth if the data sheet's is unknown."""

_LAUNCH_CLOCKS = 4000.0
"""Clocks between the starts of two dependent launches."""

_FLOAT_BYTES = 4

Matrix = tuple[tuple[Fraction, ...], ...]


@lru_cache
def matrices(outputs: int) -> tuple[Matrix, Matrix, Matrix]:
    """
    Return A^T, G and B^T: y = A^T [(G w) * (B^T d)] are the results of a filter of three taps.

    Args:
        outputs: Results along an axis: 2 or 4.

    Example:
        >>> result, filter_, source = matrices(2)
        >>> [[str(element) for element in row] for row in filter_]
        [['-1', '0', '0'], ['1/2', '1/2', '1/2'], ['1/2', '-1/2', '1/2'], ['0', '0', '1']]
    """
    points = [Fraction(point) for point in POINTS[outputs]]
    zero, unity = Fraction(0), Fraction(1)
    results = [
        [point**power for point in points] + [unity if power == outputs - 1 else zero] for power in range(outputs)
    ]
    filters, sources = [], []
    for point in points:
        others = [other for other in points if other != point]
        distance = math.prod((point - other for other in others), start=unity)
        filters.append(tuple(point**power / distance for power in range(TAPS)))
        sources.append((*_product(others), zero))
    filters.append((zero, zero, unity))
    sources.append(_product(points))
    return tuple(map(tuple, results)), tuple(filters), tuple(sources)


def _product(roots: list[Fraction]) -> tuple[Fraction, ...]:
    """Return the coefficients of the product of (x - root), the lowest power first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted, same = [Fraction(0), *coefficients], [*coefficients, Fraction(0)]
        coefficients = [up - root * low for up, low in zip(shifted, same, strict=True)]
    return tuple(coefficients)


def roundings(outputs: int, channels: int) -> int:
    """Return the roundings on the longest way to a result that sums over `channels` channels."""
    return channels + _ROUNDINGS[outputs]


@lru_cache
def growth(outputs: int) -> float:
    """
    Return a bound of the terms of a result relative to |x| |w|; a direct sum has 1.

    It is the largest of sum_j |A_ij| |G_jk| sum_l |B_jl| over results i and taps k, along both axes.

    Example:
        >>> round(growth(2), 1), round(growth(4), 1)
        (16.0, 163.3)
    """
    result, filters, sources = matrices(outputs)
    size = [sum(map(abs, row)) for row in sources]
    along = max(
        sum(abs(a) * abs(row[tap]) * most for a, row, most in zip(line, filters, size, strict=True))
        for line in result
        for tap in range(TAPS)
    )
    return float(along) ** 2


def loss(outputs: int, channels: int) -> float:
    """
    Return the worst-case error in units of the direct sum's.

    Example:
        >>> [round(loss(outputs, 128), 1) for outputs in (2, 4)]
        [1.9, 20.7]
    """
    return growth(outputs) * roundings(outputs, channels) / (TAPS * TAPS * channels)


@attrs.frozen
class Cut:
    """
    The parts of a problem in a variant of Winograd's algorithm.

    Attributes:
        outputs: Rows and columns of a tile of results.
        rows, columns: Tiles of an image.
        tiles: Tiles of the batch.
        channels, filters: Padded channels of the sum, padded channels of the result.
        most: Most tiles in scratch memory at a time: whole blocks of the products.
        block: Tiles of a block of the products.
    """

    outputs: int
    rows: int
    columns: int
    tiles: int
    channels: int
    filters: int
    most: int
    block: int

    @property
    def points(self) -> int:
        """Number of products side by side."""
        return (self.outputs + TAPS - 1) ** 2

    @property
    def filter_floats(self) -> int:
        """Elements of the transformed filter."""
        return self.points * self.channels * self.filters

    @property
    def workspace_bytes(self) -> int:
        """Most bytes of scratch memory; it never falls as the batch grows."""
        return _FLOAT_BYTES * (self.filter_floats + min(self.most, self.tiles) * self.tile_floats)

    @property
    def tile_floats(self) -> int:
        """Elements of a transformed tile and of its products."""
        return self.points * (self.channels + self.filters)

    def parts(self) -> Iterator[tuple[int, int]]:
        """Yield the first tile and the number of tiles of each part; parts are as equal as whole blocks allow."""
        if not self.tiles:
            return
        count = -(-self.tiles // self.most)
        each = -(-self.tiles // (count * self.block)) * self.block
        for first in range(0, self.tiles, each):
            yield first, min(each, self.tiles - first)


@lru_cache(maxsize=1 << 14)
def cut(problem: Problem, kernel: Kernel) -> Cut | None:
    """
    Return the parts of a problem in a variant; None if the variant cannot compute it, or its filter is too large.

    Example:
        >>> from cubatch.kernels.variant import find
        >>> problem = Problem("conv2d_fprop", "float32", 64 * 19 * 19, 128, 9 * 128, vector=4, image=(19, 19))
        >>> parts = cut(problem, find("conv2d_fprop", "float32", tile="f4x4_128x128x8"))
        >>> parts.rows, parts.columns, parts.tiles, list(parts.parts())
        (5, 5, 1600, [(0, 1600)])
    """
    outputs, tile = kernel.winograd, kernel.tile
    if outputs is None or tile is None or problem.image is None:
        return None
    h, w = problem.image
    channels, filters = (-(-extent // PIECE) * PIECE for extent in (problem.k // TAPS**2, problem.n))
    rows, columns = -(-h // outputs), -(-w // outputs)
    points = (outputs + TAPS - 1) ** 2
    most = MOST_TRANSFORMED_BYTES // (_FLOAT_BYTES * points * (channels + filters)) // tile.m * tile.m
    if not most or _FLOAT_BYTES * points * channels * filters > MOST_TRANSFORMED_BYTES:
        return None
    return Cut(outputs, rows, columns, problem.m // (h * w) * rows * columns, channels, filters, most, tile.m)


def takes(problem: Problem, kernel: Kernel) -> bool:
    """
    Return whether a variant may compute a problem: with small enough error and memory, for any batch size.

    Example:
        >>> from cubatch.kernels.variant import find
        >>> first = Problem("conv2d_fprop", "float32", 224 * 224, 64, 9 * 3, image=(224, 224))
        >>> takes(first, find("conv2d_fprop", "float32", tile="f4x4_128x128x8"))
        False
    """
    if kernel.winograd is None:
        return True
    if problem.image is None or not problem.k:
        return False
    return loss(kernel.winograd, problem.k // TAPS**2) <= MOST_LOSS and cut(problem, kernel) is not None


def workspace_bytes(problem: Problem, kernel: Kernel) -> int:
    """Return the most bytes of scratch memory of a variant; 0 for other algorithms."""
    how = cut(problem, kernel)
    return 0 if how is None else how.workspace_bytes


def product(problem: Problem, kernel: Kernel, tiles: int | None = None) -> Problem:
    """
    Return the products of a variant, side by side, as one problem; the problem itself for other algorithms.

    Args:
        problem: The problem.
        kernel: The variant.
        tiles: Tiles of one part; None is all.

    Example:
        >>> from cubatch.kernels.variant import find
        >>> problem = Problem("conv2d_dgrad", "float32", 64 * 19 * 19, 128, 9 * 128, vector=4, image=(19, 19))
        >>> product(problem, find("conv2d_dgrad", "float32", tile="f4x4_128x128x8"))
        Problem(operation='gemm_nn', dtype='float32', m=1600, n=128, k=128, groups=36, phases=1, vector=4)
    """
    how = cut(problem, kernel)
    if how is None:
        return problem
    rows = how.tiles if tiles is None else tiles
    return Problem(kernel.entry, problem.dtype, rows, how.filters, how.channels, how.points, vector=PIECE)


def clocks(problem: Problem, kernel: Kernel, device: Device, product_clocks: Callable[[Problem], float]) -> float:
    """
    Return the clocks of all launches: the products by arithmetic or memory, and the transforms by memory.

    Args:
        problem: The problem, which the variant takes.
        kernel: The variant.
        device: The GPU; its bandwidth is used if known.
        product_clocks: Returns the clocks of a launch of products side by side.
    """
    how = cut(problem, kernel)
    if how is None:
        return math.inf
    per_clock = _bytes_per_clock(device)
    pixels, floats = how.outputs**2, how.points * (how.channels + how.filters)
    total = _LAUNCH_CLOCKS + _FLOAT_BYTES * (how.filter_floats + problem.n * problem.k) / per_clock
    for _, tiles in how.parts():
        moved = _FLOAT_BYTES * tiles / per_clock
        arithmetic = product_clocks(product(problem, kernel, tiles))
        total += 3 * _LAUNCH_CLOCKS + moved * (floats + pixels * (problem.k // TAPS**2 + problem.n))
        total += max(arithmetic, moved * floats + _FLOAT_BYTES * how.filter_floats / per_clock)
    return total


def _bytes_per_clock(device: Device) -> float:
    """Return the bytes per clock that all SMs move."""
    if device.peak_bytes_per_second is None or device.clock_hz is None:
        return _BYTES_PER_CLOCK * (device.num_sms or 1)
    return _MOVED_SHARE * device.peak_bytes_per_second / device.clock_hz

"""
Winograd's algorithm for 3x3 convolutions of stride 1: what it multiplies, what memory that takes, how exact it is.

F(2x2, 3x3) makes 2 x 2 results from 16 products, F(4x4, 3x3) 4 x 4 from 36, where the direct sum has 36 and 144.
The sources are kernels/winograd/; `cook_toom.cuh` has the formulas.

Transformed inputs and products lie in scratch memory, of at most MOST_TRANSFORMED_BYTES: a batch that needs more is
computed in parts, one after the other.  So the memory plan counts it always, and it costs no more of the largest batch
than that.
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
"""Of the filter, along each axis."""

PIECE = 4
"""Channels and filters are padded to a multiple of it."""

MOST_TRANSFORMED_BYTES = 1 << 27
"""Scratch memory of the transformed input and the products, and as much again for the transformed filter."""

MOST_LOSS = 32.0
"""
Worst-case error that is taken for speed, in units of the direct sum's: 5 of the 24 bits that float32 has.

F(2x2) is within 3 of them from 14 channels on, F(4x4) within 32 from 24 channels on and within 18.2 for many.
"""

POINTS = {2: ("0", "1", "-1"), 4: ("0", "11/16", "-11/16", "3/2", "-3/2")}
"""Where the polynomials are multiplied, by results along an axis; infinity comes last."""

_ROUNDINGS = {2: 10, 4: 18}
"""On the way to a result, beside one for each channel: both axes of the three transforms."""

_MOVED_SHARE = 0.75
"""Of the data sheet's bandwidth that transforms reach: a judgement."""

_BYTES_PER_CLOCK = 10.0
"""An SM's share of the bandwidth, where the data sheet's is not known."""

_LAUNCH_CLOCKS = 4000.0
"""Between the starts of two launches that wait for each other."""

_FLOAT_BYTES = 4

Matrix = tuple[tuple[Fraction, ...], ...]


@lru_cache
def matrices(outputs: int) -> tuple[Matrix, Matrix, Matrix]:
    """
    Give A^T, G and B^T: y = A^T [(G w) * (B^T d)] are the results of a filter of three taps.

    Args:
        outputs: Results along an axis: 2 or 4.

    Example:
        >>> result, filter_, source = matrices(2)
        >>> [[str(element) for element in row] for row in filter_]
        [['-1', '0', '0'], ['1/2', '1/2', '1/2'], ['1/2', '-1/2', '1/2'], ['0', '0', '1']]
    """
    points = [Fraction(point) for point in POINTS[outputs]]
    zero, one = Fraction(0), Fraction(1)
    results = [[point**power for point in points] + [one if power == outputs - 1 else zero] for power in range(outputs)]
    filters, sources = [], []
    for point in points:
        others = [other for other in points if other != point]
        distance = math.prod((point - other for other in others), start=one)
        filters.append(tuple(point**power / distance for power in range(TAPS)))
        sources.append((*_product(others), zero))
    filters.append((zero, zero, one))
    sources.append(_product(points))
    return tuple(map(tuple, results)), tuple(filters), tuple(sources)


def _product(roots: list[Fraction]) -> tuple[Fraction, ...]:
    """Give the coefficients of the product of (x - root), the lowest power first."""
    found = [Fraction(1)]
    for root in roots:
        found = [
            up - root * same for up, same in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)
        ]  # fmt: skip
    return tuple(found)


def roundings(outputs: int, channels: int) -> int:
    """Count the roundings on the longest way to a result that sums over so many channels."""
    return channels + _ROUNDINGS[outputs]


@lru_cache
def growth(outputs: int) -> float:
    """
    Bound how much larger than |x| |w| the terms of a result are that is summed in this way: of the direct sum 1.

    By rows: the largest of sum_j |A_ij| |G_jk| sum_l |B_jl| over results i and taps k, along both axes.

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
    Give the worst-case error in units of the direct sum's: for inputs of a size, and filters of a sum of sizes.

    Example:
        >>> [round(loss(outputs, 128), 1) for outputs in (2, 4)]
        [1.9, 20.7]
    """
    return growth(outputs) * roundings(outputs, channels) / (TAPS * TAPS * channels)


@attrs.frozen
class Cut:
    """
    How a variant cuts a problem.

    Attributes:
        outputs: Rows and columns of a tile of results.
        rows, columns: Tiles of an image.
        tiles: Tiles of the batch.
        channels, filters: That are summed over, and that are computed; padded.
        most: Tiles that are in scratch memory at a time, at most: whole blocks of the products.
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
        """Products side by side."""
        return (self.outputs + TAPS - 1) ** 2

    @property
    def filter_floats(self) -> int:
        """Elements of the transformed filter."""
        return self.points * self.channels * self.filters

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory at most: never less for a larger batch."""
        return _FLOAT_BYTES * (self.filter_floats + min(self.most, self.tiles) * self.tile_floats)

    @property
    def tile_floats(self) -> int:
        """Elements of a transformed tile and of its products."""
        return self.points * (self.channels + self.filters)

    def parts(self) -> Iterator[tuple[int, int]]:
        """Give the first tile and the number of tiles of each part: as equal as whole blocks allow."""
        if not self.tiles:
            return
        count = -(-self.tiles // self.most)
        each = -(-self.tiles // (count * self.block)) * self.block
        for first in range(0, self.tiles, each):
            yield first, min(each, self.tiles - first)


@lru_cache(maxsize=1 << 14)
def cut(problem: Problem, found: Kernel) -> Cut | None:
    """
    Say how a variant cuts a problem; None where it does not compute it, or takes too much memory for its filter.

    Args:
        problem: What is computed.
        found: The variant.

    Example:
        >>> from cubatch.kernels.variant import find
        >>> problem = Problem("conv2d_fprop", "float32", 64 * 19 * 19, 128, 9 * 128, vector=4, image=(19, 19))
        >>> variant = find("conv2d_fprop", "float32", tile="f4x4_128x128x8")
        >>> found = cut(problem, variant)
        >>> found.rows, found.columns, found.tiles, list(found.parts())
        (5, 5, 1600, [(0, 1600)])
    """
    outputs, tile = found.winograd, found.tile
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


def takes(problem: Problem, found: Kernel) -> bool:
    """
    Tell whether a variant may compute a problem: exactly enough, and in bounded memory. The batch decides nothing.

    Example:
        >>> from cubatch.kernels.variant import find
        >>> first = Problem("conv2d_fprop", "float32", 224 * 224, 64, 9 * 3, image=(224, 224))
        >>> takes(first, find("conv2d_fprop", "float32", tile="f4x4_128x128x8"))
        False
    """
    if found.winograd is None:
        return True
    if problem.image is None or not problem.k:
        return False
    return loss(found.winograd, problem.k // TAPS**2) <= MOST_LOSS and cut(problem, found) is not None


def workspace_bytes(problem: Problem, found: Kernel) -> int:
    """Count the bytes of scratch memory that a variant takes at most; 0 of one of another algorithm."""
    how = cut(problem, found)
    return 0 if how is None else how.workspace_bytes


def product(problem: Problem, found: Kernel, tiles: int | None = None) -> Problem:
    """
    Give the products that a variant makes of a problem, side by side; the problem itself where it makes none.

    Args:
        problem: What is computed.
        found: The variant.
        tiles: Of one part; None is all.

    Example:
        >>> from cubatch.kernels.variant import find
        >>> problem = Problem("conv2d_dgrad", "float32", 64 * 19 * 19, 128, 9 * 128, vector=4, image=(19, 19))
        >>> product(problem, find("conv2d_dgrad", "float32", tile="f4x4_128x128x8"))
        Problem(operation='gemm_nn', dtype='float32', m=1600, n=128, k=128, groups=36, phases=1, vector=4)
    """
    how = cut(problem, found)
    if how is None:
        return problem
    rows = how.tiles if tiles is None else tiles
    return Problem(found.entry, problem.dtype, rows, how.filters, how.channels, how.points, vector=PIECE)


def clocks(problem: Problem, found: Kernel, device: Device, product_clocks: Callable[[Problem], float]) -> float:
    """
    Count the clocks of all launches: the products as they are, or what memory takes for them, and what only moves.

    Args:
        problem: What is computed; the variant takes it.
        found: The variant.
        device: Its bandwidth counts where it is known.
        product_clocks: Gives those of a launch of products side by side.
    """
    how = cut(problem, found)
    if how is None:
        return math.inf
    per_clock = _bytes_per_clock(device)
    pixels, floats = how.outputs**2, how.points * (how.channels + how.filters)
    total = _LAUNCH_CLOCKS + _FLOAT_BYTES * (how.filter_floats + problem.n * problem.k) / per_clock
    for _, tiles in how.parts():
        moved = _FLOAT_BYTES * tiles / per_clock
        arithmetic = product_clocks(product(problem, found, tiles))
        total += 3 * _LAUNCH_CLOCKS + moved * (floats + pixels * (problem.k // TAPS**2 + problem.n))
        total += max(arithmetic, moved * floats + _FLOAT_BYTES * how.filter_floats / per_clock)
    return total


def _bytes_per_clock(device: Device) -> float:
    """Give the bytes that all SMs move in a clock."""
    if device.peak_bytes_per_second is None or device.clock_hz is None:
        return _BYTES_PER_CLOCK * (device.num_sms or 1)
    return _MOVED_SHARE * device.peak_bytes_per_second / device.clock_hz

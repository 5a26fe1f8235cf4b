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

_GROWTH = {2: 16.0, 4: 163.33}
"""
Bound of the terms of a result relative to |x| |w|, rounded up; a direct sum has 1.

It is the largest of sum_j |A_ij| |G_jk| sum_l |B_jl| over results i and taps k, along both axes, with the matrices of
`cook_toom.cuh`.
"""

_ROUNDINGS = {2: 10, 4: 18}
"""Roundings of a result in addition to one per channel: both axes of the three transforms."""

_MOVED_SHARE = 0.75
"""Share of the data sheet's bandwidth that transforms reach; an assumption."""

_BYTES_PER_CLOCK = 10.0
"""An SM's share of the bandwidth if the data sheet's is unknown."""

_LAUNCH_CLOCKS = 4000.0
"""Clocks between the starts of two dependent launches."""

_FLOAT_BYTES = 4


def roundings(outputs: int, channels: int) -> int:
    """
    Return the most roundings in a row by which a result over `channels` channels is computed.

    `outputs` is the number of rows and columns of a tile of results.
    """
    return channels + _ROUNDINGS[outputs]


def loss(outputs: int, channels: int) -> float:
    """
    Return the worst-case rounding error of Winograd's algorithm, divided by that of a direct sum over `channels`.

    `outputs` is the number of rows and columns of a tile of results.
    """
    return _GROWTH[outputs] * roundings(outputs, channels) / (TAPS * TAPS * channels)


@attrs.frozen
class Cut:
    """How a variant of Winograd's algorithm divides a problem into tiles and parts."""

    outputs: int  # rows and columns of a tile of results
    rows: int  # rows, columns: tiles of an image
    columns: int
    tiles: int  # tiles of the batch
    channels: int  # channels, filters: padded channels of the sum, padded channels of the result
    filters: int
    most: int  # most tiles in scratch memory at a time, a multiple of `block`
    block: int  # tiles of a block of the products

    @property
    def points(self) -> int:
        """Number of matrix products, one per point of a transformed tile."""
        return (self.outputs + TAPS - 1) ** 2

    @property
    def filter_floats(self) -> int:
        """Number of elements of the transformed filter."""
        return self.points * self.channels * self.filters

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the transformed filter and of the most tiles at a time; never less for a larger batch."""
        return _FLOAT_BYTES * (self.filter_floats + min(self.most, self.tiles) * self.tile_floats)

    @property
    def tile_floats(self) -> int:
        """Number of float32 elements that a transformed tile with all channels and its products take together."""
        return self.points * (self.channels + self.filters)

    def parts(self) -> Iterator[tuple[int, int]]:
        """Yield (first tile, number of tiles) of each part of the batch that fits into the scratch memory at a time."""
        if not self.tiles:
            return
        count = -(-self.tiles // self.most)
        each = -(-self.tiles // (count * self.block)) * self.block
        for first in range(0, self.tiles, each):
            yield first, min(each, self.tiles - first)


def cut(problem: Problem, kernel: Kernel) -> Cut | None:
    """
    Return how a variant of Winograd's algorithm divides a problem; None for other algorithms and problems.

    It is None too if the transformed filter, or the tiles of one block of the products, exceed MOST_TRANSFORMED_BYTES.
    """
    # Most variants are of other algorithms: hashing both records for the cache would take longer than this answer.
    return None if kernel.winograd is None or problem.image is None else _cut(problem, kernel)


@lru_cache(maxsize=1 << 14)
def _cut(problem: Problem, kernel: Kernel) -> Cut | None:
    outputs, tile = kernel.winograd, kernel.tile
    if outputs is None or tile is None or problem.image is None:  # for the type checker
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
    """Return whether a variant may run a problem: Winograd's algorithm needs enough accuracy and scratch memory."""
    if kernel.winograd is None:
        return True
    if problem.image is None or not problem.k:
        return False
    return loss(kernel.winograd, problem.k // TAPS**2) <= MOST_LOSS and cut(problem, kernel) is not None


def workspace_bytes(problem: Problem, kernel: Kernel) -> int:
    """Return the bytes of scratch memory that Winograd's algorithm needs in a variant; 0 for other algorithms."""
    how = cut(problem, kernel)
    return 0 if how is None else how.workspace_bytes


def product(problem: Problem, kernel: Kernel, tiles: int | None = None) -> Problem:
    """
    Return the products of a variant of Winograd's algorithm as one problem with groups; for others the problem itself.

    `tiles` are those of one part; None for the whole batch.
    """
    how = cut(problem, kernel)
    if how is None:
        return problem
    rows = how.tiles if tiles is None else tiles
    return Problem(kernel.entry, problem.dtype, rows, how.filters, how.channels, how.points, vector=PIECE)


def clocks(problem: Problem, kernel: Kernel, device: Device, product_clocks: Callable[[Problem], float]) -> float:
    """
    Return the predicted clock cycles of all launches of Winograd's algorithm; infinity if it cannot run the problem.

    Products are limited by arithmetic or memory, transforms by memory.

    Args:
        device: The GPU; its bandwidth is used if known.
        product_clocks: Returns the predicted clock cycles of the launch of such a problem with groups.
    """
    how = cut(problem, kernel)
    if how is None:
        return math.inf
    per_clock = _bytes_per_clock(device)
    pixels, floats = how.outputs**2, how.tile_floats
    total = _LAUNCH_CLOCKS + _FLOAT_BYTES * (how.filter_floats + problem.n * problem.k) / per_clock
    for _, tiles in how.parts():
        moved = _FLOAT_BYTES * tiles / per_clock
        arithmetic = product_clocks(product(problem, kernel, tiles))
        total += 3 * _LAUNCH_CLOCKS + moved * (floats + pixels * (problem.k // TAPS**2 + problem.n))
        total += max(arithmetic, moved * floats + _FLOAT_BYTES * how.filter_floats / per_clock)
    return total


def _bytes_per_clock(device: Device) -> float:
    if device.peak_bytes_per_second is None or device.clock_hz is None:
        return _BYTES_PER_CLOCK * (device.num_sms or 1)
    return _MOVED_SHARE * device.peak_bytes_per_second / device.clock_hz

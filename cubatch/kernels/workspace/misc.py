"""Grids and scratch memory of the kernels of kernels/misc, for the memory plan and the launches."""

from __future__ import annotations

import attrs

from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.network.layer import Layer

THREADS = 256
"""Threads of a block in kernels/misc."""

VECTOR_BYTES = 16
"""Widest load of a thread."""

_SECTOR_BYTES = 32
_BLOCKS_PER_SM = 4
_ROWS_PER_THREAD = (16, 4)
_WALKED_BLOCKS_PER_SM = 8
_LOADS = 4
_LARGEST_LANES = 32
_SUM_BYTES = 4
_MOMENTS = 3
_MOST_PARTIALS = 1024
_SLICES = 256
_ROW_BLOCKS_PER_SM = 16
_LOSS_BYTES = 8
_FLAG_BYTES = 4
_ROW_SUMS = 12 * 1024  # floats of shared memory for sums: ROW_SUMS of kernels/misc/layer_norm.cu
_LEAST_SUMMED_ROWS = 4  # of a block: its sums are then no more bytes than both inputs read again in 16 bits
_WARPS = 8  # of a block
_LEAST_TILE_ROWS = 64  # of a product that computes the sums of a norm
_ALIGNMENT = 256


@attrs.frozen
class ColumnTiles:
    """How an array (rows, channels) is divided among the blocks of a kernel: kernels/common/columns.cuh."""

    vector: int  # channels of a thread
    lanes: int  # threads side by side over the channels
    blocks: int  # blocks over the channels
    tiles: int  # blocks over the rows
    rows_per_tile: int  # rows of a block


def summed_tiles(
    rows: int, channels: int, vector: int, itemsize: int, device: Device, *, blocks_per_sm: int = _BLOCKS_PER_SM
) -> ColumnTiles:
    """
    Return how an array is divided to sum its rows: among a few blocks per SM, with equal shares of the rows.

    Args:
        channels: Elements of a row.
        vector: Elements of a load.
        blocks_per_sm: Blocks that an SM holds; at most 4, for which scratch memory is planned.

    Example:
        >>> summed_tiles(100352, 64, 4, 4, Device(name="V100", num_sms=80))
        ColumnTiles(vector=4, lanes=16, blocks=1, tiles=314, rows_per_tile=320)
    """
    lanes, blocks = _lanes(channels, vector, itemsize)
    row_lanes = THREADS // lanes
    wanted = -(-min(blocks_per_sm, _BLOCKS_PER_SM) * (device.num_sms or 1) // blocks)
    most = -(-rows // (row_lanes * _LOADS))
    share = -(-rows // max(1, min(wanted, most)))
    rows_per_tile = -(-share // row_lanes) * row_lanes
    return ColumnTiles(vector, lanes, blocks, -(-rows // max(1, rows_per_tile)), rows_per_tile)


def walked_tiles(
    rows: int, channels: int, vector: int, itemsize: int, device: Device, *, samples: int = 1
) -> ColumnTiles:
    """
    Return how an array is divided if each row is written: 16 rows per thread, or 4 if that gives few blocks per SM.

    Args:
        rows: Rows of one sample, if blocks must not span samples.
        channels: Elements of a row.
        vector: Elements of a load.
        samples: Number of arrays of this shape.

    Example:
        >>> walked_tiles(1000, 64, 4, 4, Device(name="V100", num_sms=80))
        ColumnTiles(vector=4, lanes=16, blocks=1, tiles=16, rows_per_tile=64)
    """
    lanes, blocks = _lanes(channels, vector, itemsize)
    wanted = _WALKED_BLOCKS_PER_SM * (device.num_sms or 1)
    for rows_per_thread in _ROWS_PER_THREAD:
        rows_per_tile = THREADS // lanes * rows_per_thread
        tiles = -(-rows // rows_per_tile)
        if samples * tiles * blocks >= wanted:
            break
    return ColumnTiles(vector, lanes, blocks, tiles, rows_per_tile)


def _lanes(channels: int, vector: int, itemsize: int) -> tuple[int, int]:
    """
    Return the threads that work side by side on the channels of a row, and the blocks over the channels.

    The threads are as many as possible without leaving many idle.
    """
    groups = -(-channels // vector)
    least = min(_power_of_two(groups), max(1, _SECTOR_BYTES // (vector * itemsize)))
    lanes = _LARGEST_LANES
    while lanes > least and -(-groups // lanes) * lanes * 3 > groups * 4:
        lanes //= 2
    return lanes, -(-groups // lanes)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def column_sums_workspace(rows: int, channels: int, dtype: str, device: Device) -> int:
    """Return the scratch memory of sums over rows in bytes: a partial sum per tile and channel."""
    return _most_tiles(rows, channels, dtype, device) * channels * _SUM_BYTES


def batch_norm_workspace(rows: int, channels: int, dtype: str, device: Device) -> int:
    """Return the scratch memory of batch norm in training in bytes: count, mean and squares per tile and channel."""
    tiles = _most_tiles(rows, channels, dtype, device)
    return tiles * channels * _MOMENTS * _SUM_BYTES + batch_norm_finish_workspace(tiles, channels)


def batch_norm_finish_workspace(tiles: int, channels: int) -> int:
    """Return the bytes of scratch memory for merging the moments of tiles: 0 unless there are very many tiles."""
    return merged_tiles(tiles)[0] * channels * _MOMENTS * _SUM_BYTES


def merged_tiles(tiles: int) -> tuple[int, int]:
    """Return the number of groups into which tiles are merged first, and the tiles per group; (0, 0) for few tiles."""
    if tiles <= _MOST_PARTIALS:
        return 0, 0
    per_slice = -(-tiles // _SLICES)
    return -(-tiles // per_slice), per_slice


def batch_norm_backward_workspace(rows: int, channels: int, dtype: str, device: Device) -> int:
    """Return the scratch memory of batch norm's gradient in bytes: two sums per tile and two means, per channel."""
    return 2 * (_most_tiles(rows, channels, dtype, device) + 1) * channels * _SUM_BYTES


def norm_sums_workspace(rows: int, channels: int, dtype: str, device: Device) -> int:
    """
    Return the scratch bytes of a batch norm's sums in the product next to it, enough for each pass: a multiple of 256.

    The tiles of a product with sums have at least 64 rows.  If its variant computes none, the norm's own kernels use
    the memory for their sums.
    """
    tiles = product_tiles(rows)
    behind = tiles * _MOMENTS * channels * _SUM_BYTES + batch_norm_finish_workspace(tiles, channels)
    before = 2 * (tiles + 1) * channels * _SUM_BYTES + column_sums_workspace(tiles, 2 * channels, "float32", device)
    own = max(
        batch_norm_workspace(rows, channels, dtype, device),
        batch_norm_backward_workspace(rows, channels, dtype, device),
    )
    return -(-max(behind, before, own) // _ALIGNMENT) * _ALIGNMENT


def product_tiles(rows: int) -> int:
    """Return the most tiles for which a product with `rows` rows writes sums: one for each 64 rows."""
    return -(-rows // _LEAST_TILE_ROWS)


def layer_scale_backward_workspace(rows: int, channels: int, dtype: str, device: Device) -> int:
    """Return the scratch bytes of a layer scale's gradient: for each channel, 2 sums per tile and 3 further numbers."""
    return batch_norm_backward_workspace(rows, channels, dtype, device) + channels * _SUM_BYTES


def _most_tiles(rows: int, channels: int, dtype: str, device: Device) -> int:
    """Return the number of tiles into which rows are divided, the larger one for aligned or unaligned addresses."""
    itemsize = BYTES_PER_ELEMENT[dtype]
    return max(summed_tiles(rows, channels, vector, itemsize, device).tiles for vector in (1, VECTOR_BYTES // itemsize))


def row_lanes(rows: int, classes: int, device: Device) -> int:
    """
    Return the number of threads that share a row of scores: up to a warp; the whole block if rows are long or few.

    Example:
        >>> device = Device(name="V100", num_sms=80)
        >>> row_lanes(10**6, 10, device), row_lanes(10**6, 1000, device), row_lanes(256, 1000, device)
        (16, 32, 256)
    """
    is_long = classes > THREADS * _LOADS
    is_few = classes >= THREADS and rows * _LARGEST_LANES < THREADS * _BLOCKS_PER_SM * (device.num_sms or 1)
    return THREADS if is_long or is_few else min(_LARGEST_LANES, _power_of_two(classes))


def row_blocks(rows: int, classes: int, device: Device) -> int:
    """Return the number of blocks of a kernel over rows of scores."""
    at_once = THREADS // row_lanes(rows, classes, device)
    return min(-(-rows // at_once), _ROW_BLOCKS_PER_SM * (device.num_sms or 1))


def summed_rows(
    rows: int, channels: int, vector: int, device: Device, *, blocks_per_sm: int = _BLOCKS_PER_SM
) -> tuple[int, int]:
    """
    Return the threads that share a row in the gradient of a layer norm, and the blocks that also sum over rows.

    Each row that a block has at a time has sums of its own in shared memory, two for each channel. If they do not fit,
    the block has one row at a time. If the sums of one row do not fit either, other kernels sum, and the result has 0
    blocks.

    Args:
        rows: Number of rows.
        channels: Elements of a row.
        vector: Elements of a load.
        blocks_per_sm: Blocks that an SM holds; at most 4, for which scratch memory is planned.

    Example:
        >>> device = Device(name="H200", num_sms=132)
        >>> [summed_rows(25216, channels, 8, device) for channels in (192, 768, 1024, 8192)]
        [(32, 528), (32, 528), (256, 528), (32, 0)]
    """
    lanes = row_lanes(rows, channels // vector, device)
    if not _sums_fit(channels):
        return lanes, 0
    threads = lanes if 2 * channels * (THREADS // lanes) <= _ROW_SUMS else THREADS
    most = min(blocks_per_sm, _BLOCKS_PER_SM) * (device.num_sms or 1)
    return threads, min(-(-rows // max(THREADS // threads, _LEAST_SUMMED_ROWS)), most)


def _sums_fit(channels: int) -> bool:
    return 2 * channels <= _ROW_SUMS - _WARPS


def gradients_at_once(layer: Layer) -> bool:
    """
    Return whether one pass over a layer's arrays computes the gradients of its input and of its parameters.

    This needs a layer type with such a kernel, and shared memory for the sums of a row of its channels.  Of longer rows
    a launch of its own sums, for which input and gradient are read a second time.

    Example:
        >>> from cubatch.network.layers import LayerNorm
        >>> [gradients_at_once(LayerNorm(h=1, w=1, c=channels)) for channels in (6140, 6141)]
        [True, False]
    """
    return layer.gradients_at_once and _sums_fit(layer.input_shape[2])


def layer_norm_backward_workspace(rows: int, channels: int, dtype: str, device: Device) -> int:
    """Return the scratch memory of layer norm's gradient in bytes: two sums per block and two means, per channel."""
    _, blocks = summed_rows(rows, channels, 1, device)  # single elements need the most blocks
    if not blocks:
        return batch_norm_backward_workspace(rows, channels, dtype, device)
    return 2 * (blocks + 1) * channels * _SUM_BYTES


def softmax_cross_entropy_workspace(rows: int, classes: int, device: Device) -> int:
    """Return the scratch memory of the loss in bytes: a float64 sum per block."""
    return row_blocks(rows, classes, device) * _LOSS_BYTES


def loss_scale_workspace(count: int, dtype: str) -> int:
    """Return the bytes of scratch memory for finding infinite or NaN gradients, `count` in all: a flag per block."""
    return element_blocks(count, BYTES_PER_ELEMENT[dtype]) * _FLAG_BYTES


def element_blocks(count: int, itemsize: int) -> int:
    """
    Return the number of blocks of an elementwise kernel for `count` elements of `itemsize` bytes.

    kernels/common/elements.cuh has the ELEMENTS of a block.
    """
    return -(-count // (THREADS * _LOADS * (VECTOR_BYTES // itemsize)))

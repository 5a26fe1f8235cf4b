"""Grids and scratch memory of the kernels of kernels/depthwise, for the memory plan and the launches."""

from __future__ import annotations

import functools

import attrs

from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.kernels.resources import resident_blocks
from cubatch.kernels.variant import Kernel, find
from cubatch.kernels.workspace.misc import VECTOR_BYTES
from cubatch.network.windows import ConvShape

DEPTHWISE_THREADS = 128
"""Threads of a block in kernels/depthwise."""

DEPTHWISE_COLUMNS = 4
"""Columns of outputs in a strip."""

REDUCE_CHANNELS = 16
"""Channels of a block that adds up partial sums: kernels/depthwise/scalar.cu."""

LIMIT = 1 << 31
"""Elements of an image are counted in 32 bits."""

_MOST_SLABS = 1 << 16
_SUM_BYTES = 4
_STRIPS_PER_SM = 512
_SHORT_STRIP, _SHORTEST_STRIP = 8, 2
_VECTORS = {25: 4, 49: 2}  # channels of a thread, by taps, if registers do not suffice for 16 bytes
_SUMS_VECTORS = {9: 4, 25: 2, 49: 1}  # the same for the filter gradient, which has a sum per tap
_WIDEST_SLAB, _NARROWEST_SLAB = 64, 8


def supports(shape: ConvShape) -> bool:
    """Return whether the kernels of kernels/depthwise can compute a convolution: 3x3, 5x5 or 7x7, stride 1 or 2."""
    v, h, c = shape.vertical, shape.horizontal, shape.c
    return (
        shape.is_depthwise
        and (v.taps, v.stride, v.step) == (h.taps, h.stride, h.step)
        and v.taps in {3, 5, 7}
        and v.stride in {1, 2}
        and v.step == 1
        and max(h.size, h.out) * c < LIMIT
        and c < _MOST_SLABS * REDUCE_CHANNELS
    )


@attrs.frozen
class DepthwiseSums:
    """The grid of a depthwise filter gradient."""

    vector: int  # channels of a thread
    strip_rows: int  # rows of a strip of an image
    slabs: int  # blocks over the channels
    slab_vectors: int  # channel vectors of a block
    blocks: int  # blocks over the strips; each writes one partial result


def depthwise_vector(taps: int, itemsize: int) -> int:
    """
    Return the channels that a thread computes in fprop and dgrad: 16 bytes of them, or fewer to save registers.

    Example:
        >>> depthwise_vector(9, 2), depthwise_vector(25, 2), depthwise_vector(49, 2)
        (8, 4, 2)
    """
    return _VECTORS.get(taps, VECTOR_BYTES // itemsize)


def depthwise_strip_rows(rows: int, threads: int, device: Device) -> int:
    """
    Return the rows of an image that a thread computes: as many as leave enough threads to fill the device.

    There would be `threads` if each computed all rows. Strips are as many as fill its SMs, or more to share the work
    evenly if each has 8 rows.
    """
    enough = _STRIPS_PER_SM * (device.num_sms or 1)
    filling = min(-(-enough // max(1, threads)), -(-rows // _SHORTEST_STRIP))
    balancing = min(-(-4 * enough // max(1, threads)), rows // _SHORT_STRIP)
    return -(-rows // max(1, filling, balancing))


def sums_kernel(shape: ConvShape, vector: int, dtype: str) -> Kernel:
    """Return the kernel of a depthwise filter gradient that loads `vector` channels; "tf32" is stored as float32."""
    stored = "float32" if dtype == "tf32" else dtype
    if vector == 1:
        return find("depthwise_wgrad_each", stored)
    return find(f"depthwise_wgrad_s{shape.vertical.stride}", stored, FILTER=shape.vertical.taps)


def depthwise_sums(shape: ConvShape, samples: int, vector: int, dtype: str, device: Device) -> DepthwiseSums:
    """
    Return the grid of a depthwise filter gradient: blocks that the SMs hold, each with an even share of the strips.

    Args:
        vector: Channels of a load of fprop and dgrad, an upper limit for a thread; 1 for the scalar kernel.
    """
    resident = resident_blocks(sums_kernel(shape, vector, dtype), device.compute_capability)
    vector = min(vector, _SUMS_VECTORS[shape.taps])
    vectors, columns = -(-shape.c // vector), -(-shape.horizontal.out // DEPTHWISE_COLUMNS)
    strip_rows = depthwise_strip_rows(shape.vertical.out, samples * columns * vectors, device)
    slabs, slab_vectors = _even_slab(vectors)
    items = samples * columns * -(-shape.vertical.out // strip_rows)
    blocks = min(-(-items // (DEPTHWISE_THREADS // slab_vectors)), -(-resident * (device.num_sms or 1) // slabs))
    return DepthwiseSums(vector, strip_rows, slabs, slab_vectors, blocks)


@functools.lru_cache(maxsize=256)
def _even_slab(vectors: int) -> tuple[int, int]:
    """Return the number of slabs and the channel vectors per slab that leave the fewest threads and vectors idle."""
    best = (0.0, 0, 0)
    for slabs in range(-(-vectors // _WIDEST_SLAB), -(-vectors // _NARROWEST_SLAB) + 1):
        wide = -(-vectors // slabs)
        if slabs > 1 and wide < _NARROWEST_SLAB:
            continue
        used = vectors / (slabs * wide) * (DEPTHWISE_THREADS // wide * wide)
        best = max(best, (used, wide, slabs))
    return best[2], best[1]


def depthwise_wgrad_workspace(shape: ConvShape, samples: int, dtype: str, device: Device) -> int:
    """Return the bytes of scratch memory of a depthwise filter gradient: partial sums per block, tap and channel."""
    vectors = {1, depthwise_vector(shape.taps, BYTES_PER_ELEMENT[dtype])}
    blocks = max(depthwise_sums(shape, samples, vector, dtype, device).blocks for vector in vectors)
    return blocks * (shape.taps + 1) * shape.c * _SUM_BYTES

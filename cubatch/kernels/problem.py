"""A pass of a layer as a problem of the tiled kernels: a matrix product or a convolution."""

from __future__ import annotations

from functools import lru_cache

import attrs

from cubatch.hardware.facts import BYTES_PER_ELEMENT
from cubatch.kernels.padding import widened
from cubatch.kernels.tensor_map import can_gather, gathered
from cubatch.kernels.workspace import depthwise_grid
from cubatch.kernels.workspace.misc import VECTOR_BYTES
from cubatch.network.layer import Layer
from cubatch.network.passes import Pass, product_extents
from cubatch.network.windows import ConvShape


@lru_cache(maxsize=1 << 14, typed=True)  # typed: NumPy integers equal ints but are not JSON
def problem_of(layer: Layer, pass_: Pass, batch_size: int, dtype: str) -> Problem | None:
    """
    Return the matrix product or convolution of a layer's pass; None if the tiled kernels do not compute it.

    A convolution over three channels reads the padded batch (see `padding`).  Attention is represented by the
    projection to queries, keys and values, its largest tiled product.
    """
    layer = tiled(layer)
    if (shape := layer.convolution) is not None:
        if depthwise_grid.supports(shape):
            return None
        if pass_ is not Pass.DGRAD:
            shape = widened(shape)
        vector = _vector_of(pass_, dtype, shape.c // shape.groups, shape.k // shape.groups)
        return conv2d_problem(pass_, shape, batch_size, dtype, vector)
    if layer.products_in_turn or not (gemms := layer.gemms(pass_, batch_size)):
        return None
    (product,), channels = gemms, layer.product_channels
    vector = _vector_of(pass_, dtype, channels["c"], channels["k"])
    return Problem(f"gemm_{pass_.layout}", dtype, product.m, product.n, product.k, vector=vector)


def tiled(layer: Layer) -> Layer:
    """Return the layer that the tiled kernels run in place of a layer: attention's first projection, else itself."""
    return layer.projections[0] if layer.projections else layer


_NARROWEST = 4


def vectors(dtype: str) -> tuple[int, ...]:
    """
    Return the vector widths of the kernels for a dtype in elements, widest first: those of 16 bytes, 4, and 1.

    Example:
        >>> vectors("float16"), vectors("float32")
        ((8, 4, 1), (4, 1))
    """
    widest = VECTOR_BYTES // BYTES_PER_ELEMENT[dtype]
    return tuple(sorted({widest, _NARROWEST, 1}, reverse=True))


def widest_vector(dtype: str, *extents: int) -> int:
    """
    Return the widest of the `vectors` of a dtype, in elements, that divides all extents.

    Example:
        100 is no multiple of 8, and 6 is none of 4; no kernel has vectors of 2.

        >>> widest_vector("float16", 64, 100), widest_vector("float16", 64), widest_vector("tf32", 6)
        (4, 8, 1)
    """
    return next(vector for vector in vectors(dtype) if all(extent % vector == 0 for extent in extents))


def _vector_of(pass_: Pass, dtype: str, c: int, k: int) -> int:
    """
    Return the widest load, in elements, for `c` input and `k` output channels per group.

    The forward pass loads along rows of c only, so that only c must be a multiple.
    """
    return widest_vector(dtype, *((c,) if pass_ is Pass.FPROP else (c, k)))


def conv2d_problem(pass_: Pass, shape: ConvShape, samples: int, dtype: str, vector: int) -> Problem:
    """
    Return a pass of a convolution as a matrix product or convolution of the tiled kernels.

    `vector` is the widest load in elements.
    """
    v, h, groups = shape.vertical, shape.horizontal, shape.groups
    c, k = shape.c // groups, shape.k // groups
    # Phases of a strided input gradient share one launch, with the grid of the largest phase.
    phases = v.stride * h.stride if pass_ is Pass.DGRAD else 1
    inputs = -(-v.size // v.stride) * -(-h.size // h.stride)
    m, n, gemm_k = product_extents(
        pass_, outputs=samples * shape.pixels, inputs=samples * inputs, c=c, k=k, taps=shape.taps
    )
    gemm_k = -(-gemm_k // phases)
    if v.is_identity and h.is_identity and groups == 1:
        return Problem(f"gemm_{pass_.layout}", dtype, m, n, gemm_k, vector=vector)
    operation, tap_channels = f"conv2d_{pass_.value}", gathered(shape)[0].c // groups if pass_ is Pass.WGRAD else 0
    copies = can_gather(operation, shape, samples)
    image = None
    if shape.is_plain_3x3 and pass_ is not Pass.WGRAD and dtype == "float32":
        image = (v.out, h.out) if pass_ is Pass.FPROP else (v.size, h.size)
    return Problem(operation, dtype, m, n, gemm_k, groups, phases, vector, copies, tap_channels, image)


@attrs.frozen
class Problem:
    """A matrix product or convolution that one launch of a tiled kernel computes."""

    operation: str  # "conv2d_fprop", "gemm_nt", ...
    dtype: str  # storage of the elements; "tf32" if float32 elements may be multiplied as tf32
    m: int  # m, n, k: extents of the product per group and phase; with phases the largest m and the mean k
    n: int
    k: int
    groups: int = 1  # groups of channels
    phases: int = 1  # phases of a strided gradient
    vector: int = 1  # widest load that extents and addresses allow, in elements
    # whether Hopper's copy engine can gather the operands: see `tensor_map.can_gather`
    tensor_copies: bool = attrs.field(default=True, repr=False)
    # columns that belong to one tap in a filter's gradient, as `tensor_map.gathered` joins taps, else 0. A tensor map's
    # box of BOX_CHANNELS holds columns of one tap only
    tap_channels: int = attrs.field(default=0, repr=False)
    # rows and columns of an image of the result, if Winograd's algorithm can compute it: a 3x3 convolution of stride 1
    # in float32. Otherwise None
    image: tuple[int, int] | None = attrs.field(default=None, repr=False)

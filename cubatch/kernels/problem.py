"""A pass of a layer as the hand-written kernels see it: a matrix product or a convolution."""

from __future__ import annotations

from functools import lru_cache

import attrs

from cubatch.hardware.facts import BYTES_PER_ELEMENT
from cubatch.kernels.tensor_map import can_gather
from cubatch.kernels.workspace import depthwise
from cubatch.kernels.workspace.misc import VECTOR_BYTES
from cubatch.network.layer import Layer
from cubatch.network.layers import Conv2d, Linear
from cubatch.network.passes import Pass
from cubatch.network.windows import ConvShape, conv_shape

_PRODUCTS = {Pass.FPROP: "gemm_nt", Pass.DGRAD: "gemm_nn", Pass.WGRAD: "gemm_tn"}


@lru_cache(maxsize=1 << 14, typed=True)  # NumPy's integers equal ours and are no JSON
def problem_of(layer: Layer, pass_: Pass, batch_size: int, dtype: str) -> Problem | None:
    """
    Describe a pass of a layer as the tiled kernels see it; None for one that they do not run.

    Args:
        layer: The layer.
        pass_: Which of its passes.
        batch_size: Samples.
        dtype: Storage of the elements, or "tf32".

    Example:
        >>> problem_of(Linear(c=512, k=10), Pass.FPROP, 32, "float32")
        Problem(operation='gemm_nt', dtype='float32', m=32, n=10, k=512, groups=1, phases=1, vector=4)
    """
    if isinstance(layer, Conv2d):
        shape = conv_shape_of(layer)
        if depthwise.supports(shape):
            return None
        vector = widest_vector(dtype, shape.c // layer.groups, shape.k // layer.groups)
        return conv2d_problem(f"conv2d_{pass_.value}", shape, batch_size, dtype, vector)
    if isinstance(layer, Linear):
        (product,) = layer.gemms(pass_, batch_size)
        (k, c), operation = layer.parameter_shapes["w"], _PRODUCTS[pass_]
        # Gradients read rows of k too.
        vector = widest_vector(dtype, *((c,) if pass_ is Pass.FPROP else (c, k)))
        return Problem(operation, dtype, product.m, product.n, product.k, vector=vector)
    return None


def conv_shape_of(layer: Conv2d) -> ConvShape:
    """Window geometry of a convolution whose input extents are known."""
    filters = layer.parameter_shapes["w"]
    return conv_shape(layer.input_shape, filters, layer.stride, layer.pad, layer.dilation, layer.groups)


_NARROWEST = 4


def vectors(dtype: str) -> tuple[int, ...]:
    """
    List the loads that the kernels have for a dtype, widest first: of 16 bytes, of 4 elements, of one.

    Example:
        >>> vectors("float16"), vectors("float32")
        ((8, 4, 1), (4, 1))
    """
    widest = VECTOR_BYTES // BYTES_PER_ELEMENT[dtype]
    return tuple(sorted({widest, _NARROWEST, 1}, reverse=True))


def widest_vector(dtype: str, *extents: int) -> int:
    """
    Give the widest of them that divides some extents.

    Example:
        >>> widest_vector("float16", 64, 100), widest_vector("float16", 64), widest_vector("tf32", 6)
        (4, 8, 1)
    """
    return next(vector for vector in vectors(dtype) if all(extent % vector == 0 for extent in extents))


def conv2d_problem(operation: str, shape: ConvShape, samples: int, dtype: str, vector: int) -> Problem:
    """
    Describe one pass of a convolution as a matrix product.

    Args:
        operation: "conv2d_fprop", "conv2d_dgrad" or "conv2d_wgrad".
        shape: The convolution.
        samples: Samples it is handed.
        dtype: Storage of the elements.
        vector: Widest load that extents and addresses allow, in elements.

    Example:
        >>> from cubatch.network.windows import conv_shape
        >>> shape = conv_shape((7, 7, 64), (32, 1, 1, 64), (1, 1), (0,) * 4, (1, 1), 1)
        >>> conv2d_problem("conv2d_wgrad", shape, 2, "float32", 4)
        Problem(operation='gemm_tn', dtype='float32', m=32, n=64, k=98, groups=1, phases=1, vector=4)
    """
    v, h, groups = shape.vertical, shape.horizontal, shape.groups
    c, k = shape.c // groups, shape.k // groups
    pixels = samples * shape.pixels
    phases = 1
    if operation == "conv2d_fprop":
        m, n, gemm_k = pixels, k, shape.taps * c
    elif operation == "conv2d_wgrad":
        m, n, gemm_k = k, shape.taps * c, pixels
    else:
        phases = v.stride * h.stride
        m, n = samples * -(-v.size // v.stride) * -(-h.size // h.stride), c
        gemm_k = -(-shape.taps * k // phases)
    if v.is_identity and h.is_identity and groups == 1:
        operation = {"conv2d_fprop": "gemm_nt", "conv2d_dgrad": "gemm_nn", "conv2d_wgrad": "gemm_tn"}[operation]
        return Problem(operation, dtype, m, n, gemm_k, vector=vector)
    tap_channels = c if operation == "conv2d_wgrad" else 0
    copies = can_gather(operation, shape, samples)
    return Problem(operation, dtype, m, n, gemm_k, groups, phases, vector, copies, tap_channels)


@attrs.frozen
class Problem:
    """
    One launch of a tiled kernel, as a matrix product.

    Attributes:
        operation: "conv2d_fprop", "gemm_nt", ...
        dtype: Storage of the elements; "tf32" where float32 may be multiplied as that.
        m, n, k: Extents of the product, per group and phase; of phases the largest m and the mean k.
        groups: Groups of channels.
        phases: Phases of a strided gradient.
        vector: Widest load that extents and addresses allow, in elements.
        tensor_copies: Whether Hopper's copy engine can gather the operands: see `tensor_map.can_gather`.
        tap_channels: Of a filter's gradient, the columns of one tap; 0 of other problems. A tensor map's box of
            BOX_CHANNELS holds those of one tap only.
    """

    operation: str
    dtype: str
    m: int
    n: int
    k: int
    groups: int = 1
    phases: int = 1
    vector: int = 1
    tensor_copies: bool = attrs.field(default=True, repr=False)
    tap_channels: int = attrs.field(default=0, repr=False)

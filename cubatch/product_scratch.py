"""
Passes of layers as the matrix products of kernels/simt, and the scratch memory of those that are split.

Pure numbers, for the memory plan and the launches alike.
"""

from __future__ import annotations

from cubatch.hardware import BYTES_PER_ELEMENT, Device
from cubatch.kernel_scratch import VECTOR_BYTES, column_sums_workspace
from cubatch.tensor_map import can_gather
from cubatch.variants import Problem, fitting, most_partial_bytes, transposed_bytes
from cubatch.windows import ConvShape

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


def product_workspace(problem: Problem, device: Device) -> int:
    """
    Count the bytes for the slices of a split matrix product and a transposed operand, whichever variant is chosen.

    It is what splitting may take at most, not what it takes at this size: larger batches are split less, and a
    plan that shrank as the batch grew would have no largest batch.

    Args:
        problem: The product, with the widest load that its extents allow.
        device: Where; its compute capability must be known.

    Example:
        >>> v100 = Device(name="V100", compute_capability=(7, 0), num_sms=80)
        >>> product_workspace(Problem("gemm_nt", "float32", 8192, 8192, 64, vector=4), v100)
        0
    """
    found = fitting(problem, device)
    return max(most_partial_bytes(problem, one) + transposed_bytes(problem, one) for one in found)


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
        >>> from cubatch.windows import conv_shape
        >>> shape = conv_shape((7, 7, 64), (32, 1, 1, 64), (1, 1), (0,) * 4, (1, 1), 1)
        >>> conv2d_problem("conv2d_wgrad", shape, 2, "float32", 4)
        Problem(operation='gemm_tn', dtype='float32', m=32, n=64, k=98, groups=1, phases=1, vector=4)
    """
    v, h, groups = shape.vertical, shape.horizontal, shape.groups
    c, k = shape.c // groups, shape.k // groups
    pixels = samples * shape.pixels
    phases = 1
    if operation == "conv2d_fprop":
        m, n, deep = pixels, k, shape.taps * c
    elif operation == "conv2d_wgrad":
        m, n, deep = k, shape.taps * c, pixels
    else:
        phases = v.stride * h.stride
        m, n = samples * -(-v.size // v.stride) * -(-h.size // h.stride), c
        deep = -(-shape.taps * k // phases)
    if v.is_identity and h.is_identity and groups == 1:
        operation = {"conv2d_fprop": "gemm_nt", "conv2d_dgrad": "gemm_nn", "conv2d_wgrad": "gemm_tn"}[operation]
        return Problem(operation, dtype, m, n, deep, vector=vector)
    tap_channels = c if operation == "conv2d_wgrad" else 0
    copies = can_gather(operation, shape, samples)
    return Problem(operation, dtype, m, n, deep, groups, phases, vector, copies, tap_channels)


def conv2d_workspace(shape: ConvShape, samples: int, dtype: str, device: Device) -> int:
    """
    Count the bytes for a forward convolution.

    Example:
        >>> from cubatch.windows import conv_shape
        >>> shape = conv_shape((7, 7, 512), (512, 3, 3, 512), (1, 1), (1,) * 4, (1, 1), 1)
        >>> conv2d_workspace(shape, 1, "float32", Device(name="V100", compute_capability=(7, 0), num_sms=80)) > 0
        True
    """
    return _conv2d_workspace("conv2d_fprop", shape, samples, dtype, device)


def conv2d_dgrad_workspace(shape: ConvShape, samples: int, dtype: str, device: Device) -> int:
    """Count the bytes for the gradient by a convolution's input."""
    return _conv2d_workspace("conv2d_dgrad", shape, samples, dtype, device)


def conv2d_wgrad_workspace(shape: ConvShape, samples: int, dtype: str, device: Device) -> int:
    """Count the bytes for the gradients by a convolution's filter and bias, one after the other."""
    return max(
        _conv2d_workspace("conv2d_wgrad", shape, samples, dtype, device),
        column_sums_workspace(samples * shape.pixels, shape.k, dtype, device),
    )


def _conv2d_workspace(operation: str, shape: ConvShape, samples: int, dtype: str, device: Device) -> int:
    problems = (conv2d_problem(operation, shape, samples, dtype, vector) for vector in vectors(dtype))
    return max(product_workspace(problem, device) for problem in problems)


def linear_workspace(rows: int, c: int, k: int, dtype: str, device: Device) -> int:
    """
    Count the bytes for a linear layer on so many positions.

    Example:
        >>> linear_workspace(1, 4096, 1000, "float32", Device(name="V100", compute_capability=(7, 0), num_sms=80)) > 0
        True
    """
    return _gemm_workspace("gemm_nt", rows, k, c, dtype, device)


def linear_dgrad_workspace(rows: int, c: int, k: int, dtype: str, device: Device) -> int:
    """Count the bytes for the gradient by a linear layer's input."""
    return _gemm_workspace("gemm_nn", rows, c, k, dtype, device)


def linear_wgrad_workspace(rows: int, c: int, k: int, dtype: str, device: Device) -> int:
    """Count the bytes for the gradients by a linear layer's filter and bias, one after the other."""
    return max(
        _gemm_workspace("gemm_tn", k, c, rows, dtype, device), column_sums_workspace(rows, k, dtype, device)
    )  # fmt: skip


def _gemm_workspace(operation: str, m: int, n: int, k: int, dtype: str, device: Device) -> int:
    problems = (Problem(operation, dtype, m, n, k, vector=vector) for vector in vectors(dtype))
    return max(product_workspace(problem, device) for problem in problems)

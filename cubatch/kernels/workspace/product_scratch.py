"""
Passes of layers as the matrix products of kernels/simt, and the scratch memory of those that are split.

Pure numbers, for the memory plan and the launches alike.
"""

from __future__ import annotations

from cubatch.hardware.facts import Device
from cubatch.kernels import winograd_plan
from cubatch.kernels.padding import filter_bytes, widened
from cubatch.kernels.problem import Problem, conv2d_problem, vectors
from cubatch.kernels.ranking import fitting, most_partial_bytes, transposed_bytes
from cubatch.kernels.workspace.misc import column_sums_workspace
from cubatch.network.passes import Pass, product_extents
from cubatch.network.windows import ConvShape


def product_workspace(problem: Problem, device: Device) -> int:
    """
    Count the bytes for a split product's slices, transposed operands and tiles, whichever variant is chosen.

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
    return max(
        most_partial_bytes(problem, one) + transposed_bytes(problem, one) + winograd_plan.workspace_bytes(problem, one)
        for one in found
    )


def conv2d_workspace(shape: ConvShape, samples: int, dtype: str, device: Device) -> int:
    """
    Count the bytes for a forward convolution.

    Example:
        >>> from cubatch.network.windows import conv_shape
        >>> shape = conv_shape((7, 7, 512), (512, 3, 3, 512), (1, 1), (1,) * 4, (1, 1), 1)
        >>> conv2d_workspace(shape, 1, "float32", Device(name="V100", compute_capability=(7, 0), num_sms=80)) > 0
        True
    """
    return _conv2d_workspace(Pass.FPROP, shape, samples, dtype, device)


def conv2d_dgrad_workspace(shape: ConvShape, samples: int, dtype: str, device: Device) -> int:
    """Count the bytes for the gradient by a convolution's input."""
    return _conv2d_workspace(Pass.DGRAD, shape, samples, dtype, device)


def conv2d_wgrad_workspace(shape: ConvShape, samples: int, dtype: str, device: Device) -> int:
    """Count the bytes for the gradients by a convolution's filter and bias, one after the other."""
    return max(
        _conv2d_workspace(Pass.WGRAD, shape, samples, dtype, device),
        column_sums_workspace(samples * shape.pixels, shape.k, dtype, device),
    )


def _conv2d_workspace(pass_: Pass, shape: ConvShape, samples: int, dtype: str, device: Device) -> int:
    def most(shape: ConvShape) -> int:
        problems = (conv2d_problem(pass_, shape, samples, dtype, vector) for vector in vectors(dtype))
        return max(product_workspace(problem, device) for problem in problems)

    beside = 0 if pass_ is Pass.DGRAD else filter_bytes(shape, dtype)
    return max(most(shape), beside + most(widened(shape))) if beside else most(shape)


def linear_workspace(rows: int, c: int, k: int, dtype: str, device: Device) -> int:
    """
    Count the bytes for a linear layer on so many positions.

    Example:
        >>> linear_workspace(1, 4096, 1000, "float32", Device(name="V100", compute_capability=(7, 0), num_sms=80)) > 0
        True
    """
    return _linear_workspace(Pass.FPROP, rows, c, k, dtype, device)


def linear_dgrad_workspace(rows: int, c: int, k: int, dtype: str, device: Device) -> int:
    """Count the bytes for the gradient by a linear layer's input."""
    return _linear_workspace(Pass.DGRAD, rows, c, k, dtype, device)


def linear_wgrad_workspace(rows: int, c: int, k: int, dtype: str, device: Device) -> int:
    """Count the bytes for the gradients by a linear layer's filter and bias, one after the other."""
    return max(
        _linear_workspace(Pass.WGRAD, rows, c, k, dtype, device), column_sums_workspace(rows, k, dtype, device)
    )  # fmt: skip


def _linear_workspace(pass_: Pass, rows: int, c: int, k: int, dtype: str, device: Device) -> int:
    extents = product_extents(pass_, outputs=rows, inputs=rows, c=c, k=k)
    problems = (Problem(f"gemm_{pass_.layout}", dtype, *extents, vector=vector) for vector in vectors(dtype))
    return max(product_workspace(problem, device) for problem in problems)

"""Scratch memory of matrix products, for the memory plan and the launches."""

from __future__ import annotations

import attrs

from cubatch.hardware.facts import Device
from cubatch.kernels import winograd_plan
from cubatch.kernels.padding import filter_bytes, widened
from cubatch.kernels.problem import Problem, conv2d_problem, vectors
from cubatch.kernels.ranking import fitting, most_partial_bytes, transposed_bytes
from cubatch.kernels.transposing import may_transpose, operand_bytes
from cubatch.kernels.workspace.misc import column_sums_workspace
from cubatch.network.passes import Pass, product_extents
from cubatch.network.windows import ConvShape


def product_workspace(problem: Problem, device: Device) -> int:
    """
    Return the most bytes of scratch memory that any variant needs for a product, with the widest load of its extents.

    Scratch memory holds partial sums of slices of gemm_k, transposed operands and Winograd tiles.  It suffices for
    every smaller batch too. Larger batches are split into fewer slices, and a plan that shrank as the batch grew would
    have no largest batch.
    """
    needed = max(
        most_partial_bytes(problem, kernel)
        + transposed_bytes(problem, kernel)
        + winograd_plan.workspace_bytes(problem, kernel)
        for kernel in fitting(problem, device)
    )
    if may_transpose(problem, device):
        product = attrs.evolve(problem, operation="gemm_nt")
        needed = max(needed, operand_bytes(problem) + product_workspace(product, device))
    return needed


def conv2d_workspace(pass_: Pass, shape: ConvShape, samples: int, dtype: str, device: Device) -> int:
    """Return the scratch memory of a pass of a convolution in bytes; wgrad includes the gradient of the bias."""

    def of_products(shape: ConvShape) -> int:
        problems = (conv2d_problem(pass_, shape, samples, dtype, vector) for vector in vectors(dtype))
        return max(product_workspace(problem, device) for problem in problems)

    needed, wide = of_products(shape), widened(shape)
    if wide != shape and pass_ is not Pass.DGRAD:
        needed = max(needed, filter_bytes(wide, dtype) + of_products(wide))
    return max(needed, _bias_workspace(pass_, samples * shape.pixels, shape.k, dtype, device))


def linear_workspace(pass_: Pass, extents: tuple[int, int, int], dtype: str, device: Device) -> int:
    """
    Return the scratch memory of a pass of a linear layer in bytes; wgrad includes the gradient of the bias.

    `extents` are positions of the batch, input channels, output channels.
    """
    rows, c, k = extents
    product = product_extents(pass_, outputs=rows, inputs=rows, c=c, k=k)
    problems = (Problem(f"gemm_{pass_.layout}", dtype, *product, vector=vector) for vector in vectors(dtype))
    needed = max(product_workspace(problem, device) for problem in problems)
    return max(needed, _bias_workspace(pass_, rows, k, dtype, device))


def _bias_workspace(pass_: Pass, rows: int, channels: int, dtype: str, device: Device) -> int:
    return column_sums_workspace(rows, channels, dtype, device) if pass_ is Pass.WGRAD else 0

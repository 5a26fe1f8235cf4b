"""
One launch of a tiled kernel: a matrix product or a convolution as one, with everything fused into its epilogue.

`conv`, `linear` and `gemm` prepare the operands. This module chooses the variant, cuts the grid, splits gemm_k and adds
up its slices.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from cubatch.engine import backend
from cubatch.engine.native import hopper, winograd
from cubatch.engine.native.activation_functions import activation_code
from cubatch.engine.native.arrays import check, dtype_of, floats, take_workspace
from cubatch.engine.native.context import Context
from cubatch.engine.native.layout import transpose
from cubatch.errors import DeviceFailed, InvalidArgument
from cubatch.kernels import variant
from cubatch.kernels.cost_model import tiles
from cubatch.kernels.problem import Problem, vectors
from cubatch.kernels.ranking import MOST_IN_YZ, SplitKernel, can_run, ranked, transposed_bytes
from cubatch.kernels.structs import CONV, OUTPUT, PRODUCT
from cubatch.kernels.variant import Kernel
from cubatch.kernels.workspace.product_scratch import product_workspace
from cubatch.network.windows import ConvShape

PIECE = 4
"""Neighbouring elements that the epilogue handles at once."""

_REDUCED = 1024  # elements of a block of split_k_reduce
_MANY_SLICES = 32  # from which on the warps of such a block share them
_REDUCED_OF_MANY = 128
_FORWARD = ("conv2d_fprop", "gemm_nt")
_OF_INPUT = ("conv2d_dgrad", "gemm_nn")
# The passes whose epilogue has a term: kernels/common/epilogue.cuh.
_TAKEN_BY = {
    "bias": _FORWARD, "scale": _FORWARD, "shift": _FORWARD, "activation": _FORWARD, "statistics": _FORWARD,
    "mask": _OF_INPUT,
}  # fmt: skip
_FEW_COLUMNS = 16
_BAND = 16
_MOST_X = (1 << 31) - 1
_LIMIT = 1 << 31

_log = logging.getLogger(__name__)
_NO_CONV = np.zeros((), dtype=CONV)[()]
_WIDEST = 1 << 30  # pixels of a row of an image: positions further on are counted in 32 bits too


@attrs.frozen(kw_only=True, eq=False)
class Fused:
    """
    Further terms of a product, applied before it is stored; None leaves a term out.

    y = activation(scale * product + shift + bias + residual), and zero where mask is not positive.

    A forward pass (fprop, nt) takes all terms but the mask. The gradient of an input (dgrad, nn) takes residual and
    mask, the gradient of a filter (wgrad, tn) the residual.

    Attributes:
        scale, shift: float32 (columns,), both or none: a folded batch norm.
        residual: Added; of the output's shape and type. May be the output.
        activation: "none", "relu", ...
        mask: Saved output of a ReLU, of the output's shape: its gradient passes where that was positive.
        statistics: Receives count, mean and sum of squared deviations of product + bias for each tile of rows.
            float32 (`statistics_tiles`, 3, columns), as `batch_norm_finish` takes them.
    """

    scale: Any = None
    shift: Any = None
    residual: Any = None
    activation: str = "none"
    mask: Any = None
    statistics: Any = None


PLAIN = Fused()


def statistics_tiles(context: Context, problem: Problem) -> int:
    """Return the number of tiles of rows in `Fused.statistics`."""
    return tiles(problem, _with_statistics(context, problem)[0])[0]


def product_dtype(context: Context, array: Any) -> str:
    """Return the dtype in which an array is multiplied: its own, or tf32 for float32 if the context allows it."""
    dtype = dtype_of(array)
    return "tf32" if context.tf32 and dtype == "float32" else dtype


def vector_of(context: Context, extents: tuple[int, ...], *operands: Any) -> int:
    """Return how many elements the kernels load at once: as many as extents and addresses allow of `vectors`."""
    return next(
        vector
        for vector in vectors(dtype_of(operands[0]))
        if all(extent % vector == 0 for extent in extents)
        and all(context.aligned(operand, vector * operand.itemsize) for operand in operands)
    )


def divisor(number: int) -> tuple[int, int, int]:
    """
    Return the number, and the multiplier and shift that divide by it: see divide() in kernels/common/conv_geometry.cuh.

    Args:
        number: From 1 to 2^31 - 1; the kernels treat 1 separately.

    Example:
        >>> number, multiplier, shift = divisor(7)
        >>> [(x * multiplier >> 32 + shift) for x in (6, 7, 2**31 - 1)] == [0, 1, (2**31 - 1) // 7]
        True
    """
    shift = max(0, (number - 1).bit_length() - 1)
    multiplier = -(-(1 << 32 + shift) // number) if number > 1 else 0
    return number, multiplier, shift


def geometry(shape: ConvShape, rows: tuple[int, int], short_rows: tuple[int, int]) -> Any:
    """
    Describe a convolution to the kernels.

    Args:
        shape: The convolution.
        rows: Rows and columns of pixels that gemm_m counts: p and q, or those of a gradient's first phase.
        short_rows: Those of a gradient's last phase.
    """
    v, h = shape.vertical, shape.horizontal
    padded = (v.span(v.out) + max(0, -v.offset)) * (h.span(h.out) + max(0, -h.offset)) * shape.c
    largest = max(padded, v.size * h.size * shape.c, v.out * h.out * shape.k, shape.filter_elements)
    if largest >= _LIMIT:
        raise InvalidArgument("shape", shape, "one image, its padding and the filter below 2^31 elements each")
    extents = (v.size, h.size, shape.c, v.out, h.out, shape.k, v.taps, h.taps)
    steps = (v.stride, h.stride, v.step, h.step, -v.offset, -h.offset, shape.c // shape.groups, shape.k // shape.groups)
    common = math.gcd(v.stride, v.step), math.gcd(h.stride, h.step)
    phase = (v.stride // common[0], h.stride // common[1], v.step // common[0], h.step // common[1])
    divisors = tuple(divisor(max(1, count)) for count in rows + short_rows)
    return np.array(extents + steps + phase + divisors, dtype=CONV)[()]


def _as_convolution(problem: Problem) -> tuple[Any, int]:
    """
    Return a product as the geometry of a 1x1 convolution, and its number of images.

    Rows are images of one pixel (nt; nn, the gradient of an input), or pixels of wide images (tn).
    """
    images, pixels, taps, gemm_k = 0, 1, 1, max(1, problem.k)
    if problem.operation == "gemm_nt":
        c, k = gemm_k, problem.n
    elif problem.operation == "gemm_tn":
        pixels, c, k = min(gemm_k, _WIDEST), problem.n, problem.m
    else:
        images, taps, c, k = problem.m, min(problem.k, 1), problem.n, gemm_k
    extents, steps, phase = (1, pixels, c, 1, pixels, k, taps, 1), (1, 1, 1, 1, 0, 0, c, k), (1, 1, 1, 1)
    return np.array(extents + steps + phase + (divisor(1),) * 4, dtype=CONV)[()], images


def launch(
    context: Context, problem: Problem, a: Any, b: Any, out: Any, *, bias: Any = None,
    rows: int, columns: int, fused: Fused = PLAIN, conv: Any = _NO_CONV, batch: int = 0, workspace: Any = None,
) -> None:  # fmt: skip
    """
    Compute a product into `out`.

    Args:
        context: Where it runs.
        problem: Extents.
        a, b: Left and right operand.
        out: Receives the result.
        bias: (columns,), or None.
        rows: Rows of the whole output.
        columns: Columns of the whole output, all groups.
        fused: Further terms.
        conv: Of a convolution, its `geometry`.
        batch: Of a convolution, its samples.
        workspace: 1-D uint8 array of `product_scratch.product_workspace` bytes; None allocates one if needed.

    Raises:
        InvalidArgument: If arrays do not fit, the pass does not take a term, there are too many blocks, or the
            workspace is too small.
    """
    _check(problem.operation, out, bias, fused, rows=rows, columns=columns)

    def run(chosen: SplitKernel) -> None:
        _launch(
            context, chosen, problem, a, b, out=out, bias=bias,
            rows=rows, columns=columns, fused=fused, conv=conv, batch=batch, workspace=workspace,
        )  # fmt: skip

    if fused.statistics is not None:
        run(SplitKernel(_of_height(context, problem, fused.statistics)))  # whole sums in the block that owns them
    else:  # a trial would overwrite operands in the output's memory
        in_place = any(context.address(array) == context.address(out) for array in (fused.residual, fused.mask))
        _run_what_is_taken(context, problem, run, try_out=backend.is_preparing() or not in_place)


def _run_what_is_taken(
    context: Context, problem: Problem, run: Callable[[SplitKernel], None], *, try_out: bool
) -> None:
    """Run the chosen variant; if the driver refuses it, one of another family, also from then on."""
    chosen = context.choose(problem, run if try_out else None)
    try:
        run(chosen)
    except DeviceFailed as error:
        family = chosen.kernel.family
        if error.is_fatal or family in context.refused:
            raise
        _log.warning("%s; kernels/%s is not used any more", error, family)
        context.refused.add(family)
        run(context.choose(problem))


def _of_height(context: Context, problem: Problem, statistics: Any) -> Kernel:
    """Return a variant that computes statistics for as many tiles of rows as their array has."""
    candidates = _with_statistics(context, problem)
    fits = (each for each in candidates if each.family != "hopper" and tiles(problem, each)[0] == len(statistics))
    return next(fits, candidates[0])


def _with_statistics(context: Context, problem: Problem) -> list[Kernel]:
    """Return the variants whose blocks own rows of the output, the chosen one first."""
    candidates = (context.choose(problem).kernel, *ranked(problem, context.device))
    return [each for each in candidates if each.winograd is None]


def _launch(
    context: Context, split: SplitKernel, problem: Problem, a: Any, b: Any, *, out: Any, bias: Any,
    rows: int, columns: int, fused: Fused, conv: Any, batch: int, workspace: Any,
) -> None:  # fmt: skip
    """Launch one variant, and the sum of its slices."""
    chosen, count = split.kernel, split.slices
    tiles_m, tiles_n = tiles(problem, chosen)
    grid_x = tiles_m * tiles_n * problem.phases
    if grid_x > _MOST_X or problem.groups * count > MOST_IN_YZ:
        raise InvalidArgument("problem", problem, "fewer than 2^31 tiles and 65536 groups")
    if fused.statistics is not None:
        check(np.float32, (tiles_m, 3, columns), statistics=fused.statistics)
    transposed = transposed_bytes(problem, chosen) // 4
    summed = count * rows * columns if count > 1 else 0
    if transposed or summed:  # a forced variant may need more than the plan has
        needed = max(product_workspace(problem, context.device), 4 * (transposed + summed))
        workspace = take_workspace(workspace, out, needed)
    partials = floats(workspace, summed, start=transposed) if summed else None
    stored = (out, bias, fused.residual, fused.mask)
    wide = columns % PIECE == problem.n % PIECE == 0 and all(
        context.aligned(array, PIECE * size)
        for arrays, size in ((stored, out.itemsize), ((fused.scale, fused.shift, partials), 4))
        for array in arrays
    )
    band = 1 if tiles_n <= _FEW_COLUMNS else _BAND
    numbers = (rows * columns, columns, activation_code(fused.activation), wide, count)
    output, ends = (
        np.array(numbers, dtype=OUTPUT)[()],
        (out, bias, fused.scale, fused.shift, fused.residual, fused.mask),
    )
    if chosen.winograd is not None:
        winograd.launch(context, chosen, problem, a, b, ends=ends, output=output, conv=conv, workspace=workspace)
        return
    if chosen.entry != chosen.operation:
        if not can_run(problem, chosen):
            raise InvalidArgument("kernel", chosen.name, "one that can count the rows and the right operand")
        conv, batch = _as_convolution(problem)
    extents = (problem.m, problem.k, problem.n, problem.groups, tiles_m, tiles_n, band, batch)
    product = np.array(extents, dtype=PRODUCT)[()]
    if chosen.family == "hopper":
        if transposed:  # along gemm_k, the first axis of B: a filter (k, r, s, c) becomes (r, s, c, k)
            turned = floats(workspace, b.size).reshape(-1, len(b))
            b = transpose(context, b.reshape(len(b), -1), out=turned).reshape(-1)
        hopper.launch(
            context, chosen, problem, a, b, ends=ends, partials=partials, output=output, conv=conv, batch=batch
        )
    else:
        grid = (grid_x, 1, problem.groups * count)
        context.launch(chosen, grid, (a, b, *ends, fused.statistics, partials, product, output, conv))
    if count > 1:
        reduce = variant.find("split_k_reduce", dtype_of(out))
        owned = _REDUCED_OF_MANY if count >= _MANY_SLICES else _REDUCED
        context.launch(reduce, (-(-rows * columns // owned), 1, 1), (*ends, partials, output))


def _check(operation: str, out: Any, bias: Any, fused: Fused, *, rows: int, columns: int) -> None:
    given = {"bias": bias, "activation": None if fused.activation == "none" else fused.activation}
    for name, operations in _TAKEN_BY.items():
        value = given[name] if name in given else getattr(fused, name)
        if value is not None and operation not in operations:
            raise InvalidArgument(name, f"given to {operation}", "given to " + " or ".join(operations) + " alone")
    check(out.dtype, (columns,), bias=bias)
    check(np.float32, (columns,), scale=fused.scale, shift=fused.shift)
    check(out.dtype, out.shape, residual=fused.residual, mask=fused.mask)
    if out.size != rows * columns:
        raise InvalidArgument("out", out.shape, f"of {rows} rows and {columns} columns")
    if (fused.scale is None) != (fused.shift is None):
        raise InvalidArgument("scale", fused.scale, "given together with shift")
    if fused.statistics is not None and fused.scale is not None:
        raise InvalidArgument("statistics", "given", "without scale and shift: they are of product + bias")

"""
One launch of a tiled kernel: a matrix product or a convolution as one, with everything fused into its epilogue.

`conv`, `linear` and `gemm` prepare the operands. This module chooses the variant, cuts the grid, splits gemm_k and adds
up its slices.
"""

from __future__ import annotations

import logging
from typing import Any

import attrs
import numpy as np

from cubatch.engine import backend
from cubatch.engine.native import hopper, winograd
from cubatch.engine.native.activation_functions import activation_code
from cubatch.engine.native.arrays import check, floats, take_workspace
from cubatch.engine.native.context import Context, dtype_of
from cubatch.engine.native.layout import transpose
from cubatch.engine.native.operands import Fused, Operands, divisor
from cubatch.errors import DeviceFailed, InvalidArgument
from cubatch.kernels.cost_model import tiles
from cubatch.kernels.problem import Problem, vectors
from cubatch.kernels.ranking import MOST_IN_YZ, SplitKernel, can_run, transposed_bytes
from cubatch.kernels.structs import CONV, OUTPUT, PRODUCT
from cubatch.kernels.tensor_map import gathered
from cubatch.kernels.transposing import is_transposing, operand_bytes, part_of
from cubatch.kernels.workspace.product_scratch import product_workspace

PIECE = 4
"""Neighbouring elements that the epilogue handles at once."""

_REDUCED = 1024  # elements of a block of split_k_reduce
_MANY_SLICES = 32  # from which on the warps of such a block share them
_REDUCED_OF_MANY = 128
_FORWARD = ("conv2d_fprop", "gemm_nt")
_OF_INPUT = ("conv2d_dgrad", "gemm_nn")
# The passes whose epilogue has a term: kernels/common/epilogue.cuh.
_TAKEN_BY = {"bias": _FORWARD, "scale": _FORWARD, "shift": _FORWARD, "activation": _FORWARD, "mask": _OF_INPUT}
_FEW_COLUMNS = 16
_BAND = 16
_MOST_X = (1 << 31) - 1

_log = logging.getLogger(__name__)
_WIDEST = 1 << 30  # pixels of a row of an image: positions further on are counted in 32 bits too


def product_dtype(context: Context, array: Any) -> str:
    """Return the dtype in which an array is multiplied: its own, or tf32 for float32 if the context allows it."""
    dtype = dtype_of(array)
    return "tf32" if context.tf32 and dtype == "float32" else dtype


def vector_of(context: Context, extents: tuple[int, ...], *operands: Any) -> int:
    """Return how many elements the kernels load at once: as many as extents and addresses allow."""
    return next(
        vector
        for vector in vectors(dtype_of(operands[0]))
        if all(extent % vector == 0 for extent in extents)
        and all(context.aligned(operand, vector * operand.itemsize) for operand in operands)
    )


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


def launch(context: Context, operands: Operands) -> int:
    """
    Compute a product with its fused terms into its output.

    Return the number of row tiles whose sums were written into `Fused.sums`; 0 if the variant computes none.
    """
    _check(operands)
    fused = operands.fused
    # A trial would overwrite operands in the output's memory.
    in_place = any(context.address(array) == context.address(operands.out) for array in (fused.residual, fused.mask))
    return _run_what_is_taken(context, operands, try_out=backend.is_preparing() or not in_place)


def _run_what_is_taken(context: Context, operands: Operands, *, try_out: bool) -> int:
    """
    Run the chosen variant; if the driver refuses it, run one of another family and stop using the refused family.

    Return the number of tiles whose sums were written into `Fused.sums`, as `_launch`.

    No GPU has confirmed tensor maps whose pixels overlap. If one is refused, other problems still use the family.
    `try_out` is whether the choice may time variants on the arrays. They are timed without sums, since the fastest
    variant is then used for products with and without them.
    """
    problem, plain = operands.problem, operands
    if operands.fused.sums is not None:
        plain = attrs.evolve(operands, fused=attrs.evolve(operands.fused, sums=None))
    chosen = context.choose(problem, (lambda split: _launch_in_parts(context, split, plain)) if try_out else None)
    try:
        return _launch_in_parts(context, chosen, operands)
    except DeviceFailed as error:
        family, shape = chosen.kernel.family, operands.shape
        overlaps = shape is not None and gathered(shape)[0] is not shape
        refused = (family, problem) if overlaps else family
        if error.is_fatal or refused in context.refused:
            raise
        _log.warning("%s; kernels/%s is not used any more%s", error, family, f" for {problem}" if overlaps else "")
        context.refused.add(refused)
        return _launch_in_parts(context, context.choose(problem), operands)


def _launch(context: Context, split: SplitKernel, operands: Operands) -> int:
    """
    Launch a variant and, if it splits gemm_k, the kernel that adds up the slices.

    Return the number of tiles whose sums were written into `Fused.sums`; 0 if the variant computes none.
    """
    chosen, count, problem, fused = split.kernel, split.slices, operands.problem, operands.fused
    out, b, ends, columns = operands.out, operands.b, operands.ends, operands.columns
    tiles_m, tiles_n = tiles(problem, chosen)
    grid_x = tiles_m * tiles_n * problem.phases
    if grid_x > _MOST_X or problem.groups * count > MOST_IN_YZ:
        raise InvalidArgument(
            "problem", problem, "one of fewer than 2^31 tiles, and of fewer than 65536 groups times slices"
        )
    transposed = transposed_bytes(problem, chosen) // 4
    summed = count * out.size if count > 1 else 0
    workspace = operands.workspace
    if transposed or summed:  # a forced variant may need more than the plan has
        needed = max(product_workspace(problem, context.device), 4 * (transposed + summed))
        workspace = take_workspace(workspace, out, needed)
    partials = floats(workspace, summed, start=transposed) if summed else None
    stored = (out, operands.bias, fused.residual, fused.mask)
    wide = columns % PIECE == problem.n % PIECE == 0 and all(
        context.aligned(array, PIECE * size)
        for arrays, size in ((stored, out.itemsize), ((fused.scale, fused.shift, partials), 4))
        for array in arrays
    )
    numbers = (out.size, columns, activation_code(fused.activation), wide, count)
    output = np.array(numbers, dtype=OUTPUT)[()]
    if chosen.winograd is not None:
        winograd.launch(context, chosen, operands, output)
        return 0
    summed_tiles = 0
    conv, batch = operands.conv, operands.batch
    if chosen.entry != problem.operation:
        if not can_run(problem, chosen):
            raise InvalidArgument(
                "kernel", chosen.name, "one whose 32-bit counts suffice for the rows and the right operand"
            )
        conv, batch = _as_convolution(problem)
    if chosen.family == "hopper":
        if transposed:  # along gemm_k, the first axis of B: a filter (k, r, s, c) becomes (r, s, c, k)
            turned = floats(workspace, b.size).reshape(-1, len(b))
            b = transpose(context, b.reshape(len(b), -1), out=turned).reshape(-1)
        summed_tiles = hopper.launch(context, chosen, attrs.evolve(operands, b=b), partials=partials, output=output)
    else:
        statistics = _moments(fused, count, 3 * tiles_m * columns)
        summed_tiles = 0 if statistics is None else tiles_m
        band = 1 if tiles_n <= _FEW_COLUMNS else _BAND
        extents = (problem.m, problem.k, problem.n, problem.groups, tiles_m, tiles_n, band, batch)
        structs = np.array(extents, dtype=PRODUCT)[()], output, conv
        grid = (grid_x, 1, problem.groups * count)
        context.launch(chosen, grid, (operands.a, b, *ends, statistics, partials, *structs))
    if count > 1:
        owned = _REDUCED_OF_MANY if count >= _MANY_SLICES else _REDUCED
        context.run("split_k_reduce", out, (-(-out.size // owned), 1, 1), *ends, partials, output)
    return summed_tiles


def _launch_in_parts(context: Context, split: SplitKernel, operands: Operands) -> int:
    """
    Launch a variant as `_launch`; a "gemm_nt" computes a "gemm_tn" after both operands have been transposed.

    One part of gemm_k after another is transposed and multiplied. Each adds its sums to those of the parts before it.
    Return the number of tiles whose sums were written into `Fused.sums`, as `_launch`; 0 after transposing.
    """
    problem, out, fused = operands.problem, operands.out, operands.fused
    if not is_transposing(problem, split.kernel):
        return _launch(context, split, operands)
    part, held = part_of(problem), operand_bytes(problem)
    sums = 4 * split.slices * out.size if split.slices > 1 else 0  # a forced variant may need more than the plan has
    workspace = take_workspace(operands.workspace, out, held + max(product_workspace(part, context.device), sums))
    for first in range(0, problem.k, part.k):
        k = min(part.k, problem.k - first)
        transposed, start = list[Any](), 0
        for array in (operands.a, operands.b):
            rows = array.reshape(problem.k, -1)[first : first + k]
            room = floats(workspace, rows.size, start=start).reshape(-1, k)
            transposed.append(transpose(context, rows, out=room))
            start += rows.size
        a, b = transposed
        of_part = attrs.evolve(
            operands, problem=attrs.evolve(part, k=k), a=a, b=b, fused=fused, shape=None, workspace=workspace[held:]
        )
        _launch(context, split, of_part)
        fused = attrs.evolve(fused, residual=out)
    return 0


def _moments(fused: Fused, count: int, size: int) -> Any:
    """
    Return the array for moments that kernels of simt/ or mma/ compute of a product in `count` slices; None: no array.

    `size` is the number of moments. Tiles of 32 rows have more than the scratch memory holds, if there are many rows.
    """
    sums = fused.sums
    return None if sums is None or sums.x is not None or count > 1 or size > sums.partials.size else sums.partials


def _check(operands: Operands) -> None:
    operation, out, bias, fused = operands.problem.operation, operands.out, operands.bias, operands.fused
    given = {"bias": bias, "activation": None if fused.activation == "none" else fused.activation}
    for name, operations in _TAKEN_BY.items():
        value = given[name] if name in given else getattr(fused, name)
        if value is not None and operation not in operations:
            raise InvalidArgument(name, f"given to {operation}", "left out except for " + " or ".join(operations))
    check(out.dtype, (operands.columns,), bias=bias)
    check(np.float32, (operands.columns,), scale=fused.scale, shift=fused.shift)
    check(out.dtype, out.shape, residual=fused.residual, mask=fused.mask)
    if (fused.scale is None) != (fused.shift is None):
        raise InvalidArgument("scale", fused.scale, "given together with shift")

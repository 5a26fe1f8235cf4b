"""Element by element on hand-written kernels: sums of branches, concatenation and slices of channels, dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import check, column_grid, dtype_of, element_grid, in_memory, vector_width
from cubatch.engine.native.context import Context
from cubatch.errors import InvalidArgument
from cubatch.kernels import variant
from cubatch.kernels.workspace.misc import walked_tiles

_AT_ONCE = 4
"""Branches that one launch adds."""


def add(context: Context, branches: Sequence[Any], *, relu: bool = False, out: Any = None) -> Any:
    """Launch the kernels of `functional.add`."""
    if len(branches) < 2:  # noqa: PLR2004 - a sum
        raise InvalidArgument("branches", len(branches), "at least 2")
    first, *others = branches
    y = of(first).empty_like(first) if out is None else out
    check(first.dtype, first.shape, **{f"branch {index}": branch for index, branch in enumerate(branches)}, out=y)
    added = first
    while others:
        now, others = others[: _AT_ONCE - 1], others[_AT_ONCE - 1 :]
        absent = [None] * (_AT_ONCE - 1 - len(now))
        arguments = [added, *now, *absent, y, np.int64(y.size), np.int32(relu and not others)]
        context.launch(variant.find("add", dtype_of(y)), element_grid(y), arguments)
        added = y
    return y


def concat(context: Context, branches: Sequence[Any], *, out: Any = None) -> Any:
    """Launch the kernels of `functional.concat`."""
    first, channels = branches[0], sum(branch.shape[-1] for branch in branches)
    y = of(first).empty((*first.shape[:-1], channels), dtype=first.dtype) if out is None else out
    check(first.dtype, (*first.shape[:-1], channels), out=y)
    start = 0
    for branch in branches:
        check(y.dtype, (*y.shape[:-1], branch.shape[-1]), branch=branch)
        copy_columns(context, branch, y, to=start)
        start += branch.shape[-1]
    return y


def concat_backward(context: Context, dy: Any, channels: Sequence[int], *, outs: Sequence[Any]) -> None:
    """Launch the kernels of `functional.concat_backward`."""
    check(dy.dtype, (*dy.shape[:-1], sum(channels)), dy=dy)
    start = 0
    for width, out in zip(channels, outs, strict=True):
        if out is not None:
            check(dy.dtype, (*dy.shape[:-1], width), out=out)
            copy_columns(context, dy, out, begin=start, width=width)
        start += width


def slice_channels(context: Context, x: Any, start: int, end: int, *, out: Any = None) -> Any:
    """Launch the kernel of `functional.slice_channels`."""
    shape = (*x.shape[:-1], end - start)
    y = of(x).empty(shape, dtype=x.dtype) if out is None else out
    check(x.dtype, x.shape, x=x)
    check(x.dtype, shape, out=y)
    copy_columns(context, x, y, begin=start, width=end - start)
    return y


def slice_channels_backward(context: Context, dy: Any, start: int, *, parts: Any = None, out: Any) -> Any:
    """Launch the kernels of `functional.slice_channels_backward`."""
    check(dy.dtype, dy.shape, dy=dy)
    check(dy.dtype, (*dy.shape[:-1], out.shape[-1]), parts=parts, out=out)
    if parts is None:
        place_columns(context, dy, out, start)
        return out
    if context.address(parts) != context.address(out):
        copy_columns(context, parts, out)
    copy_columns(context, dy, out, to=start)
    return out


def copy_columns(
    context: Context, source: Any, target: Any, *, begin: int = 0, to: int = 0, width: int | None = None
) -> None:
    """Copy `width` columns (None: all), from column `begin` of the source to column `to` of the target."""
    have, want = source.shape[-1], target.shape[-1]
    width = have if width is None else width
    rows = source.size // max(have, 1)
    read, written = source.reshape(-1)[begin:], target.reshape(-1)[to:]
    wide = vector_width(context, width, read, written)
    vector = wide if have % wide == want % wide == 0 else 1
    _walk_columns(context, "copy_columns", (read, written), (rows, width), vector, width, have, want)


def place_columns(context: Context, source: Any, target: Any, begin: int) -> None:
    """Copy all columns of the source to the target, from column `begin` on, and zero the target's other columns."""
    width, want = source.shape[-1], target.shape[-1]
    rows = source.size // max(width, 1)
    wide = vector_width(context, width, source, target)
    vector = wide if begin % wide == want % wide == 0 else 1
    _walk_columns(context, "place_columns", (source, target), (rows, want), vector, begin, width, want)


def _walk_columns(
    context: Context, operation: str, arrays: tuple[Any, Any], extents: tuple[int, int], vector: int, *numbers: int
) -> None:
    """Launch a kernel over rows and columns, with its own numbers between those of the grid."""
    rows, columns = extents
    tiles = walked_tiles(rows, columns, vector, arrays[0].itemsize, context.device)
    between = map(np.int32, (tiles.rows_per_tile, *numbers, tiles.lanes, vector))
    kernel = variant.find(operation, dtype_of(arrays[0]))
    context.launch(kernel, column_grid(tiles), [*arrays, np.int64(rows), *between])


def dropout(context: Context, x: Any, *, p: float, seed: Any, step: Any = 0, out: Any = None, mask: Any = None) -> Any:
    """
    Launch the kernel of `functional.dropout`; the step may be an int32 array of one element.

    The mask depends on the seed, the step and the number of the element alone (Philox4x32-10, see
    kernels/misc/dropout.cu). It differs from the mask that NumPy draws.
    """
    if not 0 <= p < 1:
        raise InvalidArgument("p", p, "in [0, 1)")
    xp = of(x)
    y = xp.empty_like(x) if out is None else out
    mask = xp.empty(x.shape, dtype=np.bool_) if mask is None else mask
    check(x.dtype, x.shape, x=x, out=y)
    check(np.uint8, x.shape, mask=mask.view(np.uint8))
    key = np.random.SeedSequence(seed).generate_state(2, np.uint32)
    numbers = [np.int64(x.size), np.float32(p), np.float32(1 / (1 - p))]
    arguments = [x, y, mask, *numbers, in_memory(x, step, np.int32), *key]
    context.launch(variant.find("dropout", dtype_of(x)), element_grid(x), arguments)
    return y, mask


def dropout_backward(context: Context, dy: Any, mask: Any, *, p: float, out: Any = None) -> Any:
    """Launch the kernel of `functional.dropout_backward`."""
    dx = of(dy).empty_like(dy) if out is None else out
    check(dy.dtype, dy.shape, dy=dy, out=dx)
    check(np.uint8, dy.shape, mask=mask.view(np.uint8))
    arguments = [dy, mask, dx, np.int64(dy.size), np.float32(1 / (1 - p))]
    context.launch(variant.find("dropout_backward", dtype_of(dy)), element_grid(dy), arguments)
    return dx

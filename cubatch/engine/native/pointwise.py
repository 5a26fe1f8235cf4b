"""Element by element on hand-written kernels: sums of branches, concatenation and slices of channels, dropout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import check, column_grid, element_grid, in_memory, vector_width
from cubatch.engine.native.context import Context
from cubatch.engine.native.operation import operation
from cubatch.errors import InvalidArgument
from cubatch.kernels.workspace.misc import walked_tiles

_AT_ONCE = 4
"""Branches that one launch adds."""


@operation(out=lambda given: given.branches[0].shape)
def add(context: Context, given: SimpleNamespace) -> Any:
    if len(given.branches) < 2:  # noqa: PLR2004 - a sum
        raise InvalidArgument("branches", len(given.branches), "at least 2")
    (added, *others), y = given.branches, given.out
    check(y.dtype, y.shape, **{f"branch {index}": branch for index, branch in enumerate(given.branches)})
    while others:
        now, others = others[: _AT_ONCE - 1], others[_AT_ONCE - 1 :]
        absent = [None] * (_AT_ONCE - 1 - len(now))
        relu = given.relu and not others
        context.run("add", y, element_grid(y), added, *now, *absent, y, np.int64(y.size), relu)
        added = y
    return y


@operation(out=lambda given: (*given.branches[0].shape[:-1], sum(each.shape[-1] for each in given.branches)))
def concat(context: Context, given: SimpleNamespace) -> Any:
    y, start = given.out, 0
    for branch in given.branches:
        check(y.dtype, (*y.shape[:-1], branch.shape[-1]), branch=branch)
        copy_columns(context, branch, y, to=start)
        start += branch.shape[-1]
    return y


@operation()
def concat_backward(context: Context, given: SimpleNamespace) -> None:
    dy, start = given.dy, 0
    check(dy.dtype, (*dy.shape[:-1], sum(given.channels)), dy=dy)
    for width, out in zip(given.channels, given.outs, strict=True):
        if out is not None:
            check(dy.dtype, (*dy.shape[:-1], width), out=out)
            copy_columns(context, dy, out, begin=start, width=width)
        start += width


@operation(out=lambda given: (*given.x.shape[:-1], given.end - given.start))
def slice_channels(context: Context, given: SimpleNamespace) -> Any:
    check(given.x.dtype, x=given.x)
    copy_columns(context, given.x, given.out, begin=given.start, width=given.end - given.start)
    return given.out


@operation()
def slice_channels_backward(context: Context, given: SimpleNamespace) -> Any:
    dy, parts, out = given.dy, given.parts, given.out
    check(dy.dtype, dy=dy)
    check(dy.dtype, (*dy.shape[:-1], out.shape[-1]), parts=parts, out=out)
    if parts is None:
        place_columns(context, dy, out, given.start)
        return out
    if context.address(parts) != context.address(out):
        copy_columns(context, parts, out)
    copy_columns(context, dy, out, to=given.start)
    return out


def copy_columns(
    context: Context, source: Any, target: Any, *, begin: int = 0, to: int = 0, width: int | None = None
) -> None:
    """Copy `width` columns (None: all) of the source, from column `begin` on, to the target, from column `to` on."""
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
    context: Context, name: str, arrays: tuple[Any, Any], extents: tuple[int, int], vector: int, *numbers: int
) -> None:
    """
    Launch the kernel `name` over the rows and columns of two arrays.

    `vector` is the number of elements of a load, and `numbers` are further arguments of the kernel.
    """
    rows, columns = extents
    tiles = walked_tiles(rows, columns, vector, arrays[0].itemsize, context.device)
    between = tiles.rows_per_tile, *numbers, tiles.lanes, vector
    context.run(name, arrays[0], column_grid(tiles), *arrays, np.int64(rows), *between)


@operation(out=lambda given: given.x.shape)
def dropout(context: Context, given: SimpleNamespace) -> Any:
    """
    Launch the kernel of `functional.dropout`, and return y and the mask; the step may be an int32 array of one element.

    The mask depends on the seed, the step and the number of the element alone (Philox4x32-10, see
    kernels/misc/dropout.cu). It differs from the mask that NumPy draws.
    """
    x, y, p = given.x, given.out, given.p
    if not 0 <= p < 1:
        raise InvalidArgument("p", p, "at least 0 and less than 1")
    mask = of(x).empty(x.shape, dtype=np.bool_) if given.mask is None else given.mask
    check(x.dtype, x=x)
    check(np.uint8, x.shape, mask=mask.view(np.uint8))
    key = np.random.SeedSequence(given.seed).generate_state(2, np.uint32)
    step = in_memory(x, given.step, np.int32)
    context.run("dropout", x, element_grid(x), x, y, mask, np.int64(x.size), float(p), float(1 / (1 - p)), step, *key)
    return y, mask


@operation(out=lambda given: given.dy.shape)
def dropout_backward(context: Context, given: SimpleNamespace) -> Any:
    dy, mask, dx = given.dy, given.mask, given.out
    check(dy.dtype, dy=dy)
    check(np.uint8, dy.shape, mask=mask.view(np.uint8))
    context.run("dropout_backward", dy, element_grid(dy), dy, mask, dx, np.int64(dy.size), float(1 / (1 - given.p)))
    return dx

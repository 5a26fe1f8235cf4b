"""
Depthwise convolution: each channel by itself, so no matrix product, only taps times channels.

Every tap reads a shifted window of its operand; where the window leaves the input it is cut, not padded. Products go
through one tile of scratch memory. `conv` calls these functions for groups = c = k, with its own arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cubatch.engine.backend import of, take_workspace, view
from cubatch.memory import conv_blocks
from cubatch.network.windows import Axis, ConvShape

if TYPE_CHECKING:
    Reach = tuple[tuple[slice, slice], tuple[slice, slice]]


def forward(shape: ConvShape, x: Any, w: Any, b: Any, *, relu: bool, out: Any, workspace: Any) -> Any:
    """Return the depthwise convolution of x with w, written to `out`; the arguments are those of `conv.conv2d`."""
    work = _Work(shape, x, workspace)
    taps = work.by_tap(w)
    for samples, rows in work.blocks:
        target = out[samples, rows]
        work.xp.copyto(target, 0 if b is None else b)
        for tap, (output, source) in work.windows(rows):
            window, place = x[samples, *source], target[:, *output]
            product = work.tile(place.shape)
            work.xp.multiply(window, taps[tap], out=product)
            work.xp.add(place, product, out=place)
        if relu:
            work.xp.maximum(target, 0, out=target)
    return out


def dgrad(shape: ConvShape, dy: Any, w: Any, *, out: Any, workspace: Any) -> Any:
    """Return `out` with the gradient of a depthwise convolution's input, from dy and the filter w (c, r, s, 1)."""
    work = _Work(shape, dy, workspace)
    taps = work.by_tap(w)
    work.xp.copyto(out, 0)
    for samples, rows in work.blocks:
        errors = dy[samples, rows]
        for tap, (output, source) in work.windows(rows):
            window, place = errors[:, *output], out[samples, *source]
            product = work.tile(place.shape)
            work.xp.multiply(window, taps[tap], out=product)
            work.xp.add(place, product, out=place)
    return out


def wgrad(shape: ConvShape, x: Any, dy: Any, *, dw: Any, db: Any, workspace: Any) -> Any:
    """Write the gradients of a depthwise convolution's filter to dw and of its bias to db unless None; return dw."""
    work = _Work(shape, x, workspace)
    xp, c = work.xp, shape.c
    sums, total = work.by_tap(None), work.row()
    xp.copyto(sums, 0)
    xp.copyto(work.ones, 1)
    if db is not None:
        xp.copyto(db, 0)
    for samples, rows in work.blocks:
        errors = dy[samples, rows]
        for tap, (output, source) in work.windows(rows):
            window, place = x[samples, *source], errors[:, *output]
            product = work.tile(place.shape)
            xp.multiply(window, place, out=product)
            work.add_up(product.reshape(-1, c), sums[tap], total)
        if db is not None:
            work.add_up(errors.reshape(-1, c), db, total)
    xp.copyto(dw.reshape(c, -1), sums.T)
    return dw


class _Work:
    """Scratch memory of a depthwise pass over the array `like`, and the blocks of samples and rows that it allows."""

    def __init__(self, shape: ConvShape, like: Any, workspace: Any) -> None:
        self.xp, self._shape, self._dtype = of(like), shape, like.dtype
        need = conv_blocks.depthwise(shape, like.itemsize)
        self._workspace = take_workspace(workspace, like, need, len(like))
        self.blocks = need.cut(len(like), self._workspace.nbytes)
        most = [part.stop - part.start for part in self.blocks[0]] if self.blocks else [0, 0]  # the first is a largest
        _, self._row_at, ones_at, self._tile_at = need.offsets(*most)
        self.ones = view(self._workspace, (math.prod(most) * shape.horizontal.out,), self._dtype, offset=ones_at)

    def by_tap(self, w: Any) -> Any:
        """Return a view of the scratch area for the filter as (taps, c), with a copy of w unless that is None."""
        area = view(self._workspace, (self._shape.taps, self._shape.c), self._dtype)
        if w is not None:
            self.xp.copyto(area, w.reshape(self._shape.c, -1).T)
        return area

    def add_up(self, rows: Any, total: Any, spare: Any) -> None:
        """
        Add the sum over rows (n, c) to `total` (c,); `spare` (c,) is overwritten.

        A product with ones is many times faster than a reduction over rows.
        """
        self.xp.matmul(self.ones[: len(rows)], rows, out=spare)
        self.xp.add(total, spare, out=total)

    def row(self) -> Any:
        return view(self._workspace, (self._shape.c,), self._dtype, offset=self._row_at)

    def tile(self, shape: tuple[int, ...]) -> Any:
        return view(self._workspace, shape, self._dtype, offset=self._tile_at)

    def windows(self, rows: slice) -> Iterator[tuple[int, Reach]]:
        return enumerate(reaches(self._shape.vertical, self._shape.horizontal, rows))


def reaches(vertical: Axis, horizontal: Axis, rows: slice) -> Iterator[Reach]:
    """
    Yield for each tap, in order, the outputs in a band of rows that read an input through it, and those inputs.

    Both are a range of rows and a range of columns.
    """
    for row in range(vertical.taps):
        p, source_rows = vertical.valid(row, rows.start, rows.stop)
        for column in range(horizontal.taps):
            q, source_columns = horizontal.valid(column, 0, horizontal.out)
            yield (p, q), (source_rows, source_columns)

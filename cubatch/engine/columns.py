"""
The gathered operand of a convolution, one cache-sized block at a time.

A block is some whole samples, or some output rows of one sample if a sample is too large. Its source rows are copied
into a zero-bordered tile, and the windows of that tile into the columns

    (samples, p, q) x (r, s, c)      a window's s*c channels are contiguous: long copies
    (r, s) x (samples, p, q)         for a single channel: then a row of q pixels is contiguous

of the layout that has the longer contiguous copies; BLAS reads either.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.backend import gate, of, take_workspace, view
from cubatch.memory.blocks import Block
from cubatch.memory.conv_blocks import Tiles


class Columns:
    """
    Gathers the windows of a convolution's source, block by block, and multiplies them by filters.

    Args:
        source: Activations (n, h, w, c), C-contiguous.
        tiles: Layout of the scratch memory.
        workspace: 1-D uint8 array; None allocates it.
    """

    def __init__(self, source: Any, tiles: Tiles, workspace: Any) -> None:
        self._source, self._tiles, self._groups = source, tiles, tiles.groups
        self._xp = of(source)
        self._workspace = take_workspace(workspace, source, tiles, len(source))
        cut = tiles.cut_on_host if isinstance(source, np.ndarray) else tiles.cut
        self.blocks = cut(len(source), self._workspace.nbytes)
        self._block_shape = (0, 0)
        self._borders: tuple[int, ...] = ()
        self._border_tile: Any = None
        self._windows: Any = None
        self._columns: Any = None
        self._operand: Any = None
        self._staged_at = self._flags_at = 0

    def fixed(self, index: int, shape: tuple[int, ...]) -> Any:
        """Return a view, in this shape, of scratch area `index` of those that all blocks share."""
        offset = self._tiles.offsets(1, 1)[index]
        return view(self._workspace, shape, self._source.dtype, offset=offset)

    def staged(self, shape: tuple[int, ...]) -> Any:
        """Return a view of this shape of the scratch area for products, behind the columns of the block loaded last."""
        return view(self._workspace, shape, self._source.dtype, offset=self._staged_at)

    def load(self, block: Block) -> Any:
        """Return the gathered windows of a block: (pixels, taps * channels), or (groups, pixels, taps * c / groups)."""
        samples, band = block
        source, tiles = self._source, self._tiles
        shape = (samples.stop - samples.start, band.stop - band.start)
        if shape != self._block_shape:
            self._lay_out(*shape)
        if tiles.is_direct:
            return source[block].reshape(-1, tiles.channels)
        if tiles.is_padded:
            self._fill_borders(samples, band)
            windows = self._windows
        else:
            windows = self._view_windows(source, self._offset(samples, band), *shape)
        self._xp.copyto(self._columns, windows)
        return self._operand

    def multiply(
        self, block: Block, filters: Any, target: Any, *, scale: Any = None, residual: Any = None, positive: Any = None
    ) -> None:
        """
        Write the products of a block's windows and filters to `target`, with the terms that are added or masked.

        Args:
            block: One of `blocks`.
            filters: (taps * channels, k), or (groups, ...) of that.
            target: The block's output (samples, p, q, k * groups); may be strided unless `tiles.staged` is 0.
            scale: Factor of each filter, before the residual is added.
            residual: Added, of the target's shape; may share its memory. It needs `tiles.staged`.
            positive: A ReLU's output of the target's shape. Where that output is 0 the target is set to 0, residual
                included. It needs `tiles.flags`.
        """
        operand = self.load(block)
        if self._tiles.staged:
            groups, k = self._groups, target.shape[-1] // self._groups
            tile = self.staged((groups, *target.shape[:3], k))
            flat = tile.reshape(groups, -1, k)
            self._xp.matmul(operand, filters, out=flat if groups > 1 else flat[0])
            if scale is not None:
                self._xp.multiply(flat, scale.reshape(groups, 1, k), out=flat)
            by_group, tile = (*target.shape[:3], groups, k), tile.transpose(1, 2, 3, 0, 4)
            if residual is None:
                self._xp.copyto(target.reshape(by_group), tile)
            else:
                self._xp.add(tile, residual.reshape(by_group), out=target.reshape(by_group))
        else:
            self._xp.matmul(operand, filters, out=target.reshape(-1, target.shape[-1]))
        if positive is not None:
            flags = view(self._workspace, target.shape, self._xp.bool_, offset=self._flags_at)
            self._xp.not_equal(positive, 0, out=flags)
            gate(target, flags, target)

    def _lay_out(self, samples: int, rows: int) -> None:
        tiles, source, groups = self._tiles, self._source, self._groups
        v, h, c = tiles.vertical, tiles.horizontal, tiles.channels
        *_, border_at, columns_at, self._staged_at, self._flags_at = tiles.offsets(samples, rows)
        self._block_shape, self._borders = (samples, rows), ()
        if tiles.is_direct:
            return
        if tiles.is_padded:
            bordered = (samples, v.span(rows), h.span(h.out), c)
            self._border_tile = view(self._workspace, bordered, source.dtype, offset=border_at)
            self._windows = self._view_windows(self._border_tile, 0, samples, rows)
        if c == 1:
            area = view(self._workspace, (v.taps, h.taps, samples, rows, h.out), source.dtype, offset=columns_at)
            self._columns = area.transpose(2, 3, 4, 0, 1)[..., None, None]
            self._operand = area.reshape(v.taps * h.taps, -1).T
        else:
            shape = (groups, samples, rows, h.out, v.taps, h.taps, c // groups)
            area = view(self._workspace, shape, source.dtype, offset=columns_at)
            self._columns = area.transpose(1, 2, 3, 4, 5, 0, 6)
            self._operand = area.reshape(groups, samples * rows * h.out, -1)
            if groups == 1:
                self._operand = self._operand[0]

    def _view_windows(self, base: Any, offset: int, samples: int, rows: int) -> Any:
        """
        Return a view of every window of a block: (samples, p, q, r, s, groups, channels of a group).

        The windows begin `offset` bytes into `base`; p is `rows` of the output.
        """
        v, h, c = self._tiles.vertical, self._tiles.horizontal, self._tiles.channels
        n_step, h_step, w_step, c_step = base.strides
        shape = (samples, rows, h.out, v.taps, h.taps, self._groups, c // self._groups)
        strides = (
            n_step, h_step * v.stride, w_step * h.stride, h_step * v.step, w_step * h.step,
            c_step * (c // self._groups), c_step,
        )  # fmt: skip
        return view(base, shape, base.dtype, offset=offset, strides=strides)

    def _offset(self, samples: slice, band: slice) -> int:
        v, h = self._tiles.vertical, self._tiles.horizontal
        n_step, h_step, w_step, _ = self._source.strides
        first = band.start * v.stride + v.offset
        return int(samples.start * n_step + first * h_step + h.offset * w_step)

    def _fill_borders(self, samples: slice, band: slice) -> None:
        """Copy the block's source rows into the zero-bordered tile; write the zeros only if their places change."""
        v, h = self._tiles.vertical, self._tiles.horizontal
        _, rows, width, _ = self._border_tile.shape
        first, left = band.start * v.stride + v.offset, h.offset
        top, bottom = max(0, -first), min(rows, v.size - first)
        start, stop = max(0, -left), min(width, h.size - left)
        if (borders := (top, bottom, start, stop)) != self._borders:
            self._xp.copyto(self._border_tile, 0)
            self._borders = borders
        if bottom > top and stop > start:
            inside = self._source[samples, first + top : first + bottom, left + start : left + stop]
            self._xp.copyto(self._border_tile[:, top:bottom, start:stop], inside)

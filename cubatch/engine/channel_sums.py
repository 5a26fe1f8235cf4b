"""
Sums over positions, channel by channel, block by block of positions.

The sum of a block is a product with a vector of ones. Blocks add up in float64, so that the error does not grow with
the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cubatch.engine.backend import of, take_workspace, view
from cubatch.memory.blocks import Norm, RowNorm


class Area:
    """
    Scratch memory of sums over the rows of an array, and the blocks of rows that it allows.

    Args:
        like: The array (..., c); a row is the channels of one position.
        workspace: 1-D uint8 array; None allocates it.
        need: Layout of the scratch memory; None: that of a batch norm.
        vectors: Number of arrays (c,) in it, including one that is used internally.

    Attributes:
        sums: float64 array (2, c) for sums.
        vectors: Arrays (c,) of the type of `like` for the caller, one fewer than the argument.
    """

    def __init__(self, like: Any, workspace: Any, need: Norm | RowNorm | None = None, vectors: int = 4) -> None:
        c, count = like.shape[-1], like.size // like.shape[-1]
        self._xp, self._c, self._dtype = of(like), c, like.dtype
        need = need or Norm(itemsize=like.itemsize, channels=c)
        self._workspace = take_workspace(workspace, like, need, count)
        self._blocks = need.cut(count, self._workspace.nbytes)
        most = self._blocks[0][0].stop if self._blocks else 0  # the first block is a largest one
        sums_at, vectors_at, ones_at, *self._at = need.offsets(most, 1)
        self.sums = view(self._workspace, (2, c), "float64", offset=sums_at)
        self._partial, *self.vectors = view(self._workspace, (vectors, c), self._dtype, offset=vectors_at)
        self._ones = view(self._workspace, (most,), self._dtype, offset=ones_at)
        self._xp.copyto(self._ones, 1)

    def pieces(self) -> Iterator[slice]:
        """Return an iterator over the blocks' ranges of rows; a row is the channels of one position."""
        return (piece for piece, _ in self._blocks)

    def tile(self, piece: slice) -> Any:
        """Return a view (rows, c) of the scratch memory, for intermediate values of a block of rows."""
        return view(self._workspace, (piece.stop - piece.start, self._c), self._dtype, offset=self._at[0])

    def add_up(self, rows: Any, total: Any) -> None:
        """Add the sum over a block's rows to `total` (c,); a product with ones is faster than a reduction."""
        self._xp.matmul(self._ones[: len(rows)], rows, out=self._partial)
        self._xp.add(total, self._partial, out=total)

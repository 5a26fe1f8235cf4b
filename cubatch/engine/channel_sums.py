"""
Sums over positions, channel by channel, block by block of positions.

The sum of a block is a product with a vector of ones, and blocks add up in float64, so the error does not grow
with the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cubatch.engine.backend import of, take_workspace, view
from cubatch.memory.blocks import Norm

if TYPE_CHECKING:
    from collections.abc import Iterator


class Area:
    """The scratch memory of one call, and the blocks of rows that it allows."""

    def __init__(self, like: Any, workspace: Any) -> None:
        c, item = like.shape[-1], like.itemsize
        self._xp, self._c, self._dtype = of(like), c, like.dtype
        need = Norm(itemsize=item, channels=c)
        self._workspace = take_workspace(workspace, like, need, like.size // c)
        self._blocks = need.cut(like.size // c, self._workspace.nbytes)
        most = self._blocks[0][0].stop if self._blocks else 0  # the first block is a largest one
        sums_at, vectors_at, ones_at, self._tile_at = need.offsets(most, 1)
        self.sums = view(self._workspace, (2, c), "float64", offset=sums_at)
        self._partial, *self.vectors = view(self._workspace, (4, c), self._dtype, offset=vectors_at)
        self._ones = view(self._workspace, (most,), self._dtype, offset=ones_at)
        self._xp.copyto(self._ones, 1)

    def pieces(self) -> Iterator[slice]:
        """Cut the rows into blocks."""
        return (piece for piece, _ in self._blocks)

    def tile(self, piece: slice) -> Any:
        """View the area for a block's deviations."""
        return view(self._workspace, (piece.stop - piece.start, self._c), self._dtype, offset=self._tile_at)

    def add_up(self, rows: Any, total: Any) -> None:
        """Add the sum of a block's rows to a total; a product with ones sums faster than a reduction over rows."""
        self._xp.matmul(self._ones[: len(rows)], rows, out=self._partial)
        self._xp.add(total, self._partial, out=total)

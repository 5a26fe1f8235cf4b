"""Scratch memory of self-attention: what a block of whole samples needs, by the rule of `blocks`."""

from __future__ import annotations

import attrs

from cubatch.memory.blocks import Need

_PROJECTED = 3
"""Queries, keys and values."""


@attrs.frozen(kw_only=True)
class _Heads(Need):
    """
    What both passes know of an attention.

    Attributes:
        tokens: Positions of a sample.
        channels: Width of a token, of all heads together.
        heads: Number of heads.
    """

    tokens: int
    channels: int
    heads: int

    def _parts(self, samples: int) -> tuple[int, int, int, int]:
        """Give bytes of queries, keys and values, of the weights, of mixed values, and of a number for each query."""
        token, row = samples * self.tokens * self.itemsize, self.heads * self.tokens
        return (_PROJECTED * token * self.channels, token * row, token * self.channels, token * self.heads)


@attrs.frozen(kw_only=True)
class Attend(_Heads):
    """
    Attention forward: queries, keys and values, weights, mixed values, a number for each query.

    Attributes:
        saves: All but the last lie in arrays that are kept for the backward pass; a block still is as large as if they
            were here, since it goes through them.
    """

    saves: bool

    def areas(self, samples: int, rows: int) -> tuple[int, ...]:
        """Give the bytes of each area."""
        *kept, column = self._parts(samples * rows)
        return (column,) if self.saves else (column, *kept)

    def room(self, target: int) -> int:
        """Give the bytes for as many samples as stay in the cache with all that a block goes through."""
        if not self.saves:
            return target
        return self.num_bytes(max(1, target // sum(self._parts(1))), 1)


@attrs.frozen(kw_only=True)
class AttendBackward(_Heads):
    """Attention backward: gradients of what is saved, a number for each query, a block's part of dw_in and db_in."""

    def areas(self, samples: int, rows: int) -> tuple[int, ...]:
        """Give the bytes of each area."""
        projected, weights, mixed, column = self._parts(samples * rows)
        outputs = _PROJECTED * self.channels * self.itemsize
        return (projected, weights, mixed, column, outputs * self.channels, outputs)

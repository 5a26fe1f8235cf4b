"""Arrays as arguments of kernels: checks, width of loads, scratch memory, and grids over rows and elements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from cubatch.engine.backend import of, view
from cubatch.engine.native.context import Context, dtype_of
from cubatch.errors import InvalidArgument
from cubatch.kernels.ranking import MOST_IN_YZ
from cubatch.kernels.variant import Kernel, find
from cubatch.kernels.workspace.misc import VECTOR_BYTES, ColumnTiles, element_blocks

_COUNTED_ROWS = 1 << 31  # from the last row on, kernels find a row's sample by a division of 32 bits

_shared: ContextVar[list[Any] | None] = ContextVar("shared", default=None)


def in_memory(like: Any, value: Any, kind: Any) -> Any:
    """
    Return a number as an array of one element, from which kernels read a value that changes from step to step.

    An array (1,) of the type `kind` is returned as it is; other arrays raise InvalidArgument.
    """
    if isinstance(value, int | float | np.generic):
        return of(like).asarray(np.array([value], kind))
    check(kind, (1,), number=value)
    return value


def check(dtype: Any, shape: Sequence[int] | None = None, /, **arrays: Any) -> None:
    """
    Raise InvalidArgument unless all arrays are C-contiguous, and of the given type and shape; an array may be None.

    A kernel would access memory beyond the end of a smaller array. Shape None allows any.
    """
    for name, array in arrays.items():
        if array is None:
            continue
        if array.dtype != dtype:
            raise InvalidArgument(name, str(array.dtype), f"of dtype {np.dtype(dtype)}")
        if not array.flags.c_contiguous:
            raise InvalidArgument(name, f"strides {array.strides}", "C-contiguous")
        if shape is not None and tuple(array.shape) != tuple(shape):
            raise InvalidArgument(name, tuple(array.shape), f"of shape {tuple(shape)}")


def vector_width(context: Context, channels: int, *arrays: Any) -> int:
    """Return how many elements of `channels` in a row a thread loads at once: 16 bytes, or one if not aligned."""
    wide = VECTOR_BYTES // arrays[0].itemsize
    whole = channels % wide == 0 and all(context.aligned(array, VECTOR_BYTES) for array in arrays)
    return wide if whole else 1


@contextlib.contextmanager
def sharing_workspace() -> Iterator[None]:
    """
    Share one allocated workspace among all operations bound inside the context; no two of them may run at a time.

    Each set of arrays that a kernel is timed on would otherwise have its own, gigabytes in total.
    """
    token = _shared.set([])
    try:
        yield
    finally:
        _shared.reset(token)


def take_workspace(workspace: Any, like: Any, num_bytes: int) -> Any:
    """
    Return the given workspace; if it is None a new one, or inside `sharing_workspace` the shared one.

    A new one has `num_bytes` bytes and is allocated by the module of `like`. InvalidArgument is raised if the given one
    has fewer.
    """
    if workspace is None:
        shared = _shared.get()
        if shared is None:
            return of(like).empty(num_bytes, dtype=np.uint8)
        if not shared or shared[-1].nbytes < num_bytes:
            shared.append(of(like).empty(num_bytes, dtype=np.uint8))
        return shared[-1]
    if workspace.nbytes < num_bytes:
        raise InvalidArgument("workspace", workspace.nbytes, f"at least {num_bytes} bytes")
    return workspace


def floats(workspace: Any, count: int, *, start: int = 0) -> Any:
    """Return a view of `count` float32 elements of a workspace, from element `start` on."""
    return view(workspace, (count,), np.float32, offset=4 * start)


def summing_kernel(context: Context, operation: str, like: Any, rows: int) -> Kernel:
    """
    Return the kernel of an operation that sums over `rows` rows of arrays like `like`.

    If the context reverses sums, the kernel starts at the last row, except for 2^31 rows or more.
    """
    is_reversed = context.reverses_sums and rows < _COUNTED_ROWS
    return find(f"{operation}_reversed" if is_reversed else operation, dtype_of(like))


def tile_arguments(rows: int, channels: int, tiles: ColumnTiles) -> list[object]:
    """
    Return the first arguments of kernels that divide an array (rows, channels) among blocks.

    These are the rows, the rows of a block, the channels, the threads along the channels, and the channels of a thread.
    """
    return [np.int64(rows), tiles.rows_per_tile, channels, tiles.lanes, tiles.vector]


def element_grid(array: Any) -> tuple[int, int, int]:
    """Return the grid of an elementwise kernel over an array: blocks in x, y and z."""
    return (element_blocks(array.size, array.itemsize), 1, 1)


def column_grid(tiles: ColumnTiles) -> tuple[int, int, int]:
    """
    Return the grid of a kernel over tiles: tiles in x; blocks of columns in y and z, since y alone may be too small.

    Example:
        >>> column_grid(ColumnTiles(vector=4, lanes=32, blocks=65537, tiles=1, rows_per_tile=32))
        (1, 32769, 2)
    """
    layers = max(1, -(-tiles.blocks // MOST_IN_YZ))
    return (tiles.tiles, -(-tiles.blocks // layers), layers)

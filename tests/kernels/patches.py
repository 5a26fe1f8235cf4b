"""Batches cut into patches of a stride, as a reference in NumPy, and the convolutions over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cubatch.kernels import padding
from cubatch.network.layers import Conv2d
from cubatch.network.windows import ConvShape
from tests.kernels import cases

SHAPES = {
    "7x7 of stride 2": cases.Conv(n=3, h=11, w=9, c=3, k=8, r=7, s=7, stride=(2, 2), pad=(3, 3, 3, 3)),
    "3x2 of stride 2": cases.Conv(n=2, h=7, w=8, c=3, k=5, r=3, s=2, stride=(2, 2), pad=(1, 0, 0, 1)),
    "4x4 of stride 4": cases.Conv(n=5, h=13, w=8, c=3, k=8, r=4, s=4, stride=(4, 4)),
    "5x1 of stride 3x1": cases.Conv(n=2, h=12, w=9, c=3, k=5, r=5, s=1, stride=(3, 1), pad=(2, 2, 0, 0)),
}
CASES = pytest.mark.parametrize("drawn", SHAPES.values(), ids=list(SHAPES))


def cut(drawn: cases.Conv, x: Any) -> Any:
    """Return (n, rows, columns, high * wide * 4): the pixels of each patch in turn, zeros where there are none."""
    n, h, w, c = x.shape
    high, wide = drawn.stride
    top, _, left, _ = drawn.pad
    _, p, q, _ = drawn.y_shape
    rows, columns = p - 1 + -(-drawn.r // high), q - 1 + -(-drawn.s // wide)
    room = np.zeros((n, max(h + top, rows * high), max(w + left, columns * wide), 4), x.dtype)
    room[:, top : top + h, left : left + w, :c] = x
    room = room[:, : rows * high, : columns * wide].reshape(n, rows, high, columns, wide, 4)
    return np.ascontiguousarray(room.swapaxes(2, 3)).reshape(n, rows, columns, -1)


def computed(drawn: cases.Conv) -> ConvShape:
    """Return the convolution over patches."""
    facts = {"stride": drawn.stride, "pad": drawn.pad, "k": drawn.k, "r": drawn.r, "s": drawn.s}
    shape = padding.over_patches(Conv2d(h=drawn.h, w=drawn.w, c=3, **facts)).convolution
    assert shape is not None
    return shape

"""
What the tests of all kernels share: problems to draw, storage of 16 bits, references and bounds.

References are float64 and go tap by tap, one NumPy product each; they are checked against the loops of
tests.reference, which are too slow for more than one tile.  A bound has two parts: gamma for sums in
float32 of inputs that are what the kernel was given, and half a unit in the last place of what is stored.
"""

from __future__ import annotations

import itertools
import math
import mmap
from typing import Any

import attrs
import numpy as np
from hypothesis import strategies as st

from tests.checks import UNIT_ROUNDOFF, gamma

Array = np.ndarray[Any, Any]

DTYPES = ("float32", "float16", "bfloat16")
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
"""Distance between denormal numbers: what rounding is relative to near zero."""

_MAP_NORESERVE = 0x4000


def encoded(values: Any, dtype: str) -> Array:
    """Round to how a kernel stores elements: an array of float32, float16, or the bits of bfloat16 in uint16."""
    if dtype != "bfloat16":
        return np.asarray(values).astype(dtype)
    bits = np.asarray(values).astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to nearest, ties to even
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def decoded(stored: Array) -> Array:
    """Give the values of stored elements, in float64; uint16 is bfloat16."""
    values = (stored.astype(np.uint32) << 16).view(np.float32) if stored.dtype == np.uint16 else stored
    with np.errstate(invalid="ignore"):  # which a signalling NaN sets
        return values.astype(np.float64)


def drawn(random: np.random.Generator, shape: Any, dtype: str = "float32") -> Array:
    """Draw stored elements, uniform in (-1, 1)."""
    return encoded(random.uniform(-1, 1, shape), dtype)


def bound(operations: int, magnitude: Any, want: Any, dtype: str = "float32") -> Array:
    """
    Bound the error of a sum in float32 that is stored once.

    Args:
        operations: Roundings on the longest way to a result; a dot product of length k has k, a bias one more.
        magnitude: Sum of the absolute values of all terms.
        want: The true result.
        dtype: How it is stored; in float32 storing rounds nothing.
    """
    error = gamma(operations, UNIT_ROUNDOFF["float32"]) * np.asarray(magnitude)
    if dtype == "float32":
        return error
    return error + UNIT_ROUNDOFF[dtype] * (np.abs(want) + error) + SMALLEST[dtype] / 2


def reserved(shape: Any, dtype: Any) -> Array:
    """Give an array of zeros that takes no memory where it is not touched: for offsets beyond 2^31."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return np.frombuffer(pages, dtype).reshape(shape)


@attrs.frozen
class Conv:
    """A convolution's extents and options, under the names of `functional.conv2d`."""

    n: int
    h: int
    w: int
    c: int
    k: int
    r: int
    s: int
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        return self.n, self.h, self.w, self.c

    @property
    def w_shape(self) -> tuple[int, int, int, int]:
        return self.k, self.r, self.s, self.c // self.groups

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        p = (self.h + self.pad[0] + self.pad[1] - (self.r - 1) * self.dilation[0] - 1) // self.stride[0] + 1
        q = (self.w + self.pad[2] + self.pad[3] - (self.s - 1) * self.dilation[1] - 1) // self.stride[1] + 1
        return self.n, p, q, self.k

    @property
    def options(self) -> dict[str, Any]:
        return {"stride": self.stride, "pad": self.pad, "dilation": self.dilation, "groups": self.groups}


def _axis(draw: Any, most_extent: int, most_taps: int) -> tuple[int, int, int, int, int, int]:
    """Draw extent, taps, stride, dilation and pads of one axis, such that the filter fits."""
    taps, stride, dilation = draw(st.integers(1, most_taps)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    low, high = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    reach = (taps - 1) * dilation + 1
    least = max(1, reach - low - high)
    return draw(st.integers(least, max(least, most_extent))), taps, stride, dilation, low, high


@st.composite
def convolutions(
    draw: Any,
    *,
    most_n: int = 3,
    most_extent: int = 9,
    most_taps: int = 3,
    most_channels: int = 9,
    depthwise: bool = False,
) -> Conv:
    """Draw convolutions: odd channels, axes that differ, one-sided pads, strides and dilations, groups."""
    h, r, stride_h, dilation_h, top, bottom = _axis(draw, most_extent, most_taps)
    w, s, stride_w, dilation_w, left, right = _axis(draw, most_extent, most_taps)
    groups = draw(st.integers(1, most_channels)) if depthwise else draw(st.sampled_from([1, 1, 1, 2, 3]))
    most = max(1, most_channels // groups)
    c, k = (1, draw(st.integers(1, 2))) if depthwise else (draw(st.integers(1, most)), draw(st.integers(1, most)))
    return Conv(
        n=draw(st.integers(1, most_n)), h=h, w=w, c=groups * c, k=groups * k, r=r, s=s,
        stride=(stride_h, stride_w), pad=(top, bottom, left, right), dilation=(dilation_h, dilation_w), groups=groups,
    )  # fmt: skip


def conv2d(conv: Conv, x: Array, w: Array, b: Array | None = None) -> Array:
    """Convolve decoded arrays: y."""
    y = np.zeros(conv.y_shape)
    padded = np.pad(x, _around(conv))
    for tap, rows, columns, channels, filters in _taps(conv):
        y[..., filters] += padded[:, rows, columns, channels] @ w[(filters, *tap)].T
    return y if b is None else y + b


def conv2d_dgrad(conv: Conv, dy: Array, w: Array) -> Array:
    """Give the gradient by x."""
    dx = np.pad(np.zeros(conv.x_shape), _around(conv))
    for tap, rows, columns, channels, filters in _taps(conv):
        dx[:, rows, columns, channels] += dy[..., filters] @ w[(filters, *tap)]
    top, _, left, _ = conv.pad
    return dx[:, top : top + conv.h, left : left + conv.w]


def conv2d_wgrad(conv: Conv, x: Array, dy: Array) -> tuple[Array, Array]:
    """Give the gradients by w and by the bias."""
    dw = np.zeros(conv.w_shape)
    padded = np.pad(x, _around(conv))
    for tap, rows, columns, channels, filters in _taps(conv):
        dw[(filters, *tap)] = np.einsum("npqk,npqc->kc", dy[..., filters], padded[:, rows, columns, channels])
    return dw, dy.sum(axis=(0, 1, 2))


def _around(conv: Conv) -> tuple[tuple[int, int], ...]:
    return (0, 0), conv.pad[:2], conv.pad[2:], (0, 0)


def _taps(conv: Conv) -> Any:
    """Give each tap of each group: (r, s), the rows and columns of padded x that it meets, channels, filters."""
    _, p, q, _ = conv.y_shape
    (step_h, step_w), (spread_h, spread_w) = conv.stride, conv.dilation
    c, k = conv.c // conv.groups, conv.k // conv.groups
    for r, s, group in itertools.product(range(conv.r), range(conv.s), range(conv.groups)):
        rows = slice(r * spread_h, r * spread_h + (p - 1) * step_h + 1, step_h)
        columns = slice(s * spread_w, s * spread_w + (q - 1) * step_w + 1, step_w)
        yield (r, s), rows, columns, slice(group * c, (group + 1) * c), slice(group * k, (group + 1) * k)

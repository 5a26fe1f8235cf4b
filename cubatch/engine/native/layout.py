"""Between float32 arrays of the world outside and NHWC arrays as kernels store and pad them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.native.arrays import check, dtype_of, element_grid
from cubatch.engine.native.context import Context
from cubatch.errors import InvalidArgument
from cubatch.kernels import variant
from cubatch.kernels.workspace.misc import THREADS

_TILE = 32
_FEW = 8
"""Channels up to which a thread writes all of a pixel; beyond, tiles are turned in shared memory."""


def encode(context: Context, x: Any, *, out: Any) -> Any:
    """
    Convert float32 (..., c) to a storage type, with zeros for the channels that `out` has beyond c.

    Args:
        context: Where it runs.
        x: float32 (..., c), C-contiguous.
        out: (..., padded) of any storage type, padded at least c.

    Returns:
        out.

    Raises:
        InvalidArgument: If x is not float32, or out has fewer channels.
    """
    channels, padded = x.shape[-1], out.shape[-1]
    check(np.float32, x.shape, x=x)
    check(out.dtype, (*x.shape[:-1], padded), out=out)
    if channels == padded:
        arguments = [x, out, np.int64(x.size)]
        context.launch(variant.find("encode", dtype_of(out)), element_grid(out), arguments)
        return out
    return _pack(context, x, out, x.size // channels, 1, channels, strides=(channels, 0, 1))


def decode(context: Context, x: Any, *, out: Any) -> Any:
    """Convert a storage type to float32: `out` has the shape of x."""
    check(np.float32, x.shape, out=out)
    check(x.dtype, x.shape, x=x)
    context.launch(variant.find("decode", dtype_of(x)), element_grid(x), [x, out, np.int64(x.size)])
    return out


def copy_channels(context: Context, x: Any, *, out: Any) -> Any:
    """
    Copy (..., c) into (..., wanted) of the same storage type: zeros follow where that is wider, else it is cut.

    Args:
        context: Where it runs.
        x: (..., c), C-contiguous.
        out: (..., wanted), C-contiguous.

    Returns:
        out.
    """
    channels, wanted = x.shape[-1], out.shape[-1]
    check(x.dtype, x.shape, x=x)
    check(x.dtype, (*x.shape[:-1], wanted), out=out)
    rows = x.size // channels
    context.launch(
        variant.find("copy_channels", dtype_of(x)),
        (-(-rows // THREADS), 1, 1),
        [x, out, np.int64(rows), np.int32(channels), np.int32(wanted)],
    )
    return out


def to_nhwc(context: Context, x: Any, *, out: Any) -> Any:
    """
    Turn float32 (n, c, h, w) into (n, h, w, padded) of a storage type, with zeros from channel c on.

    Args:
        context: Where it runs.
        x: float32 (n, c, h, w), C-contiguous.
        out: (n, h, w, padded), padded at least c.

    Returns:
        out.

    Raises:
        InvalidArgument: If x is not float32, or out has fewer channels.
    """
    n, channels, h, w = x.shape
    padded, pixels = out.shape[-1], h * w
    check(np.float32, x.shape, x=x)
    check(out.dtype, (n, h, w, padded), out=out)
    if padded <= _FEW:
        return _pack(context, x, out, n * pixels, pixels, channels, strides=(channels * pixels, 1, pixels))
    _check_room(channels, padded)
    grid = (n * -(-pixels // _TILE), -(-padded // _TILE), 1)
    arguments = [x, out, np.int32(pixels), np.int32(channels), np.int32(padded)]
    context.launch(variant.find("nchw_to_nhwc", dtype_of(out)), grid, arguments)
    return out


def to_nchw(context: Context, x: Any, *, out: Any) -> Any:
    """
    Turn (n, h, w, padded) of a storage type into float32 (n, c, h, w), without the channels beyond c.

    Args:
        context: Where it runs.
        x: (n, h, w, padded), padded at least c.
        out: float32 (n, c, h, w), C-contiguous.

    Returns:
        out.

    Raises:
        InvalidArgument: If out is not float32, or has more channels.
    """
    n, channels, h, w = out.shape
    padded, pixels = x.shape[-1], h * w
    check(np.float32, out.shape, out=out)
    check(x.dtype, (n, h, w, padded), x=x)
    _check_room(channels, padded)
    grid = (n * -(-pixels // _TILE), -(-channels // _TILE), 1)
    arguments = [x, out, np.int32(pixels), np.int32(channels), np.int32(padded)]
    context.launch(variant.find("nhwc_to_nchw", dtype_of(x)), grid, arguments)
    return out


def _pack(
    context: Context, x: Any, out: Any, num_pixels: int, pixels: int, channels: int, *, strides: tuple[int, int, int]
) -> Any:
    """Gather each pixel's channels; the strides are of a sample, a pixel and a channel, in elements."""
    _check_room(channels, out.shape[-1])
    sample, pixel, channel = strides
    context.launch(
        variant.find("pack", dtype_of(out)),
        (-(-num_pixels // THREADS), 1, 1),
        [
            x, out, np.int64(num_pixels), np.int32(pixels), np.int32(channels), np.int32(out.shape[-1]),
            np.int64(sample), np.int32(pixel), np.int32(channel),
        ],
    )  # fmt: skip
    return out


def _check_room(channels: int, padded: int) -> None:
    if padded < channels:
        raise InvalidArgument("padded channels", padded, f"at least the {channels} there are")

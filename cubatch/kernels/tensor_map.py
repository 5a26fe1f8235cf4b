"""
Tensor maps, which describe arrays to Hopper's copy engine (TMA), and their 128 bytes as encoded by the CUDA driver.

A `TensorMap` holds numbers and an array.  The launcher lets the driver encode it; the simulator of the tests reads the
numbers.  The limits are those of cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col of the CUDA driver API.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
from typing import Any

import attrs
import numpy as np

from cubatch.errors import DeviceFailed, InvalidArgument
from cubatch.network.windows import Axis, ConvShape, working_phases

ROW_BYTES = 128
"""Bytes of a tile's rows in shared memory: the width of the 128-byte swizzle."""

MOST_OFFSET = 255
"""Largest offset of a tap from the first tap of its window, in pixels: 8 bits each along w and h."""

_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "tf32": 4}
ALIGNMENT = 16  # of addresses and of the bytes between rows
_MOST_EXTENT, _MOST_STRIDE_BYTES, _MOST_BOX, _MOST_PIXELS = 1 << 32, 1 << 40, 256, 1024
_MOST_STEP, _CORNERS = 8, range(-128, 128)
_MOST_PIXEL_NUMBER = (1 << 31) - (1 << 10)  # tiles may reach beyond the last pixel
_FEWEST_CHANNELS = 32  # half a box of 16-bit elements

# Of cuda.h; a float32 array of dtype TFLOAT32 is rounded to tf32 as it is copied.
_DTYPES = {"float16": 6, "float32": 7, "bfloat16": 9, "tf32": 11}
_NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_128, _FILL_ZERO = 0, 3, 2, 0
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_SUCCESS = 0


@attrs.frozen
class Window:
    """The pixels of an im2col copy: from the lower corner, `steps` apart, to the upper corner."""

    steps: tuple[int, int]  # pixels between neighbors along w and h: the stride of a convolution
    lower: tuple[int, int]  # first pixel along w and h, relative to the image's first; minus the padding
    upper: tuple[int, int]  # last pixel along w and h, relative to the image's last

    @classmethod
    def along(
        cls, size: tuple[int, int], out: tuple[int, int], steps: tuple[int, int], lower: tuple[int, int]
    ) -> Window:
        """
        Return the window that covers a given number of pixels along each axis.

        Args:
            size: Extents w and h of the image.
            out: Pixels along w and h.
            steps: Pixels between neighbors along w and h.
            lower: First pixel along w and h, relative to the image's first.

        Example:
            >>> Window.along((28, 14), (28, 7), (1, 2), (-1, -1))
            Window(steps=(1, 2), lower=(-1, -1), upper=(-1, -2))
        """
        upper = tuple(
            first + (count - 1) * step + 1 - extent
            for first, count, step, extent in zip(lower, out, steps, size, strict=True)
        )
        return cls(steps, lower, (upper[0], upper[1]))

    @property
    def is_encodable(self) -> bool:
        """Whether the window is within the limits of a tensor map."""
        return max(self.steps) <= _MOST_STEP and all(corner in _CORNERS for corner in self.lower + self.upper)


@attrs.frozen(eq=False)
class TensorMap:
    """
    An array, and the tiles of it that are copied into rows of 128 swizzled bytes.

    Raises:
        InvalidArgument: If extents, strides, box or window exceed the limits of tensor maps.
        ValueError: If the dtype is unknown.
    """

    array: Any  # its address must be a multiple of 16
    # "float16", "bfloat16", "float32", or "tf32" for float32 that is rounded by the copy
    dtype: str = attrs.field(validator=attrs.validators.in_(_DTYPES))
    dims: tuple[int, ...]  # extents, the contiguous one first; for im2col (c, w, h, n)
    box: tuple[int, ...]  # extents of a tile in the same order; for im2col (channels, pixels)
    window: Window | None = None  # pixels of an im2col copy; None for plain tiles
    # bytes between neighbors along each axis but the contiguous one; by default those of a C-contiguous array
    strides: tuple[int, ...] = attrs.field()

    @strides.default
    def _contiguous(self) -> tuple[int, ...]:
        item_bytes = _ITEM_BYTES.get(self.dtype, 0)  # an unknown dtype is refused after this
        return tuple(itertools.accumulate(self.dims[:-1], operator.mul, initial=item_bytes))[1:]

    def __attrs_post_init__(self) -> None:
        """Raise InvalidArgument if the driver would reject the tensor map."""
        if not all(0 < extent <= _MOST_EXTENT for extent in self.dims):
            raise InvalidArgument("dims", self.dims, "extents from 1 to 2^32 each")
        if any(stride % ALIGNMENT or stride >= _MOST_STRIDE_BYTES for stride in self.strides):
            raise InvalidArgument(
                "dims", self.dims, f"with strides that are multiples of {ALIGNMENT} bytes and below 2^40 bytes"
            )
        if self.box[0] * self.item_bytes != ROW_BYTES:
            raise InvalidArgument("box", self.box, f"with rows of {ROW_BYTES} bytes")
        if self.window is None:
            if len(self.box) != len(self.dims) or max(self.box) > _MOST_BOX:
                raise InvalidArgument("box", self.box, f"{len(self.dims)} extents of at most {_MOST_BOX}")
        elif self.box[1] > _MOST_PIXELS:
            raise InvalidArgument("box", self.box, f"with at most {_MOST_PIXELS} pixels")
        elif not self.window.is_encodable:
            raise InvalidArgument(
                "window",
                self.window,
                f"one with steps of at most {_MOST_STEP} and corners from {_CORNERS[0]} to {_CORNERS[-1]}",
            )

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return _ITEM_BYTES[self.dtype]


def check_address(address: int) -> int:
    """Return an array's address; raise InvalidArgument if it is not a multiple of 16."""
    if address % ALIGNMENT:
        raise InvalidArgument("address", hex(address), f"a multiple of {ALIGNMENT}")
    return address


def encode(tensor: TensorMap, address: int, driver: Any) -> bytes:
    """
    Return a tensor map as encoded by the CUDA driver, without a call to the GPU.

    Raises:
        InvalidArgument: If the address is not a multiple of 16.
        DeviceFailed: If the driver refuses the tensor map, or is older than CUDA 12.
    """
    storage = np.zeros(_MAP_BYTES + _MAP_ALIGNMENT, np.uint8)
    start = -storage.ctypes.data % _MAP_ALIGNMENT
    rank = len(tensor.dims)
    common = (
        ctypes.c_void_p(storage.ctypes.data + start), ctypes.c_int(_DTYPES[tensor.dtype]), ctypes.c_uint32(rank),
        ctypes.c_void_p(check_address(address)), (ctypes.c_uint64 * rank)(*tensor.dims),
        (ctypes.c_uint64 * (rank - 1))(*tensor.strides),
    )  # fmt: skip
    ends = tuple(ctypes.c_int(number) for number in (_NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_128, _FILL_ZERO))
    window = tensor.window
    if window is None:
        ones = (ctypes.c_uint32 * rank)(*[1] * rank)
        status = _function(driver, "cuTensorMapEncodeTiled")(
            *common, (ctypes.c_uint32 * rank)(*tensor.box), ones, *ends
        )
    else:
        steps = (ctypes.c_uint32 * rank)(1, *window.steps, 1)
        channels, pixels = (ctypes.c_uint32(extent) for extent in tensor.box)
        corners = ((ctypes.c_int * 2)(*window.lower), (ctypes.c_int * 2)(*window.upper))  # w first, then h
        status = _function(driver, "cuTensorMapEncodeIm2col")(*common, *corners, channels, pixels, steps, *ends)
    if status != _SUCCESS:
        raise DeviceFailed.by_driver(f"encoding {tensor.dims} in boxes of {tensor.box}", status)
    return storage[start : start + _MAP_BYTES].tobytes()


def _function(driver: Any, name: str) -> Any:
    function = getattr(driver, name, None)
    if function is None:
        raise DeviceFailed(name, "no such function in the CUDA driver", "Install a driver of CUDA 12 or newer.")
    return function


def can_gather(operation: str, shape: ConvShape, samples: int) -> bool:
    """Return whether tensor maps can describe the operands of a convolution's pass, with boxes at least half full."""
    vertical, horizontal = shape.vertical, shape.horizontal
    most = max(vertical.size * horizontal.size, shape.pixels) * samples
    channels = shape.k if operation == "conv2d_dgrad" else gathered(shape)[0].c
    if shape.groups != 1 or most >= _MOST_PIXEL_NUMBER or channels < _FEWEST_CHANNELS:
        return False
    if operation != "conv2d_dgrad":
        return _can_gather(vertical, gathered(shape)[0].horizontal)
    return all(_can_gather(phase.vertical, phase.horizontal) for phase in working_phases(shape))


def gathered(shape: ConvShape) -> tuple[ConvShape, int]:
    """
    Return a convolution as an im2col copy gathers its input, and the elements from one pixel to the next of a row.

    Few channels would not fill a box.  If a row of the filter reads no padding, its taps are contiguous in memory.
    They are then gathered as channels of a single pixel, which overlaps the next pixel.
    """
    row, channels = shape.horizontal, shape.horizontal.taps * shape.c
    if shape.groups > 1 or shape.c >= _FEWEST_CHANNELS or channels % _FEWEST_CHANNELS:
        return shape, shape.c
    if row.reaches_out or row.step > 1:
        return shape, shape.c
    return shape._replace(horizontal=Axis(row.out, row.out, 1, 1, 1, 0), c=channels), row.stride * shape.c


def _can_gather(vertical: Axis, horizontal: Axis) -> bool:
    window = window_of(vertical, horizontal)
    return window.is_encodable and all((axis.taps - 1) * axis.step <= MOST_OFFSET for axis in (vertical, horizontal))


def window_of(vertical: Axis, horizontal: Axis) -> Window:
    """Return the window of an im2col copy that has a pixel for each output of a convolution."""
    return Window.along(
        (horizontal.size, vertical.size),
        (horizontal.out, vertical.out),
        (horizontal.stride, vertical.stride),
        (horizontal.offset, vertical.offset),
    )

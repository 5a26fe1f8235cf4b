"""What tensor maps can say, and what is refused before a driver sees it."""

from __future__ import annotations

import pytest

from cubatch.errors import InvalidArgument
from cubatch.kernels.tensor_map import TensorMap, Window, can_gather, gathered, window_of
from cubatch.network.windows import Axis, conv_shape

WINDOW = Window((1, 1), (0, 0), (0, 0))
IMAGE = {"dtype": "float16", "dims": (64, 9, 7, 2), "box": (64, 128), "window": WINDOW}
MATRIX = {"dtype": "float16", "dims": (64, 30), "box": (64, 128)}

REFUSED = [
    (MATRIX, {"dims": (60, 30)}, "multiples of 16 bytes"),
    (MATRIX, {"dims": (0, 30)}, "from 1 to"),
    (MATRIX, {"dims": (64, (1 << 32) + 1)}, "from 1 to"),
    (MATRIX, {"dims": (1 << 31, 1 << 10, 2), "box": (64, 1, 1)}, r"below 2\^40"),
    (MATRIX, {"box": (32, 128)}, "rows of 128 bytes"),
    (MATRIX, {"box": (64, 257)}, "at most 256"),
    (MATRIX, {"box": (64, 1, 128)}, "2 extents"),
    (MATRIX, {"dtype": "float64"}, "float64"),
    (IMAGE, {"box": (64, 1025)}, "at most 1024 pixels"),
    (IMAGE, {"window": Window((1, 9), (0, 0), (0, 0))}, "steps of at most 8"),
    (IMAGE, {"window": Window((1, 1), (-129, 0), (0, 0))}, "corners from -128 to 127"),
    (IMAGE, {"window": Window((1, 1), (0, 0), (0, 128))}, "corners from -128 to 127"),
]


@pytest.mark.parametrize(("good", "change", "message"), REFUSED)
def test_each_limit_of_the_driver_is_an_error_of_its_own(good, change, message):
    """The map without the change is taken; with it the error says what is allowed."""
    TensorMap(None, **good)
    with pytest.raises((InvalidArgument, ValueError), match=message):
        TensorMap(None, **good | change)


def test_the_largest_of_everything_is_taken():
    """The limits themselves are allowed."""
    TensorMap(None, "bfloat16", (64, 1 << 32), (64, 256))
    TensorMap(None, "tf32", (4, 300, 300, 9), (32, 1024), Window((8, 8), (-128, -128), (127, 127)))


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("taps", [1, 2, 5])
def test_a_window_has_as_many_pixels_as_the_convolution(stride, taps):
    """Counted as the copy engine walks: from the lower corner, a stride at a time, up to the upper corner."""
    for size in range(taps, 14):
        axis = conv_shape((size, 1, 1), (1, taps, 1, 1), (stride, 1), (1, 2, 0, 0), (1, 1)).vertical
        one = Axis(size=1, out=1, taps=1, stride=1, step=1, offset=0)
        window = window_of(axis, one)
        walked = range(window.lower[1], size - 1 + window.upper[1] + 1, window.steps[1])
        assert len(walked) == axis.out


def test_a_gradient_is_gathered_where_each_of_its_phases_can_be():
    """A stride of 9 cannot be stepped over, but its gradient's phases have stride 1; few channels fill no box."""
    shape = conv_shape((27, 27, 64), (64, 3, 3, 64), (9, 9), (0,) * 4, (1, 1))
    assert not can_gather("conv2d_fprop", shape, 1)
    assert can_gather("conv2d_dgrad", shape, 1)
    assert not can_gather("conv2d_dgrad", shape._replace(k=24), 1)


def image(c, taps, *, stride=1, pad=0, step=1, groups=1):
    """The shape of a convolution over 20 x 21 pixels; stride, pad and dilation are those along a row."""
    filters = (64, *taps, c // groups)
    return conv_shape((20, 21, c), filters, (1, stride), (1, 1, pad, pad), (1, step), groups=groups)


@pytest.mark.parametrize(
    ("shape", "channels", "pitch"),
    [(image(16, (4, 4)), 64, 16), (image(16, (3, 2), stride=3), 32, 48), (image(24, (1, 4), stride=2), 96, 48)],
)
def test_taps_of_a_row_without_padding_are_gathered_as_channels(shape, channels, pitch):
    """Pixels begin a stride of channels apart, one for each output; the rows of taps stay."""
    row = Axis(size=shape.horizontal.out, out=shape.horizontal.out, taps=1, stride=1, step=1, offset=0)
    assert gathered(shape) == (shape._replace(horizontal=row, c=channels), pitch)
    assert can_gather("conv2d_fprop", shape, 1)
    assert can_gather("conv2d_wgrad", shape, 1)


@pytest.mark.parametrize(
    "shape",
    [
        image(32, (4, 4)), image(16, (4, 3)), image(16, (4, 4), pad=1), image(16, (4, 4), step=2),
        image(32, (4, 4), groups=2),
    ],
    ids=["many channels", "half boxes", "padding", "dilation", "groups"],
)  # fmt: skip
def test_other_taps_are_gathered_one_by_one(shape):
    """With channels enough, taps that would leave a box less than half full, and taps that are no neighbors."""
    assert gathered(shape) == (shape, shape.c)


def test_a_stride_of_any_length_is_looked_at_by_the_taps_it_leaves():
    """Of 10^18 phases nine have a tap, and each of them reads one pixel."""
    shape = conv_shape((27, 27, 64), (64, 3, 3, 64), (10**9, 10**9), (0,) * 4, (1, 1))
    assert can_gather("conv2d_dgrad", shape, 1)

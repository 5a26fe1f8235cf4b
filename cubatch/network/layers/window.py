"""Windows over an input: whether they fit, and how many positions they have."""

from __future__ import annotations

from cubatch.errors import InvalidSpec
from cubatch.network.extents import Extents


def check_window(r: int, s: int, pad: tuple[int, int, int, int], dilation: tuple[int, int], h: int, w: int) -> None:
    """Raise InvalidSpec for a filter larger than the padded input."""
    for name, taps, spread, extent, letter, around in (
        ("r", r, dilation[0], h, "h", pad[0] + pad[1]),
        ("s", s, dilation[1], w, "w", pad[2] + pad[3]),
    ):
        reach = (taps - 1) * spread + 1
        if reach > extent + around:
            raise InvalidSpec(
                name,
                taps,
                f"at most {(extent + around - 1) // spread + 1}, for the filter to fit the padded input "
                f"({letter}={extent} + pad {around}, dilation {spread})",
            )


def window_extents(
    shape: Extents,
    r: int,
    s: int,
    stride: tuple[int, int],
    pad: tuple[int, int, int, int],
    dilation: tuple[int, int],
    *,
    ceil: bool,
) -> tuple[int, int]:
    """Count window positions: floor((extent + pad - reach) / stride) + 1, or ceil as pooling may ask."""
    result = []
    for extent, taps, step, low, high, spread in (
        (shape[0], r, stride[0], pad[0], pad[1], dilation[0]),
        (shape[1], s, stride[1], pad[2], pad[3], dilation[1]),
    ):
        room = extent + low + high - (taps - 1) * spread - 1
        count = (-(-room // step) if ceil else room // step) + 1
        if ceil and (count - 1) * step >= extent + low:
            count -= 1  # the last window must start inside the input or its leading pad
        result.append(count)
    return result[0], result[1]

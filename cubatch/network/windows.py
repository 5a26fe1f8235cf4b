"""
The index arithmetic of convolution and pooling, which layers, the memory plan and the engine share.

Along one axis, output position o and tap t read the source at `o * stride + t * step + offset`; positions outside the
source read as zero.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

from cubatch.errors import InvalidArgument, InvalidSpec

Extents = tuple[int, int, int]
Pair = tuple[int, int]
Pad = tuple[int, int, int, int]


class Axis(NamedTuple):
    """An axis of a sliding window: extents of source and output, and where each output and tap reads."""

    size: int  # extent of the source
    out: int  # extent of the output
    taps: int  # taps of the window
    stride: int  # source positions between neighboring outputs
    step: int  # source positions between neighboring taps (the dilation)
    offset: int  # source position of output 0, tap 0; minus the padding in a forward pass

    @property
    def is_identity(self) -> bool:
        """Whether output position o reads source position o and nothing else."""
        return self.taps == 1 and self.stride == 1 and self.offset == 0 and self.out == self.size

    @property
    def reaches_out(self) -> bool:
        """Whether any tap of any output reads outside the source."""
        return self.offset < 0 or self.offset + self.span(self.out) > self.size

    def span(self, out: int) -> int:
        """
        Return the number of source positions from the first to the last that `out` neighboring outputs read.

        Example:
            >>> Axis(size=28, out=28, taps=3, stride=1, step=1, offset=-1).span(28)
            30
        """
        return (out - 1) * self.stride + (self.taps - 1) * self.step + 1

    def seen(self) -> slice:
        """
        Return the range of taps, first to last, that read inside the source for some output; all taps if none does.

        Example:
            >>> Axis(size=1, out=1, taps=3, stride=1, step=1, offset=-1).seen()
            slice(1, 2, None)
        """
        reading = [tap for tap in range(self.taps) if self.valid(tap, 0, self.out)[0] != slice(0, 0)]
        return slice(reading[0], reading[-1] + 1) if reading else slice(0, self.taps)

    def valid(self, tap: int, start: int, stop: int) -> tuple[slice, slice]:
        """
        Return the outputs in [start, stop) for which a tap reads a source position, not padding, and these positions.

        Both are slices, empty if there are none; the slice of outputs is relative to `start`.

        Example:
            >>> Axis(size=5, out=3, taps=3, stride=2, step=1, offset=-1).valid(0, 0, 3)
            (slice(1, 3, None), slice(1, 4, 2))
        """
        shift = tap * self.step + self.offset
        low = max(start, -(shift // self.stride))
        high = min(stop, (self.size - 1 - shift) // self.stride + 1)
        if high <= low:
            return slice(0, 0), slice(0, 0)
        first = low * self.stride + shift
        return slice(low - start, high - start), slice(first, first + (high - low - 1) * self.stride + 1, self.stride)


class ConvShape(NamedTuple):
    """The geometry of a convolution: both axes of its window, channels, filters and groups, without the batch."""

    vertical: Axis
    horizontal: Axis
    c: int
    k: int
    groups: int

    @property
    def taps(self) -> int:
        """Filter taps r * s."""
        return self.vertical.taps * self.horizontal.taps

    @property
    def pixels(self) -> int:
        """Output pixels p * q of one sample."""
        return self.vertical.out * self.horizontal.out

    @property
    def filter_elements(self) -> int:
        """Number of weights of the filter."""
        return self.k * self.taps * (self.c // self.groups)

    @property
    def is_plain_3x3(self) -> bool:
        """Whether it is a 3x3 filter of stride 1 without dilation and groups, as Winograd's algorithms need."""
        axes = (self.vertical, self.horizontal)
        return self.groups == 1 and all((axis.taps, axis.stride, axis.step) == (3, 1, 1) for axis in axes)

    @property
    def is_depthwise(self) -> bool:
        """Whether each output channel reads only the input channel of its own index."""
        return self.groups == self.c == self.k


@functools.lru_cache(maxsize=4096)
def seen_taps(shape: ConvShape) -> tuple[ConvShape, slice, slice]:
    """
    Return a convolution without taps that read only padding, such as eight of a 3x3 filter over one pixel.

    Returns:
        The convolution without them, and the rows and columns of the filter that are left. Columns are left out only
        if one row is left, so that the elements for each output channel stay contiguous.

    Example:
        >>> shape = conv_shape((1, 1, 8), (8, 3, 3, 8), (1, 1), (1, 1, 1, 1), (1, 1))
        >>> seen_taps(shape)[0].taps, *seen_taps(shape)[1:]
        (1, slice(1, 2, None), slice(1, 2, None))
    """
    rows, columns = shape.vertical.seen(), shape.horizontal.seen()
    if rows.stop - rows.start > 1:
        columns = slice(0, shape.horizontal.taps)
    axes = (_with_taps(shape.vertical, rows), _with_taps(shape.horizontal, columns))
    return shape._replace(vertical=axes[0], horizontal=axes[1]), rows, columns


def _with_taps(axis: Axis, taps: slice) -> Axis:
    return axis._replace(taps=taps.stop - taps.start, offset=axis.offset + taps.start * axis.step)


def check_window(hw: Pair, rs: Pair, pad: Pad, dilation: Pair = (1, 1)) -> None:
    """Raise InvalidSpec, with "r" or "s" as the field, for a filter larger than the padded input."""
    for name, taps, spread, extent, letter, pads in (
        ("r", rs[0], dilation[0], hw[0], "h", pad[:2]),
        ("s", rs[1], dilation[1], hw[1], "w", pad[2:]),
    ):
        if _travel(extent, taps, spread, pads) < 0:
            padded = extent + sum(pads)
            raise InvalidSpec(
                name,
                taps,
                f"at most {(padded - 1) // spread + 1}, for the filter to fit the padded input "
                f"({letter}={extent} + pad {sum(pads)}, dilation {spread})",
            )


def _travel(size: int, taps: int, step: int, pads: Pair) -> int:
    """
    Return by how many positions a window can move over the padded source; negative where it does not fit.

    The window has `taps` taps at a distance of `step`; the source has `size` positions and `pads` on both sides.
    """
    return size + sum(pads) - ((taps - 1) * step + 1)


def _axis(size: int, taps: int, stride: int, step: int, pads: Pair, *, ceil: bool, name: str) -> Axis:
    if taps < 1 or stride < 1 or step < 1:
        raise InvalidArgument(name, (taps, stride, step), "three numbers of at least 1: filter, stride and dilation")
    if min(pads) < 0:
        raise InvalidArgument("pad", pads, "at least 0 on every side")
    travel = _travel(size, taps, step, pads)
    if travel < 0:
        raise InvalidArgument(
            name,
            (taps - 1) * step + 1,
            f"at most the padded input's {size + sum(pads)}",
            "Pad more, or use a smaller filter.",
        )
    out = travel // stride + 1
    # A window that starts beyond the input and its leading padding would read nothing (PyTorch's rule).
    if ceil and travel % stride and out * stride < size + pads[0]:
        out += 1
    return Axis(size=size, out=out, taps=taps, stride=stride, step=step, offset=-pads[0])


@functools.lru_cache(maxsize=4096)
def conv_shape(
    hwc: Extents, krsc: tuple[int, int, int, int], stride: Pair, pad: Pad, dilation: Pair, *, groups: int = 1
) -> ConvShape:
    """
    Return a convolution's geometry from the shapes of one sample and of the filter.

    Args:
        hwc: Shape of one sample: (h, w, c).
        krsc: Shape of the filter: (k, r, s, c / groups).
        stride: Vertical and horizontal stride.
        pad: Zeros at the top, bottom, left and right.
        dilation: Vertical and horizontal dilation.
        groups: Number of groups that input and output channels are divided into.

    Raises:
        InvalidArgument: If an extent is out of range, or the shapes and groups do not match.

    Example:
        >>> shape = conv_shape((28, 28, 1), (32, 3, 3, 1), (1, 1), (1, 1, 1, 1), (1, 1))
        >>> shape.vertical.out, shape.pixels, shape.taps
        (28, 784, 9)
    """
    h, w, c = hwc
    k, r, s, group_c = krsc
    if groups < 1 or c % groups or k % groups:
        raise InvalidArgument("groups", groups, f"a divisor of both {c} input and {k} output channels")
    if group_c * groups != c:
        raise InvalidArgument("w", krsc, f"a filter (k, r, s, {c // groups}) for {c} input channels in {groups} groups")
    vertical = _axis(h, r, stride[0], dilation[0], pad[:2], ceil=False, name="filter height")
    horizontal = _axis(w, s, stride[1], dilation[1], pad[2:], ceil=False, name="filter width")
    return ConvShape(vertical, horizontal, c, k, groups)


class Window(NamedTuple):
    """A pooling window: its size, stride, padding and rounding."""

    r: int  # r, s: height and width
    s: int
    stride: Pair | None = None  # vertical and horizontal stride; None for the height and the width
    pad: Pad = (0, 0, 0, 0)  # rows and columns added at the top, bottom, left and right; fewer than the window has
    ceil_mode: bool = False  # whether the last window may reach over the edge, so that every input is covered
    # whether a mean divides by the window's extent in the padded input, not in the input
    count_include_pad: bool = True


@functools.lru_cache(maxsize=1024)
def pool_axes(hw: Pair, window: Window) -> tuple[Axis, Axis]:
    """
    Return the vertical and the horizontal axis of a pooling window over an input of (h, w) pixels.

    Example:
        >>> [axis.out for axis in pool_axes((7, 8), Window(2, 2, ceil_mode=True))]
        [4, 4]
    """
    down, right = window.stride or (window.r, window.s)
    vertical = _axis(hw[0], window.r, down, 1, window.pad[:2], ceil=window.ceil_mode, name="window height")
    horizontal = _axis(hw[1], window.s, right, 1, window.pad[2:], ceil=window.ceil_mode, name="window width")
    return vertical, horizontal


class Phase(NamedTuple):
    """Input positions (top + i * sh, left + j * sw) of a convolution's input gradient, for strides sh and sw."""

    top: int  # top, left: first input row and column of the phase
    left: int
    vertical: Axis  # vertical, horizontal: axes along which its input positions read dy, at stride 1
    horizontal: Axis
    rows: slice  # rows, columns: its filter taps, in reverse order
    columns: slice

    @property
    def taps(self) -> int:
        """Number of filter taps that read this phase; 0 if the stride skips it."""
        return self.vertical.taps * self.horizontal.taps

    @property
    def works(self) -> bool:
        """Whether the phase has any taps."""
        return self.taps > 0


@functools.lru_cache(maxsize=4096)
def phases(shape: ConvShape) -> tuple[Phase, ...]:
    """
    Return the phases of a strided convolution's input gradient, without those that would begin beyond the input.

    Input position h is read by tap r of output p where p * stride = h + top - r * step. All positions of one phase are
    read by the same taps, from evenly spaced outputs.

    Example:
        >>> shape = conv_shape((5, 5, 1), (1, 3, 3, 1), (2, 2), (0, 0, 0, 0), (1, 1))
        >>> [phase.taps for phase in phases(shape)]
        [4, 2, 2, 1]
    """
    return _crossed(*(_phases_along(axis, range(axis.stride)) for axis in (shape.vertical, shape.horizontal)))


@functools.lru_cache(maxsize=4096)
def working_phases(shape: ConvShape) -> tuple[Phase, ...]:
    """
    Return the phases of a strided convolution's input gradient that a filter tap reads: at most as many as taps.

    Example:
        >>> shape = conv_shape((5, 5, 1), (1, 3, 1, 1), (2, 10**9), (0, 0, 0, 0), (1, 1))
        >>> [(phase.vertical.out, phase.taps) for phase in working_phases(shape)]
        [(3, 2), (2, 1)]
    """
    axes = (shape.vertical, shape.horizontal)
    return _crossed(*(_phases_along(axis, sorted(_taps_by_phase(axis))) for axis in axes))


def _taps_by_phase(axis: Axis) -> dict[int, list[int]]:
    phases: dict[int, list[int]] = {}
    for tap in range(axis.taps):
        phases.setdefault((axis.offset + tap * axis.step) % axis.stride, []).append(tap)
    return phases


def _phases_along(axis: Axis, firsts: Iterable[int]) -> list[tuple[int, Axis, slice]]:
    """
    Return (first position, axis, taps) of each phase of the stride along an axis of a forward pass.

    The phases begin at the ascending positions `firsts` of the input; those beyond the input are left out.
    """
    phases, taps = [], _taps_by_phase(axis)
    for first in itertools.takewhile(lambda first: first < axis.size, firsts):
        seen = taps.get(first, [])
        common = math.gcd(axis.stride, axis.step)
        offset = (first - axis.offset - seen[-1] * axis.step) // axis.stride if seen else 0
        out = -(-(axis.size - first) // axis.stride)
        gather = Axis(size=axis.out, out=out, taps=len(seen), stride=1, step=axis.step // common, offset=offset)
        backwards = slice(seen[-1], seen[0] - 1 if seen[0] else None, -axis.stride // common) if seen else slice(0, 0)
        phases.append((first, gather, backwards))
    return phases


def _crossed(rows: list[tuple[int, Axis, slice]], columns: list[tuple[int, Axis, slice]]) -> tuple[Phase, ...]:
    return tuple(
        Phase(top, left, vertical, horizontal, seen_rows, seen_columns)
        for top, vertical, seen_rows in rows
        for left, horizontal, seen_columns in columns
    )

"""What a figure of values by batch size shows, as lines with intervals; `plots.study` draws it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen(kw_only=True)
class Dot:
    """
    A value.

    Attributes:
        batch_size: Samples.
        value: What is drawn upwards.
        low, high: Ends of its interval; equal to the value where none is known.
    """

    batch_size: int
    value: float
    low: float
    high: float


@attrs.frozen(kw_only=True)
class Series:
    """
    Values that a line joins.

    Attributes:
        label: What they are.
        dots: Ascending.
        is_computed: Whether nothing was measured: a dotted line without dots.
    """

    label: str
    dots: Sequence[Dot]
    is_computed: bool = False


@attrs.frozen(kw_only=True)
class Lines:
    """
    A figure of values by batch size.

    Attributes:
        title: What it shows.
        y_label: The quantity and its unit.
        series: At most three.
        marks: Rows at the foot: what is special, and the sizes that are.
        log_x, log_y: Whether an axis is logarithmic.
    """

    title: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[tuple[str, Sequence[int]]] = ()
    log_x: bool = False
    log_y: bool = False

"""Figure of `cubatch profile`: the time of layers and passes, or per sample at each batch size, by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cubatch.report.plots import style
from cubatch.report.tables import profile as table
from cubatch.units import format_percent

_MOST_ROWS = 24
_COLORS = dict(zip(table.MEANINGS, style.COLORS, strict=False))


def draw(payload: Mapping[str, Any], path: str | Path) -> None:
    """
    Draw profiles (`tables.profile.mapping`) into a file as stacked bars of time, one color for each cause.

    For a single batch size, each of the 24 longest passes has a bar. Of several sizes, each has a bar of the time per
    sample.
    """
    profiles = payload["profiles"]
    if len(profiles) > 1:
        names = [f"batch {profile['batch_size']}" for profile in profiles]
        parts = [{cause: s / profile["batch_size"] for cause, s in profile["causes"].items()} for profile in profiles]
        what = f"{payload['model']}, {payload['mode']}, {payload['dtype']}, on {payload['device']}"
        _bars(path, names, parts, title=f"Time for each sample: {what}", subtitle=table.verdict(profiles))
        return
    rows = sorted(profiles[0]["layers"], key=lambda row: -row["seconds"])[:_MOST_ROWS]
    names = [f"{table.named(row)}, {row['pass']}" if row["type"] else table.named(row) for row in rows]
    _bars(path, names, [row["causes"] for row in rows], title=table.title(payload, profiles[0]),
          subtitle=_caption(profiles[0]))  # fmt: skip


def _bars(
    path: str | Path, names: Sequence[str], parts: Sequence[Mapping[str, float]], *, title: str, subtitle: str
) -> None:
    style.check(path)
    figure, axes = style.sheet(9.0, 1.9 + 0.26 * len(names))
    style.head(axes, title, subtitle, pad=24, size=11, gap=8)
    places, ends = range(len(names)), [0.0] * len(names)
    longest = max(sum(of.values()) for of in parts)
    scale, unit = (1e3, "ms") if longest >= 1e-3 else (1e6, "µs")  # noqa: PLR2004 - a millisecond
    for cause, color in _COLORS.items():
        widths = [scale * of[cause] for of in parts]
        if any(widths):
            axes.barh(places, widths, left=ends, color=color, label=cause, height=0.72)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set_yticks(places, [style.plain(name) for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    style.rule(axes, "x")
    style.legend(figure, ncols=len(_COLORS))
    style.save(figure, path)


def _caption(profile: Mapping[str, Any]) -> str:
    total = sum(profile["causes"].values())
    return ", ".join(f"{cause} {format_percent(seconds / total)}" for cause, seconds in profile["causes"].items())

"""A result or a prediction as an HTML page or an output of a notebook: reasons, curve, table, how it was measured."""

from __future__ import annotations

import attrs

from cubatch.measure.records import TIMED
from cubatch.report import plot
from cubatch.report.curve import Curve, curve_of
from cubatch.report.html import Figure, Parts, document, output
from cubatch.report.plots import style
from cubatch.report.settings import tables_of
from cubatch.report.tables.result import has_row, legend, listed, status, tuning_grid
from cubatch.tuning.results import BatchSizeResult, Measurement

_REASONS = 80  # characters for those of a size, in the table
_MAX_LINES = 12  # reasons beneath the table


def html(result: BatchSizeResult) -> str:
    """
    Write one self-contained HTML page: reasons, curve, table, what it was measured with.

    Args:
        result: A tuning result or a prediction.

    Returns:
        The document: no script, no external resource, light and dark, every text escaped.
    """
    return document(_parts(result))


def notebook(result: BatchSizeResult) -> str:
    """
    Write the same as an output of a notebook.

    Args:
        result: As for `html`.

    Returns:
        An element that brings its own style.
    """
    return output(_parts(result))


def figure(shown: Curve, objective: str) -> Figure:
    """Return the figure of a curve for a page."""
    url = style.data_url(plot.figure_of(shown, objective, titled=False)) if style.is_installed() else ""
    return Figure(shown.title, url)


def _parts(result: BatchSizeResult) -> Parts:
    shown, failed = curve_of(result), _stop_reasons(result)
    table = attrs.evolve(
        tuning_grid(result), title="Every batch size", notes=[*([failed] if failed else []), *legend(result)]
    )
    return Parts(
        title=shown.title,
        subtitle=shown.subtitle,
        predicted=shown.predicted,
        reasons=result.reasons,
        figure=figure(shown, result.objective),
        table=table.shortened(_REASONS),
        facts=tables_of(result),
    )


def _stop_reasons(result: BatchSizeResult) -> list[str]:
    """Return why sizes that have a row gave no result, those of one reason together."""
    alike: dict[tuple[str, str], list[Measurement]] = {}
    for m in result.sizes.values():
        if has_row(m, result) and m.status not in TIMED and m.stop_reason:
            alike.setdefault((status(m, result), m.stop_reason), []).append(m)
    lines = [f"{listed(group)}: {word}: {why}" for (word, why), group in alike.items()]
    rest = len(lines) - _MAX_LINES
    return lines if rest <= 1 else [*lines[:_MAX_LINES], f"{rest} more reasons are in the JSON."]

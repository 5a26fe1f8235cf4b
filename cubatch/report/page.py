"""A tuning result or a prediction as an HTML page, or as an output of a notebook."""

from __future__ import annotations

import attrs

from cubatch.measure.records import TIMED
from cubatch.report import html as writer, plot
from cubatch.report.curve import Curve
from cubatch.report.html import Article, Figure, Section
from cubatch.report.plots import style
from cubatch.report.settings import setting_of, tables_of
from cubatch.report.tables.result import has_row, legend, list_sizes, status, tuning_grid
from cubatch.tuning.results import BatchSizeResult, Measurement

_MAX_LINES = 12  # reasons below the table


def html(result: BatchSizeResult) -> str:
    """Return a self-contained HTML page of a tuning result or prediction: no script, no external resource."""
    return writer.document(_article(result))


def notebook(result: BatchSizeResult) -> str:
    """Return a tuning result or prediction as an HTML element for a notebook, with its own style."""
    return writer.output(_article(result))


def _article(result: BatchSizeResult) -> Article:
    curve, failed = Curve(result), _stop_reasons(result)
    figure = plot.figure_of(curve, titled=False) if style.is_installed() else None
    table = attrs.evolve(tuning_grid(result), notes=[*([failed] if failed else []), *legend(result)])
    return Article(
        title=curve.title,
        subtitle=setting_of(result),
        predicted=result.predicted,
        reasons=result.reasons,
        sections=[
            Section(heading="The curve", figure=Figure(curve.title, style.data_url(figure) if figure else "")),
            Section(heading="Every batch size", table=table),
        ],
        facts=tables_of(result),
    )


def _stop_reasons(result: BatchSizeResult) -> list[str]:
    """Return a line for each reason why batch sizes have no timing; beyond 12, the last line counts the others."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in result.sizes.values():
        if has_row(m, result) and m.status not in TIMED and m.stop_reason:
            groups.setdefault((status(m, result), m.stop_reason), []).append(m)
    lines = [f"{list_sizes(group)}: {word}: {why}" for (word, why), group in groups.items()]
    rest = len(lines) - _MAX_LINES
    return lines if rest <= 1 else [*lines[:_MAX_LINES], f"{rest} more reasons are in the JSON."]

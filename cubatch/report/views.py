"""The tables of each public record, as text or as an output of a notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cubatch.engine.training_run import Training
from cubatch.fleet.fleet_result import FleetResult
from cubatch.frameworks.module_footprint import ModuleFootprint
from cubatch.memory.step_footprint import Footprint
from cubatch.report import html as written, page
from cubatch.report.grid import Grid
from cubatch.report.tables import candidates, fleet, footprint, forecast, lengths, result, serving, threads, training
from cubatch.serving.serving_plan import ServingPlan
from cubatch.tuning.comparison import Comparison
from cubatch.tuning.extents_result import ExtentsResult
from cubatch.tuning.forecast_record import Forecast
from cubatch.tuning.ladder import Candidates
from cubatch.tuning.length_plan import LengthPlan
from cubatch.tuning.results import BatchSizeResult, TuningResult
from cubatch.tuning.threads_result import ThreadsResult


def text(record: Any) -> str:
    """Return the tables of a record as plain text."""
    return "\n\n".join(grid.text() for grid in grids(record))


def html(record: Any) -> str:
    """Return the page of a tuning result or forecast, or the tables of another record, as HTML for a notebook."""
    return page.notebook(record) if isinstance(record, BatchSizeResult) else written.tables(grids(record))


def grids(record: Any) -> list[Grid]:
    """Return the tables of a record (result, forecast, footprint, plan, ...); raise TypeError for any other object."""
    for kind, tables in _TABLES.items():
        if isinstance(record, kind):
            return tables(record)
    raise TypeError(f"no table for {type(record).__name__}, only for {', '.join(kind.__name__ for kind in _TABLES)}")


def _comparison(record: Comparison) -> list[Grid]:
    forecasts = list(record.forecasts.values())
    return [forecast.compared(forecasts, record.failed, costs=record.cost_per_million_samples)]


def _training(record: Training) -> list[Grid]:
    title = f"{record.model}, {record.dtype}, batch {record.target_batch_size}, {record.optimizer}"
    ends = {"diverged": record.diverged, "stopped_early": record.stopped_early}
    return [training.epochs(record.epochs, title=f"{title}, learning rate {record.learning_rate:g}", **ends)]


_TABLES: dict[type, Callable[[Any], list[Grid]]] = {
    TuningResult: lambda record: [result.tuning_grid(record)],
    Forecast: lambda record: [forecast.prediction(record)],
    Comparison: _comparison,
    FleetResult: lambda record: [fleet.compared(record)],
    ServingPlan: lambda record: [serving.plan(record)],
    ExtentsResult: lambda record: [lengths.by_extent(record)],
    ThreadsResult: lambda record: [threads.by_threads(record)],
    LengthPlan: lambda record: [lengths.ways(record)],
    Footprint: lambda record: footprint.footprint(record, title=f"batch {record.batch_size}: memory of a step"),
    ModuleFootprint: footprint.of_module,
    Candidates: lambda record: [candidates.candidates(record, title=record.title)],
    Training: _training,
}

"""The table of a tuning result or prediction: one line per batch size, and the reasons beneath."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cubatch.report.grid import Grid
from cubatch.report.settings import setting_of
from cubatch.report.tables.common import written
from cubatch.tuning.results import BatchSizeResult, Measurement, TuningResult
from cubatch.units import format_bytes, format_count, format_percent, format_seconds, format_tenths, format_value

_MAX_LISTED = 12  # batch sizes in a line of text
_MANY = 3  # more sizes that were not run have no rows
_MARKS = {"→": "recommended", "▲": "fastest", "≈": "tied with the fastest", "~": "too noisy to tell"}


def tuning_grid(result: BatchSizeResult) -> Grid:
    """Return the table of a tuning result or prediction, a row per batch size, with the recommended row marked."""
    energy, marks, shares = result.objective == "energy", _marks(result), result.shares
    half = "90 % interval" if result.predicted else "±"
    measurements = [m for m in result.sizes.values() if has_row(m, result)]
    rows = [
        [
            marks.get(m.batch_size, ""),
            str(m.batch_size),
            written(format_seconds, m.latency_seconds),
            written(format_count, m.samples_per_second),
            interval(m) if result.predicted else written(lambda share: f"± {format_tenths(share)}", m.half_width),
            written(format_percent, shares.get(m.batch_size)),
            written(format_count, value[0] if energy and (value := m.value("energy")) else None),
            written(format_bytes, m.predicted_peak_bytes),
            written(format_bytes, m.peak_bytes),
            written(format_percent, m.roofline_fraction),
            status(m, result),
            tuple(m.reasons),
        ]
        for m in measurements
    ]
    names = ["", "batch", "time", "samples/s", half, "of best", "samples/J", "memory plan", "memory real", "roofline"]
    word = "Predicted: " if result.predicted else ""
    first, *rest = result.reasons or ("",)
    return Grid(
        title=f"{word}{result.subject}: {setting_of(result)}",
        columns=[*names, "status", "reasons"],
        rows=rows,
        marked=[index for index, m in enumerate(measurements) if m.batch_size == result.batch_size],
        notes=[*([first] if first else []), *([rest] if rest else []), *legend(result)],
        dispensable=["roofline", "memory plan", "memory real", half],
    )


def interval(measurement: Measurement) -> str | None:
    """Return the 90 % interval of the samples per second as text, "low to high"; None without an interval."""
    ends = measurement.throughput_interval
    return None if ends is None else " to ".join(format_value(rate, "throughput") for rate in ends)


def status(measurement: Measurement, result: BatchSizeResult) -> str:
    """Return the status of a batch size in words, such as "over memory"; empty for a measured size that is usable."""
    if result.predicted:
        is_over = measurement.status == "over_limit"
        unfit = "does not fit" if measurement.latency_seconds is None else "predicted too slow"
        return unfit if is_over else "predicted"
    if measurement.status == "ok":
        return ""
    if measurement.status == "over_limit":
        return "over latency" if measurement.exceeds(result.limits.get("latency_seconds")) else "over memory"
    return measurement.status.replace("_", " ")


def has_row(measurement: Measurement, result: BatchSizeResult) -> bool:
    """Return whether a batch size has a row in the table; a line below the table counts the sizes without a row."""
    if measurement.latency_seconds is not None:
        return True
    is_untried = measurement.status == "not_run"
    if is_untried and sum(m.status == "not_run" for m in result.sizes.values()) > _MANY:
        return False
    return measurement.status not in ("dropped", "interrupted")


def list_sizes(measurements: Sequence[Measurement]) -> str:
    """Return the batch sizes as text; of more than 13, the first twelve and the number of the rest."""
    sizes = [str(m.batch_size) for m in measurements]
    rest = len(sizes) - _MAX_LISTED
    return ", ".join(sizes) if rest <= 1 else f"{', '.join(sizes[:_MAX_LISTED])} and {rest} more"


def legend(result: BatchSizeResult) -> list[str]:
    """Return sentences that explain the marks in the first column, and whether a data loader counts; may be empty."""
    marks = set(_marks(result).values())
    words = _MARKS | ({"≈": "the model cannot tell it from the fastest"} if result.predicted else {})
    shown = [f"{mark} {word}" for mark, word in words.items() if mark in marks]
    if any(m.status == "dropped" and has_row(m, result) for m in result.sizes.values()):
        shown.append("dropped: cannot be the recommendation, by its timings")
    of_step = isinstance(result, TuningResult) and result.loader is not None and not result.predicted
    return [
        *([f"{', '.join(shown)}."] if shown else []),
        *(["Times and rates of the table are those of the step alone, without the data loader."] if of_step else []),
    ]


def _marks(result: BatchSizeResult) -> Mapping[int, str]:
    if result.batch_size is None:
        return {}
    marks = dict.fromkeys(result.ties, "≈") | dict.fromkeys(result.noisy_ties, "~")
    if result.fastest_batch_size is not None:
        marks[result.fastest_batch_size] = "▲"
    marks[result.batch_size] = "→"
    return marks

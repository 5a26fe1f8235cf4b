"""
Tables of `cubatch predict`: a prediction, several GPUs compared, and the time of each layer.

Every line with a number is marked as predicted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from cubatch.report.grid import Grid
from cubatch.report.settings import setting_of
from cubatch.report.tables.common import written
from cubatch.report.tables.result import interval, tuning_grid
from cubatch.tuning.comparison import is_tied
from cubatch.tuning.forecast_record import Forecast, PassShare, alike
from cubatch.tuning.results import Measurement
from cubatch.units import (
    format_bytes,
    format_objective,
    format_percent,
    format_price,
    format_seconds,
    format_value,
    join_words,
)

_KERNEL = re.compile(r"(?:_(f\dx\d))?_[a-z]+\d+_(simt|mma|hopper|winograd)_(\d\w*?)(?:_v\d+)?$")
_FEWER_OPERATIONS = re.compile("winograd|fft|.*_winograd_")  # algorithms with fewer operations than FLOP
_SHOWN_SHARE, _SHOWN_LINES = 0.95, 24  # share of the time, or lines, after which the other passes are summed up
_PREDICTED = "predicted"

_ROOFLINE_NOTE = (
    "Above 100 % of the roofline: Winograd and FFT algorithms need fewer operations than the roofline counts."
)
_COMPARED_NOTE = (
    "Each line is a GPU at its recommended size, {}. `--device NAME` lists all sizes of a GPU, and its ties."
)
_COMPARED_COLUMNS = {
    "memory": "is the memory plan of that size",
    "largest": "is the largest batch that fits",
    "bound by": "limits most of the predicted time",
}
_LAYERS_NOTE = (
    "“+2” means two more layers with an equal pass, whose times are added. “bytes” is a pass that only moves data."
)
_LAYERS_COLUMNS = {
    "blocks": "are those of a matrix product",
    "busiest SM": "is their largest number on one SM",
    "fill": "is the share of SM time in use",
}


def prediction(result: Forecast) -> Grid:
    """Return the table of a prediction for one GPU, a row per batch size."""
    grid = tuning_grid(result)
    over = any((m.roofline_fraction or 0) > 1 for m in result.sizes.values())
    spares = any(_FEWER_OPERATIONS.match(each.algorithm) for each in result.passes)
    notes = [*grid.notes, *([result.notes] if result.notes else []), *([_ROOFLINE_NOTE] if over and spares else [])]
    return attrs.evolve(grid, notes=notes)


def compared(
    results: Sequence[Forecast], failed: Mapping[str, str], *, costs: Mapping[str, float] = MappingProxyType({})
) -> Grid:
    """
    Return the table of predictions of one network on several GPUs, one row per GPU.

    Args:
        results: At least one prediction, the best first; they differ in the GPU only.
        failed: By the name of a GPU without a prediction, the reason.
        costs: Cost of a million samples by the name of the GPU, if known.
    """
    objective = results[0].objective
    answers = [(result, _answer(result)) for result in results]
    best = _value(answers[0][1], objective)[0]
    rows: list[list[Any]] = []
    for result, answer in answers:
        value = _value(answer, objective)[0]
        rows.append([
            "→" if not rows else "≈" if is_tied(results[0], result) else "",
            _name(result),
            str(answer.batch_size),
            written(format_seconds, answer.latency_seconds),
            format_value(result.samples_per_second[answer.batch_size], "throughput"),
            interval(answer),
            format_percent(best / value if objective == "latency" else value / best),
            str(result.largest_batch_size),
            written(format_bytes, answer.predicted_peak_bytes),
            written(format_price, costs.get(_name(result))),
            _bound(result.passes),
            _PREDICTED,
        ])  # fmt: skip
    rows += [["", name, *[None] * 9, "failed"] for name in failed]
    names = ["", "device", "batch", "time", "samples/s", "90 % interval", "of fastest", "largest", "memory"]
    names += ["per million", "bound by", "status"]
    tied = [row[1] for row in rows if row[0] == "≈"]
    shared = setting_of(results[0], with_device=False)
    notes = [
        _verdict(answers, objective, tied=tied),
        *([_cheapest(costs, {_name(result): result for result in results})] if costs and len(results) > 1 else []),
        *([common] if (common := _distinct_notes(results)) else []),
        *([[f"{name}: {reason}" for name, reason in failed.items()]] if failed else []),
        _COMPARED_NOTE.format(_rule(results[0])),
        f"→ fastest{', ≈ the model cannot tell it from the fastest' if tied else ''}.",
    ]
    title = f"Predicted: {results[0].subject}, {shared}, by GPU"
    dispensable = ["bound by", "of fastest", "largest", "memory", "time"]
    return Grid(
        title=title, columns=names, rows=rows, marked=[0], notes=notes, dispensable=dispensable,
        explained=_COMPARED_COLUMNS,
    )  # fmt: skip


def layers(result: Forecast) -> Grid:
    """
    Return the table of the passes of a step at the recommended batch size, longest first.

    Passes with equal predictions share a line.
    """
    groups = alike(result.passes)
    rows, covered = [], 0.0
    for place, group in enumerate(groups):
        if covered > _SHOWN_SHARE or place == _SHOWN_LINES:
            rows += _summed([each for others in groups[place:] for each in others])
            break
        covered += sum(each.share for each in group)
        first = group[0]
        facts = [_shortened(first.algorithm), first.bound, *_spread(first.blocks, result.device.num_sms or 1)]
        name = first.layer + (f", +{len(group) - 1}" if len(group) > 1 else "")
        rows.append([name, first.pass_, *_taken(group), *facts, _PREDICTED])
    names = ["layer", "pass", "time", "share", "runs as", "bound by", "blocks", "busiest SM", "fill", "status"]
    title = f"Predicted: where the time of a step goes at batch {result.batch_size}"
    dispensable = ["busiest SM", "blocks", "bound by", "share", "fill"]
    return Grid(
        title=title, columns=names, rows=rows, notes=[_LAYERS_NOTE], dispensable=dispensable, explained=_LAYERS_COLUMNS
    )


def _answer(result: Forecast) -> Measurement:
    return result.sizes[result.batch_size]


def _value(answer: Measurement, objective: str) -> tuple[float, float, float]:
    return answer.value(objective) or (0.0, 0.0, 0.0)


def _verdict(answers: Sequence[tuple[Forecast, Measurement]], objective: str, *, tied: Sequence[str]) -> str:
    (result, answer), *others = answers
    value = _value(answer, objective)[0]
    rank = "may be" if tied else "is"
    text = f"Predicted, not measured: {_name(result)} {rank} the fastest, "
    text += f"{format_objective(value, objective)} with batch {answer.batch_size}"
    if tied:
        return f"{text}. The model cannot tell it from {join_words(tied)}."
    if not others:
        return f"{text}."
    following = _value(others[0][1], objective)[0]
    factor = following / value if objective == "latency" else value / following
    return f"{text}, {factor:.2f} times as fast as {_name(others[0][0])}."


def _rule(result: Forecast) -> str:
    is_latency = result.objective == "latency"
    end, best = (
        ("largest", "its lowest predicted latency") if is_latency else ("smallest", "its highest predicted rate")
    )
    return f"the {end} within {100 * result.tolerance:.3g} % of {best}"


def _cheapest(costs: Mapping[str, float], results: Mapping[str, Forecast]) -> str:
    best, *others = sorted(costs, key=lambda name: costs[name])
    if not others:
        return f"Only {best} has a price."
    tied = [name for name in others if is_tied(results[best], results[name], ratio=costs[name] / costs[best])]
    first = f"The cheapest at these prices {'may be' if tied else 'is'} {best}"
    if tied:
        first += f": the model cannot tell its cost from that of {join_words(tied)}"
    unpriced = [name for name in results if name not in costs]
    have = "has" if len(unpriced) == 1 else "have"
    return f"{first}; {join_words(unpriced)} {have} no price." if unpriced else f"{first}."


def _distinct_notes(results: Sequence[Forecast]) -> list[str]:
    """Return the notes of several predictions, each once; a note that does not apply to all begins with its GPUs."""
    gpus_of: dict[str, dict[str, None]] = {}
    for result in results:
        for note in result.notes:
            gpus_of.setdefault(note.replace(result.device.name, "this GPU"), {})[_name(result)] = None
    return [note if len(gpus) == len(results) else f"{', '.join(gpus)}: {note}" for note, gpus in gpus_of.items()]


def _name(result: Forecast) -> str:
    return result.device.slug or result.device.name


def _bound(passes: Sequence[PassShare]) -> str | None:
    shares: dict[str, float] = {}
    for each in passes:
        if each.bound is not None:
            shares[each.bound] = shares.get(each.bound, 0.0) + each.share
    bound = max(shares, key=shares.__getitem__, default=None)
    return None if bound is None else f"{bound} {format_percent(shares[bound])}"


def _summed(rest: Sequence[PassShare]) -> list[list[Any]]:
    """Return a row that sums the matrix products in `rest`, and a row for the other passes; no row for no pass."""
    moving = [each for each in rest if each.blocks is None]
    kinds = {"products": [each for each in rest if each.blocks is not None], "bytes": moving}
    return [
        [f"{len(passes)} more", None, *_taken(passes), kind, *[None] * 4, _PREDICTED]
        for kind, passes in kinds.items()
        if passes
    ]


def _taken(passes: Sequence[PassShare]) -> tuple[str, str]:
    return format_seconds(sum(each.seconds for each in passes)), format_percent(sum(each.share for each in passes))


def _spread(blocks: int | None, num_sms: int) -> tuple[int | None, int | None, str | None]:
    """Return `blocks`, blocks of the busiest SM, and used SM time as a percentage; None three times without blocks."""
    if not blocks:
        return None, None, None
    busiest = -(-blocks // num_sms)
    return blocks, busiest, format_percent(blocks / (busiest * num_sms))


def _shortened(algorithm: str) -> str:
    """
    Return a kernel's name without the parts that other columns show.

    Example:
        >>> _shortened("conv2d_fprop_implicit_gemm_f32_simt_128x128x8_v4"), _shortened("winograd 4x4")
        ('simt 128x128x8', 'winograd 4x4')
    """
    match = _KERNEL.search(algorithm)
    return f"{match[2]} {'_'.join(filter(None, (match[1], match[3])))}" if match else algorithm

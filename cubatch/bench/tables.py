"""Results of `cubatch bench` as tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from cubatch.bench.bench_results import NOT_ASKED, Entry, Result, geometric_mean, names_of
from cubatch.bench.contest import OURS
from cubatch.bench.rivals import VENDOR
from cubatch.report.grid import Grid
from cubatch.units import format_count, format_metric, format_percent, format_seconds

_LAUNCH = ["blocks", "busiest SM", "fill", "occupancy", "at best", "time", "rate", "of best"]
_PLANNED = (
    "Nothing was timed. Kernels are in the order of the cost model, which expects the first to be the fastest; "
    "\u201cat best\u201d is the roofline of the case. Blocks of hopper kernels take several tiles in turn."
)


def entries(results: Sequence[Result], *, title: str) -> Grid:
    """Return a table with every variant and every rival, case by case."""
    rows, names = [], names_of(results)
    columns = ["case", "kernel", *_LAUNCH, *map(_ratio_to, names), "note"]
    for result in results:
        for index, entry in enumerate(result.entries):
            rows.append([result.case.name if index == 0 else "", *_entry(result, entry, names)])
        if not result.entries or result.status != "ok":
            rows.append([result.case.name, *[None] * (len(columns) - 2), result.status.replace("_", " ")])
    if len({result.case.name for result in results}) == 1:
        title, columns = f"{title}: {results[0].case.name}", columns[1:]
        rows = [row[1:] for row in rows]
    return Grid(title=title, columns=columns, rows=rows, notes=_notes(results))


def summary(results: Sequence[Result], *, title: str) -> Grid:
    """Return a table with one line per case, its fastest kernel and each rival, and totals of the network."""
    rows, names = [], names_of(results)
    for result in results:
        best, times = result.best, result.times
        facts = _entry(result, best, names) if best else [None] * (10 + len(names))
        label, blocks, _, *shares, _ = facts
        shares, ratios = shares[: len(_LAUNCH) - 2], shares[len(_LAUNCH) - 2 :]
        rivals = [_seconds(times[name]) if name in times else None for name in names]
        failed = "; ".join(f"{entry.label or entry.name}: {_trouble(entry)}" for entry in result.wrong)
        note = failed or None if result.status == "ok" else result.status.replace("_", " ")
        rows.append(
            [
                result.case.multiplicity, result.case.name, best.label if best else label, blocks, *shares,
                *itertools.chain(*zip(rivals, ratios, strict=True)), note,
            ]
        )  # fmt: skip
    columns = [
        "x", "case", "kernel", *(name for name in _LAUNCH if name != "busiest SM"),
        *itertools.chain(*((name, _ratio_to(name)) for name in names)), "note",
    ]  # fmt: skip
    return Grid(title=title, columns=columns, rows=rows, notes=[*_totals(results), *_notes(results)])


def _entry(result: Result, entry: Entry, names: Sequence[str]) -> list[Any]:
    # The launch of the main kernel; a kernel that adds up its slices may have more blocks.
    launch = next((each for each in entry.launches if each.kernel == entry.name), next(iter(entry.launches), None))
    rate, share = None, entry.copy_fraction if not result.case.flops else entry.roofline_fraction
    if entry.seconds is not None:
        rate = (
            format_metric(entry.flops_per_second, "FLOP/s")
            if entry.flops_per_second
            else format_metric(entry.bytes_per_second or 0.0, "B/s")
        )
    floor = result.roofline_seconds if entry.side == OURS else None
    return [
        entry.label or entry.name,
        format_count(launch.grid[0] * launch.grid[1] * launch.grid[2]) if launch else None,
        launch.busiest_sm_blocks if launch else None,
        _percent(launch.fill if launch else None),
        _percent(launch.occupancy if launch else None),
        None if floor is None else format_seconds(floor),
        _seconds(entry),
        rate,
        _percent(share),
        *(_ratio(entry, name) for name in names),
        None if entry.status in {"ok", "planned"} else _trouble(entry),
    ]


def _trouble(entry: Entry) -> str:
    return f"{entry.status}: {entry.reason.splitlines()[0]}"


def _percent(share: float | None) -> str | None:
    return None if share is None else format_percent(share)


def _seconds(entry: Entry) -> str | None:
    return None if entry.seconds is None else format_seconds(entry.seconds)


def _ratio(entry: Entry, name: str) -> str | None:
    ratio = entry.ratios.get(name)
    if ratio is None:
        return None
    return f"{ratio.value:.2f}" + (f" ({ratio.interval[0]:.2f} to {ratio.interval[1]:.2f})" if ratio.interval else "")


def _ratio_to(name: str) -> str:
    return "ratio" if name == VENDOR else f"ratio to {name}"


def _in_words(name: str) -> str:
    return "the vendor" if name == VENDOR else name


def _totals(results: Sequence[Result]) -> list[str]:
    """Return the sum over the layers of a network, each as often as it occurs, and the mean ratios."""
    timed = [(r, r.best.seconds) for r in results if r.best is not None and r.best.seconds is not None]
    floors = [r.case.multiplicity * r.roofline_seconds for r in results if r.roofline_seconds is not None]
    notes = []
    if len(floors) == len(results) and floors:
        notes.append(f"All layers take {format_seconds(sum(floors))} at best, by the roofline of the data sheet.")
    if timed:
        total = sum(result.case.multiplicity * seconds for result, seconds in timed)
        notes.append(f"The layers that were timed take {format_seconds(total)} on cubatch kernels.")
    for name in names_of(results):
        if paired := _compared(results, name):
            cubatch = sum(result.case.multiplicity * seconds for result, seconds, _ in paired)
            rival = sum(result.case.multiplicity * seconds * ratio for result, seconds, ratio in paired)
            mean = geometric_mean([ratio for *_, ratio in paired])
            notes.append(
                f"Cases that were timed on both: {format_seconds(cubatch)} on cubatch kernels, "
                f"{format_seconds(rival)} on those of {_in_words(name)}; the geometric mean of the ratios of "
                f"{len(paired)} cases is {mean:.3f}."
            )
    return notes


def _compared(results: Sequence[Result], name: str) -> list[tuple[Result, float, float]]:
    """Return result, seconds and ratio of the fastest kernel for each case that a rival was timed for too."""
    timed = [(result, result.times[OURS]) for result in results if OURS in result.times]
    return [
        (result, best.seconds, best.ratios[name].value)
        for result, best in timed
        if name in best.ratios and best.seconds is not None
    ]


def _notes(results: Sequence[Result]) -> list[str]:
    notes = []
    listed = [entry for result in results for entry in result.entries]
    if listed and all(entry.status == "planned" for entry in listed):
        notes.append(_PLANNED)
    notes += [
        f"\u201c{_ratio_to(name)}\u201d is the time of {_in_words(name)} divided by the time of cubatch, from "
        "interleaved rounds, with its 90 % interval: above 1 cubatch is faster."
        for name in names_of(results)
        if any(name in entry.ratios for entry in listed)
    ]
    if any(entry.seconds is not None for entry in listed):
        notes.append(
            "\u201cof best\u201d: share of the roofline of the data sheet; for operations that only move bytes, of the "
            "bandwidth of a copy."
        )
    if any(entry.status == "wrong" for entry in listed):
        notes.append("A kernel marked wrong gave results outside of its rounding bound and was not timed.")
    missing = {pair for result in results for pair in result.missing.items() if pair[1] != NOT_ASKED}
    notes += [f"No {name} for some: {reason}." for name, reason in sorted(missing)]
    if any(result.l2 == "warm" for result in results):
        notes.append("Some cases are so small that their buffers stayed in the L2.")
    return notes

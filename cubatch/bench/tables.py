"""Results of `cubatch bench` as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, TypeVar

from cubatch.bench.bench_results import NOT_ASKED, Entry, Result
from cubatch.bench.contest import OURS
from cubatch.bench.implementations import OTHER_WAYS
from cubatch.bench.rivals import VENDOR
from cubatch.report.grid import Grid
from cubatch.units import format_count, format_metric, format_percent, format_seconds

T = TypeVar("T")

_LAUNCH = ["blocks", "busiest SM", "fill", "occupancy", "at best", "time", "rate", "of best"]
_PLANNED = (
    "Nothing was timed. Kernels are in the order of the cost model, which expects the first to be the fastest; "
    "\u201cat best\u201d is the roofline of the case. Blocks of hopper kernels take several tiles in turn. "
    "`cubatch predict MODEL --library cubatch --explain` predicts the time of each layer of a network or a spec file."
)
_OTHER_WAYS = (
    "Variants marked \u201cphases\u201d or \u201ctransposed\u201d follow the others and may be faster: a step times "
    "one of them against the fastest of the others."
)


def entries(results: Sequence[Result], *, title: str) -> Grid:
    """
    Return a table with one row for each variant and each rival of each case: launch, time and rates.

    A variant also has the time of the vendor's fastest implementation divided by its own.
    """
    rows, columns = [], ["case", "kernel", *_LAUNCH, *_if_compared(results, "ratio"), "note"]
    for result in results:
        for index, entry in enumerate(result.entries):
            ratio = _if_compared(results, _ratio(entry))
            rows.append([result.case.name if index == 0 else "", *_entry(result, entry), *ratio, _note(entry)])
        if not result.entries or result.status != "ok":
            rows.append([result.case.name, *[None] * (len(columns) - 2), result.status.replace("_", " ")])
    if len({result.case.name for result in results}) == 1:
        title, columns = f"{title}: {results[0].case.name}", columns[1:]
        rows = [row[1:] for row in rows]
    return Grid(title=title, columns=columns, rows=rows, notes=_notes(results))


def summary(results: Sequence[Result], *, title: str) -> Grid:
    """
    Return a table with one row per case, and notes with the totals of the network.

    A row has the launch and time of the fastest cubatch kernel, and the time of the vendor's fastest implementation.
    "ratio" is the time of the vendor divided by that of cubatch.
    """
    rows = []
    for result in results:
        best, vendor = result.best, result.times.get(VENDOR)
        label, blocks, _, *shares = _entry(result, best) if best else [None] * (1 + len(_LAUNCH))
        failed = "; ".join(f"{entry.label or entry.name}: {_trouble(entry)}" for entry in result.wrong)
        note = failed or None if result.status == "ok" else result.status.replace("_", " ")
        pair = _if_compared(results, _seconds(vendor) if vendor else None, _ratio(best) if best else None)
        rows.append([result.case.multiplicity, result.case.name, label, blocks, *shares, *pair, note])
    launch = [name for name in _LAUNCH if name != "busiest SM"]
    columns = ["x", "case", "kernel", *launch, *_if_compared(results, VENDOR, "ratio"), "note"]
    return Grid(title=title, columns=columns, rows=rows, notes=[*_totals(results), *_notes(results)])


def _if_compared(results: Sequence[Result], *cells: T) -> tuple[T, ...]:
    """Return `cells`, which concern the vendor's libraries; an empty tuple if no result has an entry of the vendor."""
    return cells if any(entry.side == VENDOR for result in results for entry in result.entries) else ()


def _entry(result: Result, entry: Entry) -> list[Any]:
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
    ]


def _note(entry: Entry) -> str | None:
    return None if entry.status in {"ok", "planned"} else _trouble(entry)


def _trouble(entry: Entry) -> str:
    return f"{entry.status}: {entry.reason.splitlines()[0]}"


def _percent(share: float | None) -> str | None:
    return None if share is None else format_percent(share)


def _seconds(entry: Entry) -> str | None:
    return None if entry.seconds is None else format_seconds(entry.seconds)


def _ratio(entry: Entry) -> str | None:
    if entry.ratio is None:
        return None
    low, high = entry.ratio_interval or (None, None)
    return f"{entry.ratio:.2f}" + ("" if low is None else f" ({low:.2f} to {high:.2f})")


def _totals(results: Sequence[Result]) -> list[str]:
    """Return sentences on the time of all cases, times their occurrences, and on the mean ratio vendor / cubatch."""
    timed = [(r, r.best.seconds) for r in results if r.best is not None and r.best.seconds is not None]
    floors = [r.case.multiplicity * r.roofline_seconds for r in results if r.roofline_seconds is not None]
    notes = []
    if len(floors) == len(results) and floors:
        notes.append(f"All layers take {format_seconds(sum(floors))} at best, by the roofline of the data sheet.")
    if timed:
        total = sum(result.case.multiplicity * seconds for result, seconds in timed)
        notes.append(f"The layers that were timed take {format_seconds(total)} on cubatch kernels.")
    paired = [(result, best, best.ratio) for result in results if (best := result.best) and best.ratio]
    if paired:
        cubatch = sum(result.case.multiplicity * (best.seconds or 0.0) for result, best, _ in paired)
        rival = sum(result.case.multiplicity * (best.seconds or 0.0) * ratio for result, best, ratio in paired)
        mean = statistics.geometric_mean([ratio for *_, ratio in paired])
        notes.append(
            f"Cases that were timed on both: {format_seconds(cubatch)} on cubatch kernels, {format_seconds(rival)} on "
            f"those of the vendor; the geometric mean of the ratios of {len(paired)} cases is {mean:.3f}."
        )
    return notes


def _notes(results: Sequence[Result]) -> list[str]:
    notes = []
    listed = [entry for result in results for entry in result.entries]
    if listed and all(entry.status == "planned" for entry in listed):
        notes.append(_PLANNED)
        if any(entry.label.endswith(OTHER_WAYS) for entry in listed):
            notes.append(_OTHER_WAYS)
    if any(entry.ratio is not None for entry in listed):
        notes.append(
            "\u201cratio\u201d is the time of the vendor divided by the time of cubatch, from interleaved rounds, with "
            "its 90 % interval: above 1 cubatch is faster."
        )
    if any(entry.seconds is not None for entry in listed):
        notes.append(
            "\u201cof best\u201d: share of the roofline of the data sheet; for operations that only move bytes, of the "
            "bandwidth of a copy."
        )
    if any(entry.status == "wrong" for entry in listed):
        notes.append("A kernel marked wrong gave results outside of its rounding bound and was not timed.")
    missing = {result.no_rival for result in results} - {"", NOT_ASKED}
    notes += [f"No vendor for some: {reason}." for reason in sorted(missing)]
    if any(result.l2 == "warm" for result in results):
        notes.append("Some cases are so small that their buffers stayed in the L2.")
    return notes

"""Results of `cubatch bench` as grids for a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cubatch.bench.records import OURS, Entry, Result, geometric_mean
from cubatch.report.grid import Grid
from cubatch.units import format_count, format_metric, format_percent, format_seconds

_NOTES = {
    "wrong": "A kernel marked wrong gave results outside of its rounding bound and was not timed.",
    "planned": "Nothing was timed. Kernels stand in the order of the cost model, which expects most of the first; "
    "“at best” is the roofline of the case, whichever runs it. Blocks of hopper stay and take tiles in turn.",
    "ratio": "“ratio” is the vendor's time over ours, from rounds in turns, with its 90 % interval: above 1 is faster.",
}


def entries(results: Sequence[Result], *, title: str) -> Grid:
    """Lay out every variant and the vendor's library, case by case."""
    rows = []
    for result in results:
        for index, entry in enumerate(result.entries):
            rows.append([result.case.name if index == 0 else "", *_entry(result, entry)])
        if not result.entries or result.status != "ok":
            rows.append([result.case.name, None, *[None] * 9, result.status.replace("_", " ")])
    if len({result.case.name for result in results}) == 1:
        title, rows = f"{title}: {results[0].case.name}", [row[1:] for row in rows]
    columns = [
        "kernel", "blocks", "busiest SM", "fill", "occupancy", "at best", "time", "rate", "of best", "ratio", "note"
    ]  # fmt: skip
    named = columns if not rows or len(rows[0]) == len(columns) else ["case", *columns]
    return Grid(title=title, columns=named, rows=rows, notes=_notes(results))


def summary(results: Sequence[Result], *, title: str) -> Grid:
    """Lay out one line for each case: the fastest of ours beside the vendor's, and totals of the whole network."""
    rows = []
    for result in results:
        best, vendor = result.best, result.vendor
        facts = _entry(result, best) if best else [None] * 11
        _, blocks, _, fill, occupancy, floor, seconds, rate, share, ratio, note = facts
        theirs = format_seconds(vendor.seconds) if vendor and vendor.seconds else None
        said = note if result.status == "ok" else result.status.replace("_", " ")
        label = best.label if best else None
        rows.append(
            [
                result.case.multiplicity, result.case.name, label, blocks, fill, occupancy, floor, seconds, rate,
                share, theirs, ratio, said,
            ]
        )  # fmt: skip
    columns = [
        "x", "case", "kernel", "blocks", "fill", "occupancy", "at best", "time", "rate", "of best", "vendor", "ratio",
        "note",
    ]  # fmt: skip
    return Grid(title=title, columns=columns, rows=rows, notes=[*_totals(results), *_notes(results)])


def _entry(result: Result, entry: Entry) -> list[Any]:
    # The main kernel's; what adds up its slices may have more blocks.
    launch = next((one for one in entry.launches if one.kernel == entry.name), next(iter(entry.launches), None))
    ratio = None
    if entry.ratio is not None:
        low, high = entry.ratio_interval or (None, None)
        ratio = f"{entry.ratio:.2f}" + (f" ({low:.2f} to {high:.2f})" if low is not None else "")
    rate, share = None, entry.copy_fraction if not result.case.flops else entry.roofline_fraction
    if entry.seconds is not None:
        rate = (
            format_metric(entry.flops_per_second, "FLOP/s")
            if entry.flops_per_second
            else format_metric(entry.bytes_per_second or 0.0, "B/s")
        )
    return [
        entry.label or entry.name,
        format_count(launch.grid[0] * launch.grid[1] * launch.grid[2]) if launch else None,
        launch.busiest_sm_blocks if launch else None,
        format_percent(launch.fill) if launch and launch.fill is not None else None,
        format_percent(launch.occupancy) if launch and launch.occupancy is not None else None,
        format_seconds(result.roofline_seconds) if result.roofline_seconds is not None and entry.side == OURS else None,
        format_seconds(entry.seconds) if entry.seconds is not None else None,
        rate,
        format_percent(share) if share is not None else None,
        ratio,
        None if entry.status in {"ok", "planned"} else f"{entry.status}: {entry.reason.splitlines()[0]}",
    ]


def _totals(results: Sequence[Result]) -> list[str]:
    """Sum up what the network's layers take, each as often as it occurs, and the mean ratio."""
    timed = [(r, r.best.seconds) for r in results if r.best is not None and r.best.seconds is not None]
    floors = [r.case.multiplicity * r.roofline_seconds for r in results if r.roofline_seconds is not None]
    said = []
    if len(floors) == len(results) and floors:
        said.append(f"All layers take {format_seconds(sum(floors))} at best, by the roofline of the data sheet.")
    if timed:
        total = sum(result.case.multiplicity * seconds for result, seconds in timed)
        said.append(f"Those that were timed take {format_seconds(total)} on our kernels.")
    paired = [(r, r.best.ratio, seconds) for r, seconds in timed if r.best is not None and r.best.ratio is not None]
    if paired:
        ours = sum(result.case.multiplicity * seconds for result, _, seconds in paired)
        theirs = sum(result.case.multiplicity * seconds * ratio for result, ratio, seconds in paired)
        mean = geometric_mean([ratio for _, ratio, _ in paired])
        said.append(
            f"Where the vendor was timed too: {format_seconds(ours)} on ours, {format_seconds(theirs)} on the "
            f"vendor's; the ratio's geometric mean over {len(paired)} cases is {mean:.3f}."
        )
    return said


def _notes(results: Sequence[Result]) -> list[str]:
    said = []
    found = [entry for result in results for entry in result.entries]
    if found and all(entry.status == "planned" for entry in found):
        said.append(_NOTES["planned"])
    if any(entry.ratio is not None for entry in found):
        said.append(_NOTES["ratio"])
    if any(entry.seconds is not None for entry in found):
        said.append(
            "“of best”: of the roofline of the data sheet; for what only moves bytes, of the bandwidth of a copy."
        )
    if any(entry.status == "wrong" for entry in found):
        said.append(_NOTES["wrong"])
    reasons = {result.no_rival for result in results if result.no_rival not in {"", "not asked for"}}
    said += [f"No vendor for some: {reason}." for reason in sorted(reasons) if "copy" not in reason]
    if any(result.l2 == "warm" for result in results):
        said.append("Some cases are so small that their buffers stayed in the L2.")
    return said

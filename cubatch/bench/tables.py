"""Results of `cubatch bench` as grids for a person."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from cubatch.bench.records import NOT_ASKED, OURS, Entry, Result, geometric_mean, names_of
from cubatch.bench.rivals import VENDOR
from cubatch.report.grid import Grid
from cubatch.units import format_count, format_metric, format_percent, format_seconds

_NOTES = {
    "wrong": "A kernel marked wrong gave results outside of its rounding bound and was not timed.",
    "planned": "Nothing was timed. Kernels stand in the order of the cost model, which expects most of the first; "
    "“at best” is the roofline of the case, whichever runs it. Blocks of hopper stay and take tiles in turn.",
    "ratio": "“{head}” is {whose} time over ours, from rounds in turns, with its 90 % interval: above 1 ours "
    "is faster.",
}


def entries(results: Sequence[Result], *, title: str) -> Grid:
    """Lay out every variant and every rival, case by case."""
    rows, names = [], names_of(results)
    for result in results:
        for index, entry in enumerate(result.entries):
            rows.append([result.case.name if index == 0 else "", *_entry(result, entry, names)])
        if not result.entries or result.status != "ok":
            rows.append([result.case.name, *[None] * (9 + len(names)), result.status.replace("_", " ")])
    if len({result.case.name for result in results}) == 1:
        title, rows = f"{title}: {results[0].case.name}", [row[1:] for row in rows]
    columns = [
        "kernel", "blocks", "busiest SM", "fill", "occupancy", "at best", "time", "rate", "of best",
        *(_ratio_to(name) for name in names), "note",
    ]  # fmt: skip
    named = columns if not rows or len(rows[0]) == len(columns) else ["case", *columns]
    return Grid(title=title, columns=named, rows=rows, notes=_notes(results))


def summary(results: Sequence[Result], *, title: str) -> Grid:
    """Lay out one line for each case: the fastest of ours beside each rival, and totals of the whole network."""
    rows, names = [], names_of(results)
    for result in results:
        best, times = result.best, result.times
        facts = _entry(result, best, names) if best else [None] * (10 + len(names))
        _, blocks, _, fill, occupancy, floor, seconds, rate, share, *ratios, _ = facts
        theirs = [_seconds(times[name]) if name in times else None for name in names]
        failed = "; ".join(f"{entry.label or entry.name}: {_trouble(entry)}" for entry in result.wrong)
        said = failed or None if result.status == "ok" else result.status.replace("_", " ")
        label = best.label if best else None
        rows.append(
            [
                result.case.multiplicity, result.case.name, label, blocks, fill, occupancy, floor, seconds, rate,
                share, *itertools.chain(*zip(theirs, ratios, strict=True)), said,
            ]
        )  # fmt: skip
    columns = [
        "x", "case", "kernel", "blocks", "fill", "occupancy", "at best", "time", "rate", "of best",
        *itertools.chain(*((name, _ratio_to(name)) for name in names)), "note",
    ]  # fmt: skip
    return Grid(title=title, columns=columns, rows=rows, notes=[*_totals(results), *_notes(results)])


def _entry(result: Result, entry: Entry, names: Sequence[str]) -> list[Any]:
    # The main kernel's; what adds up its slices may have more blocks.
    launch = next((one for one in entry.launches if one.kernel == entry.name), next(iter(entry.launches), None))
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
        _seconds(entry),
        rate,
        format_percent(share) if share is not None else None,
        *(_ratio(entry, name) for name in names),
        None if entry.status in {"ok", "planned"} else _trouble(entry),
    ]


def _trouble(entry: Entry) -> str:
    return f"{entry.status}: {entry.reason.splitlines()[0]}"


def _seconds(entry: Entry) -> str | None:
    return None if entry.seconds is None else format_seconds(entry.seconds)


def _ratio(entry: Entry, name: str) -> str | None:
    found = entry.ratios.get(name)
    if found is None:
        return None
    return f"{found.value:.2f}" + (f" ({found.interval[0]:.2f} to {found.interval[1]:.2f})" if found.interval else "")


def _ratio_to(name: str) -> str:
    """Head the column of the ratios to a rival."""
    return "ratio" if name == VENDOR else f"ratio to {name}"


def _spoken(name: str) -> str:
    return "the vendor" if name == VENDOR else name


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
    return said + [_total(results, name) for name in names_of(results) if _compared(results, name)]


def _total(results: Sequence[Result], name: str) -> str:
    """Compare with one rival, over the cases that it was timed for too."""
    paired = _compared(results, name)
    ours = sum(result.case.multiplicity * seconds for result, seconds, _ in paired)
    theirs = sum(result.case.multiplicity * seconds * ratio for result, seconds, ratio in paired)
    ratios = [ratio for *_, ratio in paired]
    return (
        f"Where {_spoken(name)} was timed too: {format_seconds(ours)} on ours, {format_seconds(theirs)} on "
        f"{_spoken(name)}'s; the ratio's geometric mean over {len(ratios)} cases is {geometric_mean(ratios):.3f}."
    )


def _compared(results: Sequence[Result], name: str) -> list[tuple[Result, float, float]]:
    """Return seconds and ratio of the fastest of ours, where a rival was timed too."""
    timed = [(result, result.times[OURS]) for result in results if OURS in result.times]
    return [
        (result, best.seconds, best.ratios[name].value)
        for result, best in timed
        if name in best.ratios and best.seconds is not None
    ]


def _notes(results: Sequence[Result]) -> list[str]:
    said = []
    found = [entry for result in results for entry in result.entries]
    if found and all(entry.status == "planned" for entry in found):
        said.append(_NOTES["planned"])
    compared = [name for name in names_of(results) if any(name in entry.ratios for entry in found)]
    said += [_NOTES["ratio"].format(head=_ratio_to(name), whose=f"{_spoken(name)}'s") for name in compared]
    if any(entry.seconds is not None for entry in found):
        said.append(
            "“of best”: of the roofline of the data sheet; for what only moves bytes, of the bandwidth of a copy."
        )
    if any(entry.status == "wrong" for entry in found):
        said.append(_NOTES["wrong"])
    missing = {pair for result in results for pair in result.missing.items() if pair[1] != NOT_ASKED}
    said += [f"No {name} for some: {reason}." for name, reason in sorted(missing) if "copy" not in reason]
    if any(result.l2 == "warm" for result in results):
        said.append("Some cases are so small that their buffers stayed in the L2.")
    return said

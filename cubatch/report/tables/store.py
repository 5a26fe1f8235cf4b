"""Tables of `cubatch store`: all cached runs, and one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.report.grid import Grid
from cubatch.report.tables.common import written
from cubatch.units import format_seconds


def runs(cached: Sequence[Mapping[str, Any]], path: str) -> Grid:
    """Return a table with a row for each cached run; `path`, the file of the result cache, is in its title."""
    columns = {
        "id": lambda run: run["id"],
        "updated (UTC)": lambda run: str(run["updated"])[:16],
        "what": lambda run: _subject(run["identity"]),
        "input": lambda run: _input(run["identity"]),
        "mode": lambda run: run["identity"].get("mode"),
        "dtype": lambda run: run["identity"].get("dtype"),
        "state": lambda run: run["state"],
        "timings": lambda run: run["num_timings"],
        "interference": lambda run: "yes" if run["disturbed"] else None,
        "measured for": lambda run: format_seconds(run["seconds_spent"]),
    }
    notes = [] if cached else ["There are no runs."]
    return Grid.of(cached, columns if cached else {}, title=f"Runs in {path}", notes=notes)


def run(facts: Mapping[str, Any], measured: Mapping[str, Any]) -> list[Grid]:
    """
    Return the tables of one cached run: its options, its conditions, and the timings of each batch size.

    `facts` and `measured` are the run and its timings in the JSON form of `cubatch store show`.
    """
    outcomes = {outcome["batch_size"]: outcome for outcome in measured["outcomes"]}
    timings: dict[int, list[float]] = {size: [] for size in outcomes}
    for timing in measured["timings"]:
        timings.setdefault(timing["batch_size"], []).append(timing["seconds"])
    rows = [
        [
            size,
            len(seconds),
            written(format_seconds, min(seconds, default=None)),
            written(format_seconds, max(seconds, default=None)),
            str(outcomes[size]["status"]).replace("_", " ") if size in outcomes else "unfinished",
            outcomes[size]["stop_reason"] or None if size in outcomes else None,
        ]
        for size, seconds in sorted(timings.items())
    ]
    columns = ["batch", "timings", "fastest", "slowest", "status", "why"]
    settings = {key: value for key, value in facts["identity"].items() if key != "spec"}
    title = f"Run {facts['id']}: {_subject(facts['identity'])}, {facts['state']}, updated {facts['updated']}"
    return [
        _facts(title, settings),
        _facts("Conditions", facts["conditions"]),
        Grid(title="Timings", columns=columns, rows=rows, notes=[*facts["disturbed"], *facts["notes"]]),
    ]


def _facts(title: str, facts: Mapping[str, Any]) -> Grid:
    rows = [[key, value] for key, value in facts.items() if value not in (None, "", [], {})]
    return Grid(title=title, columns=["what", "value"], rows=rows)


def _input(identity: Mapping[str, Any]) -> str | None:
    spec = identity.get("spec")
    if not isinstance(spec, Mapping):
        return None
    extents = spec.get("input_shape") or [spec[axis] for axis in "hwc" if axis in spec]
    return "x".join(map(str, extents)) or None


def _subject(identity: Mapping[str, Any]) -> str | None:
    spec = identity.get("spec") or {}
    return spec.get("name") or spec.get("type") if isinstance(spec, Mapping) else str(spec)

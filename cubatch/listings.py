"""
What the commands other than `tune` print: records of the library laid out as grids.

A grid is what `report.grid` takes; numbers become text here, by `units`, and nowhere below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from cubatch.units import format_bytes, format_count, format_metric, format_percent, format_seconds

if TYPE_CHECKING:
    from cubatch.hardware import Device
    from cubatch.results import Candidate

Grid = dict[str, Any]


def plain(record: Any) -> Any:
    """
    Turn a record into plain mappings and lists for JSON, which knows no NaN and no infinity: those are None.

    Example:
        >>> from cubatch.results import Candidate
        >>> plain(Candidate(8, ("power of two",)))["reasons"]
        ['power of two']
    """
    if attrs.has(type(record)):
        return {key: plain(value) for key, value in attrs.asdict(record, recurse=False).items()}
    if isinstance(record, Mapping):
        return {str(key): plain(value) for key, value in record.items()}
    if isinstance(record, tuple | list | set | frozenset):
        return [plain(value) for value in record]
    return None if isinstance(record, float) and not math.isfinite(record) else record


def candidates(found: Iterable[Candidate], *, title: str) -> Grid:
    """Lay out the batch sizes worth measuring, with every reason."""
    rows = [
        [
            candidate.batch_size,
            written(format_seconds, candidate.predicted_seconds),
            written(format_bytes, candidate.predicted_peak_bytes),
            "over the limit" if candidate.over_limit else "",
            ", ".join(candidate.reasons) or None,
        ]
        for candidate in found
    ]
    known = any(row[1] is not None for row in rows)
    note = (
        "“predicted time” is of cubatch's own engine, by the model where the GPU's facts allow it, else the roofline; "
        "tuning measures. `cubatch predict` says the same of cuDNN."
    )
    columns = ["batch", "predicted time", "memory plan", "status", "reasons"]
    return {"title": title, "columns": columns, "rows": rows, "notes": [note] if known else []}


def explained(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """Lay out what each candidate means for each layer, and beneath it the channels that miss the Tensor Cores."""
    cells = [
        [
            row["batch_size"],
            row["layer"],
            row["layers"],
            row["pass"],
            row["tile"] + (f" / {row['slices']}" if row["slices"] > 1 else ""),
            row["blocks"],
            row["waves"],
            written(format_percent, row["last_wave"]),
            row["busiest_sm_blocks"],
            format_percent(row["fill"]),
            written(format_seconds, row["predicted_seconds"]),
        ]
        for row in rows
    ]
    missing = {
        row["layer"]: " and ".join(f"{extent} to {size}" for extent, size in row["padding"].items())
        for row in rows
        if row["padding"]
    }
    listed = ", ".join(f"{layer} ({change})" for layer, change in missing.items())
    notes = [f"Channels that miss the multiple the Tensor Cores want; pad them: {listed}."] if listed else []
    if not rows:
        notes = ["Nothing to explain: blocks are spread over SMs, and how many the device has is not known, or none."]
    if rows:
        notes = [
            "A block computes one tile of the result, or one of so many slices of its depth, the number after the /.",
            "“alike” counts equal layers, whose time is added up.",
            "A wave is a block on every SM, or as many as an SM holds of our kernel.",
            "Time follows the busiest SM, whose blocks share its pipes; “fill” is the share of SM time at work.",
            *notes,
        ]
    columns = ["batch", "layer", "alike", "pass", "tile", "blocks", "waves", "last wave", "busiest SM", "fill"]
    columns += ["time at best"]
    return {"title": "By layer", "columns": columns if rows else [], "rows": cells, "notes": notes}


def footprint(plan: Mapping[str, Any], *, title: str, forward_elements: int) -> list[Grid]:
    """Lay out the memory of a step by part and by layer; the textbook's count of elements beneath the parts."""
    parts = ("weights", "gradients", "optimizer", "activations", "activation_gradients", "workspace")
    rows = [[part.replace("_", " "), format_bytes(plan[part])] for part in parts if plan[part]]
    each, size = plan["elements_per_sample"], plan["batch_size"]
    backward = "" if each == forward_elements else f", {format_count(each)} with gradients"
    peak = format_bytes(plan["total"])
    count = f"{format_count(forward_elements)} elements per sample forward{backward}"
    notes = [
        f"Peak {peak}, in {plan['peak_layer']}; parts are sums over all layers, of which many share memory in turn.",
        f"Textbook count: {count}; times {size} is {format_count(each * size)} elements.",
    ]
    total = [["peak", peak]]
    columns = ("parameters", "weights", "activations", "activation_gradients", "workspace")
    by_layer = [
        [
            layer["name"],
            layer["type"],
            " x ".join(str(extent) for extent in layer["output_shape"]),
            format_count(layer["parameters"]) if layer["parameters"] else None,
            *(format_bytes(layer[part]) if layer[part] else None for part in columns[1:]),
        ]
        for layer in plan["layers"]
    ]
    names = ["layer", "type", "output", *(column.replace("activation_", "") for column in columns)]
    return [
        {"title": title, "columns": ["part", "bytes"], "rows": rows + total, "marked": [len(rows)], "notes": notes},
        {"title": "By layer", "columns": names, "rows": by_layer},
    ]


def rules(found: Sequence[Mapping[str, Any]], *, largest: int, limit: int | str) -> Grid:
    """Lay out the rules of thumb beside the plan, and the largest batch beneath."""
    write: dict[str, Callable[[float], str]] = {"bytes": format_bytes}
    rows = [
        [
            rule["name"],
            write.get(rule["unit"], format_count)(rule["value"]),
            write.get(rule["unit"], format_count)(rule["computed"]),
            written(lambda error: f"{100 * error:+.1f} %", rule["error"]),
            rule["unit"],
            rule["formula"],
        ]
        for rule in found
    ]
    size = format_bytes(limit) if isinstance(limit, int) else limit
    return {
        "title": "Rules of thumb beside the plan",
        "columns": ["rule", "says", "plan", "off by", "unit", "formula"],
        "rows": rows,
        "notes": [f"Largest batch size whose step fits in {size}, by the plan: {largest}."],
    }


def devices(found: Sequence[Device], *, title: str) -> Grid:
    """Lay out the facts of devices; a fact that none of them has is left out."""
    rows = [
        [
            device.slug or device.kind,
            None if device.compute_capability is None else ".".join(map(str, device.compute_capability)),
            device.num_sms,
            device.threads,
            written(format_bytes, device.memory_bytes),
            written(lambda rate: format_metric(rate, "B/s"), device.peak_bytes_per_second),
            written(lambda rate: format_metric(rate, "FLOP/s"), device.peak_flops_per_second.get("float32")),
            device.name,
        ]
        for device in found
    ]
    columns = ["--device", "capability", "SMs", "threads", "memory", "bandwidth", "float32", "name"]
    return {"title": title, "columns": columns, "rows": rows}


def epochs(done: Sequence[Mapping[str, Any]], *, title: str, diverged: bool = False) -> Grid:
    """Lay out a training run, one line for each epoch."""
    rows = [
        [
            epoch["number"],
            written(lambda loss: f"{loss:.4f}", epoch["loss"]),
            f"{100 * epoch['test_accuracy']:.2f} %",
            format_seconds(epoch["seconds"]),
            format_count(epoch["samples_per_second"]),
        ]
        for epoch in done
    ]
    notes = ["The loss left the range of numbers: try a smaller learning rate."] if diverged else []
    columns = ["epoch", "loss", "test accuracy", "time", "samples/s"]
    return {"title": title, "columns": columns, "rows": rows, "notes": notes}


def runs(kept: Sequence[Mapping[str, Any]], path: str) -> Grid:
    """Lay out the kept runs, one line each."""
    rows = [
        [
            run["id"],
            str(run["updated"])[:16],
            _subject(run["identity"]),
            run["identity"].get("mode"),
            run["identity"].get("dtype"),
            run["state"],
            run["num_timings"],
            format_seconds(run["seconds_spent"]),
        ]
        for run in kept
    ]
    notes = [] if rows else ["No runs are kept."]
    columns = ["id", "updated (UTC)", "what", "mode", "dtype", "state", "timings", "measured for"]
    return {"title": f"Kept in {path}", "columns": columns if rows else [], "rows": rows, "notes": notes}


def run(facts: Mapping[str, Any], measured: Mapping[str, Any]) -> list[Grid]:
    """Lay out one kept run: what was asked, the conditions, the timings of each size and how it ended."""
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
    asked = {key: value for key, value in facts["identity"].items() if key != "spec"}
    title = f"Run {facts['id']}: {_subject(facts['identity'])}, {facts['state']}, updated {facts['updated']}"
    return [
        _facts(title, asked),
        _facts("Conditions", facts["conditions"]),
        {"title": "Timings", "columns": ["batch", "timings", "fastest", "slowest", "status", "why"], "rows": rows,
         "notes": facts["notes"]},
    ]  # fmt: skip


def written(write: Callable[[float], str], value: float | None) -> str | None:
    """Write a number where there is one."""
    return None if value is None else write(value)


def _facts(title: str, facts: Mapping[str, Any]) -> Grid:
    rows = [[key, value] for key, value in facts.items() if value not in (None, "", [], {})]
    return {"title": title, "columns": ["what", "value"], "rows": rows}


def _subject(identity: Mapping[str, Any]) -> str | None:
    spec = identity.get("spec") or {}
    return spec.get("name") or spec.get("type") if isinstance(spec, Mapping) else str(spec)

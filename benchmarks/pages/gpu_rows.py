"""Rows, ratios, limiting factors and captions of the tables of a GPU pass, from its JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cubatch.bench.bench_results import OURS
from cubatch.units import format_percent

Row = dict[str, Any]
STEPS = "steps"
"""The stage of whole steps, whose operations stand in the tables of products, convolutions, attention and the rest."""
_SORTED = frozenset({"gemm", "layers", "fused", "attention", "misc"})
_FULL = 0.85


def rows_of(result: Mapping[str, Any], stage: str, *dtypes: str) -> list[Row]:
    """
    Return the cases of a stage that ran and were right, with the fastest kernel of cubatch, the vendor and the ratio.

    Args:
        result: A pass.
        stage: Name of a stage, or of a table that operations of steps are sorted into. The tables are "gemm", "layers"
            (convolutions), "fused" (with more than a bias), "attention" and "misc". Earlier passes have such stages.
        dtypes: Types of the cases; all if none is given.
    """
    rows = []
    of_steps = [item for item in items_of(result, STEPS) if "result" in item and stage == _sort(item["result"]["case"])]
    for item in (*items_of(result, stage), *of_steps):
        measured = item.get("result")
        if measured is None or (dtypes and measured["case"]["dtype"] not in dtypes):
            continue
        timed = [e for e in measured["entries"] if e["side"] == OURS and e["status"] == "ok" and e["seconds"]]
        if timed:
            best = min(timed, key=lambda entry: entry["seconds"])
            rivals = [e for e in measured["entries"] if e["side"] != OURS and e["seconds"]]
            others = {e["side"]: e for e in sorted(rivals, key=lambda entry: -entry["seconds"])}  # the fastest stays
            facts = {"case": measured["case"], "entries": measured["entries"], "bound": measured["bound"]}
            rows.append(facts | {"best": best, "rivals": others, "ratio": best["ratio"]})
    return rows


def _sort(case: Row) -> str:
    """Return the table that an operation of a step belongs to."""
    operation, layer = case["operation"], case["layer"] or {}
    if operation.startswith("linear"):
        return "gemm"
    if operation.startswith("attention"):
        return "attention"
    if operation.startswith("conv2d") and not 1 < layer.get("groups", 1) == layer["c"]:
        return "fused" if operation == "conv2d" and {*case["epilogue"]} - {"bias"} else "layers"
    return "misc"


def items_of(result: Mapping[str, Any], stage: str) -> list[Row]:
    """Return the items of a stage."""
    return [item for run in result["stages"] if run["name"] == stage for item in run["items"]]


def is_of(row: Row, network: str) -> bool:
    """Return whether a case occurs in a network."""
    return any(name.startswith(f"{network}/") for name in row["case"]["layers"])


def is_winograd_ground(row: Row) -> bool:
    """Return whether the vendor may use Winograd, so that there is no goal: float32, 3x3 at stride 1."""
    layer = row["case"]["layer"] or {}
    is_plain = layer.get("stride", 1) == 1 and layer.get("dilation", 1) == 1 and layer.get("groups", 1) == 1
    return row["case"]["dtype"] == "float32" and (layer.get("r"), layer.get("s")) == (3, 3) and is_plain


def limit_of(row: Row) -> str:
    """Return a description of the factors that limit a case."""
    best = row["best"]
    launch = next((each for each in best["launches"] if each["kernel"] == best["name"]), best["launches"][0])
    notes = []
    if is_winograd_ground(row):
        notes.append("3x3 at stride 1: the vendor may use Winograd")
    if launch["fill"] is not None and launch["fill"] < _FULL:
        notes.append(
            f"{format_percent(launch['fill'])} of the SMs at work ({launch['busiest_sm_blocks']} blocks on the busiest)"
        )
    if launch["spill_bytes"]:
        notes.append(f"{launch['spill_bytes']} bytes of spills")
    if row["bound"] == "memory" and best["copy_fraction"] is not None:
        notes.append(f"{format_percent(best['copy_fraction'])} of a copy's bandwidth")
    elif best["roofline_fraction"] is not None:
        notes.append(
            f"{format_percent(best['roofline_fraction'])} of the peak rate, occupancy {percent(launch['occupancy'])}"
        )
    return "; ".join(notes)


def mean_of(ratios: Sequence[float]) -> float:
    """Return the geometric mean of ratios."""
    return statistics.geometric_mean(ratios) if ratios else 0.0


def ratios_of(rows: Iterable[Row]) -> list[float]:
    """Return the ratios to the vendor of the rows that have one."""
    return [row["ratio"] for row in rows if row["ratio"] is not None]


def shares_of(rows: Iterable[Row]) -> list[float]:
    """Return the rows' shares of a copy's bandwidth."""
    return [row["best"]["copy_fraction"] for row in rows if row["best"]["copy_fraction"] is not None]


def percent(value: float | None) -> str:
    """Return a share in percent; an empty string for None."""
    return "" if value is None else format_percent(value)


def mean_cell(ratios: Sequence[float]) -> str:
    """Return the geometric mean of ratios; an empty string if there are none."""
    return f"{mean_of(ratios):.3f}" if ratios else ""


def page(result: Mapping[str, Any], stages: str, text: str, *, timed: bool = True) -> str:
    """Return a table below a caption: device, date, commits, libraries, method, and the number of missing cases."""
    device, facts = result["device"] or {}, result["environment"] or {}
    libraries = ", ".join(str(facts[name]) for name in ("cupy", "cublas") if facts.get(name))
    torch = f", PyTorch {facts['torch']} with cuDNN {facts['cudnn']}" if facts.get("torch") else ""
    names = {*stages.split()}
    runs = [run for run in result["stages"] if run["name"] in names | ({STEPS} if names & _SORTED else set())]
    skipped = sum(len(run["skipped"]) for run in runs)
    statuses = Counter(item["status"] for run in runs for item in run["items"])
    unavailable = statuses["unavailable"]
    broken = statuses.total() - statuses["ok"] - unavailable
    earlier = Counter(item["commit"] for run in runs for item in run["items"] if "commit" in item)  # of a pass resumed
    others = "".join(f" (but {count} of the cases: {commit})" for commit, count in earlier.items())
    parts = [f"{device.get('name')}, {result['date']}, commit {result['commit']}{others}, {libraries}{torch}"]
    if timed:
        parts.append("both sides in the same precision, float32 with TF32 off")
        parts.append("medians of interleaved rounds")
        parts.append("ratio: time of the vendor over that of cubatch")
    missing = ((skipped, "skipped for lack of time"), (broken, "failed"), (unavailable, "unavailable"))
    if notes := ", ".join(f"{count} {what}" for count, what in missing if count):
        parts.append(notes)
    return f"{'; '.join(parts)}.\n\n{text}"

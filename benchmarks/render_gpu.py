"""
Tables of a GPU pass for the READMEs: goals, products, convolutions, bandwidth, and what is slow and why.

They read only the pass's JSON.  What was skipped, wrong or without a vendor beside it counts nowhere, and the
captions say how much that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.tables import table
from cubatch.bench.records import geometric_mean
from cubatch.units import format_metric, format_percent, format_seconds

Row = dict[str, Any]

GEMM_GOAL, CONV_GOAL, DEPTHWISE_GOAL, DEPTHWISE_COPY_GOAL, COPY_GOAL = 0.95, 1.0, 1.2, 0.8, 0.85
GOAL_NETWORK = "resnet50"
_FULL = 0.85


def goals(result: Mapping[str, Any]) -> str:
    """Each speed goal beside what was found."""
    products, convolutions, others = rows_of(result, "gemm"), rows_of(result, "layers"), rows_of(result, "misc")
    plain = [row for row in convolutions if not is_winograd_ground(row) and _is_of(row, GOAL_NETWORK)]
    depthwise, rest = [r for r in others if r["case"]["flops"]], [r for r in others if not r["case"]["flops"]]
    found = [
        ("matrix products: geometric mean of the ratio to cuBLAS", GEMM_GOAL, _mean, _ratios(products)),
        (f"1x1 and strided convolutions of {GOAL_NETWORK}: the same to cuDNN", CONV_GOAL, _mean, _ratios(plain)),
        ("depthwise convolutions: the same to cuDNN", DEPTHWISE_GOAL, _mean, _ratios(depthwise)),
        ("depthwise convolutions: least share of a copy's bandwidth", DEPTHWISE_COPY_GOAL, min, _shares(depthwise)),
        ("other operations: least share of a copy's bandwidth", COPY_GOAL, min, _shares(rest)),
    ]
    rows = []
    for name, goal, reduce, values in found:
        if values:
            value = reduce(values)
            rows.append([name, f"{goal:.2f}", f"{value:.3f}", str(len(values)), "yes" if value >= goal else "**no**"])
    return _page(result, "gemm layers misc", table(["goal", "at least", "found", "cases", "met"], rows))


def gemm(result: Mapping[str, Any]) -> str:
    """Matrix products beside cuBLAS, one by one."""
    rows = [_compared(row) for row in rows_of(result, "gemm") if row["ratio"] is not None]
    return _page(result, "gemm", table(["product", "kernel", "time", "rate", "of peak", "cuBLAS", "ratio"], rows))


def convolutions(result: Mapping[str, Any]) -> str:
    """Convolutions beside cuDNN: geometric means by network, batch size, pass and kind."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows_of(result, "layers"):
        for network in dict.fromkeys(name.split("/")[0] for name in row["case"]["layers"]):
            groups.setdefault((network, row["case"]["batch_size"], row["case"]["pass"]), []).append(row)
    rows = []
    for (network, batch_size, pass_), members in groups.items():
        plain = [row for row in members if not is_winograd_ground(row)]
        winograd = [row for row in members if is_winograd_ground(row)]
        means = [_ratios(group) for group in (plain, winograd, members)]
        written = [f"{_mean(ratios):.3f}" if ratios else "" for ratios in means]
        rows.append([network, str(batch_size), pass_, str(len(members)), *written])
    columns = ["network", "batch", "pass", "layers", "1x1 and strided", "3x3, stride 1", "all"]
    return _page(result, "layers", table(columns, rows))


def bandwidth(result: Mapping[str, Any]) -> str:
    """Depthwise convolutions and all that only moves bytes, against a copy."""
    rows = [
        [
            row["case"]["name"],
            format_seconds(row["best"]["seconds"]),
            format_metric(row["best"]["bytes_per_second"], "B/s"),
            format_percent(row["best"]["copy_fraction"]),
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
        ]
        for row in rows_of(result, "misc")
        if row["best"]["copy_fraction"] is not None
    ]
    return _page(result, "misc", table(["operation", "time", "bandwidth", "of a copy", "ratio to cuDNN"], rows))


def slow(result: Mapping[str, Any]) -> str:
    """What misses its goal, and what limits it."""
    rows = []
    for stage, goal in (("gemm", GEMM_GOAL), ("layers", CONV_GOAL), ("misc", None)):
        for row in rows_of(result, stage):
            wanted = goal if goal is not None else (DEPTHWISE_GOAL if row["case"]["flops"] else None)
            is_slow = wanted is not None and row["ratio"] is not None and row["ratio"] < wanted
            share = row["best"]["copy_fraction"]
            least = DEPTHWISE_COPY_GOAL if row["case"]["flops"] else COPY_GOAL
            is_slow |= stage == "misc" and share is not None and share < least
            if is_slow:
                ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
                rows.append([row["case"]["name"], row["best"]["label"], ratio, limit_of(row)])
    return _page(result, "gemm layers misc", table(["case", "kernel", "ratio", "what limits it"], rows))


def limit_of(row: Row) -> str:
    """Say in words what keeps a case from its goal."""
    best = row["best"]
    launch = max(best["launches"], key=lambda launch: launch["grid"][0] * launch["grid"][1] * launch["grid"][2])
    said = []
    if is_winograd_ground(row):
        said.append("3x3 at stride 1: the vendor may use Winograd")
    if launch["fill"] is not None and launch["fill"] < _FULL:
        said.append(
            f"{format_percent(launch['fill'])} of the SMs at work ({launch['busiest_sm_blocks']} blocks on the busiest)"
        )
    if launch["spill_bytes"]:
        said.append(f"{launch['spill_bytes']} bytes of spills")
    if row["bound"] == "memory" and best["copy_fraction"] is not None:
        said.append(f"{format_percent(best['copy_fraction'])} of a copy's bandwidth")
    elif best["roofline_fraction"] is not None:
        said.append(
            f"{format_percent(best['roofline_fraction'])} of the peak rate, occupancy {_share(launch['occupancy'])}"
        )
    return "; ".join(said)


def is_winograd_ground(row: Row) -> bool:
    """Tell the convolutions that the vendor may do by another algorithm and that have no goal: 3x3 at stride 1."""
    layer = row["case"]["layer"] or {}
    is_plain = layer.get("stride", 1) == 1 and layer.get("dilation", 1) == 1 and layer.get("groups", 1) == 1
    return (layer.get("r"), layer.get("s")) == (3, 3) and is_plain


def rows_of(result: Mapping[str, Any], stage: str) -> list[Row]:
    """Give the cases of a stage that ran and were right, each with the fastest of ours and its ratio to the vendor."""
    rows = []
    for item in _items(result, stage):
        found = item.get("result")
        if found is None:
            continue
        timed = [e for e in found["entries"] if e["side"] == "ours" and e["status"] == "ok" and e["seconds"]]
        if timed:
            best = min(timed, key=lambda entry: entry["seconds"])
            vendor = next((e for e in found["entries"] if e["side"] == "vendor" and e["seconds"]), None)
            rows.append(
                {"case": found["case"], "best": best, "vendor": vendor, "ratio": best["ratio"], "bound": found["bound"]}
            )
    return rows


KINDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "gpu-goals": goals,
    "gpu-gemm": gemm,
    "gpu-convolutions": convolutions,
    "gpu-bandwidth": bandwidth,
    "gpu-slow": slow,
}


def _is_of(row: Row, network: str) -> bool:
    return any(name.startswith(f"{network}/") for name in row["case"]["layers"])


def _items(result: Mapping[str, Any], stage: str) -> list[Row]:
    return [item for run in result["stages"] if run["name"] == stage for item in run["items"]]


def _compared(row: Row) -> list[str]:
    best, vendor = row["best"], row["vendor"]
    low, high = best["ratio_interval"] or (None, None)
    interval = "" if low is None else f" ({low:.2f} to {high:.2f})"
    return [
        row["case"]["name"],
        best["label"],
        format_seconds(best["seconds"]),
        format_metric(best["flops_per_second"], "FLOP/s"),
        _share(best["roofline_fraction"]),
        format_seconds(vendor["seconds"]),
        f"{best['ratio']:.2f}{interval}",
    ]


def _mean(ratios: Sequence[float]) -> float:
    return geometric_mean(ratios) or 0.0


def _ratios(rows: Iterable[Row]) -> list[float]:
    return [row["ratio"] for row in rows if row["ratio"] is not None]


def _shares(rows: Iterable[Row]) -> list[float]:
    return [row["best"]["copy_fraction"] for row in rows if row["best"]["copy_fraction"] is not None]


def _share(value: float | None) -> str:
    return "" if value is None else format_percent(value)


def _page(result: Mapping[str, Any], stages: str, text: str) -> str:
    """Put above a table what it is of, and how much of it there is."""
    device, facts = result["device"] or {}, result["environment"] or {}
    libraries = ", ".join(str(facts[name]) for name in ("cupy", "cublas") if facts.get(name))
    torch = f", PyTorch {facts['torch']} with cuDNN {facts['cudnn']}" if facts.get("torch") else ""
    runs = [run for run in result["stages"] if run["name"] in stages.split()]
    skipped = sum(len(run["skipped"]) for run in runs)
    broken = sum(item["status"] != "ok" for run in runs for item in run["items"])
    missing = [
        f"{count} {what}" for count, what in ((skipped, "skipped for want of time"), (broken, "not right")) if count
    ]
    caption = (
        f"{device.get('name')}, {result['date']}, commit {result['commit']}, {libraries}{torch}; float32, TF32 off, "
        "medians of rounds taken in turns; the ratio is the vendor's time over ours"
        f"{'; ' + ', '.join(missing) if missing else ''}."
    )
    return f"{caption}\n\n{text}"

"""
Tables of a GPU pass: goals, single cases, means, memory, and the cases that miss their goals.

They read only the JSON of the pass.  Cases that were skipped, wrong or without a vendor do not count; captions give
their number.  A mean is always over cases of one type: precisions are never mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.pages import gpu_step
from benchmarks.pages.gpu_rows import (
    Row,
    is_of,
    is_winograd_ground,
    items_of,
    limit_of,
    mean_cell,
    mean_of,
    page,
    percent,
    ratios_of,
    rows_of,
    shares_of,
)
from benchmarks.pages.tables import table
from cubatch.bench.bench_results import OURS
from cubatch.bench.rivals import VENDOR
from cubatch.units import format_bytes, format_metric, format_percent, format_seconds

GEMM_GOAL, CONV_GOAL, DEPTHWISE_GOAL, DEPTHWISE_COPY_GOAL, COPY_GOAL = 0.95, 1.0, 1.2, 0.8, 0.85
TENSOR_GEMM_GOAL, TENSOR_CONV_GOAL, FUSED_GOAL, TRAINING_GOAL = 1.0, 1.0, 1.15, 1.0
GOAL_NETWORK, GOAL_BATCHES, GOAL_TRAINING_BATCH = "resnet50", (32, 256), 256
PASSES = ("fprop", "dgrad", "wgrad")

Goal = tuple[str, float, Callable[[Sequence[float]], float], list[float]]
"""Name, goal, function that reduces the values to one, values."""


def goals(result: Mapping[str, Any]) -> str:
    """Return each speed goal with the measured value."""
    rows = []
    for name, goal, reduce, values in (*_float32_goals(result), *_tensor_goals(result)):
        if values:
            value = reduce(values)
            rows.append([name, f"{goal:.2f}", f"{value:.3f}", str(len(values)), "yes" if value >= goal else "**no**"])
    columns = ["goal", "at least", "measured", "cases", "met"]
    return page(result, "gemm layers fused training misc", table(columns, rows))


def _float32_goals(result: Mapping[str, Any]) -> list[Goal]:
    products, others = rows_of(result, "gemm", "float32"), rows_of(result, "misc", "float32")
    plain = [row for row in rows_of(result, "layers", "float32") if not is_winograd_ground(row)]
    ours = [row for row in plain if is_of(row, GOAL_NETWORK)]
    depthwise, rest = [r for r in others if r["case"]["flops"]], [r for r in others if not r["case"]["flops"]]
    return [
        ("matrix products, float32: mean ratio to cuBLAS", GEMM_GOAL, mean_of, ratios_of(products)),
        (
            f"1x1 and strided convolutions of {GOAL_NETWORK}, float32: mean ratio to cuDNN",
            CONV_GOAL,
            mean_of,
            ratios_of(ours),
        ),
        ("depthwise convolutions: mean ratio to cuDNN", DEPTHWISE_GOAL, mean_of, ratios_of(depthwise)),
        ("depthwise convolutions: least share of a copy's bandwidth", DEPTHWISE_COPY_GOAL, min, shares_of(depthwise)),
        ("other operations: least share of a copy's bandwidth", COPY_GOAL, min, shares_of(rest)),
    ]


def _tensor_goals(result: Mapping[str, Any]) -> list[Goal]:
    targets: list[Goal] = []
    for dtype in ("float16", "bfloat16"):
        ratios = ratios_of(rows_of(result, "gemm", dtype))
        targets.append((f"matrix products, {dtype}: mean ratio to cuBLAS", TENSOR_GEMM_GOAL, mean_of, ratios))
    for batch in GOAL_BATCHES:
        name = f"{GOAL_NETWORK}, float16, batch {batch}"
        for pass_ in PASSES:
            ratios = ratios_of(_of_batch(rows_of(result, "layers", "float16"), batch, pass_))
            targets.append((f"{name}, {pass_}: mean ratio to cuDNN", TENSOR_CONV_GOAL, mean_of, ratios))
        ratios = ratios_of(_of_batch(rows_of(result, "fused", "float16"), batch, "fprop"))
        targets.append((f"{name}, fused: mean ratio to cuDNN and separate kernels", FUSED_GOAL, mean_of, ratios))
    wanted = (GOAL_NETWORK, "float16", GOAL_TRAINING_BATCH)
    steps = [i["ratio"] for i in _trained(result) if (i["network"], i["dtype"], i["batch_size"]) == wanted]
    name = f"training step of {GOAL_NETWORK}, float16, batch {GOAL_TRAINING_BATCH}: ratio to PyTorch eager"
    return [*targets, (name, TRAINING_GOAL, min, steps)]


def gemm(result: Mapping[str, Any]) -> str:
    """Return each matrix product with cuBLAS and other rivals, type by type."""
    return _one_by_one(result, "gemm", "product", "cuBLAS")


def attention(result: Mapping[str, Any]) -> str:
    """Return each pass of attention with PyTorch's."""
    return _one_by_one(result, "attention", "pass", "scaled_dot_product_attention")


def convolutions(result: Mapping[str, Any]) -> str:
    """Return geometric means of convolutions against rivals, by network, type, batch size, pass and kind."""
    groups: dict[tuple[str, str, int, str], list[Row]] = {}
    listed = [*rows_of(result, "layers"), *(_as_fused(row) for row in rows_of(result, "fused"))]
    for row in listed:
        case = row["case"]
        for network in dict.fromkeys(name.split("/")[0] for name in case["layers"]):
            groups.setdefault((network, case["dtype"], case["batch_size"], case["pass"]), []).append(row)
    rows = []
    for (network, dtype, batch_size, pass_), members in groups.items():
        plain = [row for row in members if not is_winograd_ground(row)]
        winograd = [row for row in members if is_winograd_ground(row)]
        written = [mean_cell(ratios_of(group)) for group in (plain, winograd, members)]
        rows.append([network, dtype, str(batch_size), pass_, str(len(members)), *written])
    columns = ["network", "type", "batch", "pass", "layers", "without 3x3, stride 1, float32", "only these", "all"]
    return page(result, "layers fused", table(columns, rows))


def families(result: Mapping[str, Any]) -> str:
    """Return for each family of kernels the mean ratio of its fastest variants."""
    groups: dict[tuple[str, str, str], list[tuple[Row, bool]]] = {}
    stages = {stage: rows_of(result, stage) for stage in ("gemm", "layers", "fused")}
    for stage, listed in stages.items():
        for row in listed:
            best: dict[str, Row] = {}
            for entry in row["entries"]:
                if entry["side"] == OURS and entry["ratio"] is not None:
                    family = entry["label"].split()[0]
                    best[family] = min(entry, best.get(family, entry), key=lambda each: each["seconds"])
            for family, entry in best.items():
                is_first = entry["seconds"] <= row["best"]["seconds"]
                groups.setdefault((stage, row["case"]["dtype"], family), []).append((entry, is_first))
    rows = [
        [stage, dtype, family, str(len(members)), mean_cell([entry["ratio"] for entry, _ in members]),
         str(sum(is_first for _, is_first in members))]
        for (stage, dtype, family), members in groups.items()
    ]  # fmt: skip
    columns = ["stage", "type", "family", "cases", "mean ratio", "fastest family in"]
    return page(result, "gemm layers fused", table(columns, rows))


def bandwidth(result: Mapping[str, Any]) -> str:
    """Return depthwise convolutions and operations that only move bytes, relative to a copy."""
    listed = [row for row in rows_of(result, "misc") if row["best"]["copy_fraction"] is not None]
    rows = []
    for row in listed:
        best = row["best"]
        rows.append(
            [
                row["case"]["name"],
                format_seconds(best["seconds"]),
                format_metric(best["bytes_per_second"], "B/s"),
                format_percent(best["copy_fraction"]),
                "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            ]
        )
    columns = ["operation", "time", "bandwidth", "of a copy", "ratio to cuDNN"]
    return page(result, "misc", table(columns, rows))


def training(result: Mapping[str, Any]) -> str:
    """Return training steps against PyTorch eager, channels last with automatic mixed precision: images per second."""
    rows = []
    for item in _trained(result):
        ours, theirs = item["images_per_second"].values()
        rows.append(
            [item["network"], item["dtype"], str(item["batch_size"]), f"{ours:.0f}", f"{theirs:.0f}",
             _ratio(item)]
        )  # fmt: skip
    columns = ["network", "type", "batch", "cubatch, images/s", "PyTorch, images/s", "ratio"]
    return page(result, "training", table(columns, rows))


def compiled(result: Mapping[str, Any]) -> str:
    """Return a table of whole steps against PyTorch eager and `torch.compile`: images per second, and the ratio."""
    rows = []
    for item in items_of(result, "training"):
        for name, rival in item.get("rivals", {}).items():
            facts = [item["network"], item["mode"], item["dtype"], str(item["batch_size"])]
            ours = f"{item['cubatch']['images_per_second']:.0f}"
            if rival["failure"] is not None:
                rows.append([*facts, ours, name, "failed", ""])
                continue
            rows.append([*facts, ours, name, f"{rival['images_per_second']:.0f}", _ratio(rival)])
    columns = ["network", "mode", "type", "batch", "cubatch, images/s", "rival", "rival, images/s", "ratio"]
    return page(result, "training", table(columns, rows))


def memory(result: Mapping[str, Any]) -> str:
    """Return the plans of steps, the bytes that the engine's pool held, and the bytes of the process by NVML."""
    rows = [
        [
            item["name"],
            format_bytes(item["planned_bytes"]),
            format_bytes(item["held_bytes"]),
            f"{(item['held_bytes'] - item['planned_bytes']) / 2**20:+.2f} MiB",
            "" if item["process_bytes"] is None else format_bytes(item["process_bytes"]),
        ]
        for item in items_of(result, "memory")
        if item["status"] == "ok"
    ]
    return page(result, "memory", table(["step", "planned", "held", "beyond the plan", "process"], rows), timed=False)


def conformance(result: Mapping[str, Any]) -> str:
    """Return the instructions of the GPU that differ from their emulation on the CPU."""
    items = items_of(result, "conformance")
    counts: dict[str, int] = {}
    for item in items:
        counts[item["status"]] = counts.get(item["status"], 0) + 1
    summary = ", ".join(f"{count} {status}" for status, count in counts.items()) or "none"
    rows = [
        [item["name"], "; ".join(item.get("differences", ())) or item.get("message", "")]
        for item in items
        if item["status"] not in {"ok", "unchecked"}
    ]
    differing = f"\n\n{table(['probe', 'difference or failure'], rows)}" if rows else ""
    return page(result, "conformance", f"Probes: {summary}.{differing}", timed=False)


def slow(result: Mapping[str, Any]) -> str:
    """Return the cases that miss their goals, with the factors that limit them."""
    rows = []
    for stage in ("gemm", "layers", "fused", "misc"):
        for row in rows_of(result, stage):
            wanted = _goal_of(row, stage)
            is_slow = wanted is not None and row["ratio"] is not None and row["ratio"] < wanted
            share = row["best"]["copy_fraction"]
            least = DEPTHWISE_COPY_GOAL if row["case"]["flops"] else COPY_GOAL
            is_slow |= stage == "misc" and share is not None and share < least
            if is_slow:
                ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
                rows.append([row["case"]["name"], row["best"]["label"], ratio, limit_of(row)])
    return page(result, "gemm layers fused misc", table(["case", "kernel", "ratio", "limiting factors"], rows))


KINDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "gpu-goals": goals,
    "gpu-gemm": gemm,
    "gpu-convolutions": convolutions,
    "gpu-families": families,
    "gpu-attention": attention,
    "gpu-bandwidth": bandwidth,
    "gpu-training": training,
    "gpu-compiled": compiled,
    "gpu-memory": memory,
    "gpu-conformance": conformance,
    "gpu-slow": slow,
    "gpu-steps": gpu_step.steps,
}


def _goal_of(row: Row, stage: str) -> float | None:
    is_float32 = row["case"]["dtype"] == "float32"
    return {
        "gemm": GEMM_GOAL if is_float32 else TENSOR_GEMM_GOAL,
        "layers": CONV_GOAL if is_float32 else TENSOR_CONV_GOAL,
        "fused": FUSED_GOAL,
        "misc": DEPTHWISE_GOAL if row["case"]["flops"] else None,
    }[stage]


def _of_batch(rows: list[Row], batch_size: int, pass_: str) -> list[Row]:
    return [
        row
        for row in rows
        if is_of(row, GOAL_NETWORK) and (row["case"]["batch_size"], row["case"]["pass"]) == (batch_size, pass_)
    ]


def _as_fused(row: Row) -> Row:
    return row | {"case": row["case"] | {"pass": "fused fprop"}}


def _trained(result: Mapping[str, Any]) -> list[Row]:
    """Return training steps that were timed against PyTorch eager; earlier passes have the ratio in the item itself."""
    listed = []
    for item in items_of(result, "training"):
        eager = item.get("rivals", {}).get("eager", {}) if item.get("mode") == "training" else {}
        if eager.get("ratio") is not None:
            sides = {"cubatch": item["cubatch"], "PyTorch": eager}
            speeds = {side: figures["images_per_second"] for side, figures in sides.items()}
            ratio = {name: eager[name] for name in ("ratio", "ratio_interval")}
            listed.append(item | ratio | {"images_per_second": speeds})
        elif item["status"] == "ok" and item.get("ratio") is not None:
            listed.append(item)
    return listed


def _ratio(entry: Row) -> str:
    low, high = entry["ratio_interval"] or (None, None)
    return f"{entry['ratio']:.2f}" + ("" if low is None else f" ({low:.2f} to {high:.2f})")


def _one_by_one(result: Mapping[str, Any], stage: str, what: str, vendor: str) -> str:
    listed = [row for row in rows_of(result, stage) if row["ratio"] is not None]
    listed.sort(key=lambda row: row["case"]["dtype"])
    columns = [what, "kernel", "time", "rate", "of peak", vendor, "ratio"]
    return page(result, stage, table(columns, [_compared(row) for row in listed]))


def _compared(row: Row) -> list[str]:
    best = row["best"]
    return [
        row["case"]["name"],
        best["label"],
        format_seconds(best["seconds"]),
        format_metric(best["flops_per_second"], "FLOP/s"),
        percent(best["roofline_fraction"]),
        format_seconds(row["rivals"][VENDOR]["seconds"]),
        _ratio(best),
    ]

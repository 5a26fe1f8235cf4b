"""Kernels and steps on a GPU next to cuBLAS, cuDNN and PyTorch: a geometric mean for each operation and type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.pages.gpu_rows import Row, items_of, mean_of, ratios_of, rows_of
from benchmarks.pages.tables import page, table

WIDEST = 0.1  # of the interval of a step, relative to its ratio
DTYPES = ("float16", "bfloat16", "tf32", "float32")


def means(*results: dict[str, Any]) -> str:
    """
    Return the geometric mean of the vendor's time over cubatch's, with the number of cases.

    Each mean is of the run that timed the most cases of that kind and type, and of the latest among equals.
    """
    groups: dict[str, dict[str, tuple[list[float], str]]] = {}
    for result in sorted(results, key=lambda each: each["date"]):
        for (kind, dtype), ratios in _ratios(result).items():
            known, _ = groups.setdefault(kind, {}).get(dtype, ([], ""))
            if len(ratios) >= len(known):
                groups[kind][dtype] = (ratios, result["commit"])
    rows = []
    for kind, cells in groups.items():
        per_type = [cells.get(dtype, ([], ""))[0] for dtype in DTYPES]
        means = [f"{mean_of(ratios):.2f} ({len(ratios)})" if ratios else "" for ratios in per_type]
        rows.append([kind, *means, ", ".join(dict.fromkeys(commit for _, commit in cells.values()))])
    device, dates = results[0]["device"]["name"], sorted(result["date"] for result in results)
    caption = (
        f"{device}, {dates[0]} to {dates[-1]}: time of the vendor's library over that of cubatch's fastest kernel in "
        "the same precision, geometric mean (number of cases)"
    )
    return page(caption, table(["operation, vendor", *DTYPES, "commit"], rows))


def _ratios(result: Mapping[str, Any]) -> dict[tuple[str, str], list[float]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for stage in ("gemm", "layers", "fused", "misc", "attention"):
        for row in rows_of(result, stage):
            groups.setdefault((_kind(stage, row["case"]), row["case"]["dtype"]), []).append(row)
    kinds = {key: ratios_of(rows) for key, rows in groups.items()}
    for item in items_of(result, "training"):
        low, high = item.get("ratio_interval") or (0.0, math.inf)
        if item["status"] == "ok" and high - low <= WIDEST * (item.get("ratio") or 0.0):
            kind = f"training step of {item['network']}, batch {item['batch_size']}, PyTorch eager"
            kinds[kind, item["dtype"]] = [item["ratio"]]
    return {key: ratios for key, ratios in kinds.items() if ratios}


def _kind(stage: str, case: Row) -> str:
    passed = {"fprop": "forward", "dgrad": "input gradient", "wgrad": "filter gradient"}.get(case["pass"], "")
    return {
        "gemm": "matrix products, cuBLAS",
        "layers": f"convolutions, {passed}, cuDNN",
        "fused": "convolutions with fused bias, residual and ReLU, cuDNN and separate kernels",
        "attention": f"attention, {'forward' if passed == 'forward' else 'backward'}, PyTorch",
        "misc": "depthwise convolutions, cuDNN" if case["flops"] else "operations that only move bytes, PyTorch",
    }[stage]

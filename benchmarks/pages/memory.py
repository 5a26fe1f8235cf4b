"""What was said of a process's memory, beside what it took."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.tables import table
from cubatch.units import format_bytes

WITHIN, WITHIN_BYTES = 0.02, 4 * 2**20


def memory(result: dict[str, Any]) -> str:
    """Each network's largest size, and the worst errors of all its sizes."""
    rows = []
    for model, mode in dict.fromkeys((row["model"], row["mode"]) for row in result["rows"]):
        ran = [row for row in result["rows"] if (row["model"], row["mode"]) == (model, mode) and "took" in row]
        if not ran:  # the caption counts what failed
            continue
        last = max(ran, key=lambda row: row["batch_size"])
        errors = [row["said"] - row["took"] for row in ran]
        rows.append(
            [
                f"`{model}`",
                mode,
                ", ".join(str(row["batch_size"]) for row in ran),
                format_bytes(last["planned"]),
                format_bytes(last["said"]),
                format_bytes(last["took"]),
                _percent(last["said"] / last["took"] - 1),
                _percent(min(row["planned"] / row["took"] - 1 for row in ran)),
                f"{min(errors) / 2**20:+.1f} to {max(errors) / 2**20:+.1f} MiB",
            ]
        )
    ran = [row for row in result["rows"] if "took" in row]
    close = sum(abs(row["said"] - row["took"]) <= max(WITHIN * row["took"], WITHIN_BYTES) for row in ran)
    under = [row["took"] - row["said"] for row in ran if row["said"] < row["took"]]
    missed = f", the most by {format_bytes(max(under))}" if under else ""
    caption = (
        f"{result['device']}, {result['threads']} threads, {result['date']}, commit {result['commit']}, BLAS "
        f"{result['environment']['blas']}, {result['optimizer']}; {close} of {len(ran)} sizes within "
        f"{100 * WITHIN:.0f} % or {format_bytes(WITHIN_BYTES)}, {len(under)} took more than was said{missed}, "
        f"{len(result['rows']) - len(ran)} failed."
    )
    head = ["network", "mode", "batch sizes", "plan", "said", "took", "error", "of the plan alone", "errors of all"]
    return f"{caption}\n\n{table(head, rows)}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"

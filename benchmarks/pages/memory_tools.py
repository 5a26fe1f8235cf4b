"""The memory that tools predict for ten modules, compared with a real step."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.pages.tables import origin, page, percent, table
from cubatch.units import format_bytes


def memory_tools(result: dict[str, Any]) -> str:
    """Return a row for each module with the error of each tool, and rows of mean error, largest error and seconds."""
    rows, tools = result["rows"], [key for key in result["rows"][0] if key not in ("module", "batch_size", "measured")]
    errors = {
        tool: [row[tool]["bytes"] / row["measured"]["bytes"] - 1 if "bytes" in row[tool] else None for row in rows]
        for tool in tools
    }
    known = {tool: [abs(error) for error in errors[tool] if error is not None] for tool in tools}
    seconds = {tool: [row[tool]["seconds"] for row in rows if "seconds" in row[tool]] for tool in tools}
    lines = [
        [f"{row['module']}, batch {row['batch_size']}", format_bytes(row["measured"]["bytes"])]
        + [percent(errors[tool][place], sign="+") or "error" for tool in tools]
        for place, row in enumerate(rows)
    ]
    lines += [
        ["mean error", "", *(percent(statistics.mean(known[tool])) for tool in tools)],
        ["largest error", "", *(percent(max(known[tool])) for tool in tools)],
        ["median seconds", "", *(f"{statistics.median(seconds[tool]):.1f}" for tool in tools)],
    ]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return page(f"{origin(result)}; {versions}", table(["module", "measured", *tools], lines))

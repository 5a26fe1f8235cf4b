"""Serving plans compared with a server under load."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.tables import origin, page, percent, table


def serving(result: dict[str, Any]) -> str:
    """Return a row for each rate of requests: the plan, its 99th percentile and the measured one, those of defaults."""
    rows = []
    for row in result["plans"]:
        plan, ours, defaults = row["plan"], row["measured"], row["defaults"]
        chosen = next(each for each in plan["options"] if each["max_batch_size"] == plan["max_batch_size"])
        planned = chosen["load"]["p99"]
        own = ours["own_speed_p99"]
        rows.append([
            f"{row['rate']:.0f}/s", f"{plan['max_batch_size']}, {1e3 * plan['queue_delay']:.0f} ms",
            *(f"{1e3 * seconds:.1f} ms" for seconds in (planned, ours["p99"])),
            percent(ours["p99"] / planned - 1, sign="+"),
            f"{ours['steps_before']:.2f} and {ours['steps_after']:.2f} times", f"{1e3 * own:.1f} ms",
            percent(ours["p99"] / own - 1, sign="+"), f"{1e3 * defaults['p99']:.1f} ms",
        ])  # fmt: skip
    names = [
        "requests", "largest batch, queue delay", "planned", "measured", "difference", "steps took", "at that speed",
        "difference", "Ray Serve's defaults",
    ]  # fmt: skip
    count = min(row["measured"]["requests"] for row in result["plans"])
    server = {"own": "ONNX Runtime behind a socket", "ray": "Ray Serve, behind HTTP"}[result["server"]]
    caption = f"{origin(result)}. {server}: 99th percentiles of the latency, of {count:,} requests or more"
    return page(caption, table(names, rows))

"""How the predictor's scores and speed are written in the READMEs."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.tables import table
from cubatch.units import format_seconds


def scores(result: dict[str, Any]) -> str:
    """Errors by source and by what was unseen, beside the goals and the roofline."""
    rows = []
    for name, found in result["scores"].items():
        if "mean" not in found:
            continue
        goal = result["goals"].get(name)
        low, high = found.get("mean_interval", (None, None))
        rows.append([
            name, f"{found['mean']:.1f} %", "" if low is None else f"{low:.1f} to {high:.1f}",
            f"{found['median']:.1f} %" if "median" in found else "",
            f"{found['mean_without_overhead']:.1f} %" if "mean_without_overhead" in found else "",
            f"{found['bias']:+.0f} %" if "bias" in found else "",
            "" if goal is None else " / ".join(f"{value:g} %" for value in goal if value is not None),
            f"{found['rows']}, {found['shapes']}",
        ])  # fmt: skip
    head = [
        "what",
        "mean error",
        "90 % interval",
        "median",
        "without overhead",
        "bias",
        "goal, mean / median",
        "rows, shapes",
    ]
    knees = [
        [
            name, f"{found['exact']:.0f} %", "{:.0f} to {:.0f}".format(*found["exact_interval"]),
            f"{found['exact_of_largest']:.0f} %", f"{found['scaling_error']:.3f}", str(found["sweeps"]),
        ]
        for name, found in result["scores"].items() if "exact" in found
    ]  # fmt: skip
    sweep = ["what", "knee exact", "90 % interval", "of “the largest”", "error of log t(2n)/t(n)", "ladders"]
    owned = [
        [
            name.split(",")[0], target, found["best_source"], f"{found['mean_of_best']:.1f} %",
            f"{found['mean_of_median']:.1f} %", str(found["rows"]),
        ]
        for name, targets in result["scores"].items() if "owned GPU" in name for target, found in targets.items()
    ]  # fmt: skip
    rival = ["source", "target", "best source", "its mean error", "of the median source", "rows"]
    whole = [
        [
            name, f"{found['mean_error']:.0f} %", f"{found['bias_of_network']:+.0f} %",
            f"{found['inside_interval']:.0f} %", str(found["cases"]),
        ]
        for name, found in result["scores"].items() if "inside_interval" in found
    ]  # fmt: skip
    frameworks = ["whole networks in PyTorch", "mean error", "bias", "inside the 90 % interval", "cases"]
    cliffs = result["scores"].get("cliffs", {})
    named = ", ".join(cliffs.get("named_and_measured", []))
    caption = f"{result['date']}, commit {result['commit']}; errors are |predicted / published - 1|."
    law = (
        f"Cliffs over 10 % between neighbouring batch sizes, by the law of waves alone: {cliffs['pairs']} published "
        f"pairs, measured and named: {named}; measured only: {len(cliffs['only_measured'])}; named only: "
        f"{len(cliffs['only_named'])}."
        if cliffs
        else ""
    )
    return "\n\n".join([
        caption, table(head, rows), table(sweep, knees),
        "The rival: time on another GPU times the ratio of rooflines.", table(rival, owned), table(frameworks, whole),
        law,
    ])  # fmt: skip


def _further(scores: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """The goals that are no mean error: the worst GPU, knees, cliffs, and the rival that owns a GPU."""
    rows = []
    gpus = {
        name: found for name, found in scores.items() if name.startswith("neusight, unseen GPU, ") and "bias" in found
    }
    if gpus:
        count = str(len(gpus))
        rows.append(
            ("neusight, unseen GPU, worst GPU", f"{max(g['mean'] for g in gpus.values()):.1f} %", "13 %", count)
        )
        bias = max((g["bias"] for g in gpus.values()), key=abs)
        rows.append(("neusight, unseen GPU, worst bias", f"{bias:+.1f} %", "8 %", count))
    for name, goal in (("unseen shapes", "85 %"), ("unseen GPU", "80 %")):
        knee = scores.get(f"deepbench conv, {name}, knee")
        if knee:
            text = f"{knee['exact']:.0f} % (“the largest”: {knee['exact_of_largest']:.0f} %)"
            rows.append((f"deepbench conv, {name}, knee exact", text, goal, str(knee["sweeps"])))
    beaten = [
        scores[f"{source}, unseen GPU, {target}"]["mean"] < found["mean_of_best"]
        for source in ("neusight", "deepbench conv", "deepbench gemm")
        for target, found in scores.get(f"{source}, owned GPU times roofline ratio", {}).items()
        if f"{source}, unseen GPU, {target}" in scores
    ]
    if beaten:
        text = f"{sum(beaten)} of {len(beaten)}"
        rows.append(("best owned GPU times roofline ratio beaten, no anchor", text, "all", str(len(beaten))))
    cliffs = scores.get("cliffs")
    if cliffs:
        named, missed, invented = (len(cliffs[key]) for key in ("named_and_measured", "only_measured", "only_named"))
        text = f"{named} of {named + missed}, {named} of {named + invented}"
        rows.append(("wave cliffs over 10 %: recall, precision", text, "90 %, 70 %", str(cliffs["pairs"])))
    return rows


def goals(result: dict[str, Any]) -> str:
    """The errors that have a goal, beside the roofline with a factor for each GPU."""
    rows = []
    for name, goal in result["goals"].items():
        found = result["scores"].get(name)
        if found is None:
            continue
        rival = result["scores"].get(f"{name}, roofline", {})
        rows.append([
            name, " / ".join(f"{found[key]:.1f} %" for key in ("mean", "median") if key in found),
            " / ".join(f"{value:g} %" for value in goal if value is not None),
            f"{rival['mean']:.0f} %" if rival else "", f"{found['rows']}, {found['shapes']}",
        ])  # fmt: skip
    rows += [[name, found, goal, "", count] for name, found, goal, count in _further(result["scores"])]
    caption = (
        f"{result['date']}, commit {result['commit']}: error |predicted / published - 1|, mean / median, of layers and "
        "GPUs that the fit did not see."
    )
    return f"{caption}\n\n{table(['what', 'error', 'goal', 'roofline', 'rows, shapes'], rows)}"


def speed(result: dict[str, Any]) -> str:
    """Time to predict a network."""
    rows = [
        [
            row["gpu"], row["dtype"], row["mode"], row["what"], format_seconds(row["seconds"]),
            f"{format_seconds(row['least'])} to {format_seconds(row['most'])}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    device = result["device"]
    caption = (
        f"{device['name']}, {device['threads']} threads, {result['date']}, commit {result['commit']}: "
        f"{result['network']} at {result['sizes']} batch sizes, medians of {result['rounds']} interleaved rounds; the "
        f"goal is about {format_seconds(result['goal'])}."
    )
    return f"{caption}\n\n{table(['GPU', 'dtype', 'mode', 'what', 'time', 'least and most'], rows)}"

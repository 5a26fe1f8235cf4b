"""Errors and speed of predictions: tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.pages.tables import origin, page, table
from cubatch.units import format_seconds

_ERROR = "errors are |predicted / published - 1|"


def goals(result: dict[str, Any], modules: dict[str, Any]) -> str:
    """Return the errors that have a goal, next to a roofline with one fitted factor for each GPU."""
    return _goals(result, modules, _goal_rows(result, modules))


def absent(result: dict[str, Any], modules: dict[str, Any]) -> str:
    """Return the errors for GPUs that the fit did not see, and of whole networks."""
    others = ("unseen shapes", "10 anchors", "worst bias", "jumps")
    rows = [row for row in _goal_rows(result, modules) if not any(name in row[0] for name in others)]
    return _goals(result, modules, rows)


def _goals(result: dict[str, Any], modules: dict[str, Any], rows: Sequence[Sequence[str]]) -> str:
    sources = f"{origin(result)} (whole networks: {origin(modules)})"
    caption = f"{sources}: mean / median error of what the fit did not see; {_ERROR}"
    return page(caption, table(["what", "error", "goal", "roofline", "rows"], rows))


def _goal_rows(result: dict[str, Any], modules: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, goal in result["goals"].items():
        score = result["scores"].get(name)
        if score is None:
            continue
        rival = result["scores"].get(f"{name}, roofline", {})
        rows.append([
            name, " / ".join(f"{score[key]:.1f} %" for key in ("mean", "median") if key in score),
            " / ".join(f"{value:g} %" for value in goal if value is not None),
            f"{rival['mean']:.0f} %" if rival else "", f"{score['rows']:,}",
        ])  # fmt: skip
    whole = [
        [f"whole {name} in PyTorch", f"{score['mean_error']:.0f} %", "", "", str(score["cases"])]
        for name, score in _whole(modules)
    ]  # fmt: skip
    return [*rows, *_further(result["scores"]), *whole]


def _further(scores: dict[str, Any]) -> list[list[str]]:
    """Return rows for the goals that are no mean error: the worst GPU, knees, jumps, and a rival that owns a GPU."""
    rows = []
    each = "neusight, unseen GPU, "
    gpus = [
        score for name, score in scores.items() if name.startswith(each) and name.endswith(tuple(score.get("gpus", ())))
    ]
    if gpus:
        bias = max((score["bias"] for score in gpus), key=abs)
        worst = max(score["mean"] for score in gpus)
        rows.append([f"{each}worst GPU", f"{worst:.1f} %", "13 %", "", str(len(gpus))])
        rows.append([f"{each}worst bias", f"{bias:+.1f} %", "8 %", "", str(len(gpus))])
    for name, goal in (("unseen shapes", "85 %"), ("unseen GPU", "80 %")):
        knee = scores.get(f"deepbench conv, {name}, knee")
        if knee:
            text = f"{knee['exact']:.0f} % (“the largest”: {knee['exact_of_largest']:.0f} %)"
            rows.append([f"deepbench conv, {name}, batch size exact", text, goal, "", str(knee["sweeps"])])
    beaten = [
        scores[f"{source}, unseen GPU, {target}"]["mean"] < score["mean_of_best"]
        for source in ("neusight", "deepbench conv", "deepbench gemm")
        for target, score in scores.get(f"{source}, owned GPU times roofline ratio", {}).items()
        if f"{source}, unseen GPU, {target}" in scores
    ]
    if beaten:
        text = f"{sum(beaten)} of {len(beaten)}"
        rows.append(["better than another GPU's time times the roofline ratio", text, "all", "", str(len(beaten))])
    cliffs = scores.get("cliffs")
    if cliffs:
        named, missed, invented = (len(cliffs[key]) for key in ("named_and_measured", "only_measured", "only_named"))
        text = f"{named} of {named + missed}, {named} of {named + invented}"
        rows.append(
            ["jumps over 10 % by wave quantization: recall, precision", text, "90 %, 70 %", "", str(cliffs["pairs"])]
        )
    return rows


def _whole(modules: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the scores of whole networks among those of modules."""
    return [(name, score) for name, score in modules["scores"].items() if name.startswith("networks, ")]


def _networks(modules: dict[str, Any]) -> str:
    rows = [
        [
            name, f"{score['mean_error']:.0f} %", f"{score['bias_of_network']:+.0f} %",
            f"{score['inside_interval']:.0f} %", str(score["cases"]),
        ]
        for name, score in _whole(modules)
    ]  # fmt: skip
    head = ["whole networks in PyTorch", "mean error", "bias", "inside the 90 % interval", "cases"]
    return table(head, rows)


def scores(result: dict[str, Any], modules: dict[str, Any]) -> str:
    """Return the errors by source and by what the fit did not see, knees of batch sizes, and a rival's errors."""
    rows = []
    for name, score in result["scores"].items():
        if "mean" not in score:
            continue
        low, high = score.get("mean_interval", (None, None))
        rows.append([
            name, f"{score['mean']:.1f} %", "" if low is None else f"{low:.1f} to {high:.1f}",
            f"{score['median']:.1f} %" if "median" in score else "",
            f"{score['mean_without_overhead']:.1f} %" if "mean_without_overhead" in score else "",
            f"{score['bias']:+.0f} %" if "bias" in score else "", f"{score['rows']:,}", f"{score['shapes']:,}",
        ])  # fmt: skip
    head = ["what", "mean error", "90 % interval", "median", "without overhead", "bias", "rows", "shapes"]
    knees = [
        [
            name, f"{score['exact']:.0f} %", "{:.0f} to {:.0f}".format(*score["exact_interval"]),
            f"{score['exact_of_largest']:.0f} %", f"{score['scaling_error']:.3f}", str(score["sweeps"]),
        ]
        for name, score in result["scores"].items() if "exact" in score
    ]  # fmt: skip
    sweep = ["what", "batch size exact", "90 % interval", "of “the largest”", "error of log t(2n)/t(n)", "ladders"]
    owned = [
        [
            name.split(",")[0], target, score["best_source"], f"{score['mean_of_best']:.1f} %",
            f"{score['mean_of_median']:.1f} %", str(score["rows"]),
        ]
        for name, targets in result["scores"].items() if "owned GPU" in name for target, score in targets.items()
    ]  # fmt: skip
    rival = ["source", "target", "best source", "its mean error", "of the median source", "rows"]
    return page(
        f"{origin(result)}; {_ERROR}", table(head, rows), table(sweep, knees),
        "A rival rule: the time on another GPU times the ratio of the rooflines.", table(rival, owned),
        f"Whole networks with the host of PyTorch: {origin(modules)}.", _networks(modules),
    )  # fmt: skip


def clocks(result: dict[str, Any]) -> str:
    """Return the clocks that a step of a tile took by GPU, and the errors at the boost and at the base clock."""
    tiles = sorted({tile for by_tile in result["clocks"].values() for tile in by_tile})
    rows = [
        [gpu, *(f"{by_tile[tile][0]:.2f} ({by_tile[tile][1]})" if tile in by_tile else "" for tile in tiles)]
        for gpu, by_tile in result["clocks"].items()
    ]
    errors = [
        [
            f"{', '.join(score['gpus'])} at its {name}", f"{score['mean']:.1f} %", f"{score['median']:.1f} %",
            f"{score['bias']:+.1f} %", f"{score['rows']:,}",
        ]
        for name, score in result["scores"].items()
    ]  # fmt: skip
    return page(
        f"{origin(result)}: clocks of a tile's step at the boost clock, medians (rows)", table(["GPU", *tiles], rows),
        table(["what", "mean error", "median", "bias", "rows"], errors),
    )  # fmt: skip


def launches(result: dict[str, Any]) -> str:
    """Return the errors of the vendor's kernels on an H200, and with the launches of DeepBench's harness."""
    rows = [
        [
            name, f"{score['mean_error']:.1f} %", f"{score['bias']:+.1f} %",
            f"{score['by_launch']['10']:.1f} %" if score["by_launch"] else "", str(score["rows"]),
        ]
        for name, score in result["scores"].items()
    ]  # fmt: skip
    head = ["kernels of an H200", "mean error", "bias", "mean error with launches of 10 us", "rows"]
    return page(f"{origin(result)}; {_ERROR}", table(head, rows))


def speed(result: dict[str, Any]) -> str:
    """Return the time that it takes to predict a network."""
    rows = [
        [
            row["gpu"], row["dtype"], row["mode"], row["what"], format_seconds(row["seconds"]),
            f"{format_seconds(row['least'])} to {format_seconds(row['most'])}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    caption = (
        f"{origin(result)}: {result['network']} at {result['sizes']} batch sizes, medians of {result['rounds']} "
        f"interleaved rounds. Goal: about {format_seconds(result['goal'])}. Steps: the time model alone; answer: with "
        "memory plans"
    )
    return page(caption, table(["GPU", "dtype", "mode", "what", "time", "range"], rows))

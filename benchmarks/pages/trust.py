"""What was measured, one line a question: the README's short table."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.pages.tables import table


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _search(result: dict[str, Any]) -> list[str]:
    (ours,) = (r for r in result["summary"] if r["kind"] == "all classes" and r["budget"] == 60.0)
    regret = ours["regret"]
    lost = (
        f"loses {_percent(regret['mean'])} beyond its tolerance on average, {_percent(regret['p95'])} at the 95th "
        f"percentile, in {ours['seconds']['mean']:.1f} s"
    )
    known = f"{result['devices']} fake devices whose best is known, on which its settings were chosen"
    return ["the search, within its 60 s", lost, known]


def _answers(result: dict[str, Any]) -> list[str]:
    lost = [run["lost"] for row in result["rows"] for run in row["tuned"]]
    return [
        f"answers after {result['budget_seconds']:.0f} s on a CPU",
        f"lose {_percent(statistics.median(lost))} in the median, {_percent(max(lost))} at worst, of {len(lost)} runs",
        f"beside an exhaustive run each, {result['device']}",
    ]


def _memory(result: dict[str, Any]) -> list[str]:
    sizes = [m for m in result["measurements"] if m["peak_bytes"]]
    worst = max(abs(m["predicted_peak_bytes"] / m["peak_bytes"] - 1) for m in sizes)
    return [
        "the memory plan of our own engine",
        f"off by {_percent(worst, 2)} at most, of {len(sizes)} batch sizes",
        f"{result['spec']['name']}, {result['mode']}, {result['device']['name']}",
    ]


def _predictions(result: dict[str, Any]) -> list[str]:
    scores = result["scores"]
    layers, convolutions = scores["neusight, unseen GPU"], scores["deepbench conv, unseen GPU"]
    networks = [found for found in scores.values() if "inside_interval" in found]
    least, most = (choose(found["mean_error"] for found in networks) for choose in (min, max))
    errors = (
        f"layers on a GPU that the fit has not seen: median error {layers['median']:.1f} % (NeuSight), "
        f"{convolutions['median']:.1f} % (DeepBench's convolutions); whole networks in PyTorch: mean error "
        f"{least:.0f} to {most:.0f} %, by mode and type"
    )
    return ["predictions", errors, "what others published"]


def _engine(result: dict[str, Any]) -> list[str]:
    ratios = [case["mean_ratio"] for case in result["networks"]]
    return [
        "our engine on a CPU, beside PyTorch eager",
        f"{min(ratios):.2f} to {max(ratios):.2f} times its throughput, by network and mode",
        f"{result['device']['name']}, PyTorch {result['environment']['torch']}",
    ]


def _training(result: dict[str, Any]) -> list[str]:
    last = result["epochs"][-1]
    return [
        "our engine trains",
        f"{_percent(last['test_accuracy'], 2)} of MNIST's test set after {last['number']} epochs",
        f"{result['model']}, batch {result['batch_size']}, {result['device']['name']}",
    ]


def trust(*results: dict[str, Any]) -> str:
    """One line each of what was kept of the search, tuning, memory, predictions, the engine and training, in order."""
    lines = (_search, _answers, _memory, _predictions, _engine, _training)
    rows = [line(result) for line, result in zip(lines, results, strict=True)]
    return table(["what", "measured", "on"], rows)

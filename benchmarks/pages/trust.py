"""The short table of measured results in README.md: one row for each question."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.pages.tables import percent, table


def _search(unused: dict[str, Any], tuned: dict[str, Any]) -> list[str]:
    (complete,) = (row for row in unused["rows"] if not row["without"])
    (all_classes,) = (r for r in tuned["summary"] if r["kind"] == "all classes" and r["budget"] == 60.0)
    regret = all_classes["regret"]
    lost = (
        f"loses {percent(complete['regret_60'])} on average beyond its tolerance, in {complete['seconds_60']:.1f} s; "
        f"on seed {tuned['seed']} {percent(regret['mean'])}, {percent(regret['p95'])} at the 95th percentile"
    )
    known = (
        f"{unused['devices']} fake devices with a known best size: seed {unused['seed']}, which chose no rule; seed "
        f"{tuned['seed']} chose constants"
    )
    return ["search with a budget of 60 s", lost, known]


def _repeatability(*results: dict[str, Any]) -> list[str]:
    cases = [case for result in results for case in result["workloads"]]
    rows = [row for case in cases for row in case["summary"] if row["finder"] == "cubatch"]
    spreads, losses = [row["spread"] for row in rows], [row["mean_loss"] for row in rows]
    runs, num_met = max(row["runs"] for row in rows), sum(all(row["met"].values()) for row in rows)
    facts = (
        f"recommended sizes of {runs} runs within a factor of {statistics.median(spreads):.1f} in the median and "
        f"{max(spreads):.1f} at most; mean loss {percent(min(losses))} to {percent(max(losses))}, worst single run "
        f"{percent(max(row['loss'] for row in rows))}; all goals are met in {num_met} of {len(rows)} series"
    )
    workloads = {case["workload"] for case in cases}
    devices = dict.fromkeys(result["device"] for result in results)
    return ["repeatability on a CPU", facts, f"{len(workloads)} workloads, {', '.join(devices)}"]


def _memory(result: dict[str, Any]) -> list[str]:
    sizes = [m for m in result["measurements"] if m["peak_bytes"]]
    worst = max(abs(m["predicted_peak_bytes"] / m["peak_bytes"] - 1) for m in sizes)
    return [
        "memory plan of cubatch's engine", f"off by at most {percent(worst, 2)} at {len(sizes)} batch sizes",
        f"{result['spec']['name']}, {result['mode']}, {result['device']['name']}",
    ]  # fmt: skip


def _predictions(of_layers: dict[str, Any], of_modules: dict[str, Any]) -> list[str]:
    scores = of_layers["scores"]
    layers, convolutions = scores["neusight, unseen GPU"], scores["deepbench conv, unseen GPU"]
    newer = scores["neusight, unseen GPU, held out"]
    errors = [score["mean_error"] for name, score in of_modules["scores"].items() if name.startswith("networks, ")]
    text = (
        f"layers on an unseen GPU: median error {layers['median']:.1f} % (NeuSight), {convolutions['median']:.1f} % "
        f"(DeepBench convolutions), {newer['median']:.1f} % (an A100, a newer generation than any of the fit); "
        f"whole networks: mean error {min(errors):.0f} to {max(errors):.0f} %"
    )
    return ["predictions", text, "published measurements"]


def _engine(result: dict[str, Any]) -> list[str]:
    ratios = [case["mean_ratio"] for case in result["networks"]]
    singles = [row["ratio"] for case in result["networks"] for row in case["rows"]]
    facts = (
        f"{min(ratios):.2f} to {max(ratios):.2f} times the throughput of PyTorch eager, as means per network; single "
        f"batch sizes {min(singles):.2f} to {max(singles):.2f}"
    )
    return ["cubatch's engine on a CPU", facts, f"{result['device']['name']}, PyTorch {result['environment']['torch']}"]


def _training(result: dict[str, Any]) -> list[str]:
    last = result["epochs"][-1]
    return [
        "training", f"{percent(last['test_accuracy'], 2)} test accuracy on MNIST after {last['number']} epochs",
        f"{result['model']}, batch {result['batch_size']}, {result['device']['name']}",
    ]  # fmt: skip


def trust(unused: dict[str, Any], tuned: dict[str, Any], *results: dict[str, Any]) -> str:
    """
    Return one row for each question.

    Args:
        unused: Result of the ablation, on a seed that chose no rule of the search.
        tuned: Result of the search, on a seed that chose constants.
        results: Results of repeatability, one or several, then one each of tuning, predicted layers, predicted
            modules, engine and training.
    """
    *repeated, memory, layers, modules, engine, trained = results
    rows = [
        _search(unused, tuned), _repeatability(*repeated), _memory(memory), _predictions(layers, modules),
        _engine(engine), _training(trained),
    ]  # fmt: skip
    return table(["what", "measured", "on"], rows)

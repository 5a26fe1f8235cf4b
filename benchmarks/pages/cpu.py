"""One tuning run, the engine, training and imports, measured on a CPU: tables."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.pages.tables import origin, page, percent, table
from cubatch.units import format_bytes, format_count, format_seconds


def tuning(result: dict[str, Any]) -> str:
    """Return the measured batch sizes of a tuning run."""
    best = max(m["samples_per_second"] or 0 for m in result["measurements"] if m["status"] == "ok")
    rows = []
    for m in result["measurements"]:
        is_power_of_two = m["batch_size"] & (m["batch_size"] - 1) == 0
        if m["samples_per_second"] is None or not (m["status"] == "ok" or is_power_of_two):
            continue
        interval = m["throughput_interval"]
        mark = "**" if m["batch_size"] == result["batch_size"] else ""
        rows.append([
            f"{mark}{m['batch_size']}{mark}" + (" ≈" if m["batch_size"] in result["tied_with"] else ""),
            format_seconds(m["latency_seconds"]), format_count(m["samples_per_second"]),
            " to ".join(map(format_count, interval)) if interval else "",
            percent(m["samples_per_second"] / best), format_bytes(m["predicted_peak_bytes"]),
            format_bytes(m["peak_bytes"]), "" if m["status"] == "ok" else m["status"].replace("_", " "),
        ])  # fmt: skip
    caption = (
        f"{origin(result | {'date': result['created'][:10]})}, `{result['spec']['name']}`, {result['mode']}, "
        f"{result['dtype']}, library `{result['library']}`, {result['seconds_spent']:.0f} s of measuring. "
        "The recommendation is bold, ties are marked ≈; of the sizes that the search dropped, powers of two"
    )
    head = ["batch", "time", "samples/s", "90 % interval", "of best", "memory planned", "memory used", "status"]
    return page(caption, table(head, rows))


def engine_cpu(result: dict[str, Any]) -> str:
    """Return the engine's throughput over PyTorch eager's by network, mode and batch size."""
    rows = [[case["network"], case["mode"], f"{case['mean_ratio']:.2f}", *_ratios(case)] for case in result["networks"]]
    goals = f"Goals: a geometric mean of {result['goal']:g}, no ratio below {result['worst_goal']:g}"
    return page(f"{_beside_torch(result)}. {goals}", table(["network", "mode", "mean ratio", "ratio by batch"], rows))


def engine_cpu_means(result: dict[str, Any]) -> str:
    """Return the geometric mean of the engine's ratios to PyTorch eager, a row for each network."""
    cases = {(case["network"], case["mode"]): case for case in result["networks"]}
    modes = ("inference", "training")
    rows = []
    networks = list(dict.fromkeys(name for name, _ in cases))
    for network in networks:
        means = [cases[network, mode]["mean_ratio"] for mode in modes]
        least = min(row["ratio"] for mode in modes for row in cases[network, mode]["rows"])
        rows.append([network, *(f"{mean:.2f}" for mean in means), f"{least:.2f}"])
    means = [statistics.geometric_mean(cases[name, mode]["mean_ratio"] for name in networks) for mode in modes]
    rows.append(["**geometric mean**", *(f"**{mean:.2f}**" for mean in means), ""])
    return page(_beside_torch(result), table(["network", *modes, "lowest ratio of one batch size"], rows))


def _ratios(case: dict[str, Any]) -> list[str]:
    return [", ".join(f"{row['batch_size']}: {row['ratio']:.2f}" for row in case["rows"])]


def _beside_torch(result: dict[str, Any]) -> str:
    return (
        f"{origin(result)}, PyTorch {result['environment']['torch']}, BLAS {result['environment']['blas']}. Throughput "
        f"over that of PyTorch eager in its faster memory layout, each the best of {result['rounds']} interleaved "
        "rounds"
    )


def training(result: dict[str, Any]) -> str:
    """Return loss and accuracy of a training run for each epoch."""
    rows = [
        [
            str(epoch["number"]), f"{epoch['loss']:.4f}", percent(epoch["test_accuracy"], 2),
            format_seconds(epoch["seconds"]), format_count(round(epoch["samples_per_second"])),
        ]
        for epoch in result["epochs"]
    ]  # fmt: skip
    caption = (
        f"{origin(result)}: `{result['model']}` on MNIST, batch {result['batch_size']}, {result['optimizer']}, "
        f"learning rate {result['learning_rate']}, seed {result['seed']}"
    )
    return page(caption, table(["epoch", "loss", "test accuracy", "time", "samples/s"], rows))


def mixed_precision(result: dict[str, Any]) -> str:
    """Return the accuracy after training in 16 bits next to that of float32."""
    first = result["rows"][0]["epochs"][-1]["test_accuracy"]
    rows = []
    for row in result["rows"]:
        last = row["epochs"][-1]
        accuracy = last["test_accuracy"]
        rows.append([row["dtype"], f"{last['loss']:.4f}", percent(accuracy, 2), percent(accuracy - first, 2, "+")])
    run = result["rows"][0]
    place = "cubatch kernels" if result.get("library") == "cubatch" else "NumPy"
    caption = (
        f"{origin(result)}, {place}: {run['model']}, {len(run['epochs'])} epochs on {result['images']} images, "
        f"batch {run['batch_size']}, {run['optimizer']}, learning rate {run['learning_rate']}, seed {run['seed']}. "
        f"Goal: at most {percent(result['goal'])} from float32"
    )
    return page(caption, table(["dtype", "loss", "test accuracy", "from float32"], rows))


def imports(result: dict[str, Any]) -> str:
    """Return the time to import the package and to print the help."""
    rows = [
        [
            f"`{row['what']}`", format_seconds(row["seconds"]), format_seconds(max(0.0, row["above_python"])),
            "" if row["goal"] is None else format_seconds(row["goal"]),
        ]
        for row in result["rows"]
    ]  # fmt: skip
    caption = f"{origin(result)}; medians of {result['rounds']} rounds in fresh interpreters"
    return page(caption, table(["command", "time", "above an empty Python", "goal"], rows))

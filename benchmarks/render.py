"""
Write the README's figures from the results that are kept, between markers; nothing is typed by hand.

    python -m benchmarks.render            # rewrites README.md and benchmarks/README.md
    python -m benchmarks.render --check    # exits 1 if they are not what the results say

A section begins with `<!-- results: KIND PATH... -->`, one path or several, and ends with `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pages import (
    faults,
    fleet,
    fusion,
    gpu,
    hosts,
    memory,
    modules,
    page_faults,
    predictor,
    repeatability,
    rooms,
    search,
    step_graphs,
    trust,
)
from benchmarks.pages.tables import table
from cubatch.units import format_bytes, format_count, format_seconds

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "benchmarks/README.md", "cubatch/README.md")
_SECTION = re.compile(r"(<!-- results: (\S+) (\S+(?: \S+)*) -->\n).*?(<!-- end -->)", re.DOTALL)


def _machine(result: dict[str, Any]) -> str:
    device = result["device"]
    return f"{device['name']}, {device['threads']} threads, {result['date']}, commit {result['commit']}"


def tuning(result: dict[str, Any]) -> str:
    """The measured candidates of a tuning run, and the answer."""
    best = max(m["samples_per_second"] or 0 for m in result["measurements"] if m["status"] == "ok")
    rows = []
    for m in result["measurements"]:
        is_power_of_two = m["batch_size"] & (m["batch_size"] - 1) == 0
        if m["samples_per_second"] is None or not (m["status"] == "ok" or is_power_of_two):
            continue
        low, high = m["throughput_interval"] or (None, None)
        spread = "" if low is None else f"{format_count(low)} to {format_count(high)}"
        mark = "**" if m["batch_size"] == result["batch_size"] else ""
        tie = " ≈" if m["batch_size"] in result["tied_with"] else ""
        rows.append(
            [
                f"{mark}{m['batch_size']}{mark}{tie}",
                format_seconds(m["latency_seconds"]),
                format_count(m["samples_per_second"]),
                spread,
                f"{100 * m['samples_per_second'] / best:.1f} %",
                format_bytes(m["predicted_peak_bytes"]),
                format_bytes(m["peak_bytes"]),
                "" if m["status"] == "ok" else m["status"].replace("_", " "),
            ]
        )
    device, facts = result["device"], result["environment"]
    caption = (
        f"{device['name']}, {device['threads']} threads, {result['created'][:10]}, commit {result['commit']}, "
        f"{result['mode']}, {result['dtype']}, library `{result['library']}`, BLAS {facts['blas']}, "
        f"{result['seconds_spent']:.0f} s of measuring. "
        "Answer in bold, ties with the fastest marked ≈; of the sizes that were dropped early, powers of two."
    )
    head = ["batch", "time", "samples/s", "90 % interval", "of best", "memory planned", "memory real", "status"]
    return f"{caption}\n\n{table(head, rows)}"


def answers(result: dict[str, Any]) -> str:
    """What `tune` answered, and what an exhaustive run of the ladder right after found better."""
    rows = [
        [
            row["case"],
            ", ".join(str(run["batch_size"]) for run in row["tuned"]),
            ", ".join(str(run["best_batch_size"]) for run in row["tuned"]),
            ", ".join(f"{100 * run['lost']:.1f} %" for run in row["tuned"]),
            ", ".join(f"{run['seconds']:.0f}" for run in row["tuned"]),
        ]
        for row in result["rows"]
    ]
    caption = (
        f"{result['device']}, {result['threads']} threads, {result['date']}, commit {result['commit']}, BLAS "
        f"{result['environment']['blas']}; budget {result['budget_seconds']:.0f} s. Lost is the median of turns that "
        "answer and best took after the exhaustive run; below zero the answer was the faster."
    )
    return f"{caption}\n\n{table(['case', 'answers', 'best of all', 'lost', 'seconds'], rows)}"


def engine_cpu(result: dict[str, Any]) -> str:
    """Our engine beside PyTorch eager on the CPU: ratios by network, mode and batch size."""
    rows = []
    for case in result["networks"]:
        ratios = [f"{row['batch_size']}: {row['ratio']:.2f}" for row in case["rows"]]
        rows.append([case["network"], case["mode"], f"{case['mean_ratio']:.2f}", ", ".join(ratios)])
    caption = (
        f"{_machine(result)}, PyTorch {result['environment']['torch']}, BLAS {result['environment']['blas']}; "
        f"throughput of ours over that of the faster layout of PyTorch, each the best of {result['rounds']} "
        f"interleaved rounds. Goals: a geometric mean of {result['goal']}, no ratio below {result['worst_goal']}."
    )
    return f"{caption}\n\n{table(['network', 'mode', 'mean ratio', 'ratio by batch size'], rows)}"


def training(result: dict[str, Any]) -> str:
    """Loss and accuracy of a training run, epoch by epoch."""
    rows = [
        [
            str(epoch["number"]),
            f"{epoch['loss']:.4f}",
            f"{100 * epoch['test_accuracy']:.2f} %",
            format_seconds(epoch["seconds"]),
            format_count(round(epoch["samples_per_second"])),
        ]
        for epoch in result["epochs"]
    ]
    caption = (
        f"{_machine(result)}: {result['model']}, batch {result['batch_size']}, {result['optimizer']}, "
        f"learning rate {result['learning_rate']}, seed {result['seed']}."
    )
    return f"{caption}\n\n{table(['epoch', 'loss', 'test accuracy', 'time', 'samples/s'], rows)}"


def imports(result: dict[str, Any]) -> str:
    """Time to import and to print the help."""
    rows = [
        [
            f"`{row['what']}`",
            format_seconds(row["seconds"]),
            format_seconds(max(0.0, row["above_python"])),
            "" if row["goal"] is None else format_seconds(row["goal"]),
        ]
        for row in result["rows"]
    ]
    caption = f"{_machine(result)}; medians of {result['rounds']} rounds in fresh interpreters."
    return f"{caption}\n\n{table(['', 'time', 'above an empty Python', 'goal'], rows)}"


def mixed_precision(result: dict[str, Any]) -> str:
    """Accuracy after training in 16 bits, beside float32."""
    first = result["rows"][0]["epochs"][-1]["test_accuracy"]
    rows = []
    for row in result["rows"]:
        last = row["epochs"][-1]
        away = last["test_accuracy"] - first
        rows.append(
            [row["dtype"], f"{last['loss']:.4f}", f"{100 * last['test_accuracy']:.2f} %", f"{100 * away:+.2f} %"]
        )
    run = result["rows"][0]
    place = "our kernels" if result.get("library") == "cubatch" else "on NumPy"
    caption = (
        f"{_machine(result)}, {place}: {run['model']}, {len(run['epochs'])} epochs on {result['images']} images, "
        f"batch {run['batch_size']}, {run['optimizer']}, learning rate {run['learning_rate']}, seed {run['seed']}; "
        f"the goal is at most {100 * result['goal']:.1f} % from float32."
    )
    return f"{caption}\n\n{table(['dtype', 'loss', 'test accuracy', 'from float32'], rows)}"


KINDS: dict[str, Callable[..., str]] = {
    "trust": trust.trust,
    "tuning": tuning,
    "answers": answers,
    "engine_cpu": engine_cpu,
    "search": search.search,
    "faults": faults.faults,
    "fleet": fleet.fleet,
    "training": training,
    "imports": imports,
    "mixed_precision": mixed_precision,
    "predictor": predictor.scores,
    "predictor_goals": predictor.goals,
    "predict_speed": predictor.speed,
    "rooms": rooms.rooms,
    "fusion": fusion.fusion,
    "memory": memory.memory,
    "module_memory": modules.memory,
    "page_faults": page_faults.page_faults,
    "hosts": hosts.hosts,
    "ablation": hosts.ablation,
    "repeatability": repeatability.repeatability,
    "module_answers": modules.answers,
    "step_graphs": step_graphs.step_graphs,
    **gpu.KINDS,
}


def _kept(path: str) -> dict[str, Any]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return tomllib.loads(text) if path.endswith(".toml") else json.loads(text)


def rendered(page: str) -> str:
    def section(match: re.Match[str]) -> str:
        begin, kind, paths, end = match.groups()
        return f"{begin}\n{KINDS[kind](*map(_kept, paths.split()))}\n\n{end}"

    return _SECTION.sub(section, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = []
    for name in PAGES:
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        if rendered(page) != page:
            stale.append(name)
            if not arguments.check:
                path.write_text(rendered(page), encoding="utf-8")
    if arguments.check and stale:
        print(f"not what the results say: {', '.join(stale)}; run python -m benchmarks.render", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

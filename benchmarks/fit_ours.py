"""
Fit the ratio of measured to counted time of products by cubatch's kernels, to a pass of `benchmarks.gpu_pass`.

    python -m benchmarks.fit_ours benchmarks/results/h200-sxm/2026-11-26-2572091.json

For each family a product takes a launch and the longer of two times: factor * counted arithmetic, or bytes at a share
of the bandwidth.  The share is the same for all families.  The fit minimizes the mean distance of logarithms over the
fastest variants of convolutions and linear layers that take several launches.  Only variants that the pass timed are
counted.  It prints the constants of `cubatch/estimate/cubatch_kernels.py`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cubatch.bench.implementations import OTHER_WAYS
from cubatch.estimate.cubatch_kernels import LAUNCH_SECONDS, counted
from cubatch.hardware import catalogue
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.network.layers import Conv2d, Linear
from cubatch.network.passes import Pass

KINDS = {"conv2d": Conv2d, "linear": Linear}
SHORTEST = 20e-6  # seconds: of shorter ones launches are much
RGB = 3  # channels: stored as four in networks, and by slow variants of what is timed by itself


def passes(result: dict[str, Any], device: Device) -> Iterator[tuple[str, float, float, float]]:
    """Return for each pass the predicted kernel family, its counted arithmetic and bytes, and its measured time."""
    items = [item for stage in result["stages"] if stage["name"] in {"gemm", "layers"} for item in stage["items"]]
    for timed in (item["result"] for item in items if item["status"] == "ok"):
        case = timed["case"]
        facts = dict(case["layer"])
        kind = KINDS.get(facts.pop("type"))
        entries = [e for e in timed["entries"] if e["side"] == "ours" and e.get("seconds")]
        ours = {e["name"]: e["seconds"] for e in entries if not (e.get("label") or "").endswith(OTHER_WAYS)}
        took = min(ours.values(), default=0.0)
        if kind is None or took <= SHORTEST or facts["c"] == RGB:
            continue
        layer, pass_ = kind(**facts), Pass(case["pass"])
        product = counted(layer, pass_, case["batch_size"], device, case["dtype"], among=ours)
        if product is not None:
            moved = layer.traffic(pass_, case["batch_size"]) * BYTES_PER_ELEMENT[case["dtype"]]
            yield product.kernel.family, product.seconds, moved / (device.peak_bytes_per_second or math.inf), took


def fit(
    passes: Sequence[tuple[str, float, float, float]],
) -> tuple[float, dict[str, float], dict[str, tuple[Any, Any]]]:
    """Return the share of bandwidth, the factor of each family, and errors of its passes with and without it."""
    families = sorted({family for family, *_ in passes})
    rows = {name: np.array([row[1:] for row in passes if row[0] == name]).T for name in families}

    def errors(name: str, times: float, share: float) -> Any:
        arithmetic, moving, took = rows[name]
        return np.abs(np.log((np.maximum(times * arithmetic, moving / share) + LAUNCH_SECONDS) / took))

    steps = np.arange(20, 60) / 20
    least: tuple[float, float, dict[str, float]] = (math.inf, 1.0, {})
    for share in np.arange(10, 21) / 20:
        times = {name: min(steps, key=lambda factor, name=name: errors(name, factor, share).sum()) for name in families}
        least = min(least, (sum(errors(name, times[name], share).sum() for name in families), share, times))
    _, share, times = least
    return share, times, {name: (errors(name, times[name], share), errors(name, 1.0, 1.0)) for name in families}


def main() -> None:
    """Print the constants, and how far predictions are with them and without."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("file", type=Path)
    result = json.loads(parser.parse_args().file.read_text(encoding="utf-8"))
    share, times, errors = fit(list(passes(result, catalogue.find(result["device"]["slug"]))))
    for name, (now, before) in errors.items():
        print(
            f"{name}: {times[name]:.2f} times, {len(now)} passes, off by {now.mean():.1%}, without {before.mean():.1%}"
        )
    now, before = (np.concatenate([both[place] for both in errors.values()]) for place in (0, 1))
    print(f"bandwidth: {share:.2f}; {len(now)} passes, off by {now.mean():.1%}, without {before.mean():.1%}")


if __name__ == "__main__":
    main()

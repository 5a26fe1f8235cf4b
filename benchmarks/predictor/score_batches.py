"""Whether a prediction finds the right batch size: the knee of a ladder, and the jumps of a dense sweep."""

from __future__ import annotations

import csv
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.predictor.published import Rows
from cubatch.estimate.block_counts import num_blocks
from cubatch.estimate.vendor.algorithms import Array
from cubatch.hardware.waves import busiest_sm_blocks
from cubatch.network.layers import Conv2d
from cubatch.network.passes import Pass

NEAR, RECOMMENDED = 0.95, 0.97
"""Share of the best throughput that the knee reaches, and that the size reaches which `cubatch predict` recommends."""
DROP = 0.1
"""Share of the throughput that is lost at a jump."""
_NEXT_TO = 2


def ladders(rows: Rows) -> Iterator[np.ndarray]:
    """Return the rows of each layer, pass and GPU that was measured at two batch sizes or more, smallest first."""
    groups: dict[tuple[object, ...], dict[float, int]] = {}
    names = zip(rows.gpu, rows.shape, rows.work.pass_, rows.work.n, strict=True)
    for index, (gpu, shape, pass_, n) in enumerate(names):
        groups.setdefault((gpu, shape, pass_), {}).setdefault(n, index)
    for sizes in groups.values():
        if len(sizes) > 1:
            yield np.array([sizes[n] for n in sorted(sizes)])


def knee(sizes: Array, seconds: Array, share: float = NEAR) -> float:
    """Return the smallest batch size that reaches this share of the best throughput of the ladder."""
    throughput = sizes / seconds
    return float(sizes[np.argmax(throughput >= share * throughput.max())])


def knees(rows: Rows, predicted: Array, *, seed: int) -> dict[str, object]:
    """Return how often the size recommended by predictions is the measured knee, and how often the largest batch is."""
    exact, largest, scaling = [], [], []
    for index in ladders(rows):
        sizes = rows.work.n[index]
        right = knee(sizes, rows.seconds[index])
        exact.append(knee(sizes, predicted[index], RECOMMENDED) == right)
        largest.append(sizes[-1] == right)
        grown = np.diff(np.log(predicted[index])) - np.diff(np.log(rows.seconds[index]))
        scaling.extend(np.abs(grown))
    if not exact:
        return {"sweeps": 0}
    hits, rng = np.array(exact, float), np.random.default_rng(seed)
    draws = [rng.choice(hits, len(hits)).mean() for _ in range(200)]
    return {
        "sweeps": len(hits), "exact": round(100 * float(hits.mean()), 1),
        "exact_interval": [round(100 * float(value), 1) for value in np.quantile(draws, (0.05, 0.95))],
        "exact_of_largest": round(100 * float(np.mean(largest)), 1), "scaling_error": round(float(np.mean(scaling)), 3),
    }  # fmt: skip


def cliffs(folder: Path) -> dict[str, object]:
    """
    Return the jumps between neighboring batch sizes of published sweeps: named by wave quantization, missed, invented.

    The law alone: tiles of 128 x 128 and the blocks of the busiest SM, no constant of any model.
    """
    path = folder / "batch_sweeps_game_nets.csv"
    if not path.exists():
        return {}
    sweeps: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["channels_c"] and row["sm_count"] and float(row["batch"]).is_integer():
                sweeps.setdefault(tuple(row[name] for name in ("gpu", "net", "backend", "precision")), []).append(row)
    both, only_measured, only_named, pairs = [], [], [], 0
    for key, rows in sweeps.items():
        side, channels = round(float(rows[0]["board_points_hw"]) ** 0.5), int(float(rows[0]["channels_c"]))
        board = Conv2d(h=side, w=side, c=channels, k=channels, r=3, s=3, pad=1)
        blocks = functools.partial(num_blocks, board, Pass.FPROP)
        ordered = sorted(rows, key=lambda row: float(row["batch"]))
        for before, after in itertools.pairwise(ordered):
            low, high = int(float(before["batch"])), int(float(after["batch"]))
            if high - low > _NEXT_TO:
                continue
            pairs += 1
            sms = int(float(rows[0]["sm_count"]))
            busiest = [busiest_sm_blocks(blocks(n), sms) for n in (low, high)]
            named = 1 - high / low * busiest[0] / busiest[1] > DROP
            measured = 1 - float(after["throughput"]) / float(before["throughput"]) > DROP
            where = f"{key[0]}, {low} to {high}"
            if named or measured:
                (both if named and measured else only_measured if measured else only_named).append(where)
    return {"pairs": pairs, "named_and_measured": both, "only_measured": only_measured, "only_named": only_named}

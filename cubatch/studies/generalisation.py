"""
`generalisation`: whether a network trained in large batches does worse on images that it has not seen.

Keskar et al. (2016, arXiv:1609.04836) found that large batches converge to sharp minima and test worse.  Goyal et al.
(2017, arXiv:1706.02677) found that a learning rate which grows with the batch closes much of the gap.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from cubatch.engine import data as files, train as engine
from cubatch.engine.data import Dataset
from cubatch.engine.training_run import Step
from cubatch.errors import InvalidArgument
from cubatch.measure import kernel_context, stopping
from cubatch.network.graph import Network, as_network
from cubatch.network.weight_files import load_weights
from cubatch.studies.sharpness import sharpness
from cubatch.studies.study_cache import StudyCache
from cubatch.studies.study_request import TOO_FEW_TRIALS, Findings, Study, StudyRequest, training_facts
from cubatch.units import format_count, format_seconds

BASE = 64
"""The batch size that the others are compared with."""
LEARNING_RATES = {"sgd": 0.05, "momentum": 0.02, "adam": 0.001}
"""Learning rates of BASE samples, by optimizer."""
FIXED, SCALED = "fixed", "scaled"
SIZES, QUICK_SIZES = (16, 64, 256, 1024, 4096), (16, 64, 256)
EPOCHS, SEEDS, SHARPNESS_IMAGES = (5, 2), (3, 2), (1000, 200)
"""Of the full and of the quick study."""
CACHE = "cells.jsonl"
_QUICK_IMAGES = {"train": 2000, "test": 1000}
_LEARNED = 0.2  # test accuracy, of ten classes, from which on a network has learned anything
_PATTERNS, _NOISE = (96.0, 160.0), 64.0  # of generated images


@attrs.frozen
class Cell:
    """A training run: its batch size, learning rate and seed."""

    batch_size: int
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """The key of the run's results in the cache."""
        return f"batch {self.batch_size}, rate {self.learning_rate:g}, seed {self.seed}"


def scale_rate(policy: str, batch_size: int, base_rate: float) -> float:
    """
    Return the learning rate of a batch size.

    It is `base_rate` for a batch of BASE, and with SCALED proportional to the batch: the rule of Goyal et al.

    Example:
        >>> scale_rate("fixed", 1024, 0.05), scale_rate("scaled", 1024, 0.05)
        (0.05, 0.8)
    """
    return base_rate if policy == FIXED else base_rate * batch_size / BASE


def run(request: StudyRequest, budget: float) -> Findings:
    """
    Train at each batch size with each learning rate and seed; return the comparison of the test accuracies.

    It trains until `budget` seconds are over; finished runs are cached.  It raises InvalidArgument in inference,
    without images, or if the batch size BASE is not allowed or does not fit.
    """
    request.require_training()
    network = as_network(request.work.spec)
    images = load_images(request, network)
    engine.check(network, images[0], optimizer=request.optimizer)
    limit = min(request.largest(SIZES[-1]), len(images[0]))
    sizes = [n for n in (QUICK_SIZES if request.quick else SIZES) if n <= limit]
    if BASE not in sizes:
        remedy = "Raise it, or give more memory or training images if one of them is the limit."
        raise InvalidArgument("max_batch_size", limit, f"at least {BASE}, to which other sizes are compared", remedy)
    epochs, seeds, base_rate = EPOCHS[request.quick], SEEDS[request.quick], LEARNING_RATES[request.optimizer]
    key, facts = training_facts(request, budget, images)
    cache = StudyCache(request.folder / CACHE, key | {"epochs": epochs})
    groups = {
        (policy, n): [Cell(n, scale_rate(policy, n, base_rate), request.seed + k) for k in range(seeds)]
        for policy in (FIXED, SCALED)
        for n in sizes
    }
    cells = list(dict.fromkeys(group[k] for k in range(seeds) for group in groups.values()))
    spent = 0.0
    for number, cell in enumerate(cells):
        if cell.name in cache.findings or spent < budget:
            train = functools.partial(
                _train, request, network, images, epochs, cell=cell, progress=(number, len(cells))
            )
            spent += cache.get(cell.name, train)["spent_seconds"]
    rows = [
        summarize(policy, group[0], runs)
        for (policy, _), group in groups.items()
        if (runs := [cache.findings[cell.name] for cell in group if cell.name in cache.findings])
    ]
    rows = [row | {"gap": gap_to_base(row, rows)} for row in rows]
    missing = sum(cell.name not in cache.findings for cell in cells)
    return Findings(
        facts=facts | {"seconds_spent": spent},
        answer=answer(rows),
        points=points(rows, missing=missing),
        method=_method(request, network, images),
        details={
            "data": None if request.data is None else str(request.data),
            "epochs": epochs,
            "seeds": seeds,
            "rows": rows,
        },
    )


def load_images(request: StudyRequest, network: Network) -> tuple[Dataset, Dataset]:
    """
    Return the images for training and testing: MNIST, in a quick study its first images or generated images.

    A full study without a folder of images raises InvalidArgument.
    """
    if request.data is not None:
        images = files.load_mnist(request.data)
        if not request.quick:
            return images
        return _first(images[0], _QUICK_IMAGES["train"]), _first(images[1], _QUICK_IMAGES["test"])
    if not request.quick:
        remedy = "--download fetches them; --quick uses generated images instead."
        raise InvalidArgument("data", None, "a folder with MNIST's files", remedy)
    random = np.random.default_rng(request.seed)
    patterns = random.uniform(*_PATTERNS, (network.output_shape[2], *network.input_shape))
    return _generate(patterns, _QUICK_IMAGES["train"], random), _generate(patterns, _QUICK_IMAGES["test"], random)


def _first(images: Dataset, count: int) -> Dataset:
    return attrs.evolve(images, images=images.images[:count], labels=images.labels[:count])


def _generate(patterns: np.ndarray[Any, Any], count: int, random: np.random.Generator) -> Dataset:
    """Return `count` images, each a randomly chosen pattern in strong noise, labeled with the pattern's index."""
    labels = random.integers(0, len(patterns), count).astype(np.int32)
    noisy = patterns[labels] + random.normal(0, _NOISE, (count, *patterns.shape[1:]))
    return Dataset(np.clip(noisy, 0, 255).astype(np.uint8), labels, mean=0.5, deviation=0.3)


def _train(
    request: StudyRequest,
    network: Network,
    images: tuple[Dataset, Dataset],
    epochs: int,
    *,
    cell: Cell,
    progress: tuple[int, int],
) -> dict[str, Any]:
    """
    Train one cell and return its results by name; `progress` is (cells done, all cells).

    They are the fields of the cell, "updates" (optimizer steps), "test_accuracy" and "training_loss" of the last epoch.
    "diverged" is whether training diverged, "sharpness" a Sharpness (None if it diverged).  "seconds" are those of
    training, "spent_seconds" those of the whole run.
    """
    device, start = request.work.device, time.monotonic()

    def show(step: Step) -> None:
        request.show(round(progress[0] + step.done / step.total, 2), progress[1], cell.name)

    request.show(*progress, cell.name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.npz"
        trained = engine.train(
            network, data=images, batch_size=cell.batch_size, device=device, dtype=request.dtype, epochs=epochs,
            learning_rate=cell.learning_rate, optimizer=request.optimizer, seed=cell.seed, save=path,
            context=kernel_context.usual_context(device, request.dtype), stepped=show,
        )  # fmt: skip
        samples, labels = images[0].batch(slice(0, SHARPNESS_IMAGES[request.quick]))
        sharp = None
        if not trained.diverged:
            sharp = sharpness(load_weights(network, path), samples, labels, device=device, seed=cell.seed)
    last = trained.epochs[-1]
    return {
        **attrs.asdict(cell),
        "updates": len(trained.epochs) * (len(images[0]) // cell.batch_size),
        "test_accuracy": last.test_accuracy,
        "training_loss": last.loss,
        "diverged": trained.diverged,
        "sharpness": sharp,
        "seconds": sum(epoch.seconds for epoch in trained.epochs),
        "spent_seconds": time.monotonic() - start,
    }


def summarize(policy: str, cell: Cell, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """
    Return a row for the batch size of a cell and a policy ("fixed" or "scaled"), from `_train`'s results of its seeds.

    "test_accuracy" and "training_loss" are means, "sharpness" and "seconds" medians; None for a loss or sharpness that
    is unknown. The others are "policy", "batch_size", "learning_rate", "updates" and "runs", the results.
    """
    sharp = [run["sharpness"]["eigenvalue"] for run in runs if run["sharpness"] and run["sharpness"]["settled"]]
    losses = [run["training_loss"] for run in runs]
    return {
        "policy": policy,
        "batch_size": cell.batch_size,
        "learning_rate": cell.learning_rate,
        "updates": max(run["updates"] for run in runs),
        "test_accuracy": statistics.fmean(run["test_accuracy"] for run in runs),
        "training_loss": None if None in losses else statistics.fmean(losses),
        "sharpness": statistics.median(sharp) if sharp else None,
        "seconds": statistics.median(run["seconds"] for run in runs),
        "runs": list(runs),
    }


def gap_to_base(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """
    Return the test accuracy of a row of `rows` minus that at batch size BASE with an equal policy.

    Returns:
        "difference" and its 90 % "interval", None with too few seeds; None for the row of BASE, or without such a row.
    """
    base = next((other for other in rows if (other["policy"], other["batch_size"]) == (row["policy"], BASE)), None)
    if base is None or base is row:
        return None
    own, reference = ([run["test_accuracy"] for run in group["runs"]] for group in (row, base))
    shift = stopping.shift_interval(own, reference)
    return {
        "difference": row["test_accuracy"] - base["test_accuracy"],
        "interval": None if shift is None else list(shift[1:]),
    }


def answer(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    Return a sentence on the accuracy of the largest batch relative to BASE, for each policy.

    `rows` are those of `summarize`, with their "gap" from `gap_to_base`.

    Example:
        >>> gap = {"difference": -0.021, "interval": [-0.03, -0.01]}
        >>> answer([{"policy": "fixed", "batch_size": 4096, "test_accuracy": 0.96, "gap": gap}])
        'Fixed rate: batch 4096 is 2.10 points less accurate than 64.'
    """
    parts = []
    for policy in (FIXED, SCALED):
        compared = [row for row in rows if row["policy"] == policy and row["gap"]]
        if compared:
            parts.append(f"{policy} rate: batch {compared[-1]['batch_size']} {_gap_words(compared[-1])}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else TOO_FEW_TRIALS


def _gap_words(row: Mapping[str, Any]) -> str:
    accuracy, gap = row["test_accuracy"], row["gap"]
    if accuracy < _LEARNED:
        return f"does not learn ({100 * accuracy:.1f} % right)"
    if gap["interval"] is None:
        return f"has {100 * accuracy:.2f} % right, with too few seeds to compare it with {BASE}"
    if gap["interval"][0] <= 0 <= gap["interval"][1]:
        return f"has {100 * accuracy:.2f} % right, no certain difference to {BASE}"
    direction = "less" if gap["difference"] < 0 else "more"
    return f"is {abs(100 * gap['difference']):.2f} points {direction} accurate than {BASE}"


def points(rows: Sequence[Mapping[str, Any]], *, missing: int = 0) -> list[str]:
    """
    Return sentences on the best row, undertrained batches, sharpness, time, diverged runs and missing runs.

    `rows` are those of `summarize` with their gaps; `missing` is the number of runs for which the budget was too small.
    """
    best = max(rows, key=lambda row: row["test_accuracy"])
    lines = [
        f"Best: {100 * best['test_accuracy']:.2f} % at batch {best['batch_size']}, rate {best['learning_rate']:g}."
    ]
    lines += [line for policy in (FIXED, SCALED) if (line := _undertrained(rows, policy))]
    fixed = sorted((row for row in rows if row["policy"] == FIXED), key=lambda row: row["batch_size"])
    for name, key, form in (
        ("largest eigenvalue of the Hessian", "sharpness", "{:.3g}".format),
        ("time of the epochs", "seconds", format_seconds),
    ):
        ends = [row for row in fixed if row[key] is not None]
        if len(ends) > 1:
            first, last = ends[0], ends[-1]
            lines.append(
                f"With a fixed rate the {name} is {form(first[key])} at batch {first['batch_size']} and "
                f"{form(last[key])} at {last['batch_size']}."
            )
    diverged = dict.fromkeys(
        f"{run['batch_size']} with a rate of {run['learning_rate']:g}"
        for row in rows
        for run in row["runs"]
        if run["diverged"]
    )
    if diverged:
        lines.append(f"Training diverged at batch {', '.join(diverged)}.")
    if missing:
        lines.append(
            f"{missing} runs are missing: the budget ended. The same command with a larger --budget continues."
        )
    return lines


def _undertrained(rows: Sequence[Mapping[str, Any]], policy: str) -> str:
    """
    Return a sentence if a policy's largest batch has a higher training loss and certainly lower accuracy than BASE.

    Otherwise, or without both rows, return an empty string. `rows` are those of `summarize`, with their gap.
    """
    of_policy = {row["batch_size"]: row for row in rows if row["policy"] == policy and row["training_loss"] is not None}
    if len(of_policy) < 2 or BASE not in of_policy:  # noqa: PLR2004 - a pair
        return ""
    large, base = of_policy[max(of_policy)], of_policy[BASE]
    interval = (large["gap"] or {}).get("interval")
    if not interval or interval[1] >= 0 or large["training_loss"] <= base["training_loss"]:
        return ""
    return (
        f"With a {policy} rate batch {large['batch_size']} has a higher training loss too "
        f"({large['training_loss']:.3g}, at {BASE} {base['training_loss']:.3g}) after {format_count(large['updates'])} "
        f"updates instead of {format_count(base['updates'])}: it may be undertrained rather than generalize worse."
    )


def _method(request: StudyRequest, network: Network, images: tuple[Dataset, Dataset]) -> list[str]:
    count, tested = (format_count(len(part)) for part in images)
    source = "generated images, patterns in noise" if request.data is None else "images of MNIST"
    hessian = format_count(min(SHARPNESS_IMAGES[request.quick], len(images[0])))
    return [
        (
            f"{network.name} is trained for {EPOCHS[request.quick]} epochs on {count} {source}, and tested on {tested} "
            f"others, with {SEEDS[request.quick]} seeds for weights and order; large batches make fewer updates. The "
            "learning rate falls to 0 along a cosine. The figures show means over the seeds; bars span all seeds."
        ),
        (
            f"Fixed: the learning rate of batch {BASE}, {LEARNING_RATES[request.optimizer]:g}, for all. Scaled: "
            "proportional to the batch, the linear scaling rule of Goyal et al. (2017, arXiv:1706.02677), without "
            "their warm-up."
        ),
        (
            f"Sharpness is the largest eigenvalue of the Hessian of the mean loss over the first {hessian} training "
            "images (Cohen et al., 2021, arXiv:2103.00065), by the Lanczos method on differences of gradients; median "
            "over the seeds. Rescaling weights changes it (Dinh et al., 2017, arXiv:1703.04933)."
        ),
        (
            "Two batches differ if the 90 % interval of Hodges and Lehmann for the difference of their accuracies "
            "excludes 0; it needs three seeds."
        ),
    ]


generalisation = Study(
    title="Do large batches learn worse?",
    question=(
        "Large batches use the hardware well, but networks trained with them reportedly end in sharp minima and "
        "do worse on unseen data (Keskar et al., 2016), unless the learning rate grows with the batch (Goyal et al., "
        "2017). How large is the difference here, and how much time is saved?"
    ),
    model="lenet5",
    modes=("training",),
    budgets=(1800.0, 60.0),
    run=run,
    uses_images=True,
)

"""
`generalisation`: does a network trained in large batches do worse on images that it has not seen?

Keskar et al. (2016, arXiv:1609.04836) found that large batches converge to sharp minima and test worse; Goyal et al.
(2017, arXiv:1706.02677) that a learning rate which grows with the batch closes much of the gap.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from cubatch.engine import data as files
from cubatch.engine import train as engine
from cubatch.engine.data import Dataset
from cubatch.engine.training_run import Step
from cubatch.errors import InvalidArgument
from cubatch.measure import kernel_choice, stopping
from cubatch.network.graph import Network, as_network
from cubatch.network.weights import load_weights
from cubatch.report.tables.common import joined, plain
from cubatch.studies.asked import Asked, only_training, situation
from cubatch.studies.kept import Kept
from cubatch.studies.sharpness import sharpness
from cubatch.units import format_count, format_seconds

TITLE = "Do large batches learn worse?"
DEFAULT_MODEL = "lenet5"
MODES = ("training",)
SIZES, QUICK_SIZES = (16, 64, 256, 1024, 4096), (16, 64, 256)
BASE = 64
RATES = {"sgd": 0.05, "momentum": 0.02, "adam": 0.001}
"""Learning rates of the batch of BASE samples."""
FIXED, SCALED = "fixed", "scaled"
SEEDS, QUICK_SEEDS = 3, 2
EPOCHS, QUICK_EPOCHS = 5, 2
SHARPNESS_IMAGES, QUICK_SHARPNESS_IMAGES = 1000, 200
KEPT = "cells.json"
_QUICK_IMAGES = {"train": 2000, "test": 1000}
_USUAL_SECONDS, _QUICK_SECONDS = 1800.0, 60.0
_LEARNT = 0.2  # share of the test set that a run has right which learnt at all, of ten classes
_PATTERNS, _NOISE = (96.0, 160.0), 64.0  # of made-up images

QUESTION = (
    "Large batches use the hardware well, but networks trained with them are said to end in sharp minima and to do "
    "worse on what they have not seen (Keskar et al., 2016), unless the learning rate grows with the batch (Goyal et "
    "al., 2017). How much is it here, and what is gained in time?"
)


@attrs.frozen
class Cell:
    """One training run of the study: its batch size, learning rate and seed."""

    batch_size: int
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """What its finding is kept under."""
        return f"batch {self.batch_size}, rate {self.rate:g}, seed {self.seed}"


def rate_of(policy: str, batch_size: int, base_rate: float) -> float:
    """
    Give the learning rate of a batch size.

    Args:
        policy: FIXED: the same for all; SCALED: in proportion to the batch, the linear scaling rule of Goyal et al.
        batch_size: Samples of a step.
        base_rate: Of a batch of BASE samples.

    Example:
        >>> rate_of("fixed", 1024, 0.05), rate_of("scaled", 1024, 0.05)
        (0.05, 0.8)
    """
    return base_rate if policy == FIXED else base_rate * batch_size / BASE


def study(asked: Asked) -> dict[str, Any]:
    """
    Train at each batch size with each learning rate and seed, and compare what they have learnt.

    Raises:
        InvalidArgument: If the mode is not training, there are no images, or they are none for the network.
        CubatchError: Whatever `train` raises.
    """
    only_training(asked)
    network = as_network(asked.work.spec)
    training_set, test_set = images_of(asked, network)
    engine.check(network, training_set, optimizer=asked.optimizer)
    most = min(asked.largest(SIZES[-1]), len(training_set))
    sizes = [n for n in (QUICK_SIZES if asked.quick else SIZES) if n <= most]
    if BASE not in sizes:
        raise InvalidArgument("max_batch_size", most, f"at least {BASE}, which the others are compared with")
    epochs, seeds = (QUICK_EPOCHS, QUICK_SEEDS) if asked.quick else (EPOCHS, SEEDS)
    budget, base_rate = asked.seconds(_USUAL_SECONDS, _QUICK_SECONDS), RATES[asked.optimizer]
    told = situation(asked, budget, (training_set, test_set))
    kept = Kept(asked.folder / KEPT, told.known | {"epochs": epochs})
    by_policy = {
        (policy, n): [Cell(n, rate_of(policy, n, base_rate), asked.seed + k) for k in range(seeds)]
        for policy in (FIXED, SCALED)
        for n in sizes
    }
    cells = list(dict.fromkeys(cells[k] for k in range(seeds) for cells in by_policy.values()))
    run = _Runs(asked, network, (training_set, test_set), epochs)
    spent = 0.0
    for number, cell in enumerate(cells):
        if cell.name not in kept.found:
            if spent >= budget:
                continue
            kept.keep(cell.name, run.trained(cell, number, len(cells)))
        spent += kept.found[cell.name]["spent_seconds"]
    rows = [
        row_of(policy, those[0], [kept.found[cell.name] for cell in those if cell.name in kept.found])
        for (policy, _), those in by_policy.items()
        if any(cell.name in kept.found for cell in those)
    ]
    rows = [row | {"beside_base": beside_base(row, rows)} for row in rows]
    return {
        **told.facts,
        "seconds_spent": spent,
        "title": TITLE,
        "question": [QUESTION],
        "method": _method(asked, network, (training_set, test_set), epochs=epochs, seeds=seeds),
        "answer": answer(rows),
        "points": points(rows, missing=sum(cell.name not in kept.found for cell in cells)),
        "data": None if asked.data is None else str(asked.data),
        "epochs": epochs,
        "seeds": seeds,
        "rows": rows,
    }


def images_of(asked: Asked, network: Network) -> tuple[Dataset, Dataset]:
    """
    Give the images to train on and to test with: MNIST, or a part of it, or made-up ones where a quick answer will do.

    Raises:
        InvalidArgument: If there are none, and no quick answer is asked for.
        InvalidData: If files are missing or damaged.
    """
    if asked.data is not None:
        found = files.load_mnist(asked.data)
        if not asked.quick:
            return found
        return _first(found[0], _QUICK_IMAGES["train"]), _first(found[1], _QUICK_IMAGES["test"])
    if not asked.quick:
        remedy = "--download fetches them there; --quick does without, on made-up images."
        raise InvalidArgument("data", None, "a folder with MNIST's files", remedy)
    random = np.random.default_rng(asked.seed)
    classes = network.output_shape[2]
    patterns = random.uniform(*_PATTERNS, (classes, *network.input_shape))
    return _made_up(patterns, _QUICK_IMAGES["train"], random), _made_up(patterns, _QUICK_IMAGES["test"], random)


def _first(whole: Dataset, count: int) -> Dataset:
    return attrs.evolve(whole, images=whole.images[:count], labels=whole.labels[:count])


def _made_up(patterns: np.ndarray[Any, Any], count: int, random: np.random.Generator) -> Dataset:
    """Draw images that are one of the patterns each, in much noise."""
    labels = random.integers(0, len(patterns), count).astype(np.int32)
    noisy = patterns[labels] + random.normal(0, _NOISE, (count, *patterns.shape[1:]))
    return Dataset(np.clip(noisy, 0, 255).astype(np.uint8), labels, mean=0.5, deviation=0.3)


@attrs.frozen
class _Runs:
    """Trains the cells of a study."""

    asked: Asked
    network: Network
    images: tuple[Dataset, Dataset]
    epochs: int

    def trained(self, cell: Cell, number: int, total: int) -> dict[str, Any]:
        """Train one, and give what is kept of it; `number` of `total` were done before."""
        asked, device, began = self.asked, self.asked.work.device, time.monotonic()

        def stepped(step: Step) -> None:
            asked.show(round(number + step.done / step.total, 2), total, cell.name)

        asked.show(number, total, cell.name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "weights.npz"
            run = engine.train(
                self.network, data=self.images, batch_size=cell.batch_size, device=device, dtype=asked.dtype,
                epochs=self.epochs, learning_rate=cell.rate, optimizer=asked.optimizer, seed=cell.seed, save=path,
                context=kernel_choice.usual_context(device, asked.dtype), stepped=stepped,
            )  # fmt: skip
            images, labels = self.images[0].batch(slice(0, sharpness_images(asked)))
            sharp = None
            if not run.diverged:
                sharp = sharpness(load_weights(self.network, path), images, labels, device=device, seed=cell.seed)
        last = run.epochs[-1]
        found = {
            "batch_size": cell.batch_size,
            "learning_rate": cell.rate,
            "seed": cell.seed,
            "updates": len(run.epochs) * (len(self.images[0]) // cell.batch_size),
            "test_accuracy": last.test_accuracy,
            "training_loss": last.loss,
            "diverged": run.diverged,
            "sharpness": sharp,
            "seconds": sum(epoch.seconds for epoch in run.epochs),
            "spent_seconds": time.monotonic() - began,
        }
        return dict(plain(found))


def sharpness_images(asked: Asked) -> int:
    """Give how many images the sharpness is of, at most."""
    return QUICK_SHARPNESS_IMAGES if asked.quick else SHARPNESS_IMAGES


def row_of(policy: str, cell: Cell, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up the runs of one batch size and learning rate: means of accuracy and loss, medians of the rest."""
    sharp = [run["sharpness"]["eigenvalue"] for run in runs if run["sharpness"] and run["sharpness"]["settled"]]
    losses = [run["training_loss"] for run in runs]
    return {
        "policy": policy,
        "batch_size": cell.batch_size,
        "learning_rate": cell.rate,
        "updates": max(run["updates"] for run in runs),
        "test_accuracy": statistics.fmean(run["test_accuracy"] for run in runs),
        "training_loss": None if None in losses else statistics.fmean(losses),
        "sharpness": statistics.median(sharp) if sharp else None,
        "seconds": statistics.median(run["seconds"] for run in runs),
        "runs": list(runs),
    }


def beside_base(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """
    Say how much higher the test accuracy is than at the batch of BASE samples, with its 90 % interval.

    Returns:
        "difference" and "interval", which is None where there are too few seeds; None of the base, and without it.
    """
    base = next((one for one in rows if (one["policy"], one["batch_size"]) == (row["policy"], BASE)), None)
    if base is None or base is row:
        return None
    own, reference = ([run["test_accuracy"] for run in one["runs"]] for one in (row, base))
    shift = stopping.shift_interval(own, reference)
    return {
        "difference": row["test_accuracy"] - base["test_accuracy"],
        "interval": None if shift is None else list(shift[1:]),
    }


def answer(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    Say what the largest batch costs in accuracy, by policy.

    Example:
        >>> gap = {"difference": -0.021, "interval": [-0.03, -0.01]}
        >>> large = {"policy": "fixed", "batch_size": 4096, "test_accuracy": 0.96, "beside_base": gap}
        >>> answer([large])
        'With a fixed rate batch 4096 has 2.10 points less of the test images right than 64.'
    """
    told = []
    for policy, words in ((FIXED, "a fixed rate"), (SCALED, "a scaled rate")):
        those = [row for row in rows if row["policy"] == policy and row["beside_base"]]
        if those:
            told.append(f"with {words} batch {those[-1]['batch_size']} {_gap(those[-1])}")
    if not told:
        return "Not known: the budget held too few runs. With a larger --budget the study goes on."
    text = "; ".join(told)
    return f"{text[0].upper()}{text[1:]}."


def _gap(row: Mapping[str, Any]) -> str:
    found = row["beside_base"]
    if row["test_accuracy"] < _LEARNT:
        return f"does not learn: {100 * row['test_accuracy']:.1f} % right"
    low, high = found["interval"] or (-1.0, 1.0)
    if low <= 0 <= high:
        sure = "no difference shows from" if found["interval"] else "too few seeds to compare it with"
        return f"has {100 * row['test_accuracy']:.2f} % right, {sure} {BASE}"
    less = "less" if found["difference"] < 0 else "more"
    return f"has {abs(100 * found['difference']):.2f} points {less} of the test images right than {BASE}"


def points(rows: Sequence[Mapping[str, Any]], *, missing: int = 0) -> list[str]:
    """Say which does best, what is undertrained, how sharp the minima are, what is gained in time, what is missing."""
    lines = []
    best = max(rows, key=lambda row: row["test_accuracy"])
    lines.append(
        f"Best: {100 * best['test_accuracy']:.2f} % right at batch {best['batch_size']} with a learning rate of "
        f"{best['learning_rate']:g}."
    )
    lines += _undertrained(rows)
    sharp = {(row["policy"], row["batch_size"]): row["sharpness"] for row in rows if row["sharpness"] is not None}
    ends = [key for key in sharp if key[0] == FIXED]
    if len(ends) > 1:
        first, last = ends[0], ends[-1]
        lines.append(
            f"With a fixed rate the largest eigenvalue of the Hessian is {sharp[first]:.3g} at batch {first[1]} and "
            f"{sharp[last]:.3g} at {last[1]}."
        )
    by_time = sorted((row for row in rows if row["policy"] == FIXED), key=lambda row: row["batch_size"])
    if len(by_time) > 1:
        small, large = by_time[0], by_time[-1]
        lines.append(
            f"The epochs take {format_seconds(small['seconds'])} at batch {small['batch_size']} and "
            f"{format_seconds(large['seconds'])} at {large['batch_size']}."
        )
    failed = [
        f"{run['batch_size']} with a rate of {run['learning_rate']:g}"
        for row in rows
        for run in row["runs"]
        if run["diverged"]
    ]
    if failed:
        lines.append(f"The loss left the range of numbers at batch {joined(list(dict.fromkeys(failed)))}.")
    if missing:
        lines.append(f"{missing} runs are missing: the budget ended before. With a larger --budget the study goes on.")
    return lines


def _undertrained(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tell a batch that has not learnt its training images from one that generalises worse."""
    lines = []
    for policy in (FIXED, SCALED):
        of = {row["batch_size"]: row for row in rows if row["policy"] == policy}
        largest = max(of, default=BASE)
        if BASE not in of or largest == BASE or None in {of[n]["training_loss"] for n in (BASE, largest)}:
            continue
        large, base = of[largest], of[BASE]
        gap = large["beside_base"]
        if gap and gap["interval"] and gap["interval"][1] < 0 and large["training_loss"] > base["training_loss"]:
            lines.append(
                f"With a {policy} rate batch {largest} has not learnt its training images as well either (loss "
                f"{large['training_loss']:.3g}, at {BASE} {base['training_loss']:.3g}): it made "
                f"{format_count(large['updates'])} updates and not {format_count(base['updates'])}. That "
                "alone may be why it tests worse."
            )
    return lines


def _method(asked: Asked, network: Network, images: tuple[Dataset, Dataset], *, epochs: int, seeds: int) -> list[str]:
    count, tested = (format_count(len(one)) for one in images)
    source = "made-up images, patterns in noise" if asked.data is None else "images of MNIST"
    rate = f"{RATES[asked.optimizer]:g}"
    return [
        (
            f"{network.name} is trained for {epochs} epochs on {count} {source}, and tested on {tested} others, with "
            f"{seeds} seeds for weights and order; the same number of epochs for all, so that large batches make fewer "
            "updates. The learning rate falls to 0 along a cosine. Shown are means over the seeds; bars reach from the "
            "lowest to the highest."
        ),
        (
            f"Fixed: the learning rate of batch {BASE}, {rate}, for all. Scaled: in proportion to the batch, the "
            "linear scaling rule of Goyal et al. (2017, arXiv:1706.02677), without their warm-up."
        ),
        (
            "Sharpness is the largest eigenvalue of the Hessian of the mean loss over the first "
            f"{format_count(min(sharpness_images(asked), len(images[0])))} training images (Cohen et al., 2021, "
            "arXiv:2103.00065), by the method of Lanczos on differences of gradients, to a hundredth; median over the "
            "seeds. It is not the only measure, and rescaling weights changes it (Dinh et al., 2017, "
            "arXiv:1703.04933)."
        ),
        (
            "Two batches differ where the 90 % interval of Hodges and Lehmann for the difference of their accuracies "
            "does not hold 0; it needs three seeds."
        ),
    ]

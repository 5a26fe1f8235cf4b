"""
Score the time model against published measurements, and against rules that need no model.

    python -m benchmarks.score_predictor --data DIR [--out FILE]

DIR holds CSV files as benchmarks/predictor/published.py reads them.  Rows that the model was fitted to are predicted
by models fitted again without their shape, and without their GPU.  All others are predicted by the shipped model.
Errors are |predicted / measured - 1| of the published time, which includes the harness overhead (published.py).
Without it they are "mean_without_overhead".  Intervals hold 90 of 100 bootstrap draws of whole shapes, or of rows
where almost every row is a shape of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.fit_predictor import RESULTS, fingerprints, path_of
from benchmarks.predictor import fitting, published
from benchmarks.predictor.published import CONV, GEMM, NEUSIGHT, Rows
from benchmarks.predictor.score_batches import cliffs, knees
from cubatch.estimate.vendor.algorithms import Array, Mask
from cubatch.estimate.vendor.fitted import Fitted

ANCHORS = 10
DRAWS = 30
GOALS = {
    f"{NEUSIGHT}, unseen shapes": (5.0, 3.5),
    f"{CONV}, unseen shapes, forward": (8.0, None),
    f"{CONV}, unseen shapes": (12.0, None),
    f"{GEMM}, unseen shapes": (6.0, 2.5),
    f"{NEUSIGHT}, unseen GPU": (11.0, None),
    f"{NEUSIGHT}, unseen GPU, {ANCHORS} anchors": (8.5, None),
    f"{CONV}, unseen GPU": (20.0, None),
    f"{CONV}, unseen GPU, {ANCHORS} anchors": (16.0, None),
}
"""Mean and median, in per cent, of predictor.md, 8."""


def errors(rows: Rows, predicted: Array) -> Array:
    """Return each row's error in percent of the published time."""
    return 100 * np.abs((predicted + rows.overhead) / (rows.seconds + rows.overhead) - 1)


def summary(rows: Rows, predicted: Array, *, seed: int) -> dict[str, object]:
    """Sum up errors, with bootstrap intervals over shapes."""
    percent, rng = errors(rows, predicted), np.random.default_rng(seed)
    _, shape = np.unique(rows.shape, return_inverse=True)
    count = int(shape.max()) + 1
    by_shape = [percent[shape == index] for index in range(count)] if count < 5000 else None
    means, medians = [], []
    for _ in range(200):
        drawn = rng.integers(count, size=count)
        values = np.concatenate([by_shape[i] for i in drawn]) if by_shape else rng.choice(percent, len(percent))
        means.append(values.mean())
        medians.append(np.median(values))
    kernel = 100 * np.abs(predicted / rows.seconds - 1)
    return {
        "rows": len(rows), "shapes": count, "gpus": sorted({str(slug) for slug in rows.gpu}),
        "mean": round(float(percent.mean()), 2), "mean_interval": _ends(means),
        "median": round(float(np.median(percent)), 2), "median_interval": _ends(medians),
        "mean_without_overhead": round(float(kernel.mean()), 2),
        "bias": round(float(100 * (np.exp(np.mean(np.log(predicted / rows.seconds))) - 1)), 1),
    }  # fmt: skip


def _ends(values: list[float]) -> list[float]:
    return [round(float(value), 2) for value in np.quantile(values, (0.05, 0.95))]


def anchored(rows: Rows, predicted: Array, *, sd: float, unseen_sd: float, seed: int) -> dict[str, object]:
    """
    Sum up errors with ten rows of each GPU known, which move all others of it by one factor.

    The factor is the median of their factors, shrunk towards one by the uncertainty of an unseen GPU.  A median of
    normal draws varies pi / 2 times as much as their mean.  `cubatch predict --anchors` does the same with two factors
    and whole networks (cubatch/tuning/sharpen.py).
    """
    rng, means, weights = np.random.default_rng(seed), [], []
    for slug in np.unique(rows.gpu):
        of = np.flatnonzero(rows.gpu == slug)
        if len(of) <= ANCHORS:
            continue
        gap = np.log(predicted[of] / rows.seconds[of])
        weight = ANCHORS / (ANCHORS + np.pi / 2 * (sd / unseen_sd) ** 2)
        for _ in range(DRAWS):
            known = rng.permutation(len(of)) < ANCHORS
            factor = np.exp(-weight * np.median(gap[known]))
            left = rows.take(np.isin(np.arange(len(rows)), of[~known]))
            means.append(errors(left, predicted[of[~known]] * factor).mean())
            weights.append(len(left))
    if not means:
        return {"rows": 0}
    return {
        "rows": len(rows), "shapes": len(np.unique(rows.shape)), "draws": DRAWS,
        "mean": round(float(np.average(means, weights=weights)), 2), "mean_interval": _ends(means),
    }  # fmt: skip


def roofline(rows: Rows) -> Array:
    """Predict by the data sheet: the larger of arithmetic and bytes."""
    places, work = rows.places({}), rows.work
    moved = (work.input_elements + work.output_elements + work.filter_elements) * places.element_bytes
    return np.maximum(work.flops / places.peak, moved / places.bandwidth)


def owned(rows: Rows) -> dict[str, tuple[str, float, float, int]]:
    """
    Return the error of "time on another GPU times the ratio of rooflines" by target GPU: best and median source.

    Flattered: the best source is chosen by its error on the target, which is unknown in advance.
    """
    floor, case = (
        roofline(rows),
        np.array([f"{s}|{n}|{p}" for s, n, p in zip(rows.shape, rows.work.n, rows.work.pass_, strict=True)]),
    )
    tables = {str(slug): {case[i]: i for i in np.flatnonzero(rows.gpu == slug)} for slug in np.unique(rows.gpu)}
    best_sources = {}
    for target, mine in tables.items():
        means, counts = {}, {}
        for source, theirs in tables.items():
            if published.SIBLINGS.get(source, source) == published.SIBLINGS.get(target, target):
                continue
            both = [(mine[key], theirs[key]) for key in mine.keys() & theirs.keys()]
            if both:
                here, there = np.array(both).T
                guess = rows.seconds[there] * floor[here] / floor[there]
                counts[source] = len(both)
                means[source] = float(np.mean(100 * np.abs(guess / rows.seconds[here] - 1)))
        if means:
            best = min(means, key=lambda source: means[source])
            best_sources[target] = (
                best,
                round(means[best], 2),
                round(float(np.median(list(means.values()))), 2),
                counts[best],
            )
    return best_sources


def score_source(rows: Rows, model: Fitted, fitted_rows: Mask, *, seed: int) -> dict[str, object]:
    """Score one source: rows that were fitted by models that did not see them, the others by the model as it is."""
    out: dict[str, object] = {}
    old, new = rows.take(fitted_rows), rows.take(~fitted_rows)
    if len(old):
        whole, plain = fitting.cross_validated(old, seed=seed)
        _unseen_shapes(out, old, whole, "unseen shapes", seed=seed)
        out[f"{old.name}, unseen shapes, arithmetic alone"] = summary(old, plain, seed=seed)
        left = fitting.gpu_left_out(old, seed=seed)
        tested = np.isfinite(left)
        _unseen_gpus(out, old.take(tested), left[tested], model, "unseen GPU", seed=seed)
    if len(new):
        predicted = fitting.predict(model, new)
        known = np.isin(new.gpu, list(model.scales))
        _unseen_shapes(out, new.take(known), predicted[known], "unseen shapes, held out", seed=seed)
        _unseen_gpus(out, new.take(~known), predicted[~known], model, "unseen GPU, held out", seed=seed)
    out[f"{rows.name}, owned GPU times roofline ratio"] = {
        target: {"best_source": best, "mean_of_best": low, "mean_of_median": middle, "rows": count}
        for target, (best, low, middle, count) in owned(rows).items()
    }
    return out


def _unseen_shapes(out: dict[str, object], rows: Rows, predicted: Array, name: str, *, seed: int) -> None:
    if not len(rows):
        return
    out[f"{rows.name}, {name}"] = summary(rows, predicted, seed=seed)
    for number, pass_ in enumerate(("forward", "input gradient", "filter gradient")):
        of = rows.work.pass_ == number
        if of.any() and not of.all():
            out[f"{rows.name}, {name}, {pass_}"] = summary(rows.take(of), predicted[of], seed=seed)
    out[f"{rows.name}, {name}, roofline"] = summary(rows, _fitted_roofline(rows), seed=seed)
    if rows.source in (CONV, GEMM):
        out[f"{rows.name}, {name}, knee"] = knees(rows, predicted, seed=seed)


def _fitted_roofline(rows: Rows) -> Array:
    """Return the roofline times one factor for each GPU, fitted to the rows themselves, which flatters it."""
    floor = roofline(rows)
    for slug in np.unique(rows.gpu):
        of = rows.gpu == slug
        floor[of] *= np.exp(np.median(np.log(rows.seconds[of] / floor[of])))
    return floor


def _unseen_gpus(out: dict[str, object], rows: Rows, predicted: Array, model: Fitted, name: str, *, seed: int) -> None:
    if not len(rows):
        return
    out[f"{rows.name}, {name}"] = summary(rows, predicted, seed=seed)
    for slug in np.unique(rows.gpu):
        of = rows.gpu == slug
        out[f"{rows.name}, {name}, {slug}"] = summary(rows.take(of), predicted[of], seed=seed)
    anchors = anchored(rows, predicted, sd=model.sd, unseen_sd=model.unseen_sd, seed=seed)
    out[f"{rows.name}, {name}, {ANCHORS} anchors"] = anchors
    if rows.source in (CONV, GEMM):
        out[f"{rows.name}, {name}, knee"] = knees(rows, predicted, seed=seed)


def table(scores: Mapping[str, Mapping[str, object]]) -> str:
    """Write the scores as lines of text."""
    return "\n".join(f"{name}: {_line(score, GOALS.get(name))}" for name, score in scores.items())


def _line(score: Mapping[str, object], goal: tuple[float, float | None] | None) -> str:
    if "mean" not in score:
        return json.dumps(score)
    interval = " [{}, {}]".format(*score["mean_interval"]) if "mean_interval" in score else ""
    middle = f" / {score['median']}" if "median" in score else ""
    bias = f", bias {score['bias']:+}" if "bias" in score else ""
    wanted = "" if goal is None else "   goal " + " / ".join(str(value) for value in goal if value)
    return f"{score['mean']}{interval}{middle} % ({score['rows']} rows, {score['shapes']} shapes{bias}){wanted}"


def main() -> None:
    """Score every source that the folder has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the CSV files")
    parser.add_argument(
        "--out", type=Path, help="write the scores there as JSON; with --only those of other sources stay"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=published.SOURCES, help="score these sources only")
    arguments = parser.parse_args()
    with np.load(RESULTS / "rows.npz") as file:
        known = file["fitted"]
    scores: dict[str, object] = {}
    other_scores: dict[str, object] = {}
    if arguments.only and arguments.out and arguments.out.exists():
        other_scores = json.loads(arguments.out.read_text())["scores"]
    for source in published.SOURCES:
        if arguments.only and source not in arguments.only:
            continue
        for rows in published.load(arguments.data, source):
            if rows.dtype == "float16" and not rows.tensor:
                continue
            model = Fitted.load(path_of(rows.name))
            rows_scores = score_source(rows, model, np.isin(fingerprints(rows), known), seed=arguments.seed)
            print(table(rows_scores), flush=True)
            scores |= rows_scores
    sweeps = cliffs(arguments.data)
    if sweeps:
        print(table({"cliffs": sweeps}))
        scores["cliffs"] = sweeps
    if not scores:
        parser.error(f"{arguments.data} holds none of the files of {', '.join(published.SOURCES)}")
    if arguments.out:
        from benchmarks.provenance import provenance, write

        facts = {"schema": 1, "benchmark": "predictor", **provenance(), "goals": GOALS, "scores": other_scores | scores}
        write(arguments.out, facts)


if __name__ == "__main__":
    main()

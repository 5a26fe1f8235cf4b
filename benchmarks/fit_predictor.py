"""
Fit the model of time to published measurements, and write it to where `cubatch predict` finds it.

    python -m benchmarks.fit_predictor --data DIR

DIR holds the CSV files that benchmarks/predictor/published.py reads.  The same files and seed give the same model.
"""

from __future__ import annotations

import argparse
import time
import zlib
from pathlib import Path

import attrs
import numpy as np

import cubatch
from benchmarks.predictor import fitting, published
from benchmarks.predictor.published import Rows
from cubatch.estimate.vendor.algorithms import Array
from cubatch.estimate.vendor.fitted import Fitted

DATA = Path(cubatch.__file__).parent / "data"
RESULTS = Path(__file__).parent / "results" / "predictor"


ONE_GPU_SD = 0.25
"""What is unknown of other GPUs where only one was measured: the worst of the sources with several."""

FOLDS = 2
"""Of the rows that say how sure the model is: half of the shapes teach less than all, so this errs on the safe side."""


def path_of(name: str) -> Path:
    """Return the file of a model."""
    return DATA / f"{name.replace(' ', '_')}.npz"


def fingerprints(rows: Rows) -> np.ndarray:
    """Return a checksum of each row, by which the scorer knows whether it was fitted."""
    names = zip(rows.shape, rows.work.n, rows.work.pass_, rows.gpu, strict=True)
    return np.array([zlib.crc32("|".join(map(str, (rows.name, *row))).encode()) for row in names], np.uint32)


def spread(predicted: Array, measured: Array) -> float:
    """Return the standard deviation of the normal distribution with the same 90 % quantile of gaps."""
    return float(np.quantile(np.abs(np.log(predicted / measured)), 0.9) / 1.6449)


def fitted(rows: Rows, seed: int) -> Fitted:
    """Fit a source, with how sure it is of shapes and GPUs that it has not seen."""
    model = fitting.fit(rows, seed=seed)
    if rows.tensor:
        predicted, _ = fitting.cross_validated(rows, seed=seed, folds=FOLDS)
        return attrs.evolve(model, sd=spread(predicted, rows.seconds), unseen_sd=ONE_GPU_SD)
    groups, gaps = fitting.siblings(rows), []
    for group in np.unique(groups[groups != "Kepler"]):
        out = groups == group
        alone = fitting.fit_constants(rows.take(~out), seed=seed)
        left = rows.take(out)
        scales = {slug: alone.scale(device)[:2] for slug, device in left.devices.items()}
        gaps.append(np.median(np.log(left.seconds / fitting.analytic(attrs.evolve(alone, scales=scales), left))))
    predicted, _ = fitting.cross_validated(rows, seed=seed, folds=FOLDS)
    return attrs.evolve(model, sd=spread(predicted, rows.seconds), unseen_sd=float(np.sqrt(np.mean(np.square(gaps)))))


def main() -> None:
    """Fit every source that the folder has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the CSV files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=published.SOURCES, help="fit these sources only")
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    seen = []
    for source in published.SOURCES:
        for rows in published.load(arguments.data, source):
            if rows.dtype == "float16" and not rows.tensor:
                continue
            seen.append(fingerprints(rows))
            if arguments.only and source not in arguments.only:
                continue
            begun = time.perf_counter()
            model = fitted(rows, arguments.seed)
            model.save(path_of(rows.name))
            print(
                f"{rows.name}: {len(rows)} rows, {len(np.unique(rows.shape))} shapes, "
                f"{len(rows.devices)} GPUs; sd {model.sd:.3f}, of an unseen GPU {model.unseen_sd:.3f}; "
                f"{time.perf_counter() - begun:.0f} s", flush=True,
            )  # fmt: skip
    if not seen:
        parser.error(f"{arguments.data} holds none of the files of {', '.join(published.SOURCES)}")
    np.savez_compressed(RESULTS / "rows.npz", fitted=np.unique(np.concatenate(seen)))


if __name__ == "__main__":
    main()

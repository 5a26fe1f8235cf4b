"""
The SM clock at which NeuSight's GPUs ran, and the errors of a GPU that the fit did not see at that clock.

    python -m benchmarks.predictor.score_clocks --data DIR [--out FILE]

DIR holds NeuSight's CSV files.  `published.tile_clocks` has how the clock follows from the kernels' names and grids.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.fit_predictor import path_of
from benchmarks.predictor import fitting, published
from benchmarks.provenance import provenance, write
from benchmarks.score_predictor import summary
from cubatch.estimate.vendor.fitted import Fitted


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the clocks and errors; `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the CSV files")
    parser.add_argument("--out", type=Path, help="write clocks and errors there as JSON")
    options = parser.parse_args(arguments)
    clocks = published.tile_clocks(options.data)
    model = Fitted.load(path_of(published.NEUSIGHT))
    scores = {}
    for rows in published.load(options.data, published.NEUSIGHT):
        slow = rows.at_base_clock()
        boosted = rows.take(np.isin(rows.gpu, list(slow.devices)))
        for name, each in (("boost clock", boosted), ("base clock", slow)):
            scores[name] = summary(each, fitting.predict(model, each), seed=0)
    print(clocks, scores, sep="\n")
    if options.out:
        facts = {"schema": 1, "benchmark": "predictor-clocks", **provenance(), "clocks": clocks, "scores": scores}
        write(options.out, facts)


if __name__ == "__main__":
    main()

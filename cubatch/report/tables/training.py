"""Table of `cubatch train`: one line per epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cubatch.engine.training_run import Epoch
from cubatch.report.grid import Grid
from cubatch.report.tables.common import written
from cubatch.units import format_count, format_seconds


def epochs(done: Sequence[Epoch], *, title: str, diverged: bool = False, stopped_early: bool = False) -> Grid:
    """Return the table of a training run."""
    rows = [
        [
            epoch.number,
            written(lambda loss: f"{loss:.4f}", epoch.loss if math.isfinite(epoch.loss) else None),
            f"{100 * epoch.test_accuracy:.2f} %",
            format_seconds(epoch.seconds),
            format_count(epoch.samples_per_second),
        ]
        for epoch in done
    ]
    notes = ["Training diverged: the loss is infinite or NaN. Try a smaller learning rate."] if diverged else []
    if stopped_early:
        notes.append("Stopped early: the last epochs did not improve the test accuracy.")
    columns = ["epoch", "loss", "test accuracy", "time", "samples/s"]
    return Grid(title=title, columns=columns, rows=rows, notes=notes)

"""Table of `cubatch train`: one line per epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cubatch.engine.training_run import Epoch
from cubatch.report.grid import Grid
from cubatch.units import format_count, format_seconds


def epochs(done: Sequence[Epoch], *, title: str, diverged: bool = False, stopped_early: bool = False) -> Grid:
    """Return the table of loss, accuracy and time of each epoch, with notes if training diverged or stopped early."""
    columns = {
        "epoch": lambda epoch: epoch.number,
        "loss": lambda epoch: f"{epoch.loss:.4f}" if math.isfinite(epoch.loss) else None,
        "test accuracy": lambda epoch: f"{100 * epoch.test_accuracy:.2f} %",
        "time": lambda epoch: format_seconds(epoch.seconds),
        "samples/s": lambda epoch: format_count(epoch.samples_per_second),
    }
    notes = ["Training diverged: the loss is infinite or NaN. Try a smaller learning rate."] if diverged else []
    if stopped_early:
        notes.append("Stopped early: the last epochs did not improve the test accuracy.")
    return Grid.of(done, columns, title=title, notes=notes)

"""Tables of `cubatch candidates`: the batch sizes, and the layers at each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cubatch.measure.records import Candidate
from cubatch.report.grid import Grid
from cubatch.report.tables.common import written
from cubatch.units import format_bytes, format_percent, format_seconds


def candidates(proposed: Iterable[Candidate], *, title: str) -> Grid:
    """Return the table of the batch sizes worth measuring, with predicted time, memory plan and all reasons of each."""
    listed = list(proposed)
    columns = {
        "batch": lambda c: c.batch_size,
        "predicted time": lambda c: written(format_seconds, c.predicted_seconds),
        "memory plan": lambda c: written(format_bytes, c.predicted_peak_bytes),
        "status": lambda c: "over the limit" if c.over_limit else "",
        "reasons": lambda c: ", ".join(c.reasons) or None,
    }
    note = (
        "“predicted time” is that of cubatch's own engine: from the time model, or from the roofline if facts of the "
        "GPU are unknown. `cubatch predict` predicts cuDNN."
    )
    is_predicted = any(candidate.predicted_seconds is not None for candidate in listed)
    return Grid.of(listed, columns, title=title, notes=[note] if is_predicted else [])


def explained(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the table of blocks, waves and time of each layer at each batch size, from `candidate_layers.explain`."""
    columns = {
        "batch": lambda row: row["batch_size"],
        "layer": lambda row: row["layer"],
        "alike": lambda row: row["layers"],
        "pass": lambda row: row["pass"],
        "tile": lambda row: row["tile"] + (f" / {row['slices']}" if row["slices"] > 1 else ""),
        "blocks": lambda row: row["blocks"],
        "waves": lambda row: row["waves"],
        "last wave": lambda row: written(format_percent, row["last_wave"]),
        "busiest SM": lambda row: row["busiest_sm_blocks"],
        "fill": lambda row: format_percent(row["fill"]),
        "time at best": lambda row: written(format_seconds, row["predicted_seconds"]),
    }
    missing = {
        row["layer"]: " and ".join(f"{extent} to {size}" for extent, size in row["padding"].items())
        for row in rows
        if row["padding"]
    }
    listed = ", ".join(f"{layer} ({change})" for layer, change in missing.items())
    notes = [f"Channels that are no multiple of what Tensor Cores need; pad them: {listed}."] if listed else []
    if not rows:
        notes = ["Nothing to explain: the device has no SMs, or their number is unknown."]
    if rows:
        notes = [
            "A block computes a tile of the result; with “/ 4” after it, four blocks share a tile.",
            "“alike” is the number of equal layers; “time at best” is their sum.",
            "A wave is one block on every SM; of a cubatch kernel, as many blocks as the SMs can hold.",
            "Time follows the busiest SM; “fill” is the share of SM time in use.",
            *notes,
        ]
    return Grid.of(rows, columns if rows else {}, title="By layer", notes=notes)

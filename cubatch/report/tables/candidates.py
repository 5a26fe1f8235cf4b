"""Tables of `cubatch candidates`: the batch sizes, and the layers at each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cubatch.report.grid import Grid
from cubatch.report.tables.common import written
from cubatch.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from cubatch.measure.records import Candidate


def candidates(proposed: Iterable[Candidate], *, title: str) -> Grid:
    """Return the table of the batch sizes worth measuring, with every reason."""
    rows = [
        [
            candidate.batch_size,
            written(format_seconds, candidate.predicted_seconds),
            written(format_bytes, candidate.predicted_peak_bytes),
            "over the limit" if candidate.over_limit else "",
            ", ".join(candidate.reasons) or None,
        ]
        for candidate in proposed
    ]
    known = any(row[1] is not None for row in rows)
    note = (
        "“predicted time” is that of cubatch's own engine: from the time model, or from the roofline if facts of the "
        "GPU are unknown. `cubatch predict` predicts cuDNN."
    )
    columns = ["batch", "predicted time", "memory plan", "status", "reasons"]
    return Grid(title=title, columns=columns, rows=rows, notes=[note] if known else [])


def explained(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the table of each layer at each candidate, with the channels that miss the Tensor Cores beneath."""
    cells = [
        [
            row["batch_size"],
            row["layer"],
            row["layers"],
            row["pass"],
            row["tile"] + (f" / {row['slices']}" if row["slices"] > 1 else ""),
            row["blocks"],
            row["waves"],
            written(format_percent, row["last_wave"]),
            row["busiest_sm_blocks"],
            format_percent(row["fill"]),
            written(format_seconds, row["predicted_seconds"]),
        ]
        for row in rows
    ]
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
    columns = ["batch", "layer", "alike", "pass", "tile", "blocks", "waves", "last wave", "busiest SM", "fill"]
    columns += ["time at best"]
    return Grid(title="By layer", columns=columns if rows else [], rows=cells, notes=notes)

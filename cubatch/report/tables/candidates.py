"""What `cubatch candidates` prints: the sizes, and what each does to the layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cubatch.report.grid import Grid
from cubatch.report.tables.common import written
from cubatch.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from cubatch.measure.records import Candidate


def candidates(found: Iterable[Candidate], *, title: str) -> Grid:
    """Lay out the batch sizes worth measuring, with every reason."""
    rows = [
        [
            candidate.batch_size,
            written(format_seconds, candidate.predicted_seconds),
            written(format_bytes, candidate.predicted_peak_bytes),
            "over the limit" if candidate.over_limit else "",
            ", ".join(candidate.reasons) or None,
        ]
        for candidate in found
    ]
    known = any(row[1] is not None for row in rows)
    note = (
        "“predicted time” is of cubatch's own engine, by the model where the GPU's facts allow it, else the roofline; "
        "tuning measures. `cubatch predict` says the same of cuDNN."
    )
    columns = ["batch", "predicted time", "memory plan", "status", "reasons"]
    return Grid(title=title, columns=columns, rows=rows, notes=[note] if known else [])


def explained(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """Lay out what each candidate means for each layer, and beneath it the channels that miss the Tensor Cores."""
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
    notes = [f"Channels that miss the multiple the Tensor Cores want; pad them: {listed}."] if listed else []
    if not rows:
        notes = ["Nothing to explain: blocks are spread over SMs, and how many the device has is not known, or none."]
    if rows:
        notes = [
            "A block computes one tile of the result, or one of so many slices of its depth, the number after the /.",
            "“alike” counts equal layers, whose time is added up.",
            "A wave is a block on every SM, or as many as an SM holds of our kernel.",
            "Time follows the busiest SM, whose blocks share its pipes; “fill” is the share of SM time at work.",
            *notes,
        ]
    columns = ["batch", "layer", "alike", "pass", "tile", "blocks", "waves", "last wave", "busiest SM", "fill"]
    columns += ["time at best"]
    return Grid(title="By layer", columns=columns if rows else [], rows=cells, notes=notes)

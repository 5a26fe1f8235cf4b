"""A whole step: time by kind of operation and its floor, measured if a pass has the operation, else predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from benchmarks.gpu.steps import STEPS, Step
from benchmarks.pages.gpu_rows import STEPS as STAGE, Row, page, rows_of
from benchmarks.pages.tables import table
from cubatch.bench.calls import Case
from cubatch.bench.rivals import VENDOR
from cubatch.errors import InvalidData
from cubatch.estimate import cubatch_kernels
from cubatch.hardware.arithmetic import peak_flops_per_second
from cubatch.hardware.facts import Device
from cubatch.network.layers import Attention
from cubatch.network.passes import Pass
from cubatch.units import format_percent, format_seconds

_LAUNCHES = {"batch_norm_train": 3, "batch_norm_backward": 3, "layer_norm_backward": 2}
"""
Of operations with sums over rows: partial sums, their sum, and the result.

Layer norm has the result with the first, up to 6140 channels; no step has more.
"""


@attrs.define
class Total:
    """
    Operations of one kind in a step, each as often as it occurs.

    Attributes:
        calls, measured_calls: How many, and how many of them were timed.
        bytes_seconds, flop_seconds, floor_seconds: At the data sheet's rates: every array moved once, the arithmetic,
            and of each operation the larger of the two.
        measured_seconds, predicted_seconds: Of those that were timed, and of the others.
        paired_seconds, vendor_seconds: Of those that the vendor was timed for too: cubatch's and the vendor's.
    """

    calls: int = 0
    measured_calls: int = 0
    bytes_seconds: float = 0.0
    flop_seconds: float = 0.0
    floor_seconds: float = 0.0
    measured_seconds: float = 0.0
    predicted_seconds: float = 0.0
    paired_seconds: float = 0.0
    vendor_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Measured and predicted together."""
        return self.measured_seconds + self.predicted_seconds

    def add(self, case: Case, device: Device, row: Row | None) -> None:
        """Add a case to the sums: its row of a pass, or None if it was not timed."""
        count = case.multiplicity
        self.calls += count
        self.bytes_seconds += count * case.traffic_bytes / (device.peak_bytes_per_second or 1.0)
        self.flop_seconds += count * case.flops / (peak_flops_per_second(device, case.dtype) or 1.0)
        self.floor_seconds += count * (case.roofline_seconds(device) or 0.0)
        if row is None:
            self.predicted_seconds += count * predicted_seconds(case, device)
            return
        self.measured_calls += count
        self.measured_seconds += count * row["best"]["seconds"]
        if VENDOR in row["rivals"]:
            self.paired_seconds += count * row["best"]["seconds"]
            self.vendor_seconds += count * row["rivals"][VENDOR]["seconds"]


def predicted_seconds(case: Case, device: Device) -> float:
    """Return what the predictor of cubatch kernels expects of a case."""
    layer, pass_ = case.layer, case.pass_
    if layer is None or pass_ is None or not layer.gemms(pass_, 1):
        moved = case.moved_bytes / (device.peak_bytes_per_second or 1.0)
        launches = _LAUNCHES.get(case.operation, 1)
        return moved / cubatch_kernels.MOVED_SHARE + launches * cubatch_kernels.LAUNCH_SECONDS
    plain = layer.traffic(pass_, case.batch_size) * case.itemsize(next(iter(case.operands)))
    passes = (Pass.DGRAD, Pass.WGRAD) if isinstance(layer, Attention) and pass_ is Pass.DGRAD else (pass_,)
    more = 0 if isinstance(layer, Attention) else max(0, case.traffic_bytes - plain)
    return sum(
        float(
            cubatch_kernels.pass_seconds(
                layer, each, [case.batch_size], device, case.dtype, saves="keep" in case.arrays,
                more=more // (case.itemsize("x" if "x" in case.operands else "dy") * case.batch_size),
            )[0][0]
        )
        for each in passes
    )  # fmt: skip


def totals(step: Step, device: Device, results: Sequence[Mapping[str, Any]]) -> dict[str, Total]:
    """
    Add up a step by kind of operation, the kind that takes longest first.

    Args:
        step: The step.
        device: A GPU of the catalogue.
        results: Passes of that GPU; of a case that several have, the last counts.

    Raises:
        InvalidData: If a pass is of another GPU.
    """
    rows: dict[str, Row] = {}
    for result in results:
        if (result["device"] or {}).get("name") != device.name:
            raise InvalidData("results", f"they are of {(result['device'] or {}).get('name')}, not of {device.name}")
        rows |= _rows_by_name(result)
    parts: dict[str, Total] = {}
    for case in step.cases:
        parts.setdefault(case.kind, Total()).add(case, device, rows.get(case.name))
    return dict(sorted(parts.items(), key=lambda pair: pair[1].seconds, reverse=True))


def whole(parts: Mapping[str, Total]) -> Total:
    """Add up the kinds of a step."""
    names = [field.name for field in attrs.fields(Total)]
    return Total(**{name: sum(getattr(part, name) for part in parts.values()) for name in names})


def step_page(step: Step, device: Device, results: Sequence[Mapping[str, Any]]) -> str:
    """Write a step as a table with a caption that states how much of it was measured."""
    parts = totals(step, device, results)
    everything = whole(parts)
    rows = [_row(kind, part) for kind, part in parts.items()] + [_row("**the whole step**", everything)]
    columns = [
        "kind of operation", "calls", "floor by bytes", "floor by FLOP", "floor", "time", "of it predicted",
        "time over floor", "ratio to the vendor",
    ]  # fmt: skip
    sources = [f"{result['date']}, commit {result['commit']}" for result in results]
    notes = [f"{step.name}, on {device}"]
    if everything.measured_calls:
        notes.append(f"{everything.measured_calls} of {everything.calls} calls were measured ({'; '.join(sources)})")
    else:
        notes.append(
            f"no results were given, or none has a call of this step: all {everything.calls} calls are predicted"
        )
    notes.append("floors are the data sheet's rates; a time is the sum of operations timed one by one, without gaps")
    return "; ".join(notes) + ".\n\n" + table(columns, rows)


def steps(result: Mapping[str, Any]) -> str:
    """Write a line for each step of which a pass timed operations, each counted as often as the step has it."""
    rows_by_name = _rows_by_name(result)
    rows = []
    for step in STEPS:
        timed = [(case.multiplicity, rows_by_name[case.name]) for case in step.cases if case.name in rows_by_name]
        if not timed:
            continue
        compared = [(count, row) for count, row in timed if VENDOR in row["rivals"]]
        ours_seconds, theirs = (
            sum(count * of(row)["seconds"] for count, row in compared)
            for of in (lambda row: row["best"], lambda row: row["rivals"][VENDOR])
        )
        rows.append(
            [
                step.name,
                f"{sum(count for count, _ in timed)} of {sum(case.multiplicity for case in step.cases)}",
                format_seconds(sum(count * row["best"]["seconds"] for count, row in timed)),
                f"{theirs / ours_seconds:.2f}" if compared else "",
            ]
        )
    return page(result, STAGE, table(["step", "calls that were measured", "their time", "ratio to the vendor"], rows))


def _rows_by_name(result: Mapping[str, Any]) -> dict[str, Row]:
    return {row["case"]["name"]: row for run in result["stages"] for row in rows_of(result, run["name"])}


def _ratio(total: Total) -> str:
    return f"{total.vendor_seconds / total.paired_seconds:.2f}" if total.paired_seconds else ""


def _row(kind: str, part: Total) -> list[str]:
    share = part.predicted_seconds / part.seconds if part.seconds else 0.0
    return [
        kind,
        str(part.calls),
        format_seconds(part.bytes_seconds),
        format_seconds(part.flop_seconds) if part.flop_seconds else "",
        format_seconds(part.floor_seconds),
        format_seconds(part.seconds),
        "" if not share else "all" if share == 1 else format_percent(share),
        f"{part.seconds / part.floor_seconds:.2f}" if part.floor_seconds else "",
        _ratio(part),
    ]

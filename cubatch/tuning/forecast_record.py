"""
Forecast: what was predicted of a network on a GPU, as a frozen record; JSON, table and picture of it.

The counterpart of results.TuningResult for a run that never took place, and in the same form, so that what shows one
shows the other; each form says that it is a prediction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from cubatch.hardware.facts import Device
from cubatch.measure.records import Candidate
from cubatch.tuning.results import SCHEMA, BatchSizeResult, Measurement
from cubatch.units import format_seconds

_SETTINGS = (
    "mode", "dtype", "objective", "tolerance", "library", "optimizer", "recompute", "batch_size",
    "fastest_batch_size", "largest_batch_size", "tied_with", "decided_by", "reasons", "notes",
)  # fmt: skip
_PREDICTED = (
    "batch_size", "status", "stop_reason", "reasons", "latency_seconds", "latency_interval", "samples_per_second",
    "throughput_interval", "predicted_seconds", "predicted_peak_bytes", "roofline_fraction",
)  # fmt: skip
_DEVICE_FACTS = ("name", "kind", "slug", "compute_capability", "num_sms", "memory_bytes")


@attrs.frozen(kw_only=True)
class PassShare:
    """
    What one pass of one layer takes of the step at the answer.

    Attributes:
        layer: Its name.
        pass_: "fprop", "dgrad" or "wgrad".
        seconds: Predicted time.
        share: Of the whole step, in [0, 1].
        algorithm: What should run: "128x128", "winograd 4x4", a kernel of ours, "bytes" of a layer that moves only.
        bound: "compute" or "memory": the roof that it lies under; None where a rate is not known.
        blocks: Of the grid of what runs; None of a layer that moves only.
    """

    layer: str
    pass_: str
    seconds: float
    share: float
    algorithm: str
    bound: str | None
    blocks: int | None


@attrs.frozen(kw_only=True)
class Forecast(BatchSizeResult):
    """
    The predicted answer, everything it rests on, and why; nothing of it was measured.

    Attributes:
        spec_name: What was predicted: the network's name, or the kind of layer.
        spec, input_shape: The same in full.
        device: The GPU that it is for.
        mode, dtype, objective, tolerance, library, optimizer, recompute: What was asked.
        limits: {"max_batch_size", "memory_bytes", "latency_seconds"}; None: none.
        candidates: The batch sizes looked at, ascending, with their reasons; `over_limit` ones do not fit.
        seconds: Predicted time of one step, by each batch size that fits.
        interval: (low, high) of it, which should hold 90 of 100 such steps.
        peak_bytes: The memory plan of each candidate, also of those that do not fit.
        roofline_seconds: The lower bound by the data sheet, by each batch size that fits, where it is known.
        anchors: What measurements it rests on, by their files or places in the list.
        batch_size: The answer, by the rule of `TuningResult.batch_size` on predicted medians.
        fastest_batch_size: The best predicted objective.
        largest_batch_size: The largest that fits by the plan.
        tied_with: Sizes that the model cannot tell from the fastest.
        decided_by: What kept the answer from being larger: as in a TuningResult (`decision.decide`), without "budget".
        reasons: Sentences for a person: why this size, what weighs most, what the figures rest on.
        passes: The step at the answer, the pass that takes longest first.
        notes: What the model has never seen of what was asked, and how sure it is, in sentences.
    """

    predicted: ClassVar[bool] = True
    spec_name: str
    spec: Mapping[str, Any] = attrs.field(hash=False)
    input_shape: tuple[int, ...]
    device: Device
    mode: str
    dtype: str
    objective: str
    tolerance: float
    library: str
    optimizer: str
    recompute: bool
    limits: Mapping[str, Any] = attrs.field(hash=False)
    candidates: tuple[Candidate, ...]
    seconds: Mapping[int, float] = attrs.field(hash=False)
    interval: Mapping[int, tuple[float, float]] = attrs.field(hash=False)
    peak_bytes: Mapping[int, int] = attrs.field(hash=False)
    roofline_seconds: Mapping[int, float] = attrs.field(hash=False)
    anchors: tuple[str, ...]
    batch_size: int
    fastest_batch_size: int
    largest_batch_size: int
    tied_with: tuple[int, ...]
    decided_by: str | None
    reasons: tuple[str, ...]
    passes: tuple[PassShare, ...]
    notes: tuple[str, ...]

    @property
    def samples_per_second(self) -> dict[int, float]:
        """Predicted throughput by batch size."""
        return {n: n / seconds for n, seconds in self.seconds.items()}

    @property
    def throughput_interval(self) -> dict[int, tuple[float, float]]:
        """(low, high) of the predicted throughput by batch size."""
        return {n: (n / high, n / low) for n, (low, high) in self.interval.items()}

    def why_not(self, batch_size: int) -> str:
        """Say why a candidate cannot be the answer; empty where it can."""
        limit = self.limits["latency_seconds"]
        if batch_size not in self.seconds:
            return "planned above the memory limit"
        if limit is not None and self.seconds[batch_size] > limit:
            return f"predicted above the latency limit of {format_seconds(limit)}"
        return ""

    @property
    def sizes(self) -> Mapping[int, Measurement]:
        """What is predicted of each batch size, ascending, in the form of a measurement without timings."""
        rates, spreads = self.samples_per_second, self.throughput_interval
        return {
            n: Measurement(
                batch_size=n,
                status="over_limit" if self.why_not(n) else "ok",
                stop_reason=self.why_not(n),
                reasons=candidate.reasons,
                latency_seconds=self.seconds.get(n),
                latency_interval=self.interval.get(n),
                samples_per_second=rates.get(n),
                throughput_interval=spreads.get(n),
                predicted_seconds=self.seconds.get(n),
                predicted_peak_bytes=self.peak_bytes[n],
                roofline_fraction=self.roofline_seconds[n] / self.seconds[n] if n in self.roofline_seconds else None,
            )
            for candidate in self.candidates
            for n in (candidate.batch_size,)
        }

    @property
    def device_facts(self) -> Mapping[str, Any]:
        """Name, kind and other facts of the GPU."""
        facts = self.device.to_mapping()
        return {name: facts[name] for name in _DEVICE_FACTS}

    def to_mapping(self) -> dict[str, Any]:
        """
        Return the forecast as plain mappings and lists, in the form of a tuning result's JSON.

        `"predicted": true` marks it, entries of "measurements" have the status "predicted" or "over_limit", and
        what only a run can know is missing, so that nobody takes it for a measurement.
        """
        mapping = {
            "schema": SCHEMA,
            "predicted": True,
            "spec_name": self.spec_name,
            "anchors": self.anchors,
            "spec": dict(self.spec),
            "input_shape": self.input_shape,
            "device": self.device_facts,
            "limits": dict(self.limits),
            **{name: getattr(self, name) for name in _SETTINGS},
            "passes": [
                {name.rstrip("_"): value for name, value in attrs.asdict(share).items()} for share in self.passes
            ],
            "measurements": [
                {name: getattr(m, name) for name in _PREDICTED}
                | {"status": m.status if m.status == "over_limit" else "predicted"}
                for m in self.sizes.values()
            ],
        }
        plain: dict[str, Any] = json.loads(json.dumps(mapping, allow_nan=False))
        return plain

    def to_json(self, *, indent: int | None = None) -> str:
        """Write the forecast as JSON: `to_mapping`."""
        return json.dumps(self.to_mapping(), ensure_ascii=False, indent=indent)

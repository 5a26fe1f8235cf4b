"""
Forecast: the prediction for a network on a GPU, as a frozen record with JSON, table and figure.

It has the form of a TuningResult, so that both are shown by the same code; each view marks it as a prediction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from cubatch.hardware.facts import Device
from cubatch.measure.records import Candidate
from cubatch.tuning.results import SCHEMA, BatchSizeResult, Measurement
from cubatch.units import format_seconds

_SETTINGS = (
    "mode", "dtype", "objective", "tolerance", "library", "optimizer", "recompute", "experimental", "batch_size",
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
    A pass of a layer in the predicted step of the recommended batch size.

    Attributes:
        layer: The layer's name, or the operator's of a module.
        pass_: "fprop", "dgrad" or "wgrad"; of other operators of a module "forward", "backward" or "optimizer".
        seconds: Predicted seconds in a step.
        share: Share of the predicted time of all passes, in [0, 1].
        algorithm: Predicted algorithm: "128x128", "winograd 4x4", a cubatch kernel, or "bytes" of a layer that only
            moves data.
        bound: "compute" or "memory", the limiting roof; None if a rate is unknown.
        blocks: Blocks of the grid; None for a layer that only moves data.
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
    A predicted recommendation, with predicted times, memory and reasons; nothing was measured.

    Attributes:
        spec_name: The network's name, the kind of layer, or the module's class.
        spec, input_shape: The spec as a mapping, and the extents (h, w, c) of a sample; of a module its name, and None.
        device: The GPU.
        mode, dtype, objective, tolerance, library, optimizer, recompute, experimental, accumulate: The request.
            `recompute` is None for a module.
        limits: {"max_batch_size", "memory_bytes", "latency_seconds"}; None: no limit.
        candidates: The batch sizes, ascending, with their reasons; `over_limit` ones do not fit.
        seconds: Predicted seconds of a step, by each batch size that fits.
        interval: 90 % interval (low, high) of these seconds, by each batch size that fits.
        peak_bytes: Peak bytes by the memory plan of each candidate, also of candidates that do not fit.
        roofline_seconds: Lower bound of the seconds by the data sheet, by each batch size that fits, if known.
        anchors: Origins of the measurements that correct the prediction: files or places in the list.
        batch_size: The recommendation, by the rule of `TuningResult.batch_size` on predicted medians.
        fastest_batch_size: The size with the best predicted objective.
        largest_batch_size: The largest that fits by the memory plan.
        tied_with: Sizes that the model cannot tell apart from the fastest. They do not decide the recommendation.
        decided_by: As in a TuningResult (`decision.decide`), without "budget"; None if no limit was met.
        reasons: Sentences for a user.
        passes: The passes of the layers in a step of the recommended size, the longest first.
        notes: Sentences about the limits of the model for this request.
    """

    predicted: ClassVar[bool] = True
    spec_name: str
    spec: Mapping[str, Any] = attrs.field(hash=False)
    input_shape: tuple[int, ...] | None
    device: Device
    mode: str
    dtype: str
    objective: str
    tolerance: float
    library: str
    optimizer: str
    recompute: bool | None
    experimental: tuple[str, ...] = ()
    accumulate: int = 1
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
        """Predicted samples per second, by batch size."""
        return {n: n * self.accumulate / seconds for n, seconds in self.seconds.items()}

    @property
    def throughput_interval(self) -> dict[int, tuple[float, float]]:
        """90 % interval (low, high) of the predicted samples per second, by batch size."""
        samples = {n: n * self.accumulate for n in self.interval}
        return {n: (samples[n] / high, samples[n] / low) for n, (low, high) in self.interval.items()}

    def why_not(self, batch_size: int) -> str:
        """Return why a candidate cannot be recommended; empty if it can."""
        limit = self.limits["latency_seconds"]
        if batch_size not in self.seconds:
            return "planned above the memory limit"
        if limit is not None and self.seconds[batch_size] > limit:
            return f"predicted above the latency limit of {format_seconds(limit)}"
        return ""

    @property
    def sizes(self) -> Mapping[int, Measurement]:
        """The predicted time and memory of each batch size as a `Measurement`, ascending."""
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
        """Facts of the GPU: "name", "kind", "slug", "compute_capability", "num_sms" and "memory_bytes"."""
        facts = self.device.to_mapping()
        return {name: facts[name] for name in _DEVICE_FACTS}

    def to_mapping(self) -> dict[str, Any]:
        """
        Return the forecast as plain mappings and lists, in the form of a tuning result's JSON.

        `"predicted": true` marks it. Entries of "measurements" have the status "predicted" or "over_limit", and lack
        the keys that only a run can fill.
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
            "shares": self.shares,
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
        """Return the forecast as JSON text, in the form of `to_mapping`; `indent` None: on one line."""
        return json.dumps(self.to_mapping(), ensure_ascii=False, indent=indent)


def alike(passes: Sequence[PassShare]) -> list[list[PassShare]]:
    """Return groups of passes with equal predictions, the group with the most seconds first."""
    groups: dict[tuple[object, ...], list[PassShare]] = {}
    for share in passes:
        kind = share.pass_, share.algorithm, share.blocks, share.bound, share.seconds
        groups.setdefault(kind, []).append(share)
    return sorted(groups.values(), key=lambda group: -sum(share.share for share in group))

"""A tuning result written by hand, in the JSON form of schema 1, for the tests of what prints it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.tuning.results import TuningResult


def measurement(batch_size: int, seconds: float | None = None, status: str = "ok", **more: Any) -> dict[str, Any]:
    """One measurement; without a time, one that never ran."""
    rate = None if seconds is None else batch_size / seconds
    return {
        "batch_size": batch_size,
        "status": status,
        "reasons": ["power of two"],
        "latency_seconds": seconds,
        "latency_interval": None if seconds is None else [0.98 * seconds, 1.02 * seconds],
        "samples_per_second": rate,
        "throughput_interval": None if rate is None else [0.98 * rate, 1.02 * rate],
        "timings_seconds": [] if seconds is None else [seconds] * 5,
        "stop_reason": "",
        "throttled": 0,
        "flops_per_second": None,
        "roofline_fraction": None,
        "sm_clock_mhz": None,
        "joules_per_sample": None,
        "peak_bytes": None,
        "peak_device_bytes": None,
        "predicted_peak_bytes": batch_size * 2**20,
        "predicted_seconds": None,
        "occupancy": None,
        "fill": None,
        "layers": [],
    } | more


def tuned(**more: Any) -> dict[str, Any]:
    """Five sizes: 1000, 2000, 3000 samples/s, a plateau of 3020, and one that ran out of memory."""
    return {
        "schema": 1,
        "created": "2026-11-20T08:00:00Z",
        "spec": {"name": "tiny-net"},
        "input_shape": [28, 28, 1],
        "mode": "training",
        "dtype": "float32",
        "objective": "throughput",
        "tolerance": 0.01,
        "optimizer": "sgd",
        "library": "im2col",
        "recompute": False,
        "limits": {"max_batch_size": None, "memory_bytes": 2**30, "latency_seconds": None},
        "budget_seconds": 60.0,
        "seconds_spent": 12.5,
        "seed": 0,
        "l2": "warm",
        "device": {
            "name": "Test GPU",
            "kind": "cuda",
            "compute_capability": [7, 0],
            "num_sms": 80,
            "memory_bytes": 2**34,
        },
        "environment": {"cubatch": "0.1.0", "python": "3.11.0", "numpy": "2.0", "blas": "", "cupy": None},
        "batch_size": 64,
        "fastest_batch_size": 128,
        "largest_batch_size": 200,
        "largest_measured": 128,
        "tied_with": [64],
        "decided_by": "plateau",
        "reasons": ["The curve is flat from batch 64 on."],
        "measurements": [
            measurement(16, 16 / 1000, "dropped"),
            measurement(32, 32 / 2000),
            measurement(64, 64 / 3000, reasons=["coulom n=1", "crest 2 of conv3_2"]),
            measurement(128, 128 / 3020),
            measurement(256, status="out_of_memory", stop_reason="needs 1.20 GiB, 1.00 GiB may be used"),
        ],
    } | more


def result_of(**more: Any) -> TuningResult:
    """The same as a record."""
    return TuningResult.from_mapping(tuned(**more))


def about(
    rates: Mapping[int, float], *, few: Sequence[int] = (), wide: Sequence[int] = (), **more: Any
) -> dict[str, Any]:
    """Lay out sizes by their samples per second, a few of them with 2 timings, others known to ± 30 % only."""
    measurements = []
    for n, rate in rates.items():
        spread = 0.3 if n in wide else 0.001
        facts: dict[str, Any] = {"throughput_interval": [(1 - spread) * rate, (1 + spread) * rate]}
        if n in few:
            facts = {"throughput_interval": None, "latency_interval": None, "timings_seconds": [n / rate] * 2}
        measurements.append(measurement(n, n / rate, **facts))
    best = max(rates, key=lambda n: rates[n])
    return tuned(**{"measurements": measurements, "fastest_batch_size": best, "batch_size": best, "tied_with": [],
                    "decided_by": "peak"} | more)  # fmt: skip

"""Predictions written by hand, and the lines of a table that is made of them."""

from __future__ import annotations

from typing import Any

from cubatch.hardware.facts import Device
from cubatch.measure.records import Candidate
from cubatch.tuning.forecast_record import Forecast, PassShare


def one_pass(layer, seconds, share, **more):
    """A pass of a layer."""
    facts = {"pass_": "fprop", "algorithm": "128x128", "blocks": 100, "bound": "compute"} | more
    return PassShare(layer=layer, seconds=seconds, share=share, **facts)


def predicted(name="Test GPU", rates=((16, 1000), (32, 2000), (64, 2048)), factor=1.25, batch_size=32, **more):
    """A prediction by hand: samples/s by batch size, with intervals a factor to either side; 256 does not fit."""
    seconds = {n: n / rate for n, rate in rates}
    sizes = [*seconds, 256]
    facts: dict[str, Any] = {
        "spec_name": "tiny-net",
        "spec": {"name": "tiny-net"},
        "input_shape": (28, 28, 1),
        "device": Device(name=name, slug=name.lower().replace(" ", "-"), num_sms=80),
        "mode": "training",
        "dtype": "float32",
        "objective": "throughput",
        "tolerance": 0.01,
        "library": "vendor",
        "optimizer": "sgd",
        "recompute": False,
        "limits": {"max_batch_size": None, "memory_bytes": 2**30, "latency_seconds": None},
        "candidates": tuple(Candidate(n, ("power of two",), over_limit=n == 256) for n in sizes),
        "seconds": seconds,
        "interval": {n: (taken / factor, taken * factor) for n, taken in seconds.items()},
        "peak_bytes": {n: n * 2**20 for n in sizes},
        "roofline_seconds": {},
        "anchors": (),
        "batch_size": batch_size,
        "fastest_batch_size": max(rates, key=lambda pair: pair[1])[0],
        "largest_batch_size": 200,
        "tied_with": (),
        "decided_by": "plateau",
        "reasons": ("Predicted, not measured: use batch size 32.", "The predicted curve is flat from batch 32 on."),
        "notes": ("Predicted from what others published.",),
        "passes": (
            one_pass("conv1", 0.010, 0.625),
            one_pass("conv2", 0.0055, 0.34375, bound="memory", algorithm="bytes", blocks=None),
            one_pass("fc", 0.0005, 0.03125),
        ),
    }
    return Forecast(**(facts | more))


def lines_of(text):
    """The lines of the first table, without the marks before them."""
    lines = text.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("-")) + 1
    return [line.lstrip("→▲≈ ") for line in lines[first : lines.index("", first)]]


def fastest_first(found):
    """Sort predictions by what their objective looks at, at each one's answer, as `compare` gives them."""

    def value(result):
        n = result.batch_size
        return result.seconds[n] if result.objective == "latency" else -result.samples_per_second[n]

    return sorted(found, key=value)

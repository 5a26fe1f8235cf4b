"""Predictions written by hand, in the JSON form of schema 1, and the lines of a table that is made of them."""

from __future__ import annotations

from tests.unit.tuned import measurement, tuned


def one_pass(layer, seconds, share, **more):
    """A pass of a layer in the JSON form."""
    return {
        "layer": layer, "pass": "fprop", "seconds": seconds, "share": share, "algorithm": "128x128", "blocks": 100,
        "bound": "compute",
    } | more  # fmt: skip


def predicted(name="Test GPU", rates=((16, 1000), (32, 2000), (64, 2048)), factor=1.25, batch_size=32, **more):
    """A prediction by hand: samples/s by batch size, with intervals a factor to either side."""
    measurements = [
        measurement(
            n, n / rate, "predicted", latency_interval=[n / rate / factor, n / rate * factor],
            throughput_interval=[rate / factor, rate * factor],
        )
        for n, rate in rates
    ]  # fmt: skip
    facts = {
        "predicted": True,
        "device": {"name": name, "slug": name.lower().replace(" ", "-"), "num_sms": 80},
        "measurements": [*measurements, measurement(256, status="over_limit")],
        "batch_size": batch_size,
        "fastest_batch_size": 64,
        "library": "vendor",
        "tied_with": [],
        "reasons": ["The predicted curve is flat from batch 32 on."],
        "notes": ["Predicted from what others published."],
        "passes": [
            one_pass("conv1", 0.010, 0.625),
            one_pass("conv2", 0.0055, 0.34375, bound="memory", algorithm="bytes", blocks=None),
            one_pass("fc", 0.0005, 0.03125),
        ],
    }
    return tuned(**{**facts, **more})


def lines_of(text):
    """The lines of the first table, without the marks before them."""
    lines = text.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("-")) + 1
    return [line.lstrip("→▲≈ ") for line in lines[first : lines.index("", first)]]


def fastest_first(found):
    """Sort predictions by what their objective looks at, at each one's answer, as `compare` gives them."""

    def value(result):
        (answer,) = [one for one in result["measurements"] if one["batch_size"] == result["batch_size"]]
        return answer["latency_seconds"] if result["objective"] == "latency" else -answer["samples_per_second"]

    return sorted(found, key=value)

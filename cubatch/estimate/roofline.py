"""
Roofline of a layer pass on a device: the least time by arithmetic and by bytes.

A pass takes at least its arithmetic at the peak rate and at least its bytes at the bandwidth; the larger bound counts.
It ranks passes and orders batch sizes before anything is measured.  It is a lower bound, not a forecast.
"""

from __future__ import annotations

from collections import Counter

from cubatch.estimate.scheduled import scheduled_passes
from cubatch.hardware.arithmetic import peak_flops_per_second
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.network.graph import Spec, cached
from cubatch.network.layer import Layer, extents
from cubatch.network.passes import Pass


def layer_seconds(
    layer: Layer, pass_: Pass, batch_size: int, device: Device, dtype: str, *, more: int = 0
) -> float | None:
    """
    Return the roofline of one pass of a layer: the least seconds that its FLOP and bytes take.

    seconds = max(flops / peak, bytes / bandwidth), with each input, output and parameter moved once
    (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009).

    It ignores launches, wave quantization, tile edges, other instructions, repeated reads, and data that stays in the
    L2 between layers.  All but the last make the real pass slower.  This is safe for ranking the passes of one network
    on one device, since the large passes are the least affected. `more` are further elements per sample that the pass
    moves for fused layers.

    Returns:
        float | None: Seconds; 0.0 for a pass that moves nothing; None if a rate that is needed is unknown.
    """
    bounds = _roofs(layer, pass_, batch_size, device, dtype, more=more)
    return None if bounds is None else max(bounds)


def bound(layer: Layer, pass_: Pass, batch_size: int, device: Device, dtype: str) -> str | None:
    """Return the resource that bounds a pass by the roofline: "compute" or "memory"; None if a rate is unknown."""
    bounds = _roofs(layer, pass_, batch_size, device, dtype)
    return None if bounds is None else ("compute" if bounds[0] > bounds[1] else "memory")


def roofline_seconds(
    spec: Spec, batch_size: int, device: Device, mode: str = "inference", dtype: str = "float32", *,
    library: str = "cubatch",
) -> float | None:  # fmt: skip
    """
    Return the roofline of one step in seconds: the sum over its passes of `layer_seconds`.

    It is None if a rate that is needed is unknown, as on a CPU. Elements that a pass reads for a fused layer count, and
    so do sums of gradients. The library decides which layers are fused. A training step leaves out the loss and the
    optimizer, which take a small share of the time of a large batch.
    """
    total = 0.0
    for (layer, pass_, more), count in _distinct_passes(spec, mode, library).items():
        seconds = (
            _moved_seconds(batch_size * more, device, dtype)
            if layer is None
            else layer_seconds(layer, pass_, batch_size, device, dtype, more=more)
        )
        if seconds is None:
            return None
        total += count * seconds
    return total


@cached
def _distinct_passes(spec: Spec, mode: str, library: str) -> Counter[tuple[Layer | None, Pass, int]]:
    """
    Return the occurrences of each (layer, pass, further elements per sample) in a step; the layer is None if fused.

    The result is cached, since all batch sizes share it.
    """
    return Counter(
        (extents(at.node.layer) if at.runs else None, at.pass_, at.more)
        for at in scheduled_passes(spec, mode, library)
        if at.runs or at.more
    )


def _roofs(
    layer: Layer, pass_: Pass, batch_size: int, device: Device, dtype: str, *, more: int = 0
) -> tuple[float, float] | None:
    peak, flops = peak_flops_per_second(device, dtype), layer.pass_flops(pass_, batch_size)
    moving = _moved_seconds(layer.traffic(pass_, batch_size) + batch_size * more, device, dtype)
    if moving is None or (flops and peak is None):
        return None
    return flops / peak if peak else 0.0, moving


def _moved_seconds(elements: int, device: Device, dtype: str) -> float | None:
    bandwidth = device.peak_bytes_per_second
    return None if bandwidth is None else elements * BYTES_PER_ELEMENT[dtype] / bandwidth

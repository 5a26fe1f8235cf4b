"""
Seconds of a layer pass on a device: the roofline.

A pass can be no faster than its arithmetic at the device's peak rate, and no faster than its
bytes at the device's bandwidth; the larger of the two is the time given here.  It ranks passes and
orders batch sizes before anything was measured; it is a lower bound, not a forecast.
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
    Bound the time of one pass of a layer from below by the roofline.

    seconds = max(flops / peak, bytes / bandwidth), with each input, output and parameter moved once
    (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009).

    Ignored: launches, how blocks divide among SMs, what a kernel loses to its tile's edges and to its own
    instructions, re-reading what does not stay in a cache, and what stays in the L2 between layers.
    All but the last make the real pass slower.  That is safe where it is used, to rank the
    passes of one network on one device, since the large passes that decide are the least affected.

    Args:
        layer: With its extents known.
        pass_: Which product.
        batch_size: Samples.
        device: Its peaks count.
        dtype: Of storage and arithmetic.
        more: Elements of a sample that it moves for its neighbours.

    Returns:
        float | None: Seconds; 0.0 for a pass that moves nothing; None where a rate that counts is not known.

    Example:
        >>> from cubatch.network.layers import ReLU
        >>> card = Device(name="card", peak_bytes_per_second=1e9)
        >>> layer_seconds(ReLU(h=10, w=10, c=10), Pass.FPROP, 125, card, "float32")
        0.001
    """
    found = _roofs(layer, pass_, batch_size, device, dtype, more)
    return None if found is None else max(found)


def bound(layer: Layer, pass_: Pass, batch_size: int, device: Device, dtype: str) -> str | None:
    """
    Return which roof a pass lies under: "compute", "memory", or None where a rate is not known.

    Example:
        >>> from cubatch.network.layers import Linear
        >>> card = Device(name="card", peak_bytes_per_second=1e9, peak_flops_per_second={"float32": 1e11})
        >>> square = Linear(c=1000, k=1000)
        >>> bound(square, Pass.FPROP, 1, card, "float32"), bound(square, Pass.FPROP, 1000, card, "float32")
        ('memory', 'compute')
    """
    found = _roofs(layer, pass_, batch_size, device, dtype)
    return None if found is None else ("compute" if found[0] > found[1] else "memory")


def roofline_seconds(
    spec: Spec, batch_size: int, device: Device, mode: str = "inference", dtype: str = "float32"
) -> float | None:
    """
    Bound the time of one step from below: the sum of its passes, each by `layer_seconds`.

    Layers that a neighbour's operation does add to that what they make it read; sums of gradients count wherever they
    are made.  Beyond what a single pass ignores, a training step leaves out the loss and the optimiser, which are
    small against the passes unless the batch is.

    Args:
        spec: A layer or network.
        batch_size: Samples.
        device: Its peaks count.
        mode: "inference" or "training".
        dtype: Of storage and arithmetic.

    Returns:
        float | None: Seconds; None where a rate that counts is not known, as on a CPU.
    """
    total = 0.0
    for (layer, pass_, more), count in _distinct_passes(spec, mode).items():
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
def _distinct_passes(spec: Spec, mode: str) -> Counter[tuple[Layer | None, Pass, int]]:
    """Count the passes that are equal, without layer where it does not run; cached, as all batch sizes share them."""
    return Counter(
        (extents(at.node.layer) if at.runs else None, at.pass_, at.more)
        for at in scheduled_passes(spec, mode)
        if at.runs or at.more
    )


def _roofs(
    layer: Layer, pass_: Pass, batch_size: int, device: Device, dtype: str, more: int = 0
) -> tuple[float, float] | None:
    """Seconds of the arithmetic and seconds of the bytes."""
    peak, flops = peak_flops_per_second(device, dtype), layer.pass_flops(pass_, batch_size)
    moving = _moved_seconds(layer.traffic(pass_, batch_size) + batch_size * more, device, dtype)
    if moving is None or (flops and peak is None):
        return None
    return flops / peak if peak else 0.0, moving


def _moved_seconds(elements: int, device: Device, dtype: str) -> float | None:
    """Seconds of so many elements at the device's bandwidth."""
    bandwidth = device.peak_bytes_per_second
    return None if bandwidth is None else elements * BYTES_PER_ELEMENT[dtype] / bandwidth

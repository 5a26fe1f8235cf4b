"""
What each pass of a network puts on the SMs at each batch size that was measured: the rows of `Measurement.layers`.

Blocks and occupancy are arithmetic on the kernel that runs and on what is recorded of it, not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cubatch import timing
from cubatch.hardware import Device
from cubatch.layer import Layer, Pass, extents
from cubatch.outlook import predicted
from cubatch.residency import recorded_figures
from cubatch.spec import Spec
from cubatch.teeth import Choose, on_sms

FACTS = ("kernel", "slices", "blocks", "blocks_per_sm", "occupancy", "busiest_sm_blocks", "fill")
"""What a row has of `teeth.on_sms`."""


def layer_rows(
    spec: Spec,
    batch_sizes: Sequence[int],
    device: Device,
    *,
    mode: str,
    dtype: str,
    recompute: bool,
    choose: Choose,
) -> dict[int, list[dict[str, Any]]]:
    """
    Say for each batch size how the passes that our tiled kernels compute fall on the SMs.

    Args:
        spec: A layer or network.
        batch_sizes: Samples, at least one size.
        device: A GPU.
        mode, dtype, recompute: As for `autotune`.
        choose: Gives the kernel of a product; asked for each once, from the first size to the last.

    Returns:
        dict: By batch size, a row for each such layer and pass in the order of the network: `layer`, `pass`, FACTS,
        and `predicted_seconds`, None where the device's facts do not allow a prediction.

    Example:
        >>> from cubatch import models
        >>> from cubatch.catalogue import find
        >>> from cubatch.teeth import first_ranked
        >>> how = {"mode": "inference", "dtype": "float32", "recompute": False, "choose": first_ranked}
        >>> rows = layer_rows(models.build("go-net"), [64], find("v100-sxm2-16gb"), **how)[64]
        >>> len(rows), rows[0]["layer"], rows[0]["blocks_per_sm"], rows[0]["occupancy"]
        (80, 'conv1', 3, 0.1875)
    """
    step = predicted(spec, batch_sizes, device, mode=mode, dtype=dtype, library="cubatch", recompute=recompute)
    work, unknown = timing.layer_passes(spec, mode), [None] * len(batch_sizes)
    expected = [unknown] * len(work) if step is None else [item.seconds.tolist() for item in step.passes]
    distinct: dict[tuple[Layer, Pass], int] = {}
    passes = [
        (node.name, pass_, distinct.setdefault((extents(node.layer), pass_), len(distinct)), seconds)
        for (node, pass_), seconds in zip(work, expected, strict=True)
        if node.layer.gemms(pass_, 1)
    ]
    budget, rows = recorded_figures(), dict[int, list[dict[str, Any]]]()
    for column, size in enumerate(batch_sizes):
        found = [
            on_sms(layer, pass_, size, device=device, dtype=dtype, library="cubatch", budget=budget, choose=choose)
            for layer, pass_ in distinct
        ]
        facts = [{fact: one[fact] for fact in FACTS} for one in found]
        rows[size] = [
            {"layer": name, "pass": pass_.value, **facts[i], "predicted_seconds": seconds[column]}
            for name, pass_, i, seconds in passes
            if facts[i]["kernel"] is not None
        ]
    return rows

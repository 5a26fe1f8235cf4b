"""The distribution of each pass of a network over the SMs: tiles, blocks, the busiest SM."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs

from cubatch.estimate.batch_sweep import spread
from cubatch.estimate.block_counts import TILE, Blocks, num_blocks
from cubatch.estimate.expected import predicted
from cubatch.hardware.facts import Device
from cubatch.kernels import cost_model
from cubatch.kernels.problem import Problem, problem_of
from cubatch.kernels.ranking import Choose, first_ranked
from cubatch.kernels.resources import resident
from cubatch.kernels.variant import Kernel
from cubatch.network import graph
from cubatch.network.layer import Layer, extents
from cubatch.network.passes import Pass
from cubatch.workload import Workload


def first_grid(
    layer: Layer, pass_: Pass, batch_size: int, *, device: Device, dtype: str, library: str
) -> tuple[tuple[int, int], int | None, Blocks]:
    """
    Return tile and blocks of a pass, by the cubatch kernel ranked first or by the vendor's usual tile.

    Args:
        batch_size: Samples; for small batches smaller tiles are ranked first.
        library: "cubatch" or "im2col", which stands for the vendor.

    Returns:
        Rows and columns of the tile; rows of outputs in a tile of Winograd's algorithm (None for others); a
        function from a batch size to the number of blocks.

    Example:
        >>> from cubatch.network.layers import Conv2d
        >>> conv = Conv2d(h=8, w=8, c=128, k=128, r=3, s=3, pad=1)
        >>> v100 = Device(name="V100", compute_capability=(7, 0), num_sms=80)
        >>> tile, outputs, blocks = first_grid(
        ...     conv, Pass.FPROP, 4096, device=v100, dtype="float32", library="cubatch"
        ... )
        >>> tile, outputs, blocks(96)
        ((256, 128), 4, 72)
    """
    chosen = _chosen(layer, pass_, batch_size, device=device, dtype=dtype, library=library)
    if chosen is None:
        return TILE, None, functools.partial(num_blocks, layer, pass_)
    kernel = chosen[1]

    def blocks(size: int) -> int:
        problem = problem_of(layer, pass_, size, dtype)
        return 0 if problem is None else cost_model.blocks(problem, kernel)

    return _tile_of(kernel), kernel.winograd, blocks


def on_sms(
    layer: Layer,  # layer, pass_, batch_size, device, dtype, library: as for `first_grid`; the device's SMs are known
    pass_: Pass,
    batch_size: int,
    *,
    device: Device,
    dtype: str,
    library: str,
    choose: Choose = first_ranked,  # chooses the kernel of a problem
) -> dict[str, Any]:
    """
    Return the distribution of a pass's blocks over the SMs of a GPU.

    Returns:
        dict: `kernel` by name, or None; its `tile`, "128x128" without one; `blocks_per_sm` that are resident, 1 for the
        vendor's kernels; `occupancy`; and the attributes of `Spread`. Unknown values are None.

    Example:
        >>> from cubatch.hardware.catalogue import find
        >>> from cubatch.network.layers import Conv2d
        >>> go = Conv2d(h=19, w=19, c=128, k=128, r=3, s=3, pad=1)
        >>> facts = on_sms(go, Pass.FPROP, 29, device=find("v100-sxm2-16gb"), dtype="float32", library="im2col")
        >>> facts["blocks"], facts["waves"], facts["last_wave"]
        (82, 2, 0.025)
    """
    chosen = _chosen(layer, pass_, batch_size, device=device, dtype=dtype, library=library, choose=choose)
    problem, kernel, slices = (None, None, 1) if chosen is None else chosen
    tile = _tile_of(kernel)
    occupied = None if kernel is None else resident(kernel, device.compute_capability)
    if problem is None or kernel is None:
        blocks = num_blocks(layer, pass_, batch_size, tile)
    else:
        blocks = slices * cost_model.blocks(problem, kernel)
    blocks_per_sm = 1 if library == "im2col" else None if occupied is None else occupied.blocks_per_sm
    return {
        "kernel": None if kernel is None else kernel.name,
        "tile": f"{tile[0]}x{tile[1]}",
        "blocks_per_sm": blocks_per_sm,
        "occupancy": None if occupied is None else occupied.occupancy,
        **attrs.asdict(spread(blocks, device.num_sms or 1, blocks_per_sm=blocks_per_sm or 0, slices=slices)),
    }


def _tile_of(kernel: Kernel | None) -> tuple[int, int]:
    return TILE if kernel is None or kernel.tile is None else (kernel.tile.m, kernel.tile.n)


def _chosen(
    layer: Layer,
    pass_: Pass,
    batch_size: int,
    *,
    device: Device,
    dtype: str,
    library: str,
    choose: Choose = first_ranked,
) -> tuple[Problem, Kernel, int] | None:
    problem = problem_of(layer, pass_, batch_size, dtype) if library == "cubatch" else None
    if problem is None or device.num_sms is None or device.compute_capability is None:
        return None
    chosen = choose(problem, device)
    return problem, chosen.kernel, chosen.slices


FACTS = ("kernel", "slices", "blocks", "blocks_per_sm", "occupancy", "busiest_sm_blocks", "fill")
"""Keys of `on_sms` in a row."""


def layer_rows(work: Workload, batch_sizes: Sequence[int], choose: Choose) -> dict[int, list[dict[str, Any]]]:
    """
    Return the distribution over the SMs of all passes that tiled kernels compute, for each batch size.

    Args:
        work: The workload, on a GPU with `library="cubatch"`.
        batch_sizes: At least one batch size.
        choose: Chooses the kernel of a problem, once for each problem and in the order of the sizes.

    Returns:
        dict: By batch size, a row for each of these passes in the order of the network: `layer`, `pass`, FACTS, and
        `predicted_seconds`, None if the device's facts do not suffice.

    Example:
        >>> from cubatch.kernels.ranking import first_ranked
        >>> work = Workload.of("go-net", "v100-sxm2-16gb", mode="inference", dtype="float32")
        >>> rows = layer_rows(work, [64], first_ranked)[64]
        >>> len(rows), rows[0]["layer"], rows[0]["blocks_per_sm"], rows[0]["occupancy"]
        (80, 'conv1', 2, 0.25)
    """
    step = predicted(work, batch_sizes)
    done, unknown = graph.layer_passes(work.spec, work.mode), [None] * len(batch_sizes)
    expected = [unknown] * len(done) if step is None else [item.seconds.tolist() for item in step.passes]
    distinct: dict[tuple[Layer, Pass], int] = {}
    passes = [
        (node.name, pass_, distinct.setdefault((extents(node.layer), pass_), len(distinct)), seconds)
        for (node, pass_), seconds in zip(done, expected, strict=True)
        if node.layer.gemms(pass_, 1)
    ]
    rows = dict[int, list[dict[str, Any]]]()
    on = functools.partial(on_sms, device=work.device, dtype=work.dtype, library="cubatch", choose=choose)
    for column, size in enumerate(batch_sizes):
        figures = [on(layer, pass_, size) for layer, pass_ in distinct]
        facts = [{fact: each[fact] for fact in FACTS} for each in figures]
        rows[size] = [
            {"layer": name, "pass": pass_.value, **facts[i], "predicted_seconds": seconds[column]}
            for name, pass_, i, seconds in passes
            if facts[i]["kernel"] is not None
        ]
    return rows

"""
The teeth of the saw: batch sizes at which the blocks of a layer fill the SMs evenly.

Two rules find them.  Coulom's formula knows a convolution's input only; crests are searched in the
number of blocks that a pass of a layer really has, by the tile of the kernel that runs it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from cubatch import timing, variants
from cubatch.hardware import Device
from cubatch.kernel import Kernel
from cubatch.kernel_budget import Budget
from cubatch.kernel_plan import problem_of
from cubatch.kinds import Conv2d
from cubatch.layer import MAX_EXTENT, Layer, Pass, extents
from cubatch.residency import Needs, recorded
from cubatch.spec import Node, Spec, as_network
from cubatch.tiling import TILE, Blocks, largest_batch, num_blocks, products, tiles
from cubatch.variants import Problem
from cubatch.waves import Occupancy, busiest_sm_blocks, coulom_batch_size, count_waves, fill

TOP = 3
STEPS = 8
PASSED = 2

Choose = Callable[[Problem, Device], Kernel]
"""Gives the kernel that runs a product on a device."""


@attrs.frozen
class Proposal:
    """A batch size with one reason; reasons of one kind take one turn when the ladder is cut."""

    batch_size: int
    kind: str
    reason: str


def first_ranked(problem: Problem, device: Device) -> Kernel:
    """Choose the kernel that is ranked first."""
    return variants.ranked(problem, device)[0]


def first_tile(
    layer: Layer, pass_: Pass, batch_size: int, *, device: Device, dtype: str, library: str
) -> tuple[int, int]:
    """
    Give the tile of a pass: that of our kernel which is ranked first, else the vendor's usual 128 x 128.

    Args:
        layer: The layer.
        pass_: Which of its passes.
        batch_size: Samples; small ones rank smaller tiles first.
        device: A GPU.
        dtype: Storage of the elements.
        library: "cubatch" or "im2col".

    Example:
        >>> conv = Conv2d(h=8, w=8, c=128, k=128, r=3, s=3, pad=1)
        >>> v100 = Device(name="V100", compute_capability=(7, 0), num_sms=80)
        >>> first_tile(conv, Pass.FPROP, 4096, device=v100, dtype="float32", library="cubatch")
        (256, 128)
    """
    return _tile_of(_chosen(layer, pass_, batch_size, device=device, dtype=dtype, library=library))


def on_sms(
    layer: Layer,
    pass_: Pass,
    batch_size: int,
    *,
    device: Device,
    dtype: str,
    library: str,
    budget: Budget,
    choose: Choose = first_ranked,
) -> dict[str, Any]:
    """
    Say how the blocks of a pass fall on the SMs of a GPU.

    Args:
        layer, pass_, batch_size, device, dtype, library: As for `first_tile`; the device's SMs are known.
        budget: What is recorded of our kernels; see `residency.recorded_figures`.
        choose: Says which of them runs.

    Returns:
        dict: `kernel` that runs, or None; its `tile`, "128x128" where there is none; `slices` of the depth;
        `blocks` of all slices, as launched; `blocks_per_sm` that are resident, one for the vendor's kernels and None
        where nothing is recorded, as their `occupancy`; `waves` of those and how full the `last_wave` is, or None;
        `busiest_sm_blocks` and `fill`.

    Example:
        >>> from cubatch.catalogue import find
        >>> go = Conv2d(h=19, w=19, c=128, k=128, r=3, s=3, pad=1)
        >>> v100, budget = find("v100-sxm2-16gb"), Budget("", {}, {})
        >>> facts = on_sms(go, Pass.FPROP, 29, device=v100, dtype="float32", library="im2col", budget=budget)
        >>> facts["blocks"], facts["waves"], facts["last_wave"]
        (82, 2, 0.025)
    """
    num_sms = device.num_sms or 1
    chosen = _chosen(layer, pass_, batch_size, device=device, dtype=dtype, library=library, choose=choose)
    tile, slices = _tile_of(chosen), 1 if chosen is None else variants.slices(*chosen, device)
    held = None if chosen is None else _held(chosen[1], device, budget)
    blocks = num_blocks(layer, pass_, batch_size, tile) if chosen is None else slices * variants.blocks(*chosen)
    resident = 1 if library == "im2col" else None if held is None else held.blocks_per_sm
    waves = count_waves(blocks, blocks_per_sm=resident, num_sms=num_sms) if resident else None
    return {
        "kernel": None if chosen is None else chosen[1].name,
        "tile": f"{tile[0]}x{tile[1]}",
        "slices": slices,
        "blocks": blocks,
        "blocks_per_sm": resident,
        "occupancy": None if held is None else held.occupancy,
        "waves": None if waves is None else waves.num_waves,
        "last_wave": None if waves is None else waves.last_wave_fraction,
        "busiest_sm_blocks": busiest_sm_blocks(blocks, num_sms),
        "fill": fill(blocks, num_sms),
    }


def _held(kernel: Kernel, device: Device, budget: Budget) -> Occupancy | None:
    """Count what an SM holds of a kernel; None where nothing is recorded."""
    if device.arch is None or device.compute_capability is None:
        return None
    needs = recorded(kernel, device.arch, budget)
    return None if needs is None else _residents(needs, device.compute_capability)


@functools.lru_cache(maxsize=1024)
def _residents(needs: Needs, compute_capability: tuple[int, int]) -> Occupancy:
    return needs.on(compute_capability)


def _tile_of(chosen: tuple[Problem, Kernel] | None) -> tuple[int, int]:
    return TILE if chosen is None or chosen[1].tile is None else (chosen[1].tile.m, chosen[1].tile.n)


def _chosen(
    layer: Layer,
    pass_: Pass,
    batch_size: int,
    *,
    device: Device,
    dtype: str,
    library: str,
    choose: Choose = first_ranked,
) -> tuple[Problem, Kernel] | None:
    """Give a pass as a product, and the kernel chosen for it; None where no kernel of ours is known to run."""
    problem = problem_of(layer, pass_, batch_size, dtype) if library == "cubatch" else None
    if problem is None or device.num_sms is None or device.compute_capability is None:
        return None
    return problem, choose(problem, device)


def _levels(end: int) -> Iterator[int]:
    """1 to 8, then doubling, below `end`."""
    doubling = (STEPS * 2**i for i in itertools.count(1))
    return itertools.takewhile(lambda level: level < end, itertools.chain(range(1, STEPS + 1), doubling))


def coulom(spec: Spec, num_sms: int, limit: int) -> list[Proposal]:
    """Coulom's sizes for the three distinct convolutions with most FLOP."""
    convolutions = [node.layer for node in as_network(spec).nodes if isinstance(node.layer, Conv2d)]
    distinct = list(dict.fromkeys(extents(layer) for layer in sorted(convolutions, key=_flops, reverse=True)))[:TOP]
    found = []
    for layer in distinct:
        h, w, c = layer.input_shape
        # A level is out of reach when even its batch is past the limit; the rule is linear in n.
        end = (limit + 1) * h * w * c // ((1 << 14) * num_sms) + 2
        sizes = ((n, coulom_batch_size(n, h=h, w=w, c=c, num_sms=num_sms)) for n in _levels(end))
        found.append([Proposal(size, "coulom", f"coulom n={n}") for n, size in sizes if 1 <= size <= limit])
    return by_turns(found)


def slowest(
    spec: Spec, device: Device, mode: str, dtype: str, batch_size: int, library: str = "im2col"
) -> list[tuple[str, Blocks]]:
    """
    Name the three passes of most predicted time whose grids differ, with their blocks as a function of the batch.

    Where the device's peaks are not known, FLOP stand for time.  Blocks are of the tile chosen for `batch_size`.
    """

    def cost(item: tuple[Node, Pass]) -> tuple[float, int]:
        node, pass_ = item
        seconds = timing.layer_seconds(node.layer, pass_, batch_size, device, dtype)
        return seconds or 0.0, sum(gemm.flops for gemm in node.layer.gemms(pass_, 1))

    def tile_of(layer: Layer, pass_: Pass) -> tuple[int, int]:
        return first_tile(layer, pass_, batch_size, device=device, dtype=dtype, library=library)

    growing = [
        (node, pass_)
        for node, pass_ in timing.layer_passes(spec, mode)
        if num_blocks(node.layer, pass_, 1) < num_blocks(node.layer, pass_, MAX_EXTENT)
    ]
    distinct: dict[object, tuple[Node, Pass]] = {}
    for node, pass_ in sorted(growing, key=cost, reverse=True):
        tile = tile_of(node.layer, pass_)
        grid = tile, tuple((gemm.m, tiles(gemm.n, tile[1]), gemm.count) for gemm in products(node.layer, pass_, 1))
        distinct.setdefault(grid, (node, pass_))
    return [
        (
            node.name if pass_ is Pass.FPROP else f"{node.name} {pass_.value}",
            functools.partial(num_blocks, node.layer, pass_, tile=tile_of(node.layer, pass_)),
        )
        for node, pass_ in itertools.islice(distinct.values(), TOP)
    ]


def crests(passes: Sequence[tuple[str, Blocks]], num_sms: int, limit: int) -> list[Proposal]:
    """The largest batch for each number of blocks on the busiest SM, and the batch just past the first two."""
    tops, past = [], []
    for name, blocks in passes:
        found = []
        for level in _levels(busiest_sm_blocks(blocks(limit + 1), num_sms)):
            size = largest_batch(blocks, level * num_sms, limit)
            if size and busiest_sm_blocks(blocks(size), num_sms) == level:
                found.append(Proposal(size, "crest", f"crest {level} of {name}"))
        tops.append(found)
        past.append([
            Proposal(crest.batch_size + 1, "past crest", f"past {crest.reason}")
            for crest in found[:PASSED]
            if crest.batch_size < limit
        ])  # fmt: skip
    return [*by_turns(tops), *by_turns(past)]


def by_turns(lists: Sequence[Sequence[Proposal]]) -> list[Proposal]:
    """First the first of each, then the second of each, and so on."""
    return [item for turn in itertools.zip_longest(*lists) for item in turn if item is not None]


def _flops(layer: Layer) -> int:
    return layer.flops("inference")

"""Batch sizes at which the blocks of a layer fill whole waves of the SMs: the peaks of throughput."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import attrs

from cubatch.estimate import roofline
from cubatch.estimate.block_counts import Blocks, largest_batch, num_blocks, products, tiles
from cubatch.estimate.on_sms import first_grid
from cubatch.hardware.waves import busiest_sm_blocks, coulom_batch_size
from cubatch.network import graph
from cubatch.network.extents import MAX_EXTENT
from cubatch.network.graph import Node, Spec, as_network
from cubatch.network.layer import Layer, extents
from cubatch.network.passes import Pass
from cubatch.workload import Workload

TOP = 3  # layers or passes that make proposals
STEPS = 8  # levels before they double
PASSED = 2  # levels whose next batch size is proposed too, to show the fall behind a peak
_CREST = "crest"  # in reasons, for a wave peak


@attrs.frozen
class Proposal:
    """A batch size proposed for one reason. If not all proposals can be candidates, kinds of reasons take turns."""

    batch_size: int
    kind: str
    reason: str


def _levels(end: int) -> Iterator[int]:
    """Return the numbers 1 to 8, then 16, 32, 64 and so on, as far as they are below `end`."""
    doubling = (STEPS * 2**i for i in itertools.count(1))
    return itertools.takewhile(lambda level: level < end, itertools.chain(range(1, STEPS + 1), doubling))


def coulom(spec: Spec, num_sms: int, limit: int) -> list[Proposal]:
    """
    Return the batch sizes at which each SM has n whole tiles of 128 x 128 outputs, for several n: Coulom's rule.

    They are those of the three distinct convolutions with most FLOP, up to `limit`.
    """
    convolutions = [node.layer for node in as_network(spec).nodes if node.layer.convolution]
    distinct = list(dict.fromkeys(extents(layer) for layer in sorted(convolutions, key=_flops, reverse=True)))[:TOP]
    queues = []
    for layer in distinct:
        h, w, c = layer.input_shape
        # A level is out of reach when even its batch is past the limit; the rule is linear in n.
        end = (limit + 1) * h * w * c // ((1 << 14) * num_sms) + 2
        sizes = ((n, coulom_batch_size(n, h=h, w=w, c=c, num_sms=num_sms)) for n in _levels(end))
        queues.append([Proposal(size, "coulom", f"coulom n={n}") for n, size in sizes if 1 <= size <= limit])
    return interleaved(queues)


def slowest(work: Workload, batch_size: int) -> list[tuple[str, Blocks]]:
    """
    Return the three passes with most predicted time and different grids, each with its blocks by batch size.

    If the device's peak rates are unknown, FLOP replace time. Blocks are those of the tile chosen for `batch_size`.
    """

    def cost(item: tuple[Node, Pass]) -> tuple[float, int]:
        node, pass_ = item
        seconds = roofline.layer_seconds(node.layer, pass_, batch_size, work.device, work.dtype)
        return seconds or 0.0, sum(gemm.flops for gemm in node.layer.gemms(pass_, 1))

    def grid_of(layer: Layer, pass_: Pass) -> tuple[tuple[int, int], int | None, Blocks]:
        return first_grid(layer, pass_, batch_size, device=work.device, dtype=work.dtype, library=work.library)

    growing = [
        (node, pass_)
        for node, pass_ in graph.layer_passes(work.spec, work.mode)
        if num_blocks(node.layer, pass_, 1) < num_blocks(node.layer, pass_, MAX_EXTENT)
    ]
    distinct: dict[object, tuple[Node, Pass]] = {}
    for node, pass_ in sorted(growing, key=cost, reverse=True):
        tile, outputs, _ = grid_of(node.layer, pass_)
        extents_of = tuple((gemm.m, tiles(gemm.n, tile[1]), gemm.count) for gemm in products(node.layer, pass_, 1))
        grid = tile, outputs, extents_of
        distinct.setdefault(grid, (node, pass_))
    return [
        (
            node.name if pass_ is Pass.FPROP else f"{node.name} {pass_.value}",
            grid_of(node.layer, pass_)[2],
        )
        for node, pass_ in itertools.islice(distinct.values(), TOP)
    ]


def wave_peaks(passes: Sequence[tuple[str, Blocks]], num_sms: int, limit: int) -> list[Proposal]:
    """Return the largest batch size by number of blocks on the busiest SM, and the first two of each pass plus 1."""
    tops, past = [], []
    for name, blocks in passes:
        peaks = []
        for level in _levels(busiest_sm_blocks(blocks(limit + 1), num_sms)):
            size = largest_batch(blocks, level * num_sms, limit)
            if size and busiest_sm_blocks(blocks(size), num_sms) == level:
                peaks.append(Proposal(size, _CREST, f"{_CREST} {level} of {name}"))
        tops.append(peaks)
        past.append([
            Proposal(peak.batch_size + 1, "past crest", f"past {peak.reason}")
            for peak in peaks[:PASSED]
            if peak.batch_size < limit
        ])  # fmt: skip
    return [*interleaved(tops), *interleaved(past)]


def interleaved(lists: Sequence[Sequence[Proposal]]) -> list[Proposal]:
    """Return the first items of all lists, then the second ones, and so on."""
    return [item for turn in itertools.zip_longest(*lists) for item in turn if item is not None]


def _flops(layer: Layer) -> int:
    return layer.flops("inference")

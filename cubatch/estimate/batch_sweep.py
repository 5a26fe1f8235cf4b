"""
The blocks of a layer on the SMs as the batch size changes.

The share of busy SMs rises until the SM with the most blocks gets one more, then it falls: wave quantization.  The
cubatch kernels split deep products of few tiles, so the busiest SM's work is counted in tiles of full depth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import attrs

from cubatch.checks import check_whole
from cubatch.errors import InvalidArgument, UnknownName
from cubatch.estimate.block_counts import largest_batch
from cubatch.estimate.occupancy_sweep import nearest
from cubatch.hardware.facts import Device
from cubatch.hardware.waves import busiest_sm_blocks, count_waves, fill
from cubatch.kernels import cost_model, ranking
from cubatch.kernels.problem import problem_of
from cubatch.kernels.variant import Kernel
from cubatch.network.extents import MAX_EXTENT
from cubatch.network.graph import Spec, as_network
from cubatch.network.layer import Layer
from cubatch.network.passes import Pass

MOST_BATCH = 1 << 14
"""Largest batch size of a sweep, which computes the split of the product for each size."""

_LEVELS = 8
_LEAST_BATCHES = 64
_GAIN = 0.01  # smallest gain in busy SMs of a better batch size


def heaviest_layer(spec: Spec, kernel: Kernel, name: str | None = None) -> tuple[Layer, Pass]:
    """
    Return the layer of a network that a kernel computes, and its pass: the named layer, else that with most FLOP.

    Args:
        spec: The network, or a single layer.
        kernel: A tiled kernel variant.
        name: Name of the layer; None chooses the layer with most FLOP.

    Raises:
        UnknownName: If no layer has this name.
        InvalidArgument: If the kernel is not tiled, computes no layer, or not the named layer.
    """
    if kernel.tile is None:
        raise InvalidArgument("kernel", kernel.name, "a tiled kernel, of a matrix product or convolution")
    nodes = as_network(spec).nodes
    if name is not None and name not in {node.name for node in nodes}:
        raise UnknownName("layer", name, [node.name for node in nodes])
    computed = [
        (attrs.evolve(node.layer, name=node.name), pass_)
        for node in nodes
        for pass_ in Pass
        if name in (None, node.name) and _computes(kernel, node.layer, pass_)
    ]
    if not computed:
        field = "layer" if name else "model"
        others = {
            problem.operation
            for node in nodes
            for pass_ in Pass
            if name == node.name and (problem := problem_of(node.layer, pass_, 1, kernel.dtype)) is not None
        }
        remedy = f"Its passes run as {', '.join(sorted(others))}." if others - {kernel.operation} else ""
        wanted = f"computed by {kernel.name}: {kernel.operation}, channels in multiples of {kernel.vector}"
        raise InvalidArgument(field, name or str(spec.name), wanted, remedy)
    return max(computed, key=lambda each: sum(gemm.flops for gemm in each[0].gemms(each[1], 1)))


def _computes(kernel: Kernel, layer: Layer, pass_: Pass) -> bool:
    problem = problem_of(layer, pass_, 1, kernel.dtype)
    return problem is not None and problem.operation == kernel.operation and ranking.can_run(problem, kernel)


@attrs.frozen(kw_only=True)
class Spread:
    """The distribution of blocks over the SMs."""

    blocks: int  # tiles of the result times slices of the depth
    slices: int  # slices of the product's depth
    busiest_sm_blocks: int  # blocks that the busiest SM runs; time follows these
    fill: float  # share of the GPU's SM time that the blocks use, from 0 to 1
    waves: int | None  # number of waves of resident blocks, a partial last one included; None if no block fits
    last_wave: float | None  # blocks of the last wave as a share of a full one; None if no block fits


@attrs.frozen(kw_only=True)
class Grid(Spread):
    """The distribution of the blocks of a pass over the SMs at one batch size."""

    batch_size: int  # samples per step


def spread(blocks: int, num_sms: int, *, blocks_per_sm: int, slices: int = 1) -> Spread:
    """
    Return the distribution of blocks over SMs.

    Args:
        blocks: Blocks of all slices together.
        num_sms: SMs of the GPU.
        blocks_per_sm: Blocks that one SM holds; 0 if none fits.
        slices: Slices of the product's depth.

    Example:
        >>> shared = spread(82, 80, blocks_per_sm=2)
        >>> shared.waves, shared.last_wave, shared.busiest_sm_blocks, shared.fill
        (1, 0.5125, 2, 0.5125)
    """
    waves = count_waves(blocks, blocks_per_sm=blocks_per_sm, num_sms=num_sms) if blocks_per_sm else None
    return Spread(
        blocks=blocks,
        slices=slices,
        busiest_sm_blocks=busiest_sm_blocks(blocks, num_sms),
        fill=fill(blocks, num_sms),
        waves=None if waves is None else waves.num_waves,
        last_wave=None if waves is None else waves.last_wave_fraction,
    )


@attrs.frozen
class BatchStep:
    """A range of batch sizes for which the busiest SM has equal work."""

    first: Grid  # first, last: the grids of the smallest and the largest batch size in it
    last: Grid
    cliff: bool = False  # whether the busiest SM has more work at the next batch size
    # share of the throughput lost at the next batch size, if time follows the busiest SM; 0 without more work
    drop: float = 0.0


@attrs.frozen
class BatchSweep:
    """The grids of all batch sizes up to a largest one, in ranges with equal work of the busiest SM."""

    grid: Grid | None  # the grid at the given batch size; None without one
    steps: tuple[BatchStep, ...]  # the ranges of batch sizes, in ascending order, without gaps
    better: Grid | None  # the nearest last grid of a range that keeps at least 1 % more SMs busy; None if there is none


def grid_of(layer: Layer, pass_: Pass, kernel: Kernel, batch_size: int, *, device: Device, blocks_per_sm: int) -> Grid:
    """
    Return the distribution of a kernel's blocks over the SMs at a batch size; an SM holds `blocks_per_sm` blocks.

    InvalidArgument is raised if the kernel does not compute the pass, the GPU's SMs are unknown, or the size is out of
    range.
    """
    check_whole("batch_size", batch_size, most=MAX_EXTENT)
    problem = problem_of(layer, pass_, batch_size, kernel.dtype)
    if problem is None or not _computes(kernel, layer, pass_):
        raise InvalidArgument("kernel", kernel.name, f"one that computes {pass_.value} of {layer}")
    if device.num_sms is None:
        raise InvalidArgument("device", str(device), "a GPU whose SMs are known")
    slices = ranking.slices(problem, kernel, device)
    blocks = slices * cost_model.blocks(problem, kernel)
    on_sms = spread(blocks, device.num_sms, blocks_per_sm=blocks_per_sm, slices=slices)
    return Grid(batch_size=batch_size, **attrs.asdict(on_sms))


def batch_sweep(at: Callable[[int], Grid], num_sms: int, batch_size: int | None) -> BatchSweep:
    """
    Return the grids of all batch sizes from 1 on, in ranges with equal work of the busiest SM.

    The sweep ends where the busiest SM has more than eight tiles, but has at least 64 sizes, and a quarter more than
    `batch_size`. It never exceeds MOST_BATCH. `at` returns the grid of a batch size. `batch_size` is the given one, or
    None.
    """
    if batch_size is not None:
        check_whole("batch_size", batch_size, most=MOST_BATCH)
    top = largest_batch(lambda n: at(n).blocks // at(n).slices, _LEVELS * num_sms, MOST_BATCH - 1)
    grows = at(MOST_BATCH).blocks // at(MOST_BATCH).slices > at(1).blocks // at(1).slices
    top = max(_LEAST_BATCHES, top + 1 if grows else 0, (batch_size or 0) * 5 // 4)
    grids = [at(n) for n in range(1, min(top, MOST_BATCH) + 1)]
    same = itertools.groupby(grids, key=lambda grid: (grid.slices, grid.busiest_sm_blocks))
    stretches = [tuple(stretch) for _, stretch in same]
    steps = [BatchStep(stretch[0], stretch[-1]) for stretch in stretches]
    steps = [
        attrs.evolve(step, cliff=True, drop=_drop(step.last, after.first))
        if _work(after.first) > _work(step.last)
        else step
        for step, after in itertools.pairwise(steps)
    ] + steps[-1:]
    now = None if batch_size is None else grids[batch_size - 1]
    if now is None:
        return BatchSweep(None, tuple(steps), None)
    ends = (step.last for step in steps[:-1])  # the last step ends with the sweep
    better = {end.batch_size: end for end in ends if end.fill > now.fill + _GAIN}
    near = nearest(now.batch_size, better)
    return BatchSweep(now, tuple(steps), None if near is None else better[near])


def _work(grid: Grid) -> float:
    """Return the blocks of the busiest SM / slices: its load in tiles of the product's full depth."""
    return grid.busiest_sm_blocks / grid.slices


def _drop(before: Grid, after: Grid) -> float:
    return 1 - after.batch_size / before.batch_size * _work(before) / _work(after)

"""Tables of `cubatch occupancy`: blocks per SM, and how they change with one quantity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from cubatch.estimate.batch_sweep import BatchStep, BatchSweep, Spread
from cubatch.estimate.occupancy_sweep import Sweep
from cubatch.hardware.architectures import Architecture
from cubatch.hardware.facts import Device
from cubatch.hardware.waves import Occupancy
from cubatch.kernels.resources import Needs
from cubatch.network.layer import Layer
from cubatch.network.passes import Pass
from cubatch.report.grid import Grid
from cubatch.report.tables.common import plain, span, written
from cubatch.units import format_bytes, format_count, format_percent

UNITS = {"threads": "threads", "registers": "registers", "shared": "bytes of shared memory"}


@attrs.frozen
class Answer:
    """The occupancy of a kernel on a GPU, and how its blocks are distributed over the SMs."""

    name: str | None  # name of the variant; None if the user gave numbers instead
    needs: Needs  # resources of a block
    held: Occupancy  # blocks per SM and their limits
    spread: Spread | None = None  # distribution of the blocks over the SMs; None if their number is unknown


def answers(launches: Sequence[Answer], device: Device, sm: Architecture, *, title: str) -> Grid:
    """Return the table of the launches, a row each; for a single launch, a note lists the limit of each resource."""

    def of_spread(name: str, write: Callable[[float], str] = str) -> Callable[[Answer], str | None]:
        return lambda launch: written(write, getattr(launch.spread, name, None))

    columns = {
        "variant": lambda launch: launch.name if len(launches) > 1 else None,
        "threads": lambda launch: launch.needs.threads,
        "registers": lambda launch: launch.needs.registers,
        "shared": lambda launch: format_bytes(launch.needs.shared_bytes),
        "blocks/SM": lambda launch: launch.held.blocks_per_sm,
        "occupancy": lambda launch: format_percent(launch.held.occupancy),
        "limited by": lambda launch: limiters(launch.held.limiters),
        "batch": of_spread("batch_size"),  # a grid of a layer has one
        "blocks": of_spread("blocks"),
        "waves": of_spread("waves"),
        "last wave": of_spread("last_wave", format_percent),
        "busiest SM": of_spread("busiest_sm_blocks"),
        "fill": of_spread("fill", format_percent),
    }
    compilers = sorted({launch.needs.nvrtc for launch in launches if launch.needs.nvrtc})
    notes = [_limits(device, sm)]
    if len(launches) == 1:
        allowed = (f"{name.replace('_', ' ')} {limit}" for name, limit in launches[0].held.limits.items())
        notes.append(f"Blocks per SM that each resource allows: {', '.join(allowed)}.")
    if any(not launch.held.blocks_per_sm for launch in launches):
        notes.append("0 blocks: the launch fails on this GPU, since a block needs more than the limit.")
    if any(launch.spread is not None for launch in launches):
        notes.append("In a wave every SM has as many blocks as it can hold. Time follows the busiest SM; “fill” is the "
                     "share of SM time in use.")  # fmt: skip
    if any(launch.spread is not None and "_hopper_" in (launch.name or "") for launch in launches):
        notes.append("Hopper kernels launch one block per SM, which computes several tiles: “blocks” are tiles here.")
    if compilers:
        notes.append(f"Registers and shared memory are those of NVRTC {', '.join(compilers)}.")
    return Grid.of(launches, columns, title=title, notes=notes)


def _limits(device: Device, sm: Architecture) -> str:
    capability = device.compute_capability or (0, 0)
    return (
        f"An SM of sm_{capability[0]}{capability[1]} holds {sm.warps_per_sm} warps, {sm.blocks_per_sm} blocks, "
        f"{format_count(sm.registers_per_sm)} registers, {format_bytes(sm.shared_bytes_per_sm)} of shared memory "
        f"(at most {format_bytes(sm.shared_bytes_per_block)} per block"
        + (f", of which the driver takes {format_bytes(sm.reserved_shared_bytes)} more)." if sm.reserved_shared_bytes
           else ").")
    )  # fmt: skip


def sweep(swept: Sweep) -> Grid:
    """Return the table of the steps of an occupancy sweep, with the present step marked."""
    now, better = swept.at(swept.value), None if swept.better is None else swept.at(swept.better)
    columns = {
        UNITS[swept.quantity]: lambda step: span(format_count, (step.first, step.last)),
        "blocks/SM": lambda step: step.blocks_per_sm,
        "occupancy": lambda step: format_percent(step.occupancy),
        "limited by": lambda step: limiters(step.limiters),
        "remarks": lambda step: _remarks(
            "now" if step is now else "nearest better" if step is better else "",
            f"drop beyond {format_count(step.last)}" if step.cliff else "",
        ),
    }
    title = f"If only the {UNITS[swept.quantity]} change"
    return Grid.of(swept.steps, columns, title=title, marked=[swept.steps.index(now)], notes=[advice(swept)])


def advice(swept: Sweep) -> str:
    """
    Return a sentence on the nearest value of the swept resource with a higher occupancy, or that no value has one.

    Such as "Nearest better: 80 registers (16 fewer) make 3 blocks and 37.5 % instead of 25.0 %."
    """
    unit = UNITS[swept.quantity]
    if swept.better is None:
        what = "amount of shared memory" if swept.quantity == "shared" else f"number of {unit}"
        return f"No other {what} keeps more warps resident."
    now, then, change = swept.at(swept.value), swept.at(swept.better), swept.better - swept.value
    by = f"{format_count(abs(change))} {'more' if change > 0 else 'fewer'}"
    return (
        f"Nearest better: {format_count(swept.better)} {unit} ({by}) make {then.blocks_per_sm} "
        f"block{'' if then.blocks_per_sm == 1 else 's'} and {format_percent(then.occupancy)} "
        f"instead of {format_percent(now.occupancy)}."
    )


def batch_sweep(swept: BatchSweep, *, subject: str) -> Grid:
    """Return the table of a sweep: a row per range of batch sizes, marked if the present size is in it."""
    now, better = swept.grid, swept.better

    def is_now(step: BatchStep) -> bool:
        return now is not None and step.first.batch_size <= now.batch_size <= step.last.batch_size

    columns = {
        "batch": lambda step: span(format_count, (step.first.batch_size, step.last.batch_size)),
        "blocks": lambda step: span(format_count, (step.first.blocks, step.last.blocks)),
        "slices": lambda step: step.last.slices,
        "busiest SM": lambda step: step.last.busiest_sm_blocks,
        "fill": lambda step: (
            format_percent(step.first.fill)
            + ("" if step.first == step.last else f" to {format_percent(step.last.fill)}")
        ),
        "waves": lambda step: step.last.waves,
        "last wave": lambda step: written(format_percent, step.last.last_wave),
        "remarks": lambda step: _remarks(
            f"now: {now.batch_size}" if now and is_now(step) else "nearest better" if step.last == better else "",
            # Where the number of slices changes, a larger batch may be faster.
            f"drop beyond {step.last.batch_size}: {format_percent(step.drop)} lost" if step.drop > 0 else "",
        ),
    }
    notes = [
        batch_advice(swept),
        "Waves and the last wave are those of the largest batch of the line.",
        "A drop loses this share of samples per second, if time follows the busiest SM.",
    ]
    title = f"If only the batch size changes: {subject}"
    marked = [place for place, step in enumerate(swept.steps) if is_now(step)]
    return Grid.of(swept.steps, columns, title=title, marked=marked, notes=filter(None, notes))


def batch_advice(swept: BatchSweep) -> str | None:
    """Return a sentence on the nearest batch size that keeps more SMs busy; None if the sweep has no present size."""
    now, better = swept.grid, swept.better
    if now is None:
        return None
    if better is None:
        return f"No listed batch size uses clearly more of the SMs than {now.batch_size}, {format_percent(now.fill)}."
    return (
        f"Nearest better: batch {better.batch_size} uses {format_percent(better.fill)} of the SMs, {now.batch_size} "
        f"uses {format_percent(now.fill)}."
    )


def mapping(
    device: Device, launches: Sequence[Answer], swept: Sweep | BatchSweep | None, place: tuple[Layer, Pass] | None
) -> dict[str, Any]:
    """
    Return launches and a sweep in the JSON form that docs/reference/api.md lists for `cubatch occupancy`.

    `swept` is None without a sweep. `place` is the layer and pass that the launches compute, None if unknown.
    """
    listed = [
        {
            "kernel": launch.name,
            "threads": launch.needs.threads,
            "registers": launch.needs.registers,
            "shared_bytes": launch.needs.shared_bytes,
            "nvrtc": launch.needs.nvrtc,
            "warps_per_sm": launch.held.blocks_per_sm * -(-launch.needs.threads // 32),
            **plain(launch.held),
            "spread": launch.spread and plain(launch.spread),
        }
        for launch in launches
    ]
    return {
        "schema": 1,
        "device": device.to_mapping(),
        "layer": place and place[0].name,
        "pass": place and place[1].value,
        "launches": listed,
        "sweep": swept and plain(swept),
    }


def _remarks(*remarks: str) -> str | None:
    return ", ".join(filter(None, remarks)) or None


def subject(needs: Needs) -> str:
    """Return threads, registers per thread and shared memory of a block as text."""
    return f"{needs.threads} threads, {needs.registers} registers, {format_bytes(needs.shared_bytes)} of shared memory"


def limiters(names: Sequence[str]) -> str:
    """Return names of limiting resources, as in `Occupancy.limiters`, as text: "registers, shared memory"."""
    return ", ".join(name.replace("_", " ") for name in names)

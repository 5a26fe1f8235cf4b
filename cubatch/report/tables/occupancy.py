"""Tables of `cubatch occupancy`: blocks per SM, and how they change with one quantity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from cubatch.report.grid import Grid
from cubatch.report.tables.common import plain, span, written
from cubatch.units import format_bytes, format_count, format_percent

if TYPE_CHECKING:
    from cubatch.estimate.batch_sweep import BatchSweep, Spread
    from cubatch.estimate.occupancy_sweep import Sweep
    from cubatch.hardware.architectures import Architecture
    from cubatch.hardware.facts import Device
    from cubatch.hardware.waves import Occupancy
    from cubatch.kernels.resources import Needs
    from cubatch.network.layer import Layer
    from cubatch.network.passes import Pass


UNITS = {"threads": "threads", "registers": "registers", "shared": "bytes of shared memory"}


@attrs.frozen
class Answer:
    """
    A kernel on a GPU.

    Attributes:
        name: Name of the variant; None if the user gave numbers instead.
        needs: Resources of a block.
        held: Blocks per SM and their limits.
        spread: Distribution of the blocks over the SMs; None if their number is unknown.
    """

    name: str | None
    needs: Needs
    held: Occupancy
    spread: Spread | None = None


def answers(launches: Sequence[Answer], device: Device, sm: Architecture, *, title: str) -> Grid:
    """Return the table of the launches; a single one has the limit of each resource beneath."""
    names = ["variant", "threads", "registers", "shared", "blocks/SM", "occupancy", "limited by"]
    names += ["batch", "blocks", "waves", "last wave", "busiest SM", "fill"]
    rows = [_line(launch, several=len(launches) > 1) for launch in launches]
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
    return Grid(title=title, columns=names, rows=rows, notes=notes)


def _line(launch: Answer, *, several: bool) -> list[Any]:
    facts: list[Any] = [None] * 6
    if (spread := launch.spread) is not None:
        last, busiest = written(format_percent, spread.last_wave), spread.busiest_sm_blocks
        batch_size = getattr(spread, "batch_size", None)  # a grid of a layer has one
        facts = [batch_size, spread.blocks, spread.waves, last, busiest, format_percent(spread.fill)]
    return [
        launch.name if several else None,
        launch.needs.threads,
        launch.needs.registers,
        format_bytes(launch.needs.shared_bytes),
        launch.held.blocks_per_sm,
        format_percent(launch.held.occupancy),
        limiters(launch.held.limiters),
        *facts,
    ]


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
    rows = [
        [
            span(format_count, (step.first, step.last)),
            step.blocks_per_sm,
            format_percent(step.occupancy),
            limiters(step.limiters),
            _remarks(
                "now" if step is now else "nearest better" if step is better else "",
                f"drop beyond {format_count(step.last)}" if step.cliff else "",
            ),
        ]
        for step in swept.steps
    ]
    names = [UNITS[swept.quantity], "blocks/SM", "occupancy", "limited by", "remarks"]
    title, marked = f"If only the {UNITS[swept.quantity]} change", [swept.steps.index(now)]
    return Grid(title=title, columns=names, rows=rows, marked=marked, notes=[advice(swept)])


def advice(swept: Sweep) -> str:
    """
    Return the nearest better value as a sentence.

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
    """Return the table of the steps of a sweep over batch sizes, with the present step marked."""
    now, better = swept.grid, swept.better
    rows, marked = [], []
    for index, step in enumerate(swept.steps):
        here = now is not None and step.first.batch_size <= now.batch_size <= step.last.batch_size
        marked += [index] if here else []
        last = step.last
        rows.append([
            span(format_count, (step.first.batch_size, last.batch_size)),
            span(format_count, (step.first.blocks, last.blocks)),
            last.slices,
            last.busiest_sm_blocks,
            format_percent(step.first.fill) + ("" if step.first == last else f" to {format_percent(last.fill)}"),
            last.waves,
            written(format_percent, last.last_wave),
            _remarks(
                f"now: {now.batch_size}" if here and now else "nearest better" if last == better else "",
                # Where the number of slices changes, a larger batch may be faster.
                f"drop beyond {last.batch_size}: {format_percent(step.drop)} lost" if step.drop > 0 else "",
            ),
        ])  # fmt: skip
    names = ["batch", "blocks", "slices", "busiest SM", "fill", "waves", "last wave", "remarks"]
    notes = [
        batch_advice(swept),
        "Waves and the last wave are those of the largest batch of the line.",
        "A drop loses this share of samples per second, if time follows the busiest SM.",
    ]
    title = f"If only the batch size changes: {subject}"
    return Grid(title=title, columns=names, rows=rows, marked=marked, notes=filter(None, notes))


def batch_advice(swept: BatchSweep) -> str | None:
    """Return the nearest batch size that keeps more SMs busy, as a sentence; None without a present batch size."""
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
    """Return launches and a sweep in JSON form."""
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
    """Return the resources of a block as text."""
    return f"{needs.threads} threads, {needs.registers} registers, {format_bytes(needs.shared_bytes)} of shared memory"


def limiters(names: Sequence[str]) -> str:
    """Return the resources that limit the blocks per SM, as text."""
    return ", ".join(name.replace("_", " ") for name in names)

"""What `cubatch occupancy` prints: how many blocks an SM holds, and what changes when one thing changes."""

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
    One kernel, or numbers that were given, on a GPU.

    Attributes:
        name: Of the variant; None for numbers.
        needs: What a block takes.
        held: How many an SM holds.
        spread: How its blocks fall on the SMs, where their number is known: of a pass at a batch size it is a Grid.
    """

    name: str | None
    needs: Needs
    held: Occupancy
    spread: Spread | None = None


def answers(found: Sequence[Answer], device: Device, sm: Architecture, *, title: str) -> Grid:
    """Lay out a line per launch; a single one with the blocks that each resource allows."""
    names = ["variant", "threads", "registers", "shared", "blocks/SM", "occupancy", "limited by"]
    names += ["batch", "blocks", "waves", "last wave", "busiest SM", "fill"]
    rows = [_line(one, several=len(found) > 1) for one in found]
    compilers = sorted({one.needs.nvrtc for one in found if one.needs.nvrtc})
    notes = [_limits(device, sm)]
    if len(found) == 1:
        allowed = (f"{name.replace('_', ' ')} {limit}" for name, limit in found[0].held.limits.items())
        notes.append(f"Blocks that each resource would allow by itself: {', '.join(allowed)}.")
    if any(not one.held.blocks_per_sm for one in found):
        notes.append("0 blocks: such a launch fails on this GPU, for want of what limits it.")
    if any(one.spread is not None for one in found):
        notes.append("Waves count full complements of resident blocks; time follows the busiest SM, whose blocks share "
                     "its pipes. “fill” is the share of SM time at work.")  # fmt: skip
    if any(one.spread is not None and "_hopper_" in (one.name or "") for one in found):
        notes.append("Kernels of hopper launch a block for each SM, which takes tiles in turn: blocks here are tiles.")
    if compilers:
        notes.append(f"Registers and shared memory as NVRTC {', '.join(compilers)} compiles the kernel.")
    return Grid(title=title, columns=names, rows=rows, notes=notes)


def _line(one: Answer, *, several: bool) -> list[Any]:
    facts: list[Any] = [None] * 6
    if one.spread is not None:
        falls, batch_size = one.spread, getattr(one.spread, "batch_size", None)
        last, busiest = written(format_percent, falls.last_wave), falls.busiest_sm_blocks
        facts = [batch_size, falls.blocks, falls.waves, last, busiest, format_percent(falls.fill)]
    return [
        one.name if several else None,
        one.needs.threads,
        one.needs.registers,
        format_bytes(one.needs.shared_bytes),
        one.held.blocks_per_sm,
        format_percent(one.held.occupancy),
        limiters(one.held.limiters),
        *facts,
    ]


def _limits(device: Device, sm: Architecture) -> str:
    capability = device.compute_capability or (0, 0)
    return (
        f"An SM of sm_{capability[0]}{capability[1]} holds {sm.warps_per_sm} warps, {sm.blocks_per_sm} blocks, "
        f"{format_count(sm.registers_per_sm)} registers, {format_bytes(sm.shared_bytes_per_sm)} of shared memory "
        f"({format_bytes(sm.shared_bytes_per_block)} of one block"
        + (f", {format_bytes(sm.reserved_shared_bytes)} more of each go to the system)." if sm.reserved_shared_bytes
           else ").")
    )  # fmt: skip


def sweep(found: Sweep) -> Grid:
    """Lay out the steps of a staircase, the present one marked, cliffs and the nearest better value named."""
    now, better = found.at(found.value), None if found.better is None else found.at(found.better)
    rows = [
        [
            span(format_count, (step.first, step.last)),
            step.blocks_per_sm,
            format_percent(step.occupancy),
            limiters(step.limiters),
            _remarks(
                "now" if step is now else "nearest better" if step is better else "",
                f"cliff beyond {format_count(step.last)}" if step.cliff else "",
            ),
        ]
        for step in found.steps
    ]
    names = [UNITS[found.quantity], "blocks/SM", "occupancy", "limited by", "remarks"]
    title, marked = f"If only the {UNITS[found.quantity]} change", [found.steps.index(now)]
    return Grid(title=title, columns=names, rows=rows, marked=marked, notes=[advice(found)])


def advice(found: Sweep) -> str:
    """
    Return the nearest value that is better than the present one, as a sentence.

    Such as "Nearest better: 80 registers (16 fewer) make 3 blocks and 37.5 % instead of 25.0 %."
    """
    unit = UNITS[found.quantity]
    if found.better is None:
        what = "amount of shared memory" if found.quantity == "shared" else f"number of {unit}"
        return f"No other {what} keeps more warps resident."
    now, then, change = found.at(found.value), found.at(found.better), found.better - found.value
    by = f"{format_count(abs(change))} {'more' if change > 0 else 'fewer'}"
    return (
        f"Nearest better: {format_count(found.better)} {unit} ({by}) make {then.blocks_per_sm} "
        f"block{'' if then.blocks_per_sm == 1 else 's'} and {format_percent(then.occupancy)} "
        f"instead of {format_percent(now.occupancy)}."
    )


def batch_sweep(found: BatchSweep, *, subject: str) -> Grid:
    """Lay out the teeth of a saw, the present one marked, cliffs and the nearest better crest named."""
    now, better = found.grid, found.better
    rows, marked = [], []
    for index, step in enumerate(found.steps):
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
                # Slices may change with it, and one sample more can then be worth the work.
                f"cliff beyond {last.batch_size}: {format_percent(step.drop)} lost" if step.drop > 0 else "",
            ),
        ])  # fmt: skip
    names = ["batch", "blocks", "slices", "busiest SM", "fill", "waves", "last wave", "remarks"]
    notes = [
        batch_advice(found),
        "Waves and the last wave are those of the largest batch of the line.",
        "What a cliff loses is samples a second, if time follows the busiest SM.",
    ]
    title = f"If only the batch size changes: {subject}"
    return Grid(title=title, columns=names, rows=rows, marked=marked, notes=filter(None, notes))


def batch_advice(found: BatchSweep) -> str | None:
    """Return the crest near the batch size that keeps more SMs busy, as a sentence; None without a batch size."""
    now, better = found.grid, found.better
    if now is None:
        return None
    if better is None:
        return f"No crest up to here keeps clearly more SMs at work than {now.batch_size}, {format_percent(now.fill)}."
    return (
        f"Nearest better: batch {better.batch_size} keeps {format_percent(better.fill)} of the SMs at work, "
        f"{now.batch_size} keeps {format_percent(now.fill)}."
    )


def mapping(
    device: Device, found: Sequence[Answer], swept: Sweep | BatchSweep | None, place: tuple[Layer, Pass] | None
) -> dict[str, Any]:
    """Return launches and a sweep as plain mappings for JSON."""
    launches = [
        {
            "kernel": one.name,
            "threads": one.needs.threads,
            "registers": one.needs.registers,
            "shared_bytes": one.needs.shared_bytes,
            "nvrtc": one.needs.nvrtc,
            "warps_per_sm": one.held.blocks_per_sm * -(-one.needs.threads // 32),
            **plain(one.held),
            "spread": one.spread and plain(one.spread),
        }
        for one in found
    ]
    return {
        "schema": 1,
        "device": device.to_mapping(),
        "layer": place and place[0].name,
        "pass": place and place[1].value,
        "launches": launches,
        "sweep": swept and plain(swept),
    }


def _remarks(*found: str) -> str | None:
    return ", ".join(filter(None, found)) or None


def subject(needs: Needs) -> str:
    """Return the name of a launch without a kernel: "256 threads, 96 registers, 16.00 KiB of shared memory"."""
    return f"{needs.threads} threads, {needs.registers} registers, {format_bytes(needs.shared_bytes)} of shared memory"


def limiters(names: Sequence[str]) -> str:
    """Write what forbids one more block."""
    return ", ".join(name.replace("_", " ") for name in names)

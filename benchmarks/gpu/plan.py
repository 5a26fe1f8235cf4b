"""The GPU pass without a GPU: all items are listed, planned and compiled, and problems are printed."""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks.gpu import cases, conformance, items as gpu_items, probes as gpu_probes
from benchmarks.gpu.stages import Item, Stage, chosen
from cubatch.bench import measure
from cubatch.bench.target import count_sets
from cubatch.errors import CubatchError
from cubatch.hardware import catalogue, memory_limit as hardware_memory
from cubatch.hardware.facts import Device
from cubatch.kernels import variant
from cubatch.report.grid import Grid
from cubatch.tuning import step_memory
from cubatch.units import format_bytes


def dry_run(stages: Sequence[Stage], device_name: str, *, only: str, compiled: bool) -> int:
    """
    Print the plan of a pass for a GPU that need not be in this machine.

    Args:
        stages: Stages that would run.
        device_name: A name of the catalogue.
        only: Expression that selects items by name.
        compiled: Whether to compile the kernels.

    Returns:
        int: 0, or 1 if a kernel does not compile or an item cannot be planned.
    """
    device = catalogue.find(device_name)
    problems: list[str] = []
    if compiled:
        workers = len(os.sched_getaffinity(0))
        probes = conformance.sources(gpu_probes.probes(gpu_items.arch_of(device)))
        failed = [*gpu_items.compile_all(device, workers), *gpu_items.compile_all(device, workers, probes)]
        problems += [f"{kernel.name}: {reason}" for kernel, reason in failed]
    rows = []
    for stage in stages:
        items = chosen(stage, device, only)
        launched, unplanned = _planned(items, device, compiled=compiled)
        names = [item.name for item in items]
        unplanned += [f"two items named {name}" for name in sorted(set(names)) if names.count(name) > 1]
        if stage.name == "memory":
            unplanned += _plans(device)
        if stage.name == "correctness" and not only:
            unplanned += _unchecked(launched, device)
        problems += [f"{stage.name}: {problem}" for problem in unplanned]
        guess = sum(item.seconds for item in items)
        rows.append([stage.name, len(items), f"{guess:.0f} s", f"{stage.seconds:.0f} s", stage.shows])
    print(
        Grid(
            title=f"Planned for {device}",
            columns=["stage", "items", "would take", "share", "shows"],
            rows=rows,
            notes=["Items that do not fit the share of their stage are skipped, the least valuable first."],
        ).text()
    )
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


def _planned(items: Sequence[Item], device: Device, *, compiled: bool) -> tuple[set[str], list[str]]:
    """Plan the items that are cases; return the kernels that they launch, and problems."""
    limit, launched, problems = hardware_memory.memory_limit(device).bytes, set(), []
    for case in (item.case for item in items if item.case is not None):
        needed = case.num_bytes * count_sets(case, device.l2_bytes)
        if needed > limit:
            problems.append(f"{case.name} needs {format_bytes(needed)}, {format_bytes(limit)} are there")
        try:
            result = measure.plan(case, device, variants="all", compiled=compiled)
        except CubatchError as error:
            problems.append(f"{case.name}: {error}")
            continue
        launched |= {launch.kernel for entry in result.entries for launch in entry.launches}
        problems += [f"{case.name}: {entry.name}: {entry.reason}" for entry in result.wrong]
        if not result.entries:
            problems.append(f"{case.name}: no variant runs it")
    return launched, problems


def _unchecked(launched: set[str], device: Device) -> list[str]:
    """Return a problem for each kernel that no case of the stage runs."""
    return [
        f"no case runs {kernel.name}"
        for kernel in variant.kernels()
        if kernel.runs_on(gpu_items.arch_of(device))
        and kernel.name not in launched
        and kernel.operation not in cases.ELSEWHERE
    ]


def _plans(device: Device) -> list[str]:
    """Return a problem for each network whose planned memory exceeds the device."""
    limit, problems = hardware_memory.memory_limit(device).bytes, []
    for network, mode, batch_size, dtype, library in cases.trained():
        total = step_memory.footprint(
            network, batch_size=batch_size, mode=mode, dtype=dtype, device=device, library=library,
            optimizer="momentum" if mode == "training" else "sgd",
        ).total  # fmt: skip
        if total > limit:
            problems.append(
                f"{network.name}, {mode}, batch {batch_size}, {dtype}, {library} needs {format_bytes(total)}"
            )
    return problems

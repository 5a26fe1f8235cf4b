"""The stages of the GPU pass: in each, a list of items that a process goes through one by one, best first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from benchmarks import gpu_cases, gpu_items, gpu_sweep
from benchmarks.gpu_items import Session
from cubatch import kernel
from cubatch.bench.cases import Case, of_layer
from cubatch.hardware import Device
from cubatch.kernel import Kernel

_TUNED = (("mnist-cnn", "training"), ("resnet18", "inference"))


@attrs.frozen
class Item:
    """
    One thing that a stage does.

    Attributes:
        name: Unique in its stage.
        run: Does it.
        case: What it measures, where that is a case.
        seconds: A guess of how long it takes.
        limit_seconds: It hangs if it takes longer.
    """

    name: str
    run: Callable[[Session], dict[str, Any]]
    case: Case | None = None
    seconds: float = 1.0
    limit_seconds: float = 30.0


@attrs.frozen
class Stage:
    """
    A part of the pass.

    Attributes:
        name: For --stage.
        shows: What it is for, in a phrase.
        seconds: Its share of the default time.
        items: Lists what it does on a device.
    """

    name: str
    shows: str
    seconds: float
    items: Callable[[Device], list[Item]]


def _of_cases(found: Iterable[Case], device: Device) -> list[Item]:
    return [
        Item(case.name, lambda session, case=case: gpu_items.timed(case, session), case, _guess(case, device))
        for case in found
    ]


def _guess(case: Case, device: Device) -> float:
    """Guess the seconds of a case: preparing and checking, then rounds of ours and the vendor's."""
    step = 2 * (case.roofline_seconds(device) or 0.0)
    return 0.15 + case.num_bytes / 50e9 + max(gpu_items.CASE_SECONDS / 2, 20 * step)


def _checks(_: Device) -> list[Item]:
    return [
        Item(case.name, lambda session, case=case, seed=seed: gpu_items.verified(case, seed, session), case, 0.05, 10.0)
        for seed, case in enumerate(gpu_cases.odd_shapes(), start=gpu_cases.SEED)
    ] + [Item("layouts", gpu_items.layouts, seconds=0.5, limit_seconds=10.0)]


def _occupancies(device: Device) -> list[Item]:
    by_source: dict[str, list[Kernel]] = {}
    for found in kernel.kernels():
        if found.runs_on(gpu_items.arch_of(device)):
            by_source.setdefault(found.source, []).append(found)
    return [
        Item(source, lambda session, found=found: gpu_items.occupancy(found, session), seconds=0.02 * len(found))
        for source, found in by_source.items()
    ]


def _memories(_: Device) -> list[Item]:
    return [
        Item(
            f"{network.name}, {mode}, batch {batch_size}, {library}",
            lambda session, arguments=(network.name, mode, batch_size, library): gpu_items.memory_of(
                *arguments, session
            ),
            seconds=3.0,
            limit_seconds=60.0,
        )
        for library in ("cubatch", "im2col")
        for network, mode, batch_size in gpu_cases.trained()
    ]


def _tunings(_: Device) -> list[Item]:
    return [
        Item(
            f"{name}, {mode}, {library}",
            lambda session, arguments=(name, mode, library): gpu_items.tuned(*arguments, session),
            seconds=16.0,
            limit_seconds=60.0,
        )
        for library in ("cubatch", "im2col")
        for name, mode in _TUNED
    ]


def _sweeps(_: Device) -> list[Item]:
    return [
        Item(
            of_layer(layer, pass_, gpu_cases.LARGEST_SWEPT).name,
            lambda session, layer=layer, pass_=pass_: gpu_sweep.sweep(
                layer, pass_, session.place, session.contest, until=session.deadline
            ),
            of_layer(layer, pass_, gpu_cases.LARGEST_SWEPT),
            4.0,
            60.0,
        )
        for layer, pass_ in gpu_cases.swept()
    ]


def _facts(_: Device) -> list[Item]:
    return [
        Item("device", gpu_items.device_facts),
        Item("copies", gpu_items.copies, seconds=3.0),
        Item("gemm", gpu_items.gemm_ceiling, seconds=3.0),
    ]


def _units(_: Device) -> list[Item]:
    return [Item("all units", gpu_items.compile_units, seconds=20.0, limit_seconds=240.0)]


STAGES = (
    Stage("compile", "every kernel for this GPU", 40, _units),
    Stage("facts", "the device, its copy bandwidth, cuBLAS's float32 rate", 12, _facts),
    Stage("correctness", "every variant against float64 on odd shapes", 50, _checks),
    Stage("gemm", "matrix products beside cuBLAS", 40, lambda device: _of_cases(gpu_cases.gemms(), device)),
    Stage("layers", "convolutions beside cuDNN", 120, lambda device: _of_cases(gpu_cases.convolutions(), device)),
    Stage("misc", "depthwise and misc against a copy", 30, lambda device: _of_cases(gpu_cases.memory_bound(), device)),
    Stage("occupancy", "registers and blocks per SM against the driver", 8, _occupancies),
    Stage("memory", "the memory plan against the real peak", 30, _memories),
    Stage("tune", "autotune against a dense sweep around its answer", 60, _tunings),
    Stage("sweep", "every batch size from 1 to 256", 70, _sweeps),
)


def stage_named(name: str) -> Stage:
    """Find a stage."""
    return next(stage for stage in STAGES if stage.name == name)

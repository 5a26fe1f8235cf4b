"""The stages of the GPU pass: in each, a list of items that a process goes through one by one, best first."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from benchmarks.gpu import cases, conformance, steps, sweep, tensor_cases, training
from benchmarks.gpu import items as gpu_items
from benchmarks.gpu import probes as gpu_probes
from benchmarks.gpu.items import Session
from cubatch.bench.cases import Case, of_layer
from cubatch.bench.target import count_sets
from cubatch.hardware import arithmetic
from cubatch.hardware import memory_limit as hardware_memory
from cubatch.hardware.facts import Device
from cubatch.kernels import variant
from cubatch.kernels.variant import Kernel

_TUNED = (
    ("resnet18", "training", "float16", "cubatch"),
    ("mnist-cnn", "training", "float32", "cubatch"),
    ("resnet18", "inference", "float32", "cubatch"),
    ("mnist-cnn", "training", "float32", "im2col"),
    ("resnet18", "inference", "float32", "im2col"),
)
_STEPS = (("resnet50", 256, "float16"), ("resnet50", 256, "bfloat16"), ("resnet50", 32, "float16"))

COMPILED_RIVALS = {"torch.compile": ("eager", "compile"), "torch.compile max-autotune": ("compile max-autotune",)}
"""
The rivals of an item, by the end of the item's name.

Max-autotune is an item of its own, and the last: it may tune kernels for minutes.
"""

_COMPILED_OPTIONS: dict[str, dict[str, Any]] = {
    "torch.compile": {"keyword": "compile", "seconds": 90.0, "limit_seconds": 360.0},
    "torch.compile max-autotune": {"keyword": "max-autotune", "seconds": 360.0, "limit_seconds": 1200.0},
}
"""By the end of the item's name. The seconds are estimates: they have not been measured on a GPU."""


@attrs.frozen
class Item:
    """
    One thing that a stage does.

    Attributes:
        name: Unique in its stage.
        run: Does it.
        case: What it measures, where that is a case.
        seconds: A guess of how long it takes.
        limit_seconds: It hangs if it, or a kernel of it that is new, takes longer.
        keyword: The item runs only if the text of `--only` contains this word; empty: no word is needed.
        steps: Names of the steps that have it, by which `--only` finds it too.
    """

    name: str
    run: Callable[[Session], dict[str, Any]]
    case: Case | None = None
    seconds: float = 1.0
    limit_seconds: float = 30.0
    keyword: str = ""
    steps: Sequence[str] = ()


@attrs.frozen
class Stage:
    """
    A part of the pass.

    Attributes:
        name: For --stage.
        shows: What it is for, in a phrase.
        seconds: Its share of the default time.
        items: Lists what it does on a device.
        always: Whether a resumed pass does it again: what it leaves is on the machine, not in the file.
    """

    name: str
    shows: str
    seconds: float
    items: Callable[[Device], list[Item]]
    always: bool = False


def _timed(case: Case, device: Device, of: Sequence[str] = ()) -> Item:
    seconds = _guess(case, device)
    return Item(case.name, lambda session: gpu_items.timed(case, session), case, seconds, steps=of)


def _of_cases(found: Iterable[Case], device: Device) -> list[Item]:
    return [_timed(case, device) for case in found if case.dtype in arithmetic.supported_dtypes(device)]


def _steps(device: Device) -> list[Item]:
    """Return the operations of every step that the device has memory for."""
    dtypes, limit = arithmetic.supported_dtypes(device), hardware_memory.memory_limit(device).bytes
    return [
        _timed(case, device, names)
        for case, names in steps.merged((step for step in steps.STEPS if step.dtype in dtypes), device)
        if case.num_bytes * count_sets(case, device.l2_bytes) <= limit
    ]


def _guess(case: Case, device: Device) -> float:
    """Guess the seconds of a case: preparing and checking, then rounds of ours and the vendor's."""
    step = 2 * (case.roofline_seconds(device) or 0.0)
    return 0.15 + case.num_bytes / 50e9 + max(gpu_items.CASE_SECONDS / 2, 20 * step)


def _mixed(on_tensor_cores: Iterable[Case], others: Iterable[Case]) -> list[Case]:
    """Two on tensor cores for every other, so that a stage that is cut off has some of both."""
    found, rest = [], iter(others)
    for first, second in itertools.zip_longest(*[iter(on_tensor_cores)] * 2):
        found += [first, second, next(rest, None)]
    return [case for case in (*found, *rest) if case is not None]


def _checks(device: Device) -> list[Item]:
    odd = [case for case in tensor_cases.odd_shapes() if case.dtype in arithmetic.supported_dtypes(device)]
    odd += cases.odd_shapes()
    return [
        Item(case.name, lambda session, case=case, seed=seed: gpu_items.verified(case, seed, session), case, 0.05, 10.0)
        for seed, case in enumerate(odd, start=cases.SEED)
    ] + [Item("layouts", gpu_items.layouts, seconds=0.5, limit_seconds=10.0)]


def _occupancies(device: Device) -> list[Item]:
    by_source: dict[str, list[Kernel]] = {}
    for found in variant.kernels():
        if found.runs_on(gpu_items.arch_of(device)):
            by_source.setdefault(found.source, []).append(found)
    return [
        Item(source, lambda session, found=found: gpu_items.occupancy(found, session), seconds=0.02 * len(found))
        for source, found in by_source.items()
    ]


def _memories(_: Device) -> list[Item]:
    return [
        Item(
            f"{network.name}, {mode}, batch {batch_size}, {dtype}, {library}",
            functools.partial(training.memory_of, network.name, mode, batch_size, dtype, library),
            seconds=3.0,
            limit_seconds=60.0,
        )
        for network, mode, batch_size, dtype, library in cases.trained()
    ]


def _trainings(_: Device) -> list[Item]:
    return [
        Item(
            f"{name}, batch {batch_size}, {dtype}",
            functools.partial(training.whole_step, name, "training", batch_size, dtype, ("eager",)),
            seconds=15.0,
            limit_seconds=90.0,
        )
        for name, batch_size, dtype in _STEPS
    ] + [
        # Compiling takes minutes, which the default pass does not have: a keyword keeps these items out of it.
        Item(
            f"{name}, {mode}, batch {batch_size}, float16, {ending}",
            functools.partial(training.whole_step, name, mode, batch_size, "float16", rival_names),
            **_COMPILED_OPTIONS[ending],
        )
        for ending, rival_names in COMPILED_RIVALS.items()
        for mode in ("training", "inference")
        for name, batch_sizes in steps.BATCHES.items()
        for batch_size in batch_sizes
    ]


def _tunings(_: Device) -> list[Item]:
    return [
        Item(
            f"{name}, {mode}, {dtype}, {library}",
            functools.partial(training.tuned, name, mode, dtype, library),
            seconds=16.0,
            limit_seconds=60.0,
        )
        for name, mode, dtype, library in _TUNED
    ]


def _sweeps(_: Device) -> list[Item]:
    return [
        Item(
            of_layer(layer, pass_, cases.LARGEST_SWEPT).name,
            lambda session, layer=layer, pass_=pass_: sweep.sweep(
                session.sized(of_layer(layer, pass_, cases.LARGEST_SWEPT)),
                session.target,
                session.contest,
                until=session.deadline,
            ),
            of_layer(layer, pass_, cases.LARGEST_SWEPT),
            4.0,
            60.0,
        )
        for layer, pass_ in cases.swept()
    ]


def _facts(_: Device) -> list[Item]:
    return [
        Item("libraries", gpu_items.libraries),
        Item("copies", gpu_items.copies, seconds=3.0),
        *(
            Item(f"gemm, {dtype}", functools.partial(gpu_items.gemm_ceiling, dtype), seconds=1.0)
            for dtype in ("float32", *tensor_cases.DTYPES)
        ),
    ]


def _conformances(device: Device) -> list[Item]:
    return [
        Item(found.name, functools.partial(conformance.conforms, found), seconds=0.05, limit_seconds=30.0)
        for found in gpu_probes.probes(gpu_items.arch_of(device))
    ]


def _products(device: Device) -> list[Item]:
    return _of_cases(_mixed(tensor_cases.gemms(), cases.gemms()), device)


def _units(device: Device) -> list[Item]:
    probes = gpu_probes.probes(gpu_items.arch_of(device))
    return [
        Item("all units", gpu_items.compile_units, seconds=20.0, limit_seconds=240.0),
        Item("probes and twins", functools.partial(conformance.build, probes), seconds=8.0, limit_seconds=60.0),
    ]


STAGES = (
    Stage("compile", "every kernel for this GPU", 35, _units, always=True),
    Stage("facts", "the device's copy bandwidth, cuBLAS's rates", 12, _facts),
    Stage("conformance", "every instruction of the kernels against its twin on the CPU", 10, _conformances),
    Stage("correctness", "every variant against float64 on odd shapes", 60, _checks),
    Stage("gemm", "matrix products beside cuBLAS", 55, _products),
    Stage("steps", "every operation of the networks' steps, its floor and the vendor's time", 162, _steps),
    Stage("training", "whole steps against PyTorch eager and torch.compile", 35, _trainings),
    Stage("occupancy", "registers and blocks per SM against the driver", 6, _occupancies),
    Stage("memory", "the memory plan against the real peak", 25, _memories),
    Stage("tune", "autotune against a dense sweep around its answer", 35, _tunings),
    Stage("sweep", "every batch size from 1 to 256", 35, _sweeps),
)  # fmt: skip


def stage_named(name: str) -> Stage:
    """Find a stage."""
    return next(stage for stage in STAGES if stage.name == name)


def chosen(stage: Stage, device: Device, only: str) -> list[Item]:
    """
    Return a stage's items whose name, or a step of which, matches an expression that contains the item's keyword.

    The stage of facts is always whole: it identifies the device of a file.
    """
    return [
        item
        for item in stage.items(device)
        if stage.name == "facts"
        or (item.keyword in only and any(re.search(only, name) for name in (item.name, *item.steps)))
    ]

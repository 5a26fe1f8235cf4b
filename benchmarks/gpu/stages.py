"""The stages of the GPU pass: each has a list of items for one process, the most valuable first."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from benchmarks.gpu import cases, conformance, eager, items as gpu_items, probes as gpu_probes, steps, training
from benchmarks.gpu.items import Session
from benchmarks.gpu.steps import Step
from cubatch.bench.calls import Case
from cubatch.bench.target import count_sets
from cubatch.hardware import arithmetic, memory_limit as hardware_memory
from cubatch.hardware.facts import Device

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
    An item of a stage.

    Attributes:
        name: Unique in its stage.
        run: Does the work and returns a mapping for the JSON.
        case: The case that it measures; None if it measures something else.
        seconds: Estimate of its time.
        limit_seconds: Time after which it counts as hung; also for a kernel that it launches for the first time.
        keyword: The item runs only if the text of `--only` contains this word; empty if no word is needed.
        steps: Steps that have it, by which `--only` finds it too.
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
        name: Name for `--stage`.
        shows: Its purpose in a phrase.
        seconds: Its share of the default time.
        items: Returns its items on a device.
        always: Whether a resumed pass runs it again, because its results are on the machine and not in the file.
    """

    name: str
    shows: str
    seconds: float
    items: Callable[[Device], list[Item]]
    always: bool = False


COMPILED = ", compiled"
"""End of the name of a case that `torch.compile` takes part in; it compiles for seconds, so a keyword selects it."""


def _timed(case: Case, device: Device, of: Sequence[str] = ()) -> Item:
    seconds = _guess(case, device)
    return Item(case.name, functools.partial(gpu_items.timed, case), case, seconds, steps=of)


def _of_cases(listed: Iterable[Case], device: Device) -> list[Item]:
    return [_timed(case, device) for case in listed if case.dtype in arithmetic.supported_dtypes(device)]


def _steps(device: Device) -> list[Item]:
    """Return the operations of every step that the device has memory for; some also with `torch.compile`."""
    dtypes, limit = arithmetic.supported_dtypes(device), hardware_memory.memory_limit(device).bytes
    items = [
        _timed(case, device, names)
        for case, names in steps.merged((step for step in steps.STEPS if step.dtype in dtypes), device)
        if case.num_bytes * count_sets(case, device.l2_bytes) <= limit
    ]
    return items + [
        attrs.evolve(
            item, name=item.name + COMPILED, run=functools.partial(gpu_items.timed, item.case, others=eager.COMPILED),
            seconds=item.seconds + 10.0, limit_seconds=120.0, keyword="compiled",
            steps=[name + COMPILED for name in item.steps],
        )
        for item in items
        if item.case is not None and item.case.operation in eager.COMPILED_OPERATIONS
    ]  # fmt: skip


def _guess(case: Case, device: Device) -> float:
    """Return an estimate of the seconds of a case: preparing and checking, then rounds of cubatch and the vendor."""
    step = 2 * (case.roofline_seconds(device) or 0.0)
    return 0.15 + case.num_bytes / 50e9 + max(gpu_items.CASE_SECONDS / 2, 20 * step)


def _checks(device: Device) -> list[Item]:
    odd = [case for case in cases.odd_products() if case.dtype in arithmetic.supported_dtypes(device)]
    odd += cases.odd_shapes()
    return [
        Item(case.name, functools.partial(gpu_items.verified, case, seed), case, 0.05, 10.0)
        for seed, case in enumerate(odd, start=cases.SEED)
    ]


def _memories(_: Device) -> list[Item]:
    return [
        Item(
            f"{network.name}, {mode}, batch {batch_size}, {dtype}, {library}",
            functools.partial(training.memory_of, Step(network.name, mode, batch_size, dtype), library),
            seconds=3.0,
            limit_seconds=60.0,
        )
        for network, mode, batch_size, dtype, library in cases.trained()
    ]


def _trainings(_: Device) -> list[Item]:
    return [
        Item(
            f"{name}, batch {batch_size}, {dtype}",
            functools.partial(training.whole_step, Step(name, "training", batch_size, dtype), ("eager",)),
            seconds=15.0,
            limit_seconds=90.0,
        )
        for name, batch_size, dtype in _STEPS
    ] + [
        # Compiling takes minutes, which the default pass does not have: a keyword keeps these items out of it.
        Item(
            f"{name}, {mode}, batch {batch_size}, float16, {ending}",
            functools.partial(training.whole_step, Step(name, mode, batch_size), rival_names),
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


def _facts(_: Device) -> list[Item]:
    return [Item("libraries", gpu_items.libraries)]


def _conformances(device: Device) -> list[Item]:
    return [
        Item(probe.name, functools.partial(conformance.conforms, probe), seconds=0.05, limit_seconds=30.0)
        for probe in gpu_probes.probes(gpu_items.arch_of(device))
    ]


def _products(device: Device) -> list[Item]:
    return _of_cases(cases.gemms(), device)


def _units(device: Device) -> list[Item]:
    probes = gpu_probes.probes(gpu_items.arch_of(device))
    return [
        Item("all units", gpu_items.compile_units, seconds=20.0, limit_seconds=240.0),
        Item("probes and twins", functools.partial(conformance.build, probes), seconds=8.0, limit_seconds=60.0),
    ]


STAGES = (
    Stage("compile", "every kernel for this GPU", 35, _units, always=True),
    Stage("facts", "versions of the vendor's libraries", 4, _facts),
    Stage("conformance", "every instruction of the kernels against its twin on the CPU", 10, _conformances),
    Stage("correctness", "every variant against float64 on odd shapes", 60, _checks),
    Stage("gemm", "matrix products against cuBLAS", 55, _products),
    Stage("steps", "every operation of steps of networks, its floor and the time of the vendor", 162, _steps),
    Stage("training", "whole steps against PyTorch eager and torch.compile", 35, _trainings),
    Stage("memory", "the memory plan against the real peak", 25, _memories),
    Stage("tune", "autotune against a dense sweep around its answer", 35, _tunings),
)  # fmt: skip


def stage_named(name: str) -> Stage:
    """Return a stage."""
    return next(stage for stage in STAGES if stage.name == name)


def chosen(stage: Stage, device: Device, only: str) -> list[Item]:
    """
    Return a stage's items whose name, or a step of which, matches an expression that contains the item's keyword.

    The stage `facts` is always whole: it identifies the device of a file.
    """
    return [
        item
        for item in stage.items(device)
        if stage.name == "facts"
        or (item.keyword in only and any(re.search(only, name) for name in (item.name, *item.steps)))
    ]

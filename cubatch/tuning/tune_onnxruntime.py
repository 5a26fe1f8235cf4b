"""autotune(library="onnxruntime"): the walk for an ONNX file that ONNX Runtime runs."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from cubatch import files
from cubatch.engine.conditions import conditions
from cubatch.errors import InvalidArgument, InvalidSpec, MissingDependency
from cubatch.frameworks.onnx_graph import OnnxGraph
from cubatch.frameworks.onnxruntime_runner import PROVIDERS
from cubatch.hardware import probe
from cubatch.hardware import room as hardware_room
from cubatch.hardware.facts import Device
from cubatch.measure import heap
from cubatch.measure.goal import Goal
from cubatch.measure.runner import FactoryRef
from cubatch.search import walk
from cubatch.tuning import store as kept
from cubatch.tuning import tune
from cubatch.tuning.learned import tuned
from cubatch.tuning.limits import Limits
from cubatch.tuning.named_module import WorkersModule
from cubatch.tuning.results import TuningResult

LIBRARY = "onnxruntime"
_WHEELS = ("onnxruntime", "onnxruntime-gpu")


def tune_file(
    spec: object,
    device: Device | str | None,
    *,
    devices: object,
    mode: str,
    dtype: str,
    recompute: bool,
    isolate: bool | str,
    goal: Goal,
    limits: Limits,
    memory_limit: int | str | None,
    store: bool | str | Path,
    progress: Callable[[walk.Event], None] | None,
) -> TuningResult:
    """
    Tune what ONNX Runtime makes of a file; see `autotune`, whose arguments these are.

    Raises:
        InvalidArgument: If one of them is not for ONNX Runtime, or its child InvalidSpec the file.
        DoesNotFit: If not even one sample fits.
        DeviceNotAvailable: If the ONNX Runtime that is installed is without CUDA.
        MissingDependency: If it, or onnx, is not installed.
    """
    path = _path(spec)
    _check(devices, mode, dtype, goal, recompute=recompute, isolate=isolate)
    kept.check_place(store)
    tune.check_progress(progress)
    found = probe.resolve(device, live=True)
    versions = _versions(found)
    room = hardware_room.memory_limit(found, memory_limit)
    identity = {
        "spec": {"name": path.name},
        "file": str(path.resolve()),
        "library": LIBRARY,
        "mode": mode,
        "provider": versions["provider"],
        "device": found.uuid or found.name,
        "mig": found.mig,
        **attrs.asdict(goal),
        **limits.identity,
        "memory_limit": memory_limit,
    }

    def runner(memory_limit: int, seed: int) -> WorkersModule:
        arguments = {
            "path": str(path.resolve()), "device": found.address, "threads": found.threads,
            "memory_limit": memory_limit, "seed": seed,
        }  # fmt: skip
        return WorkersModule(FactoryRef("cubatch.frameworks.onnxruntime_runner:runner", arguments), remedy="")

    with kept.open_run(
        kept.path_of(store), identity=identity,
        conditions=conditions(found) | {"malloc": heap.settings(found.kind)} | versions | _sums(path),
        budget=limits.budget, memory_bytes=room.bytes, refresh=store == "refresh",
    ) as run:  # fmt: skip
        run.notes += heap.told(found.kind)
        return tuned(path.name, LIBRARY, found, mode, None, runner, run, goal, limits, room, progress, versions)


def _path(spec: object) -> Path:
    if not isinstance(spec, str | Path) or Path(spec).suffix.lower() != ".onnx":
        remedy = "torch.onnx.export writes one."
        raise InvalidArgument("layer_spec", spec, f'the path of an .onnx file for library="{LIBRARY}"', remedy)
    if not files.is_file(spec):
        raise InvalidArgument("layer_spec", str(spec), "a file that is there")
    return Path(spec)


def _check(devices: object, mode: str, dtype: str, goal: Goal, *, recompute: bool, isolate: bool | str) -> None:
    """Refuse what ONNX Runtime does not do."""
    remedy = "ONNX Runtime runs a file as it is, for inference only; autotune_module trains a PyTorch module."
    for_it = f'for library="{LIBRARY}"'
    if devices is not None:
        raise InvalidArgument("devices", devices, f"left out {for_it}: devices share steps of training", remedy)
    if mode != "inference":
        raise InvalidArgument("mode", mode, f'"inference" {for_it}', remedy)
    if recompute is not False:
        raise InvalidArgument("recompute", recompute, f"False {for_it}", remedy)
    if dtype != "float32":
        raise InvalidArgument("dtype", dtype, f"left out {for_it}: the file has its own", "Convert the file instead.")
    if goal.objective == "energy":
        raise InvalidArgument("objective", goal.objective, f'"throughput" or "latency" {for_it}')
    if not (isolate is True or isolate == "auto"):
        raise InvalidArgument("isolate", isolate, f'True or "auto" {for_it}, which runs in a process that may die')


def _versions(device: Device) -> dict[str, Any]:
    """Say which ONNX Runtime is there, without importing it."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise MissingDependency("ONNX Runtime", f'library="{LIBRARY}"', LIBRARY)
    if importlib.util.find_spec("onnx") is None:
        raise MissingDependency("onnx", f'library="{LIBRARY}"', LIBRARY)
    installed = []
    for name in _WHEELS:
        try:
            installed.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return {"onnxruntime": ", ".join(installed) or None, "provider": PROVIDERS[device.kind]}


def _sums(path: Path) -> dict[str, str]:
    """Sum up the file, and those of its weights that lie beside it."""
    sums = {}
    for number, each in enumerate(OnnxGraph(path).files):
        try:
            with each.open("rb") as file:
                sum_ = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InvalidSpec("ONNX file", str(path), f"one whose weights are beside it ({error})") from error
        sums[f"file_sha256 of {each.name}" if number else "file_sha256"] = sum_
    return sums

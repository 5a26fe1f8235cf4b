"""An ONNX file that ONNX Runtime runs: `autotune(library="onnxruntime")`."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import attrs

from cubatch import checks, files
from cubatch.errors import InvalidArgument, InvalidSpec, MissingDependency
from cubatch.frameworks import heap
from cubatch.frameworks.onnx_graph import OnnxGraph
from cubatch.frameworks.onnxruntime_runner import PROVIDERS
from cubatch.hardware import memory_limit as hardware_memory, probe
from cubatch.hardware.facts import Device
from cubatch.measure.runner import LearnsMemory
from cubatch.tuning.request import Request
from cubatch.tuning.subjects.bounded_subject import BoundedSubject, share_cpus

LIBRARY = "onnxruntime"
_WHEELS = ("onnxruntime", "onnxruntime-gpu")


@attrs.define(kw_only=True)
class OnnxSubject(BoundedSubject):
    """An ONNX file that ONNX Runtime runs."""

    path: Path  # path of the file
    dims: Mapping[str, int] = attrs.field(factory=dict)  # extents of open axes and values of integer inputs, by name

    @classmethod
    def of(
        cls, spec: object, device: Device | str | None, request: Request, *, devices: object, mode: str, dtype: str,
        recompute: bool, isolate: bool | str, dims: Mapping[str, int] | None = None, threads: int | None = None,
    ) -> Self:  # fmt: skip
        """
        Return the subject of an ONNX file, after checking the arguments of `autotune`.

        `spec` is the file's path, and `dims` has extents of open axes and values of integer inputs by name.
        `device` None is the first GPU, else the CPU; `threads` None: one instance, with all CPUs.

        Raises:
            InvalidArgument: If there is no such file, or an argument is not for ONNX Runtime.
            DeviceNotAvailable: If the device is not in this machine.
            MissingDependency: If ONNX Runtime or onnx is not installed.
        """
        path = _path(spec)
        if not isinstance(dims or {}, Mapping):
            raise InvalidArgument("dims", dims, "a mapping from names of axes to extents, such as {'sequence': 128}")
        fixed = {name: checks.check_whole(f"dims[{name!r}]", extent, least=0) for name, extent in (dims or {}).items()}
        _check(devices, mode, dtype, request.goal.objective, recompute=recompute, isolate=isolate)
        resolved = probe.resolve(device, live=True)
        versions = _versions(resolved)
        memory = hardware_memory.memory_limit(resolved, request.memory_limit)
        resolved, memory, shares = share_cpus(resolved, memory, threads)
        return cls(
            name=path.name, library=LIBRARY, device=resolved, memory=memory, mode=mode, seed=request.seed,
            budget=request.budget, versions=versions, path=path, dims=fixed, shares=shares,
        )  # fmt: skip

    @property
    def identity(self) -> Mapping[str, Any]:
        """`spec` (the `name`, extents of open axes), `file`, `library`, `mode`, execution `provider` and instances."""
        dims = {"dims": dict(self.dims)} if self.dims else {}
        return {
            "spec": {"name": self.name, **dims}, "file": str(self.path.resolve()), "library": LIBRARY,
            "mode": self.mode, "provider": self.versions["provider"], **self.instances,
        }  # fmt: skip

    @property
    def conditions(self) -> Mapping[str, Any]:
        """Checksums of the file and its weights, version and provider of ONNX Runtime, and the settings of malloc."""
        return {"malloc": heap.settings(self.device.kind), **self.versions, **_checksums(self.path, self.dims)}

    def make_runner(self) -> LearnsMemory:
        """Return a runner whose worker process loads the file and runs its steps."""
        arguments = {
            "path": str(self.path.resolve()), "device": self.device.address, "threads": self.device.threads,
            "memory_limit": self.memory.bytes, "seed": self.seed, "dims": dict(self.dims),
        }  # fmt: skip
        return self.remote("cubatch.frameworks.onnxruntime_runner:runner", arguments, "")


def _path(spec: object) -> Path:
    if not isinstance(spec, str | Path) or Path(spec).suffix.lower() != ".onnx":
        remedy = "torch.onnx.export writes one."
        raise InvalidArgument("layer_spec", spec, f'the path of an .onnx file for library="{LIBRARY}"', remedy)
    if not files.is_file(spec):
        raise InvalidArgument("layer_spec", str(spec), "a file that exists")
    return Path(spec)


def _check(
    devices: object, mode: str, dtype: str, objective: str, *, recompute: bool, isolate: bool | str
) -> None:  # fmt: skip
    """Raise InvalidArgument for options that ONNX Runtime does not support."""
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
    if objective == "energy":
        raise InvalidArgument("objective", objective, f'"throughput" or "latency" {for_it}')
    if not (isolate is True or isolate == "auto"):
        raise InvalidArgument("isolate", isolate, f'True or "auto" {for_it}, which runs in a process that may die')


def _versions(device: Device) -> dict[str, Any]:
    """
    Return the installed ONNX Runtime packages (`onnxruntime`) and the execution `provider`, without an import.

    MissingDependency is raised if ONNX Runtime or onnx is not installed.
    """
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


def _checksums(path: Path, dims: Mapping[str, int]) -> dict[str, str]:
    checksums = {}
    for number, each in enumerate(OnnxGraph(path, dims).files):
        try:
            with each.open("rb") as file:
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InvalidSpec("ONNX file", str(path), f"one whose weights are in the same folder ({error})") from error
        checksums[f"file_sha256 of {each.name}" if number else "file_sha256"] = checksum
    return checksums

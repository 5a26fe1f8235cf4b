"""Functions that run on a worker of the cluster: one describes its device, the other tunes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import socket
from collections.abc import Mapping
from typing import Any

import cubatch
from cubatch.engine import conditions
from cubatch.errors import CubatchError
from cubatch.hardware import probe
from cubatch.tuning import tune

_PACKAGES = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "distributed")
_DASK_SHARE = 0.6
"""Of a worker's memory limit: Dask pauses the worker at 0.8 of it, ends it at 0.95, and uses some itself."""


def describe(dask_worker: Any) -> dict[str, Any]:
    """
    Return a description of the device that a worker measures on: the first GPU that it sees, else its CPU.

    "device" is as `Device.to_mapping`, "blas_threads" a number, "memory_bytes" Dask's limit or None. "resources" are
    those that a task must claim to have the GPU alone, or None; "versions" is the result of `versions`.
    """
    device = probe.resolve(None, live=True)
    return {
        "device": device.to_mapping(),
        "blas_threads": conditions.conditions(device)["blas_threads"],
        "memory_bytes": dask_worker.memory_manager.memory_limit,
        "resources": {name: 1 for name in dask_worker.state.total_resources if name == "GPU"} or None,
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Return versions by package that must be equal on all workers and at the caller; None for a missing package."""
    installed: dict[str, str | None] = {"cubatch": cubatch.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        installed[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def measure(spec: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, str]:
    """
    Tune on this worker, while no other worker measures on its GPU, or on its host without a GPU.

    Return "result", a `TuningResult` in JSON, or "error", the message of a CubatchError: Dask cannot pickle a class of
    two parents.
    """
    from distributed import Lock, get_worker

    worker = get_worker()
    device = probe.resolve(None, live=True)
    if device.kind == "cpu" and worker.memory_manager.memory_limit:
        options = {"memory_limit": int(_DASK_SHARE * worker.memory_manager.memory_limit), **options}
    with Lock(f"cubatch {device.uuid or socket.gethostname()}"):
        try:
            return {"result": tune.autotune(dict(spec), **options).to_json()}
        except CubatchError as error:
            return {"error": str(error)}

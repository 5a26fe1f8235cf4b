"""
The conditions of a run other than the device: versions, BLAS, threads, the engine's own source.

Cached timings apply only under the same conditions, and sums are rounded alike only with the same software. No GPU
library is imported to find them.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import threadpoolctl

import cubatch
from cubatch.errors import CubatchError
from cubatch.hardware import nvml
from cubatch.hardware.facts import Device
from cubatch.kernels.variant import kernels_path

_PACKAGE = Path(cubatch.__file__).parent
# The packages that decide which calls a step makes and how they are timed; one too many only measures again.
_PACKAGES = ("network", "hardware", "kernels", "memory", "engine", "measure", "frameworks")
_ENGINE = tuple(f"{package}/**/*.py" for package in _PACKAGES)
_CUPY_WHEELS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_NVRTC_WHEELS = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")
_CUBLAS_WHEELS = ("nvidia-cublas-cu12", "nvidia-cublas")


def environment(device: Device) -> dict[str, Any]:
    """
    Return the software that a tuning run uses; results have it as `environment`.

    Args:
        device: The measured device; for a CPU the driver is None.

    Returns:
        dict: Versions of "cubatch", "python", "numpy", its "blas", "cupy", "nvrtc", "cublas" and "driver"; None for
            what is not installed or not used on this device. SHA-256 sums of the engine's source, "engine_sha256", and
            of the kernels, "kernels_sha256".
    """
    on_gpu = device.kind == "cuda"
    return {
        "cubatch": cubatch.__version__,
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "blas": _blas(),
        "cupy": _version(_CUPY_WHEELS) if on_gpu else None,
        "nvrtc": _version(_NVRTC_WHEELS) if on_gpu else None,
        "cublas": _version(_CUBLAS_WHEELS) if on_gpu else None,
        "driver": _driver(device) if on_gpu else None,
        "engine_sha256": _sha256(_PACKAGE, _ENGINE),
        "kernels_sha256": kernels_sha256(),
    }


def kernels_sha256() -> str:
    """Return the SHA-256 sum of the kernels' sources and configurations, without the recorded registers."""
    return _sha256(kernels_path(), ("**/*.cu", "**/*.cuh", "configs.toml"))


def conditions(device: Device) -> dict[str, Any]:
    """
    Return the values that must be equal for cached timings to apply: `environment` and the device's settings.

    These are "threads", "blas_threads" (None on a GPU), "memory_bytes" and "power_limit_watts".
    """
    facts = environment(device)
    return facts | {
        "threads": device.threads,
        # A batch of one is computed by one thread, with several in BLAS: OMP_NUM_THREADS and similar variables.
        "blas_threads": _numpys_blas().get("num_threads") if device.kind == "cpu" else None,
        "memory_bytes": device.memory_bytes,
        "power_limit_watts": device.power_limit_watts,
    }


def arithmetic(device: Device) -> dict[str, Any]:
    """
    Return the conditions that decide how sums are rounded; None for what is missing or not used.

    They are "device", "threads", the versions of "cubatch", "NumPy", "BLAS", "CuPy", "NVRTC", "cuBLAS" and "driver",
    and a hash of "kernels". Kernel variants that a GPU's timings choose are not included: the first step chooses them.
    """
    facts = environment(device)
    return {
        "device": str(device), "threads": device.threads, "cubatch": facts["cubatch"], "NumPy": facts["numpy"],
        "BLAS": facts["blas"], "CuPy": facts["cupy"], "NVRTC": facts["nvrtc"], "cuBLAS": facts["cublas"],
        "driver": facts["driver"], "kernels": facts["kernels_sha256"][:16] if device.kind == "cuda" else None,
    }  # fmt: skip


def _version(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def _blas() -> str:
    """Return name and version of NumPy's BLAS: "openblas 0.3.30 SkylakeX"."""
    library = _numpys_blas()
    parts = (library.get("internal_api"), library.get("version"), library.get("architecture"))
    return " ".join(str(part) for part in parts if part) or "unknown"


def _numpys_blas() -> Mapping[str, Any]:
    """Return threadpoolctl's record ("version", "num_threads", ...) of NumPy's BLAS, not SciPy's; empty if unknown."""
    import numpy as np

    package = Path(np.__file__).resolve().parent
    own = (package, package.with_name("numpy.libs"))  # the folder of libraries in wheels

    def rank(library: Mapping[str, Any]) -> tuple[bool, bool, str]:
        folder = Path(library["filepath"]).parent
        mine = any(folder.is_relative_to(place) for place in own)
        return not mine, folder.suffix == ".libs", str(folder)

    loaded = [library for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"]
    return min(loaded, key=rank, default={})


def _driver(device: Device) -> str | None:
    try:
        return nvml.Monitor(device.uuid).driver_version() if device.uuid else None
    except CubatchError:  # no NVML: the driver stays unknown, and a change of it unnoticed
        return None


@lru_cache(maxsize=8)
def _sha256(root: Path, patterns: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()

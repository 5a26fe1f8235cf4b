"""
GPU memory of a process outside its arrays: the CUDA context, code of kernels, handles and workspaces of libraries.

Nothing reports it in advance. It is estimated until a process has run on the GPU. From then on the largest measured
value is used, cached for this GPU and driver in the user's cache directory.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from cubatch import sqlite_file, whole_file
from cubatch.errors import CubatchError
from cubatch.hardware import architectures, nvml
from cubatch.hardware.facts import Device

_CONTEXT_BYTES_PER_THREAD = 2048
"""
Bytes of a CUDA context for every thread that can be resident on the GPU, chiefly its local memory.

Published measurements: 107 MiB (34 SMs of 1536 threads), 256 (82), 426 (142), 555 (188). The rule gives 102, 246, 426
and 564 (llama.cpp pull request 23604, InvokeAI issue 9413, unsloth-zoo pull request 1053).
"""
_LIBRARY_BYTES = 128 * 2**20
"""Code and workspaces that CuPy and cuBLAS load with the first products; 32 MiB is cuBLAS's workspace on Hopper."""
# A GPU of unknown size is taken for a large one: the run loses some memory, and does not run out of it.
_ASSUMED_CAPABILITY = (9, 0)
_ASSUMED_SMS = 132


def overhead_bytes(device: Device) -> int:
    """Return the bytes of GPU memory that a process takes in addition to arrays: measured earlier, else estimated."""
    cached = _read().get(key) if device.live and (key := _key(device)) else None
    return cached if cached is not None else _estimate(device)


def source(device: Device) -> str:
    """
    Return whether the result of `overhead_bytes` is measured or estimated, as a phrase.

    Example:
        >>> source(Device(name="a GPU", num_sms=80, compute_capability=(7, 0)))
        'estimated from published sizes of CUDA contexts'
    """
    is_measured = device.live and (key := _key(device)) is not None and key in _read()
    return "the largest measured on this GPU" if is_measured else "estimated from published sizes of CUDA contexts"


def record(device: Device, measured_bytes: int) -> None:
    """
    Cache a measured overhead in bytes if it is larger than the cached one; without a writable cache do nothing.

    It is the memory of this process by NVML, less its arrays.
    """
    key, cached = _key(device), _read()
    if key is None or measured_bytes <= cached.get(key, 0):
        return
    with contextlib.suppress(OSError, RuntimeError):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        whole_file.write(path, json.dumps(cached | {key: measured_bytes}, indent=1).encode())


def folder() -> Path:
    """Return the directory of cubatch's caches, that of the default store."""
    return sqlite_file.default_path().parent


def _path() -> Path:
    return folder().expanduser() / "context_overhead.json"


def _read() -> dict[str, int]:
    """Return the cached overheads in bytes by "UUID DRIVER_VERSION"; empty if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        content = json.loads(_path().read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return {key: size for key, size in content.items() if isinstance(size, int) and size > 0}
    return {}


def _key(device: Device) -> str | None:
    with contextlib.suppress(CubatchError):
        return f"{device.uuid} {nvml.Monitor(device.uuid).driver_version()}" if device.uuid else None
    return None


def _estimate(device: Device) -> int:
    known = architectures.known()
    limits = known.get(device.compute_capability or _ASSUMED_CAPABILITY, known[_ASSUMED_CAPABILITY])
    threads = (device.num_sms or _ASSUMED_SMS) * limits.threads_per_sm
    return threads * _CONTEXT_BYTES_PER_THREAD + _LIBRARY_BYTES

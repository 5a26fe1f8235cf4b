"""
What a process takes of a GPU beside its arrays: the CUDA context, code of kernels, libraries' handles and workspaces.

Nothing tells it beforehand.  For a GPU that nothing ran on yet it is estimated; once something did, the most that was
seen is kept, for this GPU under this driver, in the user's cache.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from cubatch import sqlite_file
from cubatch.errors import CubatchError
from cubatch.hardware import architectures, nvml
from cubatch.hardware.facts import Device

_CONTEXT_BYTES_PER_THREAD = 2048
"""
What a CUDA context takes for every thread that can be resident on the GPU, chiefly its local memory.
Contexts measured by others: 107 MiB (34 SMs of 1536 threads), 256 (82), 426 (142), 555 (188); the rule
gives 102, 246, 426, 564 (llama.cpp pull request 23604, InvokeAI issue 9413, unsloth-zoo pull request 1053).
"""

_LIBRARY_BYTES = 128 * 2**20
"""Code and workspaces that CuPy and cuBLAS load with the first products: 32 MiB of it cuBLAS's workspace on Hopper."""

_ASSUMED_CAPABILITY = (9, 0)
_ASSUMED_SMS = 132
"""A GPU whose size is not known is taken for a large one: it loses some memory, and does not run out of it."""


def reserve_bytes(device: Device) -> int:
    """
    Return the bytes of GPU memory that a process takes in addition to its arrays: cached for this GPU or by a rule.

    Example:
        >>> reserve_bytes(Device(name="a GPU", num_sms=80, compute_capability=(7, 0))) // 2**20
        448
    """
    kept = _kept().get(key) if device.live and (key := _key(device)) else None
    return kept if kept is not None else _estimated(device)


def keep(device: Device, taken_bytes: int) -> None:
    """
    Keep what a process was seen to take of a GPU beside its arrays, where it is more than any before it took.

    A place that cannot be written costs the knowledge, and nothing else.

    Args:
        device: In this machine.
        taken_bytes: What NVML says that the process holds, less its arrays.
    """
    key, kept = _key(device), _kept()
    if key is None or taken_bytes <= kept.get(key, 0):
        return
    with contextlib.suppress(OSError, RuntimeError):
        path = folder().expanduser() / "reserve.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(kept | {key: taken_bytes}, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def folder() -> Path:
    """Say where it is kept: in the user's cache directory."""
    return sqlite_file.default_path().parent


def _kept() -> dict[str, int]:
    """Read what is kept; nothing of a file that is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        found = json.loads((folder().expanduser() / "reserve.json").read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return {key: size for key, size in found.items() if isinstance(size, int) and size > 0}
    return {}


def _key(device: Device) -> str | None:
    with contextlib.suppress(CubatchError):
        return f"{device.uuid} {nvml.Monitor(device.uuid).driver_version()}" if device.uuid else None
    return None


def _estimated(device: Device) -> int:
    known = architectures.known()
    limits = known.get(device.compute_capability or _ASSUMED_CAPABILITY, known[_ASSUMED_CAPABILITY])
    threads = (device.num_sms or _ASSUMED_SMS) * limits.threads_per_sm
    return threads * _CONTEXT_BYTES_PER_THREAD + _LIBRARY_BYTES

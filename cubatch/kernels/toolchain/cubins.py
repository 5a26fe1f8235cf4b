"""
Cache of compiled kernels: the machine code as a file, and a JSON file with its resources.

Files are written whole, so processes may share the folder.  A file that cannot be read is ignored.  The folder may be
deleted at any time.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import platformdirs

from cubatch import whole_file


@attrs.frozen
class Resources:
    """Resources of one block of a kernel, as reported by the assembler."""

    registers: int  # registers per thread
    # bytes of register spills (stores and loads) per thread, with those of functions that are not inlined
    spill_bytes: int
    shared_bytes: int  # static shared memory of a block, without the 1024 bytes that the system uses from sm_80 on
    threads: int | None  # most threads of a block by the launch bounds; None without bounds


@attrs.frozen
class Cubin:
    """The result of compiling a source with its macros for an architecture."""

    # file of the machine code, which exists as long as this process runs. No file if the code was not requested
    path: Path
    nvrtc: str  # build of the compiler: "12.9.86"
    resources: Mapping[str, Resources]  # resources by entry
    log: str  # log of the compiler


def default_folder() -> Path:
    """Return the folder of cached cubins: in the user's cache, which XDG_CACHE_HOME sets."""
    return Path(platformdirs.user_cache_dir("cubatch")) / "kernels"


def load(folder: Path, key: str, *, code: bool = True) -> Cubin | None:
    """
    Return a compiled kernel from the cache; None if it is missing or its JSON cannot be read.

    `code` is whether the machine code is needed, or only its resources.
    """
    for place in (folder, *([_private_folder()] if _private_folder.cache_info().currsize else [])):
        path = place / f"{key}.cubin"
        try:
            facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            resources = {entry: Resources(**values) for entry, values in facts["resources"].items()}
            cubin = Cubin(path, facts["nvrtc"], resources, facts["log"])
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            continue
        if path.exists() or not code:
            return cubin
    return None


def save(
    folder: Path, key: str, cubin: bytes, *, nvrtc: str, resources: Mapping[str, Resources], log: str, code: bool = True
) -> Cubin:
    """
    Write a cubin to the cache; if the folder is read-only, for this process only, with a warning.

    Args:
        folder: The folder, created if missing.
        key: Key for `load`.
        cubin: The machine code.
        nvrtc, resources, log: As in Cubin.
        code: Whether to write the machine code too, not only the resources.
    """
    facts = {
        "nvrtc": nvrtc,
        "resources": {entry: attrs.asdict(values) for entry, values in resources.items()},
        "log": log,
    }
    stored = cubin if code else None
    try:
        path = _write(folder, key, stored, facts)
    except OSError as error:
        reason = error.strerror or str(error)
        warnings.warn(f"compiled kernels are not cached, {folder} cannot be written: {reason}", stacklevel=2)
        path = _write(_private_folder(), key, stored, facts)
    return Cubin(path, nvrtc, resources, log)


def _write(folder: Path, key: str, cubin: bytes | None, facts: Mapping[str, Any]) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{key}.cubin"
    if cubin is not None:  # before the facts, whose reader expects it
        whole_file.write(path, cubin)
    whole_file.write(path.with_suffix(".json"), json.dumps(facts).encode())
    return path


@cache
def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="cubatch-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder

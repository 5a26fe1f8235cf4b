"""
Compiled kernels, kept on disk: the machine code as a file that loads, and beside it what is known of it.

Writers put whole files in place at once, so that processes may share the folder; what is damaged or half
written counts as not there.  The folder may be deleted at any time.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import shutil
import stat
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
    """
    What one block of a kernel takes from an SM, as the assembler reports it.

    Attributes:
        registers: Per thread.
        spill_bytes: Stores and loads of registers that went to local memory instead, per thread, those of functions
            that are not inlined included.
        stack_bytes: Local memory per thread.
        shared_bytes: Static shared memory of a block, without the 1024 bytes that the system takes from sm_80 on.
        barriers: Barriers of the block.
        threads: Most threads of a block by the source's launch bounds; None where it bounds none.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    barriers: int
    threads: int | None


@attrs.frozen
class Cubin:
    """
    One compile unit for one architecture.

    Attributes:
        path: The machine code; stays where it is at least as long as this process runs. No file where the code was
            not asked for.
        nvrtc: Build of the compiler: "12.9.86".
        resources: By entry.
        log: What the compiler said.
    """

    path: Path
    nvrtc: str
    resources: Mapping[str, Resources]
    log: str


def default_folder() -> Path:
    """Give the folder of kept cubins: in the user's cache, which XDG_CACHE_HOME moves."""
    return Path(platformdirs.user_cache_dir("cubatch")) / "kernels"


def load(folder: Path, key: str, *, code: bool = True) -> Cubin | None:
    """
    Find a kept cubin.

    Args:
        folder: Where.
        key: As it was saved.
        code: Whether the machine code is wanted, or only what is known of it.

    Returns:
        None where there is none, it is not whole, or others than the user could have put it there.
    """
    for place in (folder, *([_private_folder()] if _private_folder.cache_info().currsize else [])):
        path = place / f"{key}.cubin"
        try:
            if not _is_own(place):
                continue
            facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            if code and facts["sha256"] != hashlib.sha256(path.read_bytes()).hexdigest():
                continue
            resources = {entry: Resources(**values) for entry, values in facts["resources"].items()}
            return Cubin(path, facts["nvrtc"], resources, facts["log"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
    return None


def save(
    folder: Path, key: str, cubin: bytes, *, nvrtc: str, resources: Mapping[str, Resources], log: str, code: bool = True
) -> Cubin:
    """
    Keep a cubin; where the folder cannot be written, or others may write there, for this process only, with a warning.

    Args:
        folder: Where; made if it is not there.
        key: What it is found by.
        cubin: The machine code.
        nvrtc, resources, log: As in Cubin.
        code: Whether to keep the code itself too.
    """
    facts = {
        "nvrtc": nvrtc,
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "resources": {entry: attrs.asdict(values) for entry, values in resources.items()},
        "log": log,
    }
    kept = cubin if code else None
    try:
        path = _write(folder, key, kept, facts)
    except OSError as error:
        reason = error.strerror or str(error)
        warnings.warn(f"compiled kernels are not kept, {folder} cannot be written: {reason}", stacklevel=2)
        path = _write(_private_folder(), key, kept, facts)
    return Cubin(path, nvrtc, resources, log)


def _write(folder: Path, key: str, cubin: bytes | None, facts: Mapping[str, Any]) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(folder):
        raise PermissionError(errno.EACCES, "it belongs to another user, or anybody may write there", str(folder))
    path = folder / f"{key}.cubin"
    # The facts come last: whoever finds them finds the code they were written for, or one that is refused.
    if cubin is not None:
        whole_file.write(path, cubin)
    whole_file.write(path.with_suffix(".json"), json.dumps(facts).encode())
    return path


def _is_own(folder: Path) -> bool:
    """Whether only this user and root can have put code there, which is loaded unseen."""
    status = folder.stat()
    return status.st_uid in {os.getuid(), 0} and not status.st_mode & stat.S_IWOTH


@cache
def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="cubatch-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder

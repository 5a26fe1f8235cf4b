"""CuPy, the array library of the GPU: imported here and nowhere else, in the versions that cubatch is written for."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from cubatch.errors import (
    CubatchError,
    DeviceFailed,
    MissingDependency,
    OutOfMemory,
    UnsupportedVersion,
    is_out_of_memory,
)

CUPY_RELEASES = (13, 14)
CUDA_RELEASES = (12, 13)

_NUMBER = re.compile(r"\d+")


def cupy(purpose: str = "computing on a GPU") -> ModuleType:
    """
    Import CuPy, which takes seconds and needs a driver.

    Args:
        purpose: What needs it, as the beginning of a sentence.

    Raises:
        MissingDependency: If it is not installed.
        UnsupportedVersion: If it is of a release, or made for a CUDA, that cubatch is not written for.

    Example:
        >>> cupy().__name__  # doctest: +SKIP
        'cupy'
    """
    try:
        import cupy as found
    except ImportError as error:
        raise MissingDependency("cupy", purpose, "cuda12x") from error
    _check(found)
    module: ModuleType = found
    return module


@contextlib.contextmanager
def translating(operation: str) -> Iterator[None]:
    """
    Raise CuPy's errors as ours, and any library's want of memory.

    Args:
        operation: What is done, as the beginning of a sentence.

    Raises:
        OutOfMemory, DeviceFailed: In the place of the library's error.

    Example:
        >>> with translating("waiting for the GPU"):  # doctest: +SKIP
        ...     cupy.cuda.get_current_stream().synchronize()
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, CubatchError):  # ours, which says more
            raise
        if is_out_of_memory(error):
            raise OutOfMemory(operation) from error
        known = getattr(sys.modules.get("cupy_backends.cuda.api.runtime"), "CUDARuntimeError", None)
        if known is None or not isinstance(error, known):
            raise
        status = int(error.status)
        raise DeviceFailed(operation, str(error).split(":")[0], late(status), status) from error


def late(cuda_status: int) -> str:
    """
    Say that a fault may be of a kernel before the call that reported it; empty where it cannot be.

    Args:
        cuda_status: What the driver reported.
    """
    is_blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")  # each launch waits for its kernel
    if is_blocking or not DeviceFailed("", "", "", cuda_status).is_fatal:
        return ""
    return (
        "A kernel that was launched before may have done it: the GPU tells late. CUDA_LAUNCH_BLOCKING=1 in the "
        "environment tells which."
    )


@functools.cache
def _check(found: Any) -> None:
    """Refuse other releases, once for a module: the arrays' operations come by here all the time."""
    release = _NUMBER.match(found.__version__)
    cuda = found.cuda.runtime.runtimeGetVersion() // 1000  # 12090 is 12.9; AMD's HIP has eight digits
    if release is None or int(release[0]) not in CUPY_RELEASES or cuda not in CUDA_RELEASES:
        wanted = f"CuPy {_either(CUPY_RELEASES)} for CUDA {_either(CUDA_RELEASES)}"
        raise UnsupportedVersion(wanted, f"CuPy {found.__version__} for CUDA {cuda}", "cuda12x")


def _either(releases: tuple[int, ...]) -> str:
    return " or ".join(map(str, releases))

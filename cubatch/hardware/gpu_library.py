"""CuPy, the array library of the GPU: imported only here, in supported versions."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast

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
    Import and return CuPy, which takes seconds and needs a driver.

    `purpose` is the task that needs CuPy, for the error.

    Raises:
        MissingDependency: If CuPy is not installed.
        UnsupportedVersion: If the version of CuPy or of its CUDA is not supported.
    """
    try:
        import cupy as module
    except ImportError as error:
        raise MissingDependency("cupy", purpose, "cuda12x") from error
    _check(module)
    return cast("ModuleType", module)


@contextlib.contextmanager
def translating(operation: str) -> Iterator[None]:
    """
    Raise CUDA errors of CuPy in the block as DeviceFailed, and out-of-memory errors of any library as OutOfMemory.

    `operation` is that of the block, for the error. Other errors pass unchanged.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, CubatchError):
            raise
        if is_out_of_memory(error):
            raise OutOfMemory(operation) from error
        known = getattr(sys.modules.get("cupy_backends.cuda.api.runtime"), "CUDARuntimeError", None)
        if known is None or not isinstance(error, known):
            raise
        status = int(error.status)
        raise DeviceFailed(operation, str(error).split(":")[0], late(status), status) from error


def late(cuda_status: int) -> str:
    """Return a hint that an earlier kernel may have caused a CUDA status; empty text if it cannot have."""
    is_blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")  # each launch waits for its kernel
    if is_blocking or not DeviceFailed("", "", "", cuda_status).is_fatal:
        return ""
    return (
        "A kernel that was launched earlier may have caused it: the GPU reports late. CUDA_LAUNCH_BLOCKING=1 in the "
        "environment shows which."
    )


@functools.cache
def _check(module: Any) -> None:
    """Raise UnsupportedVersion for an unsupported CuPy or CUDA; cached, since every array operation calls this."""
    release = _NUMBER.match(module.__version__)
    cuda = module.cuda.runtime.runtimeGetVersion() // 1000  # 12090 is 12.9; AMD's HIP has eight digits
    if release is None or int(release[0]) not in CUPY_RELEASES or cuda not in CUDA_RELEASES:
        supported = f"CuPy {_either(CUPY_RELEASES)} for CUDA {_either(CUDA_RELEASES)}"
        raise UnsupportedVersion(supported, f"CuPy {module.__version__} for CUDA {cuda}", "cuda12x")


def _either(releases: tuple[int, ...]) -> str:
    return " or ".join(map(str, releases))

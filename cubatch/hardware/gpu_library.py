"""CuPy, the array library of the GPU: imported here and nowhere else, in the versions that cubatch is written for."""

from __future__ import annotations

import functools
import re
from types import ModuleType
from typing import Any

from cubatch.errors import MissingDependency, UnsupportedVersion

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

"""The environment in which Python finds real CuPy on simulated libraries."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cubatch.kernels.toolchain import cubins
from tests.cpusim import building as cpusim
from tests.cudasim.building import HERE, SOURCES

ROOT = HERE.parent.parent


def of(home: Path, *, devices: str = "h100", late: bool = False, faults: str = "") -> dict[str, str]:
    """
    Give the variables of a process in the simulation, and of all that it starts.

    Args:
        home: What `building.built` gave.
        devices: GPUs, by their names in src/devices.cpp, separated by commas.
        late: Whether work in streams waits until somebody waits for it.
        faults: What goes wrong, as src/faults.cpp says.
    """
    path = [HERE / "site", home / "site", ROOT]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "LD_LIBRARY_PATH": str(home / "lib"),
        "CUDASIM_HOME": str(home),
        "CUDASIM_SOURCES": str(SOURCES),
        "CUDASIM_DEVICES": devices,
        "CUDASIM_LATE": "1" if late else "",
        "CUDASIM_FAULTS": faults,
        "CUPY_ACCELERATORS": "",  # CUB's headers want nvcc
        "CUPY_CACHE_DIR": str(home / "jit"),
        "XDG_CACHE_HOME": str(_cache(home)),
        "CUBATCH_CPUSIM_CACHE": str(cpusim.cache_directory()),
    }


def _cache(home: Path) -> Path:
    """Give a cache of its own, so that no tuning result of a simulated GPU is kept; only cubins are the user's."""
    found, theirs = home / "cache" / "cubatch", cubins.default_folder()
    found.mkdir(parents=True, exist_ok=True)
    theirs.mkdir(parents=True, exist_ok=True)
    if not (found / theirs.name).exists():
        with contextlib.suppress(FileExistsError):
            (found / theirs.name).symlink_to(theirs)
    return found.parent

"""
What every Python process of the simulation does first.

It loads the simulated libraries under the names that CuPy looks for, and sees to it that for each cubin that cubatch
compiles a file of its name names the unit of tests/cpusim made of the same kernel: that is what a launch runs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.abc
import importlib.util
import os
import sys
import threading
from pathlib import Path

_UNITS = Path(os.environ.get("CUDASIM_HOME", "")) / "units"


def _load_libraries(folder: Path) -> None:
    order = ("libcuda.so.1", "libnvrtc.so.*", "libcublasLt.so.*", "libcublas.so.*", "libnccl.so.2", "libnvidia-ml.so.1")
    for name in order:
        for library in folder.glob(name):
            ctypes.CDLL(str(library))


def _with_units(module: object) -> None:
    plain = module.compile_unit

    @functools.wraps(plain)
    def compile_unit(kernel: object, arch: str, **options: object) -> object:
        found = plain(kernel, arch, **options)
        if found.path is None:
            return found
        from cubatch.kernels.variant import arch_number, kernels
        from tests.cpusim import building

        unit = f"{building.shared_object(kernel, arch_number(arch), 'plain')}\n"
        # By the names of its variants faults are planted: entries are called alike in many units.
        of_unit = [one for one in kernels() if (one.source, one.defines) == (kernel.source, kernel.defines)]
        unit += "".join(f"{one.entry} {one.name}\n" for one in of_unit)
        is_twin = Path(kernel.source).is_absolute()  # of no registry: one unit for each entry
        place = _UNITS / f"{found.path.name}{f'.{kernel.entry}' if is_twin else ''}"
        if not place.exists() or place.read_text() != unit:
            part = place.with_name(f"{place.name}.{os.getpid()}.{threading.get_ident()}")
            part.write_text(unit)
            part.replace(place)
        return found

    module.compile_unit = compile_unit


class _Changed(importlib.abc.MetaPathFinder):
    """Changes one module right after it is loaded."""

    def __init__(self, name: str, change: object) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: object, target: object = None) -> object:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: object) -> None:
            load(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec


if "CUDASIM_HOME" in os.environ:
    _load_libraries(Path(os.environ["CUDASIM_HOME"]) / "lib")
    sys.meta_path.insert(0, _Changed("cubatch.kernels.toolchain.compile", _with_units))

"""
ptxas, NVIDIA's assembler of PTX, as a program of its own: needs no GPU.

NVRTC has one inside and makes the same machine code.  This one spares compiling a source to PTX once more for an
architecture whose PTX is known already.  It comes with a PyPI wheel or a CUDA toolkit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import attrs

from cubatch.kernels.toolchain import nvrtc
from cubatch.kernels.toolchain.nvrtc import Program

_WHEELS = ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc")
_RELEASE = re.compile(r"\bV([\d.]+)")


@attrs.frozen
class Ptxas:
    """
    One assembler.

    Attributes:
        path: The program.
        version: Its build: "12.9.86".
    """

    path: str
    version: str

    def assemble(self, ptx: str, arch: str) -> Program:
        """
        Make machine code of PTX, as NVRTC does with the options of `compile.FLAGS`.

        Args:
            ptx: Its text, for this architecture.
            arch: "sm_86".

        Returns:
            Program: As NVRTC gives it; what the assembler said is its log.
        """
        with tempfile.TemporaryDirectory(prefix="cubatch-ptx-") as folder:
            source, target = Path(folder) / "unit.ptx", Path(folder) / "unit.cubin"
            source.write_text(ptx, encoding="utf-8")
            command = [self.path, "-v", "-lineinfo", f"-arch={arch}", "-o", str(target), str(source)]
            found = subprocess.run(command, capture_output=True, text=True, check=False)
            log = found.stdout + found.stderr
            if found.returncode:
                return Program(f"ptxas ended with {found.returncode}", log)
            return Program("", log, ptx, target.read_bytes())


def of_version(version: str) -> Ptxas | None:
    """
    Find the assembler of a build; None where it is not installed.

    Args:
        version: "12.9.86", as `Nvrtc.version` has it.
    """
    return next((found for found in _installed() if found.version == version), None)


@cache
def _installed() -> tuple[Ptxas, ...]:
    """List the assemblers of PyPI's wheels, of the toolkit at CUDA_PATH or CUDA_HOME, and on the PATH."""
    places = nvrtc.wheel_files(_WHEELS, re.compile("ptxas"))
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            places.append(str(Path(os.environ[variable]) / "bin" / "ptxas"))
    places += [found for found in (shutil.which("ptxas"),) if found]
    versions = ((place, _version(place)) for place in places)
    return tuple(Ptxas(place, version) for place, version in versions if version)


def _version(path: str) -> str:
    """Ask a program for its build; empty where it does not run."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    found = _RELEASE.search(said.stdout)
    return found[1] if found else ""

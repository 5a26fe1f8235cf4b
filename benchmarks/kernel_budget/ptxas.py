"""
ptxas, NVIDIA's assembler of PTX, as a program; needs no GPU.

NVRTC contains one that makes the same machine code.  The program makes machine code for an architecture whose PTX is
known, without compiling the source again.  It comes with a PyPI wheel or a CUDA toolkit.
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
    An assembler.

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
            Program: As of NVRTC; the output of the assembler is its log.
        """
        with tempfile.TemporaryDirectory(prefix="cubatch-ptx-") as folder:
            source, target = Path(folder) / "unit.ptx", Path(folder) / "unit.cubin"
            source.write_text(ptx, encoding="utf-8")
            command = [self.path, "-v", "-lineinfo", f"-arch={arch}", "-o", str(target), str(source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            log = done.stdout + done.stderr
            if done.returncode:
                return Program(f"ptxas ended with {done.returncode}", log)
            return Program("", log, ptx, target.read_bytes())


def of_version(version: str) -> Ptxas | None:
    """
    Return the assembler of a build; `None` if it is not installed.

    Args:
        version: "12.9.86", as `Nvrtc.version` has it.
    """
    return next((assembler for assembler in _installed() if assembler.version == version), None)


@cache
def _installed() -> tuple[Ptxas, ...]:
    """List the assemblers of PyPI's wheels, of the toolkit at CUDA_PATH or CUDA_HOME, and on the PATH."""
    places = nvrtc.wheel_files(_WHEELS, re.compile("ptxas"))
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            places.append(str(Path(os.environ[variable]) / "bin" / "ptxas"))
    places += [path for path in (shutil.which("ptxas"),) if path]
    versions = ((place, _version(place)) for place in places)
    return tuple(Ptxas(place, version) for place, version in versions if version)


def _version(path: str) -> str:
    """Return the build of a program; empty if it does not run."""
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    release = _RELEASE.search(shown.stdout)
    return release[1] if release else ""

"""
PTX that architectures share, so that a source is not compiled from the start for each of them.

More than half of the time of a cubin goes into its PTX.  Groups of architectures share all but the line with
their name.  From it ptxas makes the cubin that NVRTC would have made.  sm_89 has the instructions of sm_86, so both
have the same resources.  All variants were compared under one build of the compiler; the tests compare one of each
group again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs

from benchmarks.kernel_budget import ptxas
from cubatch.hardware import architectures
from cubatch.kernels.toolchain.nvrtc import Program
from cubatch.kernels.variant import Kernel, arch_number

_BUILD = "12.9.86"
_TARGET = re.compile(r"^\.target \w+", re.MULTILINE)
_BY_ASSEMBLER = re.compile(r"^ptxas ", re.MULTILINE)


def shared_ptx(kernel: Kernel, arch: str) -> str:
    """
    Return the first of the architectures that share the PTX of a kernel: "sm_80" for sm_80 to sm_90.

    Args:
        kernel: The kernel.
        arch: "sm_86".

    Returns:
        str: The architecture itself if it shares with no other.
    """
    # Conversion to bfloat16 is an instruction from sm_80 on; tensor cores differ before that.
    kind = "mma" if kernel.family == "mma" else "bfloat16" if kernel.dtype == "bfloat16" else "plain"
    known = architectures.numbered(arch_number(arch))
    return arch if known is None else known.ptx.get(kind, arch)


def derive(kernel: Kernel, arch: str, version: str, known: Mapping[str, Program], *, code: bool) -> Program | None:
    """
    Return what NVRTC would compile, from its programs for other architectures.

    Args:
        kernel: The kernel.
        arch: "sm_86".
        version: Build of NVRTC, which ptxas must have too.
        known: Programs by architecture.
        code: Whether the machine code is needed, or only its resources.

    Returns:
        Program: `None` if it must be compiled: its PTX is unknown, there is no ptxas, or its build was not compared.
    """
    assembler = ptxas.of_version(version) if version == _BUILD else None
    if assembler is None:
        return None
    architecture = architectures.numbered(arch_number(arch))
    same = None if architecture is None else architecture.same_instructions
    if not code and same is not None and same in known:
        return known[same]
    wanted = shared_ptx(kernel, arch)
    shared = next((program for other, program in known.items() if shared_ptx(kernel, other) == wanted), None)
    if shared is None:
        return None
    program = assembler.assemble(_TARGET.sub(f".target {arch}", shared.ptx, count=1), arch)
    source_log = _BY_ASSEMBLER.split(shared.log, maxsplit=1)[0]
    return attrs.evolve(program, log=source_log + program.log)

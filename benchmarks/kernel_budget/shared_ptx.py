"""
What neighbouring architectures have in common, so that a source is not compiled from the start for each of them.

More than half of the time that a cubin takes goes into its PTX.  Groups of architectures have it in common but for the
line that names them, and ptxas makes of it the cubin that NVRTC would have made.  The instructions for sm_89 are those
for sm_86, so that what one takes the other does.  All variants were compared for this under one build of the compiler;
the tests compare one of each group again.
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
    Name the architectures that have a kernel's PTX in common by the first of them: "sm_80" for sm_80 to sm_90.

    Args:
        kernel: Which.
        arch: "sm_86".

    Returns:
        The architecture itself where it shares with no other.
    """
    # Conversion to bfloat16 is an instruction from sm_80 on; tensor cores differ before that.
    kind = "mma" if kernel.family == "mma" else "bfloat16" if kernel.dtype == "bfloat16" else "plain"
    known = architectures.numbered(arch_number(arch))
    return arch if known is None else known.ptx.get(kind, arch)


def derive(kernel: Kernel, arch: str, version: str, known: Mapping[str, Program], *, code: bool) -> Program | None:
    """
    Give what NVRTC would compile, by what it compiled for other architectures.

    Args:
        kernel: What was compiled.
        arch: "sm_86".
        version: NVRTC's build, which ptxas must be of too.
        known: What came of it, by architecture.
        code: Whether the machine code itself is wanted, or only what it takes.

    Returns:
        Program: None where it has to be compiled: its PTX is not known, there is no ptxas, or the build is another than
            the one that was compared.
    """
    assembler = ptxas.of_version(version) if version == _BUILD else None
    if assembler is None:
        return None
    architecture = architectures.numbered(arch_number(arch))
    same = None if architecture is None else architecture.same_instructions
    if not code and same is not None and same in known:
        return known[same]
    wanted = shared_ptx(kernel, arch)
    found = next((program for other, program in known.items() if shared_ptx(kernel, other) == wanted), None)
    if found is None:
        return None
    program = assembler.assemble(_TARGET.sub(f".target {arch}", found.ptx, count=1), arch)
    said_of_source = _BY_ASSEMBLER.split(found.log, maxsplit=1)[0]
    return attrs.evolve(program, log=said_of_source + program.log)

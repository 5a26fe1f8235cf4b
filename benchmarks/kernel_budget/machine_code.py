"""Checks of compiled kernels by their machine code: expected instructions, main loops and register-bank conflicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from benchmarks.kernel_budget import sass
from benchmarks.kernel_budget.banks import BankConflicts, bank_conflicts
from benchmarks.kernel_budget.loops import Loop, main_loops
from cubatch.hardware import architectures
from cubatch.kernels import survey
from cubatch.kernels.variant import Kernel, arch_number

EXPECTED = {"mma": ("HMMA",), "hopper": ("HGMMA", "UTMALDG")}
"""Instructions that every entry of a family must have: products on tensor cores, loads of tiles."""

ON_CUDA_CORES = ("simt", "winograd")
"""Families whose tiles are summed by FFMA: their register-bank conflicts are held to the budget."""

WATCHED = "conv2d_fprop"
"""The operation whose first variant in each family stands for the family's main loop."""


@attrs.frozen
class Code:
    """
    Facts of the machine code of a variant.

    Attributes:
        problems: Messages about missing instructions and fences that are too wide.
        loop: Its main loop; None if that is not held to the budget.
        conflicts: Register-bank conflicts of its main loop; None unless it has a tile and runs on CUDA cores.
    """

    problems: tuple[str, ...] = ()
    loop: Loop | None = None
    conflicts: BankConflicts | None = None


def watched(known: Iterable[Kernel]) -> frozenset[tuple[str, str]]:
    """
    Return the variants whose main loops are held to the budget, with their architectures: one of each tiled family.

    Example:
        >>> from cubatch.kernels import variant
        >>> sorted(name for name, arch in watched(variant.kernels()) if arch == "sm_90")[0]
        'conv2d_fprop_f2x2_f32_winograd_256x128x8'
    """
    first: dict[tuple[str, str], str] = {}
    for kernel in known:
        for arch in survey.ARCHS if kernel.operation == WATCHED and kernel.tile is not None else ():
            if kernel.runs_on(arch_number(arch)) and _is_readable(arch):
                first.setdefault((kernel.family, arch), kernel.name)
    return frozenset((name, arch) for (_, arch), name in first.items())


def expected(kernel: Kernel, arch: str) -> tuple[str, ...]:
    """Return the instructions that the machine code of a variant must have."""
    if not _is_readable(arch):
        return ()
    capability = divmod(arch_number(arch), 10)
    waits = ("ACQBULK",) if "griddepcontrol" in architectures.of(capability).instructions else ()
    return (*EXPECTED.get(kernel.family, ()), *waits)


def is_needed(kernel: Kernel, arch: str, loops: frozenset[tuple[str, str]]) -> bool:
    """Return whether a check reads the machine code of a variant."""
    return bool(expected(kernel, arch)) or (kernel.name, arch) in loops or _has_banks(kernel)


def inspect(kernels: Sequence[Kernel], arch: str, cubin: bytes, loops: frozenset[tuple[str, str]]) -> dict[str, Code]:
    """
    Check the machine code of the variants of one unit of compilation; return it by the names of the variants.

    Args:
        kernels: The variants, all from one source and its macros.
        arch: "sm_70".
        cubin: The machine code.
        loops: As `watched` returns.

    Raises:
        InvalidData: If the bytes are no machine code.
    """
    number = arch_number(arch)
    texts = sass.texts(cubin) if any(map(_has_banks, kernels)) else {}
    reads_opcodes = expected(kernels[0], arch) or any((kernel.name, arch) in loops for kernel in kernels)
    opcodes, main = (sass.count_opcodes(cubin), main_loops(cubin, number)) if reads_opcodes else ({}, {})
    inspected = {}
    for kernel in kernels:
        has_banks = _has_banks(kernel) and kernel.entry in texts
        loop, counts = main.get(kernel.entry), opcodes.get(kernel.entry, {})
        problems = [f"no {name} in its machine code" for name in expected(kernel, arch) if not counts.get(name)]
        if loop is not None and loop.fences and "HGMMA" in EXPECTED.get(kernel.family, ()):
            problems.append(f"{loop.fences} fences of more than the block in a loop around wgmma")
        inspected[kernel.name] = Code(
            tuple(problems),
            loop if (kernel.name, arch) in loops else None,
            bank_conflicts(texts[kernel.entry], number) if has_banks else None,
        )
    return inspected


def _has_banks(kernel: Kernel) -> bool:
    return kernel.tile is not None and kernel.family in ON_CUDA_CORES


def _is_readable(arch: str) -> bool:
    return architectures.of(divmod(arch_number(arch), 10)).instruction_bytes == sass.INSTRUCTION_BYTES

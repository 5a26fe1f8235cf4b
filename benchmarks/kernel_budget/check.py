"""Compile kernels for architectures and check their figures and their machine code."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from benchmarks.kernel_budget import machine_code, shared_ptx, struct_layout
from benchmarks.kernel_budget.budget import Checked
from cubatch.errors import CompileError
from cubatch.kernels import survey, variant
from cubatch.kernels.survey import Progress
from cubatch.kernels.toolchain import compile as compiler, nvrtc
from cubatch.kernels.toolchain.nvrtc import Program
from cubatch.kernels.variant import Kernel, arch_number, kernels_path


@attrs.frozen
class SharingCompiler:
    """
    Compiles one kernel for one architecture, from the PTX of another where both share it.

    Attributes:
        kernel: The kernel.
        arch: "sm_86".
        code: Whether the machine code itself is needed.
        programs: Programs of the same source for other architectures; the new one is added.
    """

    kernel: Kernel
    arch: str
    code: bool
    programs: MutableMapping[str, Program]

    @property
    def version(self) -> str:
        """Build of NVRTC."""
        return nvrtc.for_arch(arch_number(self.arch)).version

    def compile(self, source: str, name: str, options: Sequence[str]) -> Program:
        """Compile as `Nvrtc.compile` does."""
        program = shared_ptx.derive(self.kernel, self.arch, self.version, self.programs, code=self.code)
        program = program or nvrtc.for_arch(arch_number(self.arch)).compile(source, name, options)
        if not program.error:
            self.programs[self.arch] = program
        return program


def check(
    chosen: Sequence[Kernel],
    archs: Sequence[str] = survey.ARCHS,
    *,
    may_spill: Mapping[str, str] | None = None,
    root: Path | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> list[Checked]:
    """
    Compile variants for architectures on all cores; find what `survey` finds, and what the machine code shows.

    Args:
        chosen: The variants.
        archs, may_spill, root, folder, progress: As for `survey.survey`, None included.

    Raises:
        As `survey.survey`.
    """
    loops = machine_code.watched(variant.kernels())
    code: dict[tuple[str, str], machine_code.Code] = {}

    def compile_group(group: Mapping[str, Sequence[Kernel]]) -> None:
        programs: dict[str, Program] = {}
        for arch, kernels in group.items():
            needed = any(machine_code.is_needed(kernel, arch, loops) for kernel in kernels)
            sharing = SharingCompiler(kernels[0], arch, needed, programs)
            try:
                cubin = compiler.compile_unit(
                    kernels[0], arch, root=root, folder=folder, code=needed, compiler=sharing
                )  # fmt: skip
            except CompileError:  # which the survey reports
                continue
            if needed:
                inspected = machine_code.inspect(kernels, arch, cubin.path.read_bytes(), loops)
                code.update({(name, arch): each for name, each in inspected.items()})

    groups = _groups(chosen, archs)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number, _ in enumerate(pool.map(compile_group, groups), start=1):
            if progress is not None:
                progress(number, len(groups), "")
    rows = survey.survey(chosen, archs, may_spill=may_spill, root=root, folder=folder)
    mismatch = struct_layout.mismatch(root or kernels_path(), archs[0]) if groups else ""
    checked = []
    for row in rows:
        machine = code.get((row.kernel.name, row.arch), machine_code.Code())
        layout = (mismatch,) if mismatch and row.figures and row.kernel.family in struct_layout.FAMILIES else ()
        problems = (*row.problems, *layout, *(machine.problems if row.figures else ()))
        checked.append(Checked(attrs.evolve(row, problems=problems), machine.loop, machine.conflicts))
    return checked


def _groups(chosen: Iterable[Kernel], archs: Sequence[str]) -> list[dict[str, list[Kernel]]]:
    """Return units of compilation by architecture, those that share PTX in one group."""
    groups: dict[tuple[object, ...], dict[str, list[Kernel]]] = {}
    for arch, kernels in survey.units(chosen, archs):
        first = kernels[0]
        group = groups.setdefault((first.source, first.defines, shared_ptx.shared_ptx(first, arch)), {})
        group[arch] = kernels
    return list(groups.values())

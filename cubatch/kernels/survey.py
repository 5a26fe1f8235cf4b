"""Compile all kernels for all architectures and check each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import attrs

from cubatch.errors import CompileError, InvalidArgument
from cubatch.hardware import architectures
from cubatch.hardware.arithmetic import check_kernels
from cubatch.hardware.facts import Device
from cubatch.hardware.waves import Occupancy
from cubatch.kernels.resources import Figures, Needs, Recorded, needs_of, recorded_needs
from cubatch.kernels.toolchain import compile as compiler
from cubatch.kernels.toolchain.cubins import Cubin
from cubatch.kernels.variant import Kernel, arch_number

ARCHS = architectures.surveyed()
"""Architectures that each kernel is checked for: one of each generation and size of SM, from Maxwell to Blackwell."""

Progress = Callable[[float, float, str], None]


@attrs.frozen
class Row:
    """The result of compiling and checking a variant for an architecture."""

    kernel: Kernel  # the variant
    arch: str  # "sm_70"
    status: str  # "ok", "error" (does not compile), "not_applicable" (to the architecture), or "unknown" (not recorded)
    nvrtc: str | None = None  # compiler build of these figures; None without figures
    figures: Figures | None = None  # registers, shared memory and spills; None if unknown
    occupancy: Occupancy | None = None  # resident blocks of an SM; None without figures
    problems: tuple[str, ...] = ()  # reasons why a launch would fail or be slow, as sentences
    error: CompileError | None = None  # the compile error; None if there was none

    @property
    def shared_bytes(self) -> int | None:
        """Bytes of static and dynamic shared memory of a block; None without figures."""
        return None if self.figures is None else self.figures.shared_bytes + self.kernel.dynamic_shared_bytes


def survey(
    chosen: Sequence[Kernel], archs: Sequence[str] = ARCHS, *, may_spill: Mapping[str, str] | None = None,
    root: Path | None = None, folder: Path | None = None, progress: Progress | None = None,
) -> list[Row]:  # fmt: skip
    """
    Compile variants for architectures on all cores and check each.

    Problems are compiler errors and warnings, spilled registers, and blocks that no SM of the architecture can hold.
    Launch bounds that differ from the threads of configs.toml are a problem too.

    Args:
        chosen: The variants.
        archs: The architectures: "sm_70", ...
        may_spill: By name of a variant, the reason why its spilled registers are not a problem; None: none may spill.
        root, folder: As for `compile_kernel`, None included.
        progress: Called after each compilation with the number of those that are done, the number of all, and the
            source file with its architecture. Variants with the same source and macros share a compilation. None:
            nothing is called.

    Returns:
        list: A row per variant and architecture, in the given order.

    Raises:
        InvalidArgument: If an architecture is unknown, or no installed NVRTC compiles for it.
        MissingDependency: If NVRTC is not installed.
    """
    for arch in archs:
        architectures.of(_capability(arch))
    compile_units = units(chosen, archs)
    ending = threading.Event()

    def compiled(arch: str, kernels: Sequence[Kernel]) -> list[Row]:
        if ending.is_set():
            return []
        try:
            cubin = compiler.compile_unit(kernels[0], arch, root=root, folder=folder, code=False)
        except CompileError as error:
            return [Row(kernel, arch, "error", problems=("it does not compile",), error=error) for kernel in kernels]
        return [_row(kernel, arch, cubin, may_spill or {}) for kernel in kernels]

    rows: dict[tuple[str, str], Row] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        waiting = [pool.submit(compiled, arch, kernels) for arch, kernels in compile_units]
        try:
            for done, future in enumerate(as_completed(waiting), start=1):
                unit_rows = future.result()
                rows |= {(row.kernel.name, row.arch): row for row in unit_rows}
                if progress is not None:
                    progress(done, len(waiting), f"{unit_rows[-1].kernel.source} {unit_rows[-1].arch}")
        except BaseException:  # Ctrl-C too: start no further compilation
            ending.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [rows.get((kernel.name, arch)) or Row(kernel, arch, "not_applicable") for kernel in chosen for arch in archs]


def units(chosen: Iterable[Kernel], archs: Sequence[str]) -> list[tuple[str, list[Kernel]]]:
    """Return (architecture, variants) of each compilation: variants share one if source and macros are equal."""
    grouped: dict[tuple[object, ...], list[Kernel]] = {}
    for arch in archs:
        for kernel in chosen:
            if kernel.runs_on(arch_number(arch)):
                grouped.setdefault((arch, kernel.source, kernel.defines), []).append(kernel)
    return [(str(key[0]), kernels) for key, kernels in grouped.items()]


def recorded(chosen: Iterable[Kernel], budget: Recorded, archs: Sequence[str] = ARCHS) -> list[Row]:
    """Return a row per variant and architecture from the resources recorded in `budget`, without compiling."""
    rows = []
    for kernel in chosen:
        for arch in archs:
            figures = budget.figures.get(kernel.name, {}).get(arch_number(arch))
            if not kernel.runs_on(arch_number(arch)):
                rows.append(Row(kernel, arch, "not_applicable"))
            elif figures is None:
                rows.append(Row(kernel, arch, "unknown"))
            else:
                occupied = _occupancy(kernel, arch, figures)
                rows.append(Row(kernel, arch, "ok", budget.nvrtc, figures, occupied))
    return rows


def _row(kernel: Kernel, arch: str, cubin: Cubin, may_spill: Mapping[str, str]) -> Row:
    resources = cubin.resources.get(kernel.entry)
    if resources is None:
        problem = f'{kernel.source} has no extern "C" entry {kernel.entry}'
        return Row(kernel, arch, "error", problems=(problem,))
    figures = Figures(resources.registers, resources.shared_bytes, resources.spill_bytes)
    occupied = _occupancy(kernel, arch, figures)
    problems = [*compiler.warnings_of(cubin.log)]
    if resources.spill_bytes and kernel.name not in may_spill:
        problems.append(f"{resources.spill_bytes} bytes of registers spilled per thread")
    if resources.threads != kernel.threads:
        bound = "none" if resources.threads is None else resources.threads
        problems.append(f"launched with {kernel.threads} threads, its launch bounds say {bound}")
    if not occupied.blocks_per_sm:
        problems.append(f"no SM can hold a block: {', '.join(occupied.limiters).replace('_', ' ')}")
    return Row(kernel, arch, "ok", cubin.nvrtc, figures, occupied, tuple(problems))


def _occupancy(kernel: Kernel, arch: str, figures: Figures) -> Occupancy:
    return needs_of(kernel, figures, None).on(_capability(arch))


def _capability(arch: str) -> tuple[int, int]:
    return divmod(arch_number(arch), 10)


def needs(kernel: Kernel, arch: str, budget: Recorded) -> Needs:
    """
    Return the resources of a kernel's block on an architecture ("sm_70").

    They are those recorded in `budget`, or else compiled, which needs no GPU. Raises InvalidArgument if the kernel is
    not meant for the architecture, CompileError if it does not compile.
    """
    if not kernel.runs_on(arch_number(arch)):
        raise InvalidArgument("device", arch, f"one that {kernel.name} is compiled for: {kernel.where}")
    figures = recorded_needs(kernel, arch, budget)
    if figures is not None:
        return figures
    check_kernels(Device(name=arch, compute_capability=_capability(arch)))
    (row,) = survey([kernel], [arch], may_spill=budget.may_spill)
    if row.error is not None:
        raise row.error
    if row.figures is None:
        raise InvalidArgument("kernel", kernel.name, f"a kernel whose source has its entry: {'; '.join(row.problems)}")
    return needs_of(kernel, row.figures, row.nvrtc)

"""Every kernel for every architecture: compiled side by side, with what is wrong with any of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import attrs

from cubatch.errors import CompileError, InvalidArgument
from cubatch.hardware import architectures
from cubatch.hardware.arithmetic import check_kernels
from cubatch.hardware.facts import Device
from cubatch.hardware.waves import Occupancy, occupancy
from cubatch.kernels import structs, variant
from cubatch.kernels.resources import Figures, Needs, Recorded, needs_of, recorded_needs
from cubatch.kernels.toolchain import compile as compiler
from cubatch.kernels.toolchain import nvrtc, sass, shared_ptx
from cubatch.kernels.toolchain.banks import BankConflicts, bank_conflicts
from cubatch.kernels.toolchain.cubins import Cubin
from cubatch.kernels.toolchain.loops import Loop, main_loops
from cubatch.kernels.toolchain.nvrtc import Program
from cubatch.kernels.variant import Kernel, arch_number, kernels_path

ARCHS = architectures.surveyed()
"""What every kernel is checked for: one of each generation and size of SM, from Maxwell to Blackwell."""

EXPECTED: Mapping[str, tuple[str, ...]] = {"mma": ("HMMA",), "hopper": ("HGMMA", "UTMALDG")}
"""Instructions that every entry of a family must have: products on tensor cores, loads of tiles."""

_ON_CUDA_CORES = ("simt", "winograd")
"""The families whose tiles are summed by FFMA: their register-bank conflicts are held to the budget."""

_WATCHED = "conv2d_fprop"
"""The operation whose first variant in each family stands for the family's main loop."""

Progress = Callable[[float, float, str], None]


@attrs.frozen
class Row:
    """
    One variant on one architecture.

    Attributes:
        kernel: The variant.
        arch: "sm_70".
        status: "ok", "error": it does not compile, "not_applicable": it is not meant for the architecture,
            "unknown": the budget has no figures of it.
        nvrtc: Build of the compiler that the figures are of; None without figures.
        figures: What it takes; None without.
        occupancy: How many blocks an SM holds; None without figures.
        problems: What is wrong with it, in words.
        error: Why it does not compile.
        loop: What its main loop is made of, where that is watched.
        conflicts: Register-bank conflicts of its main loop, where it has a tile and no tensor cores.
    """

    kernel: Kernel
    arch: str
    status: str
    nvrtc: str | None = None
    figures: Figures | None = None
    occupancy: Occupancy | None = None
    problems: tuple[str, ...] = ()
    error: CompileError | None = None
    loop: Loop | None = None
    conflicts: BankConflicts | None = None

    @property
    def shared_bytes(self) -> int | None:
        """Shared memory of a block, static and dynamic; None without figures."""
        return None if self.figures is None else self.figures.shared_bytes + self.kernel.dynamic_shared_bytes


def survey(
    chosen: Sequence[Kernel],
    archs: Sequence[str] = ARCHS,
    *,
    may_spill: Mapping[str, str] | None = None,
    root: Path | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """
    Compile variants for architectures, on all cores, and look for what is wrong with each.

    Wrong are: an error or warning of the compiler, a spilled register, launch bounds other than the threads of
    configs.toml, a block that no SM of the architecture can hold, machine code without its family's instructions, and
    structs that are other than those of `structs`; and fences of more than the block in a loop around wgmma.

    Args:
        chosen: The variants.
        archs: "sm_70", ...
        may_spill: Variants whose spills are no problem.
        root, folder: As `compile_kernel` takes them.
        progress: Called with what is done, of how much, and the last source.

    Returns:
        list: A row for each variant and architecture, in the order given.

    Raises:
        MissingDependency: If there is no NVRTC.
        InvalidArgument: If an architecture is not known to it.
        UnknownName: If the limits of its SM are not known.
    """
    for arch in archs:
        architectures.of(_capability(arch))
    units = _units(chosen, archs)
    loops = watched(variant.kernels())
    mismatch = structs.mismatch(root or kernels_path(), archs[0]) if units else ""

    ending = threading.Event()

    def compiled_for_each(unit: Mapping[str, Sequence[Kernel]]) -> list[Row]:
        known: dict[str, Program] = {}
        return [row for arch, kernels in unit.items() if not ending.is_set() for row in compiled(arch, kernels, known)]

    def compiled(arch: str, kernels: Sequence[Kernel], known: dict[str, Program]) -> list[Row]:
        expected, is_watched = _expected(kernels[0], arch), bool(loops & {(kernel.name, arch) for kernel in kernels})
        code = bool(expected) or is_watched or _has_banks(kernels[0])
        try:
            cubin = compiler.compile_unit(kernels[0], arch, root=root, folder=folder, code=code, known=known)
        except CompileError as error:
            return [Row(kernel, arch, "error", problems=("it does not compile",), error=error) for kernel in kernels]
        rows = [_row(kernel, arch, cubin, may_spill or {}) for kernel in kernels]
        if mismatch and kernels[0].family in structs.FAMILIES:
            rows = [attrs.evolve(row, problems=(*row.problems, mismatch)) for row in rows]
        if not code:
            return rows
        return _with_code(rows, arch, cubin.path.read_bytes(), expected, loops)

    rows: dict[tuple[str, str], Row] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        waiting = [pool.submit(compiled_for_each, unit) for unit in units]
        try:
            done, of_all = 0, sum(map(len, units))
            for future in as_completed(waiting):
                found = future.result()
                rows |= {(row.kernel.name, row.arch): row for row in found}
                done += len({row.arch for row in found})
                if progress is not None:
                    progress(done, of_all, f"{found[-1].kernel.source} {found[-1].arch}")
        except BaseException:  # Ctrl-C too: what has not begun need not
            ending.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [rows.get((kernel.name, arch)) or Row(kernel, arch, "not_applicable") for kernel in chosen for arch in archs]


def watched(known: Iterable[Kernel]) -> frozenset[tuple[str, str]]:
    """
    Name the variants whose main loops are held to the budget, each with an architecture: one of each tiled family.

    Example:
        >>> sorted(name for name, arch in watched(variant.kernels()) if arch == "sm_90")[0]
        'conv2d_fprop_f2x2_f32_winograd_256x128x8'
    """
    first: dict[tuple[str, str], str] = {}
    for kernel in known:
        for arch in ARCHS if kernel.operation == _WATCHED and kernel.tile is not None else ():
            if kernel.runs_on(arch_number(arch)) and _is_readable(arch):
                first.setdefault((kernel.family, arch), kernel.name)
    return frozenset((name, arch) for (_, arch), name in first.items())


def _units(chosen: Iterable[Kernel], archs: Sequence[str]) -> list[dict[str, list[Kernel]]]:
    """Group variants of one source and its macros by architecture, those that have something in common together."""
    units: dict[tuple[object, ...], dict[str, list[Kernel]]] = {}
    for arch in archs:
        for kernel in chosen:
            if kernel.runs_on(arch_number(arch)):
                unit = (kernel.source, kernel.defines, shared_ptx.shared_ptx(kernel, arch))
                units.setdefault(unit, {}).setdefault(arch, []).append(kernel)
    return list(units.values())


def recorded(chosen: Iterable[Kernel], budget: Recorded, archs: Sequence[str] = ARCHS) -> list[Row]:
    """
    Give the rows of a survey from the checked-in figures, without compiling anything.

    Args:
        chosen: The variants.
        budget: The figures.
        archs: "sm_70", ...
    """
    rows = []
    for kernel in chosen:
        for arch in archs:
            figures = budget.figures.get(kernel.name, {}).get(arch_number(arch))
            if not kernel.runs_on(arch_number(arch)):
                rows.append(Row(kernel, arch, "not_applicable"))
            elif figures is None:
                rows.append(Row(kernel, arch, "unknown"))
            else:
                held = _occupancy(kernel, arch, figures)
                rows.append(Row(kernel, arch, "ok", budget.nvrtc, figures, held))
    return rows


def excesses(rows: Iterable[Row], budget: Recorded) -> list[Row]:
    """
    Add to each compiled row where it goes beyond the budget, or is not in it; another NVRTC's rows stay as they are.

    Args:
        rows: Of a survey.
        budget: The figures not to exceed.
    """
    checked = []
    for row in rows:
        if row.figures is not None and row.nvrtc == budget.nvrtc:
            limit = budget.figures.get(row.kernel.name, {}).get(arch_number(row.arch))
            over = _excess(row.figures, limit)
            if row.loop is not None:
                allowed = budget.loops.get(row.kernel.name, {}).get(arch_number(row.arch))
                over += ["the budget has no main loop of it"] if allowed is None else row.loop.excess(allowed)
            if row.conflicts is not None:
                most = budget.banks.get(row.kernel.name, {}).get(arch_number(row.arch))
                over += ["the budget has no bank conflicts of it"] if most is None else row.conflicts.excess(most)
            row = attrs.evolve(row, problems=(*row.problems, *over))  # noqa: PLW2901
        checked.append(row)
    return checked


def _excess(found: Figures, limit: Figures | None) -> list[str]:
    if limit is None:
        return ["the budget has no figures of it"]
    compared = (
        (found.registers, limit.registers, "registers"),
        (found.shared_bytes, limit.shared_bytes, "bytes of static shared memory"),
        (found.spill_bytes, limit.spill_bytes, "bytes spilled"),
    )
    return [f"{value} {what}, the budget allows {most}" for value, most, what in compared if value > most]


def leftovers(known: Iterable[Kernel], budget: Recorded) -> list[str]:
    """List what the budget names and no variant is called, as after a renaming."""
    names = {kernel.name for kernel in known}
    return sorted({*budget.figures, *budget.may_spill} - names)


def require_compiler(budget: Recorded) -> None:
    """
    Refuse to make figures of another NVRTC than those of the budget, before minutes are spent on it.

    Raises:
        InvalidArgument: If another would compile for any of the architectures.
    """
    for arch in ARCHS:
        version = nvrtc.for_arch(arch_number(arch)).version
        if version != budget.nvrtc:
            raise InvalidArgument(f"NVRTC for {arch}", version, f"{budget.nvrtc}, which the budget is of")


def savings(rows: Iterable[Row], budget: Recorded) -> list[str]:
    """List the variants that take less than the budget allows, on any architecture: it could be lowered."""
    found: dict[str, None] = {}  # an ordered set
    for row in rows:
        limit = budget.figures.get(row.kernel.name, {}).get(arch_number(row.arch))
        if row.figures is not None and limit is not None and row.nvrtc == budget.nvrtc and _excess(limit, row.figures):
            found[row.kernel.name] = None
    return list(found)


def budget_of(rows: Iterable[Row], previous: Recorded, sources: str) -> Recorded:
    """
    Make a budget of what a survey found, with the exemptions of the previous one.

    Args:
        rows: Of a survey of all variants.
        previous: What it takes the place of.
        sources: Digest of what was surveyed.
    """
    figures: dict[str, dict[int, Figures]] = {}
    loops: dict[str, dict[int, Loop]] = {}
    banks: dict[str, dict[int, BankConflicts]] = {}
    for row in rows:
        if row.figures is not None:
            figures.setdefault(row.kernel.name, {})[arch_number(row.arch)] = row.figures
        if row.loop is not None:
            loops.setdefault(row.kernel.name, {})[arch_number(row.arch)] = row.loop
        if row.conflicts is not None:
            banks.setdefault(row.kernel.name, {})[arch_number(row.arch)] = row.conflicts
    return attrs.evolve(previous, figures=figures, sources=sources, loops=loops, banks=banks)


def _has_banks(kernel: Kernel) -> bool:
    """Return whether the bank conflicts of a variant are held to the budget."""
    return kernel.tile is not None and kernel.family in _ON_CUDA_CORES


def _with_code(
    rows: Sequence[Row], arch: str, code: bytes, expected: tuple[str, ...], loops: AbstractSet[tuple[str, str]]
) -> list[Row]:
    """Add to the rows of one compilation unit what its machine code shows."""
    texts = sass.texts(code)
    rows = [
        attrs.evolve(row, conflicts=bank_conflicts(texts[row.kernel.entry], arch_number(arch)))
        if _has_banks(row.kernel) and row.kernel.entry in texts
        else row
        for row in rows
    ]
    if not expected and not loops & {(row.kernel.name, arch) for row in rows}:
        return rows
    opcodes, main = sass.count_opcodes(code), main_loops(code, arch_number(arch))
    rows = [_with_missing(row, expected, opcodes.get(row.kernel.entry, {})) for row in rows]
    return [_with_loop(row, main.get(row.kernel.entry), (row.kernel.name, arch) in loops) for row in rows]


def _row(kernel: Kernel, arch: str, cubin: Cubin, may_spill: Mapping[str, str]) -> Row:
    found = cubin.resources.get(kernel.entry)
    if found is None:
        problem = f'{kernel.source} has no extern "C" entry {kernel.entry}'
        return Row(kernel, arch, "error", problems=(problem,))
    figures = Figures(found.registers, found.shared_bytes, found.spill_bytes)
    held = _occupancy(kernel, arch, figures)
    problems = [*compiler.warnings_of(cubin.log)]
    if found.spill_bytes and kernel.name not in may_spill:
        problems.append(f"{found.spill_bytes} bytes of registers spilled per thread")
    if found.threads != kernel.threads:
        bound = "none" if found.threads is None else found.threads
        problems.append(f"launched with {kernel.threads} threads, its launch bounds say {bound}")
    if not held.blocks_per_sm:
        problems.append(f"no SM can hold a block: {', '.join(held.limiters).replace('_', ' ')}")
    return Row(kernel, arch, "ok", cubin.nvrtc, figures, held, tuple(problems))


def _expected(kernel: Kernel, arch: str) -> tuple[str, ...]:
    """Name the instructions to look for."""
    if not _is_readable(arch):
        return ()
    waits = ("ACQBULK",) if "griddepcontrol" in architectures.of(_capability(arch)).instructions else ()
    return (*EXPECTED.get(kernel.family, ()), *waits)


def _is_readable(arch: str) -> bool:
    return architectures.of(_capability(arch)).instruction_bytes == sass.INSTRUCTION_BYTES


def _with_loop(row: Row, loop: Loop | None, is_watched: bool) -> Row:  # noqa: FBT001
    problems = row.problems
    if loop is not None and loop.fences and "HGMMA" in EXPECTED.get(row.kernel.family, ()):
        problems += (f"{loop.fences} fences of more than the block in a loop around wgmma",)
    return attrs.evolve(row, problems=problems, loop=loop if is_watched else None)


def _with_missing(row: Row, expected: Sequence[str], opcodes: Mapping[str, int]) -> Row:
    missing = [f"no {name} in its machine code" for name in expected if not opcodes.get(name)]
    return attrs.evolve(row, problems=(*row.problems, *missing))


def _occupancy(kernel: Kernel, arch: str, figures: Figures) -> Occupancy:
    return occupancy(
        compute_capability=_capability(arch),
        threads_per_block=kernel.threads,
        registers_per_thread=figures.registers,
        shared_bytes_per_block=figures.shared_bytes + kernel.dynamic_shared_bytes,
    )


def _capability(arch: str) -> tuple[int, int]:
    return divmod(arch_number(arch), 10)


def needs(kernel: Kernel, arch: str, budget: Recorded) -> Needs:
    """
    Give what a block takes on an architecture: recorded, or else compiled, which needs no GPU either.

    Args:
        kernel: The variant.
        arch: "sm_70".
        budget: The figures, see `recorded_figures`.

    Raises:
        InvalidArgument: If the kernel is not meant for the architecture.
        MissingDependency: If nothing is recorded and there is no compiler.
        CompileError: If it does not compile.

    Example:
        >>> from cubatch.kernels.resources import recorded_figures
        >>> from cubatch.kernels.variant import find
        >>> variant = find("gemm_nt", "float32", tile="128x128x8", vector=4)
        >>> needs(variant, "sm_70", recorded_figures()).threads
        256
    """
    if not kernel.runs_on(arch_number(arch)):
        raise InvalidArgument("device", arch, f"one that {kernel.name} is compiled for: {kernel.where}")
    found = recorded_needs(kernel, arch, budget)
    if found is not None:
        return found
    check_kernels(Device(name=arch, compute_capability=_capability(arch)))
    (row,) = survey([kernel], [arch], may_spill=budget.may_spill)
    if row.error is not None:
        raise row.error
    if row.figures is None:
        raise InvalidArgument("kernel", kernel.name, f"a kernel whose source has its entry: {'; '.join(row.problems)}")
    return needs_of(kernel, row.figures, row.nvrtc)

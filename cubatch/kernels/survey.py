"""Every kernel for every architecture: compiled side by side, with what is wrong with any of them."""

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
from cubatch.hardware.waves import Occupancy, occupancy
from cubatch.kernels.resources import Figures, Needs, Recorded, needs_of, recorded_needs
from cubatch.kernels.toolchain import compile as compiler
from cubatch.kernels.toolchain.cubins import Cubin
from cubatch.kernels.variant import Kernel, arch_number

ARCHS = architectures.surveyed()
"""What every kernel is checked for: one of each generation and size of SM, from Maxwell to Blackwell."""

Progress = Callable[[float, float, str], None]


@attrs.frozen
class Row:
    """
    One variant on one architecture.

    Attributes:
        kernel: The variant.
        arch: "sm_70".
        status: "ok", "error" (it does not compile), "not_applicable" (it is not meant for the architecture), or
            "unknown" (nothing is recorded of it).
        nvrtc: Build of the compiler of these figures; None without figures.
        figures: Registers, shared memory and spills; None if unknown.
        occupancy: Resident blocks of an SM; None without figures.
        problems: Messages about what would fail or surprise at a launch.
        error: The compile error, if any.
    """

    kernel: Kernel
    arch: str
    status: str
    nvrtc: str | None = None
    figures: Figures | None = None
    occupancy: Occupancy | None = None
    problems: tuple[str, ...] = ()
    error: CompileError | None = None

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
    Compile variants for architectures on all cores and check each.

    A problem is an error or a warning of the compiler, a spilled register, launch bounds other than the threads of
    configs.toml, or a block that no SM of the architecture can hold.

    Args:
        chosen: The variants.
        archs: "sm_70", ...
        may_spill: Variants whose spills are no problem.
        root, folder: As `compile_kernel` takes them.
        progress: Called with the units compiled, all units, and the last source.

    Returns:
        list: A row for each variant and architecture, in the order given.

    Raises:
        MissingDependency: If there is no NVRTC.
        InvalidArgument: If an architecture is not known to it.
        UnknownName: If the limits of its SM are not known.
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
        except BaseException:  # Ctrl-C too: what has not begun need not
            ending.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [rows.get((kernel.name, arch)) or Row(kernel, arch, "not_applicable") for kernel in chosen for arch in archs]


def units(chosen: Iterable[Kernel], archs: Sequence[str]) -> list[tuple[str, list[Kernel]]]:
    """Return the units of compilation: an architecture and the variants that one source with its macros defines."""
    grouped: dict[tuple[object, ...], list[Kernel]] = {}
    for arch in archs:
        for kernel in chosen:
            if kernel.runs_on(arch_number(arch)):
                grouped.setdefault((arch, kernel.source, kernel.defines), []).append(kernel)
    return [(str(key[0]), kernels) for key, kernels in grouped.items()]


def recorded(chosen: Iterable[Kernel], budget: Recorded, archs: Sequence[str] = ARCHS) -> list[Row]:
    """
    Return the rows of a survey from the recorded figures; nothing is compiled.

    Args:
        chosen: The variants.
        budget: The recorded figures.
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

"""What one block of a kernel takes from an SM: given as numbers, recorded with the sources, or compiled on the spot."""

from __future__ import annotations

import attrs

from cubatch import kernel as kernel_module
from cubatch import kernel_budget, kernel_survey
from cubatch.errors import InvalidArgument, UnknownName
from cubatch.kernel import Kernel, arch_number
from cubatch.kernel_budget import Budget, Figures
from cubatch.waves import Occupancy, occupancy


@attrs.frozen
class Needs:
    """
    What one block of a launch takes.

    Attributes:
        threads: Of the block.
        registers: Per thread.
        shared_bytes: Of the block, static and dynamic.
        nvrtc: Build of the compiler that says so; None for numbers that were given.
    """

    threads: int
    registers: int
    shared_bytes: int = 0
    nvrtc: str | None = None

    def on(self, compute_capability: tuple[int, int]) -> Occupancy:
        """
        Count the blocks that one SM holds.

        Raises:
            InvalidArgument: If a number is out of its range.
            UnknownName: If the limits of the compute capability are not known.

        Example:
            >>> Needs(threads=256, registers=128, shared_bytes=16896).on((7, 0)).blocks_per_sm
            2
        """
        return occupancy(
            compute_capability=compute_capability,
            threads_per_block=self.threads,
            registers_per_thread=self.registers,
            shared_bytes_per_block=self.shared_bytes,
        )


def named(name: str) -> list[Kernel]:
    """
    Find the variant of a name, or all those whose names begin with it: "conv2d_fprop_implicit_gemm_f32_simt".

    Raises:
        UnknownName: If there is none; lists names that are near.

    Example:
        >>> [variant.tile.n for variant in named("gemm_nt_implicit_gemm_f32_simt_256x128x8")]
        [128]
    """
    known = kernel_module.kernels()
    found = [one for one in known if one.name == name] or [one for one in known if one.name.startswith(name)]
    if not found:
        raise UnknownName("kernel", name, [one.name for one in known])
    return found


def recorded(kernel: Kernel, arch: str, budget: Budget) -> Needs | None:
    """
    Give what is recorded of a kernel for an architecture; None where nothing is.

    Args:
        kernel: The variant.
        arch: "sm_70".
        budget: The figures, see `recorded_figures`.
    """
    figures = budget.figures.get(kernel.name, {}).get(arch_number(arch))
    return None if figures is None else _needs(kernel, figures, budget.nvrtc)


def recorded_figures() -> Budget:
    """
    Read the figures recorded with the sources.

    Raises:
        InvalidData: If they cannot be read.
    """
    return kernel_budget.read(kernel_module.kernels_path() / "resources.toml")


def needs(kernel: Kernel, arch: str, budget: Budget) -> Needs:
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
        >>> variant = kernel_module.find("gemm_nt", "float32", tile="128x128x8", vector=4)
        >>> needs(variant, "sm_70", recorded_figures()).threads
        256
    """
    if not kernel.runs_on(arch_number(arch)):
        raise InvalidArgument("device", arch, f"one that {kernel.name} is compiled for: {kernel.where}")
    found = recorded(kernel, arch, budget)
    if found is not None:
        return found
    (row,) = kernel_survey.survey([kernel], [arch], may_spill=budget.may_spill)
    if row.error is not None:
        raise row.error
    if row.figures is None:
        raise InvalidArgument("kernel", kernel.name, f"a kernel whose source has its entry: {'; '.join(row.problems)}")
    return _needs(kernel, row.figures, row.nvrtc)


def _needs(kernel: Kernel, figures: Figures, nvrtc: str | None) -> Needs:
    return Needs(kernel.threads, figures.registers, figures.shared_bytes + kernel.dynamic_shared_bytes, nvrtc)

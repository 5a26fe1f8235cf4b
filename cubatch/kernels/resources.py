"""Registers, shared memory and spills of each kernel, as recorded with the sources in resources.toml."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import attrs

from cubatch.errors import InvalidData, UnknownName
from cubatch.hardware.waves import Occupancy, occupancy
from cubatch.kernels import variant as kernel_module
from cubatch.kernels.variant import Kernel, arch_number

_Parsed = TypeVar("_Parsed")
_FIGURES = re.compile(r"(\d+)(?:/(\d+))?(?:\+(\d+))?")
RESIDENT_BLOCKS = 4
"""Blocks that an SM is assumed to hold of a kernel without recorded figures."""


@attrs.frozen
class Figures:
    """Registers, shared memory and spills of one variant on one architecture."""

    registers: int  # registers per thread
    shared_bytes: int = 0  # static shared memory of a block
    spill_bytes: int = 0  # spilled bytes per thread

    def __str__(self) -> str:
        shared = f"/{self.shared_bytes}" if self.shared_bytes else ""
        spills = f"+{self.spill_bytes}" if self.spill_bytes else ""
        return f"{self.registers}{shared}{spills}"

    @classmethod
    def parse(cls, text: str) -> Figures:
        """
        Return the resources of a text "registers/shared bytes", with "+spilled bytes" if there are any.

        Other text raises ValueError.

        Example:
            >>> Figures.parse("128/16896+24")
            Figures(registers=128, shared_bytes=16896, spill_bytes=24)
        """
        match = _FIGURES.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not 'registers/shared bytes', with '+spilled bytes' if there are any")
        return cls(*(int(part or 0) for part in match.groups()))


@attrs.frozen
class Recorded:
    """Registers, shared memory and spills of all variants, as recorded in resources.toml."""

    nvrtc: str  # build of the NVRTC that compiled the variants
    may_spill: Mapping[str, str]  # variants that may spill, each with the reason; written by hand
    figures: Mapping[str, Mapping[int, Figures]]  # resources by variant and architecture (compute capability times ten)


def read(path: Path) -> Recorded:
    """Return the registers, shared memory and spills in resources.toml; raise InvalidData if it is damaged."""
    try:
        with path.open("rb") as file:
            data = tomllib.load(file)
        return Recorded(data["nvrtc"], data.get("may_spill", {}), by_arch(data["figures"], Figures.parse))
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise InvalidData(str(path), f"not a table of kernel resources: {error!r}", "Install cubatch again.") from error


def by_arch(table: Mapping[str, str], parse: Callable[[str], _Parsed]) -> dict[str, dict[int, _Parsed]]:
    """
    Parse a table of resources.toml into values by variant and architecture (compute capability times ten).

    `parse` converts the text of a value, such as "20".

    Example:
        >>> by_arch({"sums_f32": "52=20 80=24"}, int)
        {'sums_f32': {52: 20, 80: 24}}
    """
    figures: dict[str, dict[int, _Parsed]] = {}
    for name, line in table.items():
        pairs = (word.split("=") for word in line.split())
        figures[name] = {int(arch): parse(text) for arch, text in pairs}
    return figures


@attrs.frozen
class Needs:
    """Resources of one block of a launch."""

    threads: int  # threads of the block
    registers: int  # registers per thread
    shared_bytes: int = 0  # static and dynamic shared memory of the block
    nvrtc: str | None = None  # NVRTC build of these figures; None for figures given by the user

    def on(self, compute_capability: tuple[int, int]) -> Occupancy:
        """Return how many blocks and warps an SM of this compute capability holds, and which resource limits them."""
        return occupancy(
            compute_capability=compute_capability,
            threads_per_block=self.threads,
            registers_per_thread=self.registers,
            shared_bytes_per_block=self.shared_bytes,
        )


def named(name: str) -> list[Kernel]:
    """
    Return a list with the variant of this name, or else all variants whose names begin with it.

    Raises UnknownName if there is none.
    """
    known = kernel_module.kernels()
    exact = [kernel for kernel in known if kernel.name == name]
    matching = exact or [kernel for kernel in known if kernel.name.startswith(name)]
    if not matching:
        raise UnknownName("kernel", name, [kernel.name for kernel in known], "`cubatch kernels` lists them.")
    return matching


def recorded_needs(kernel: Kernel, arch: str, budget: Recorded) -> Needs | None:
    """Return the resources of a kernel's block on an architecture ("sm_70") recorded in `budget`; None if missing."""
    figures = budget.figures.get(kernel.name, {}).get(arch_number(arch))
    return None if figures is None else needs_of(kernel, figures, budget.nvrtc)


def recorded_figures() -> Recorded:
    """Return registers, shared memory and spills of each kernel from kernels/resources.toml."""
    return read(kernel_module.kernels_path() / "resources.toml")


@functools.lru_cache(maxsize=1024)
def resident(kernel: Kernel, compute_capability: tuple[int, int] | None) -> Occupancy | None:
    """Return how many of a kernel's blocks an SM holds; None without a record, or if the capability is None."""
    if compute_capability is None:
        return None
    needs = recorded_needs(kernel, "sm_{}{}".format(*compute_capability), _cached_figures())
    return None if needs is None else needs.on(compute_capability)


def resident_blocks(kernel: Kernel, compute_capability: tuple[int, int] | None) -> int:
    """
    Return the number of a kernel's blocks that one SM holds, by its recorded resources.

    It is RESIDENT_BLOCKS, 4, without a record or if the compute capability is None.
    """
    held = resident(kernel, compute_capability)
    return RESIDENT_BLOCKS if held is None else held.blocks_per_sm


@functools.lru_cache(maxsize=1)
def _cached_figures() -> Recorded:
    return recorded_figures()


def needs_of(kernel: Kernel, figures: Figures, nvrtc: str | None) -> Needs:
    """
    Return the resources of a block of a compiled kernel: its `figures`, and its dynamic shared memory.

    `nvrtc` is the compiler build of the figures; None if it does not matter.
    """
    return Needs(kernel.threads, figures.registers, figures.shared_bytes + kernel.dynamic_shared_bytes, nvrtc)

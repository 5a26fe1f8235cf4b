"""What one block of a kernel takes from an SM: registers, shared memory and spills, as recorded with the sources."""

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
"""Blocks that an SM is assumed to hold where nothing is recorded of a kernel."""


@attrs.frozen
class Figures:
    """
    What one variant takes on one architecture.

    Attributes:
        registers: Per thread.
        shared_bytes: Static shared memory of a block.
        spill_bytes: Spilled per thread.
    """

    registers: int
    shared_bytes: int = 0
    spill_bytes: int = 0

    def __str__(self) -> str:
        shared = f"/{self.shared_bytes}" if self.shared_bytes else ""
        spills = f"+{self.spill_bytes}" if self.spill_bytes else ""
        return f"{self.registers}{shared}{spills}"

    @classmethod
    def parse(cls, text: str) -> Figures:
        """
        Read what str() writes.

        Raises:
            ValueError: If the text is none of that.

        Example:
            >>> Figures.parse("128/16896+24")
            Figures(registers=128, shared_bytes=16896, spill_bytes=24)
        """
        found = _FIGURES.fullmatch(text)
        if found is None:
            raise ValueError(text)
        return cls(*(int(part or 0) for part in found.groups()))


@attrs.frozen
class Recorded:
    """
    The checked-in figures.

    Attributes:
        nvrtc: The build they are of.
        may_spill: Variants that are allowed to, each with the reason; written by hand.
        figures: By variant and architecture (compute capability times ten).
    """

    nvrtc: str
    may_spill: Mapping[str, str]
    figures: Mapping[str, Mapping[int, Figures]]


def read(path: Path) -> Recorded:
    """
    Read the figures of resources.toml.

    Raises:
        InvalidData: If the file is missing or has another form.
    """
    try:
        with path.open("rb") as file:
            data = tomllib.load(file)
        return Recorded(data["nvrtc"], data.get("may_spill", {}), by_arch(data["figures"], Figures.parse))
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise InvalidData(str(path), f"is no budget of kernels: {error!r}") from error


def by_arch(table: Mapping[str, str], parse: Callable[[str], _Parsed]) -> dict[str, dict[int, _Parsed]]:
    """
    Read a table of resources.toml: a value by variant and architecture.

    Raises:
        ValueError: If a value has another form.

    Example:
        >>> by_arch({"sums_f32": "52=20 80=24"}, int)
        {'sums_f32': {52: 20, 80: 24}}
    """
    found: dict[str, dict[int, _Parsed]] = {}
    for name, line in table.items():
        pairs = (word.split("=") for word in line.split())
        found[name] = {int(arch): parse(text) for arch, text in pairs}
    return found


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


def recorded_needs(kernel: Kernel, arch: str, budget: Recorded) -> Needs | None:
    """
    Give what is recorded of a kernel for an architecture; None where nothing is.

    Args:
        kernel: The variant.
        arch: "sm_70".
        budget: The figures, see `recorded_figures`.
    """
    figures = budget.figures.get(kernel.name, {}).get(arch_number(arch))
    return None if figures is None else needs_of(kernel, figures, budget.nvrtc)


def recorded_figures() -> Recorded:
    """
    Read the figures recorded with the sources.

    Raises:
        InvalidData: If they cannot be read.
    """
    return read(kernel_module.kernels_path() / "resources.toml")


@functools.lru_cache(maxsize=256)
def resident_blocks(kernel: Kernel, compute_capability: tuple[int, int] | None) -> int:
    """
    Return how many blocks of a kernel one SM holds, by its recorded registers; 4 where nothing is recorded.

    Example:
        >>> from cubatch.kernels.variant import find
        >>> resident_blocks(find("depthwise_wgrad_s1", "float32", FILTER=3), (7, 0))
        3
    """
    if compute_capability is None:
        return RESIDENT_BLOCKS
    needs = recorded_needs(kernel, "sm_{}{}".format(*compute_capability), _cached_figures())
    return RESIDENT_BLOCKS if needs is None else needs.on(compute_capability).blocks_per_sm


@functools.lru_cache(maxsize=1)
def _cached_figures() -> Recorded:
    """Return the recorded figures, read once in a process."""
    return recorded_figures()


def needs_of(kernel: Kernel, figures: Figures, nvrtc: str | None) -> Needs:
    """What a block of a compiled kernel takes, its dynamic shared memory included."""
    return Needs(kernel.threads, figures.registers, figures.shared_bytes + kernel.dynamic_shared_bytes, nvrtc)

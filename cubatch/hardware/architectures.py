"""
What one SM of each compute capability is: `data/architectures.toml`, read once.

Whatever differs between architectures, and is no GPU's own, is asked for here: what an SM holds, what it computes in a
clock, how code for it is compiled, which of them behave alike in predictions.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from cubatch.errors import UnknownName

_PATH = Path(__file__).parents[1] / "data" / "architectures.toml"
_KIB = 1024


@attrs.frozen(kw_only=True, eq=False)
class Architecture:
    """
    One compute capability; sizes in bytes, registers of 32 bits, rates of one SM.

    Attributes:
        name: NVIDIA's name of the generation: "Volta".
        compute_capability: (major, minor).
        threads_per_sm, warps_per_sm, blocks_per_sm: Resident at most at a time.
        registers_per_sm: In the register file.
        registers_per_block: One block may use.
        partitions: Sub-partitions with a register file of their own; a warp lives in one of them.
        shared_bytes_per_sm: Largest shared memory that all resident blocks divide.
        shared_bytes_per_block: Largest of one block, once it has opted in; 48 KiB need no opting in.
        reserved_shared_bytes: Taken by the system from the SM's share for each resident block.
        shared_unit_bytes: Shared memory is given out in multiples of this.
        shared_carveouts: Sizes that the SM's shared memory can be set to; one where it is fixed.
        barriers_per_sm: Pool of named barriers; None where they are not counted.
        float32_lanes: Multiply-adds of float32 in a clock.
        tensor_cores: Tensor Cores; None where that is not known.
        boards_without: Whether there are boards whose chip leaves them out.
        tensor_dtypes: Types that they take.
        tensor_fma: Dense multiply-adds in a clock by type, by the fastest instruction; empty where no source was seen.
        geforce_share: Of tensor_fma, what GeForce boards have.
        mma_fma, wgmma_fma: The same by mma.sync and by wgmma, of float16 and tf32; empty without the instruction.
        instructions: Those that kernels ask for and that are there.
        target: What the compiler is told for wgmma; None where that is the architecture itself.
        last_cuda: Last release that compiles for it; None: the newest does.
        surveyed: Whether every kernel is compiled for it before a release.
        ptx: By kind of kernel, the first architecture that has its PTX in common; without those that it shares none of.
        same_instructions: The architecture whose machine code takes the same; None without.
        instruction_bytes: Of its machine code; None where that is not laid out in equal pieces.
        kin: Name of the GPUs whose SMs issue instructions alike.
        power_limited: Whether small boards are taken to hold less than their boost clock.
        tensor_measured: Whether the published times of Tensor Cores are of it.
        source: Where the facts were printed.
    """

    name: str
    compute_capability: tuple[int, int]
    threads_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int
    registers_per_block: int
    partitions: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    reserved_shared_bytes: int
    shared_unit_bytes: int
    shared_carveouts: tuple[int, ...]
    barriers_per_sm: int | None = None
    float32_lanes: int
    tensor_cores: int | None = None
    boards_without: bool = False
    tensor_dtypes: tuple[str, ...]
    tensor_fma: Mapping[str, int] = attrs.field(factory=dict)
    geforce_share: float = 1.0
    mma_fma: Mapping[str, int] = attrs.field(factory=dict)
    wgmma_fma: Mapping[str, int] = attrs.field(factory=dict)
    instructions: tuple[str, ...]
    target: str | None = None
    last_cuda: str | None = None
    surveyed: bool
    ptx: Mapping[str, str] = attrs.field(factory=dict)
    same_instructions: str | None = None
    instruction_bytes: int | None = None
    kin: str
    power_limited: bool
    tensor_measured: bool
    source: str

    @property
    def arch(self) -> str:
        """In the compiler's spelling: "sm_70"."""
        return "sm_{}{}".format(*self.compute_capability)

    @property
    def number(self) -> int:
        """Compute capability times ten."""
        major, minor = self.compute_capability
        return 10 * major + minor

    @property
    def has_tensor_cores(self) -> bool | None:
        """Whether its GPUs have Tensor Cores; None where some have none."""
        return None if self.boards_without else bool(self.tensor_dtypes)

    @property
    def is_compiled_for(self) -> bool:
        """Whether there is a compiler that kernels can be compiled for it with."""
        return self.last_cuda is None or _release(self.last_cuda) >= _release(every().cuda)


@attrs.frozen(kw_only=True)
class Every:
    """
    What holds for every architecture, of launches and of how registers are given out.

    Attributes:
        warp_threads: Threads of a warp.
        threads_per_block, registers_per_thread, barriers_per_block: Most of a launch.
        register_unit: Registers are given to a warp in multiples of this.
        partitions_at_launch: A launch is checked as if every SM had so many, those of sm_60 (two) included.
        shared_bytes_without_opting_in: Shared memory of a block that need not be asked for.
        cuda: Release of the compiler that comes with cubatch[kernels].
        source: Where the facts were printed.
    """

    warp_threads: int
    threads_per_block: int
    registers_per_thread: int
    register_unit: int
    partitions_at_launch: int
    barriers_per_block: int
    shared_bytes_without_opting_in: int
    cuda: str
    source: str


@cache
def every() -> Every:
    """
    Return what holds for all of them.

    Example:
        >>> every().warp_threads
        32
    """
    facts = dict(_tables()["every"])
    return Every(shared_bytes_without_opting_in=_KIB * facts.pop("shared_kib_without_opting_in"), **facts)


@cache
def known() -> Mapping[tuple[int, int], Architecture]:
    """Return every architecture by compute capability, in ascending order."""
    found = [_architecture(facts) for name, facts in _tables().items() if name != "every"]
    return MappingProxyType({one.compute_capability: one for one in found})


def of(compute_capability: Sequence[int]) -> Architecture:
    """
    Look a compute capability up.

    Args:
        compute_capability: (major, minor), or a list of them.

    Raises:
        UnknownName: If it is not in the table, or no pair of whole numbers.

    Example:
        >>> of((9, 0)).shared_bytes_per_block
        232448
    """
    given = tuple(compute_capability) if isinstance(compute_capability, list) else compute_capability
    try:
        return known()[given]  # type: ignore[index]
    except (KeyError, TypeError):
        said = ".".join(map(str, given)) if isinstance(given, tuple) else str(given)
        raise UnknownName("compute_capability", said, [f"{major}.{minor}" for major, minor in known()]) from None


@cache
def like(compute_capability: tuple[int, int]) -> Architecture:
    """
    Return the architecture that one is taken to be like: itself, else the last in the table before it, else the first.

    Example:
        >>> like((8, 6)).arch, like((99, 0)).arch, like((3, 5)).arch
        ('sm_86', 'sm_121', 'sm_37')
    """
    found, *later = known().values()
    for one in later:
        if one.compute_capability <= compute_capability:
            found = one
    return found


def numbered(number: int) -> Architecture | None:
    """
    Return the architecture of a compute capability times ten; None where it is not in the table.

    Example:
        >>> numbered(90).target, numbered(35)
        ('sm_90a', None)
    """
    return known().get(divmod(number, 10))


@cache
def surveyed() -> tuple[str, ...]:
    """
    Return the architectures that every kernel is compiled for before a release.

    Example:
        >>> surveyed()[0], surveyed()[-1]
        ('sm_52', 'sm_120')
    """
    return tuple(one.arch for one in known().values() if one.surveyed)


def _release(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    with _PATH.open("rb") as file:
        return tomllib.load(file)


def _architecture(table: Mapping[str, Any]) -> Architecture:
    facts: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    return Architecture(
        shared_bytes_per_sm=_KIB * facts.pop("shared_kib_per_sm"),
        shared_bytes_per_block=_KIB * facts.pop("shared_kib_per_block"),
        reserved_shared_bytes=facts.pop("shared_reserved_bytes"),
        shared_carveouts=tuple(_KIB * size for size in facts.pop("shared_carveouts_kib")),
        **facts,
    )

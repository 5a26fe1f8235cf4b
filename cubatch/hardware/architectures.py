"""
Facts of each compute capability, read once from `data/architectures.toml`.

They hold for every GPU of an architecture: resources of an SM, its arithmetic in a clock, compiler options, and which
architectures are predicted alike.
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
    A compute capability; sizes in bytes, registers of 32 bits, rates of one SM.

    Attributes:
        name: NVIDIA's name of the generation: "Volta".
        compute_capability: (major, minor).
        threads_per_sm, warps_per_sm, blocks_per_sm: Most that are resident at a time.
        registers_per_sm: Registers in the register file.
        registers_per_block: Registers that one block may use.
        partitions: Sub-partitions with a register file each; a warp lives in one of them.
        shared_bytes_per_sm: Largest shared memory that all resident blocks divide.
        shared_bytes_per_block: Largest shared memory of one block; more than 48 KiB needs an opt-in.
        reserved_shared_bytes: Shared memory that the system takes for each resident block.
        shared_unit_bytes: Shared memory is allocated in multiples of this.
        shared_carveouts: Sizes that the SM's shared memory can be set to; one where it is fixed.
        barriers_per_sm: Pool of named barriers; None where they are not counted.
        float32_lanes: Multiply-adds of float32 in a clock.
        tensor_cores: Number of Tensor Cores; None where unknown.
        boards_without: Whether some boards have chips without Tensor Cores.
        tensor_dtypes: Types that Tensor Cores take.
        tensor_fma: Dense multiply-adds in a clock by type, with the fastest instruction; empty without a source.
        geforce_share: Rate of GeForce boards as a share of `tensor_fma`.
        mma_fma, wgmma_fma: Dense multiply-adds in a clock with mma.sync and with wgmma, for float16 and tf32; empty
            without the instruction.
        instructions: Available instructions, of those that kernels ask for.
        target: Compiler target for wgmma; None where it is the architecture itself.
        last_cuda: Last CUDA release that compiles for it; None is the newest.
        surveyed: Whether every kernel is compiled for it before a release.
        ptx: By kind of kernel, the first architecture for which the compiler makes the same PTX; without kinds that
            have none.
        same_instructions: Architecture that executes the same machine code; None if there is none.
        instruction_bytes: Size of a machine instruction; None where sizes differ.
        kin: Name of the GPUs whose SMs issue instructions alike.
        power_limited: Whether small boards are assumed to stay below their boost clock.
        tensor_measured: Whether the published times of Tensor Cores include it.
        source: Where the facts were published.
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
        """Its name for the compiler: "sm_70"."""
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
        """Whether the CUDA release of cubatch[kernels] can compile for it."""
        return self.last_cuda is None or _release(self.last_cuda) >= _release(every().cuda)


@attrs.frozen(kw_only=True)
class Every:
    """
    Limits of launches and registers that are the same for every architecture.

    Attributes:
        warp_threads: Threads of a warp.
        threads_per_block, registers_per_thread, barriers_per_block: Largest values of a launch.
        register_unit: Registers are allocated to a warp in multiples of this.
        partitions_at_launch: A launch is checked as if every SM had this number of partitions, even sm_60 with two.
        shared_bytes_without_opting_in: Shared memory of a block that needs no opt-in.
        cuda: Release of the compiler that comes with cubatch[kernels].
        source: Where the limits were published.
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
    Return the limits that every architecture shares.

    Example:
        >>> every().warp_threads
        32
    """
    facts = dict(_tables()["every"])
    return Every(shared_bytes_without_opting_in=_KIB * facts.pop("shared_kib_without_opting_in"), **facts)


@cache
def known() -> Mapping[tuple[int, int], Architecture]:
    """Return every architecture by compute capability, in ascending order."""
    architectures = [_architecture(facts) for name, facts in _tables().items() if name != "every"]
    return MappingProxyType({each.compute_capability: each for each in architectures})


def of(compute_capability: Sequence[int]) -> Architecture:
    """
    Return the architecture of a compute capability, (major, minor).

    Example:
        >>> of((9, 0)).shared_bytes_per_block
        232448
    """
    given = tuple(compute_capability) if isinstance(compute_capability, list) else compute_capability
    try:
        return known()[given]  # type: ignore[index]
    except (KeyError, TypeError):
        text = ".".join(map(str, given)) if isinstance(given, tuple) else str(given)
        raise UnknownName("compute_capability", text, [f"{major}.{minor}" for major, minor in known()]) from None


@cache
def like(compute_capability: tuple[int, int]) -> Architecture:
    """
    Return the nearest architecture of the table: the same, else the last before it, else the first.

    Example:
        >>> like((8, 6)).arch, like((99, 0)).arch, like((3, 5)).arch
        ('sm_86', 'sm_121', 'sm_37')
    """
    first, *later = known().values()
    older = [each for each in later if each.compute_capability <= compute_capability]
    return older[-1] if older else first


def numbered(number: int) -> Architecture | None:
    """
    Return the architecture of a compute capability times ten; None if it is not in the table.

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
    return tuple(each.arch for each in known().values() if each.surveyed)


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

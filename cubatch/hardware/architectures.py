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
    """Resources of a compute capability: sizes in bytes, registers of 32 bits, rates per clock of one SM."""

    name: str  # NVIDIA's name of the generation: "Volta"
    compute_capability: tuple[int, int]  # (major, minor)
    threads_per_sm: int  # threads_per_sm, warps_per_sm, blocks_per_sm: most that are resident at a time
    warps_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int  # registers in the register file
    registers_per_block: int  # registers that one block may use
    partitions: int  # sub-partitions with a register file each; a warp lives in one of them
    shared_bytes_per_sm: int  # largest shared memory that all resident blocks divide
    shared_bytes_per_block: int  # largest shared memory of one block; more than 48 KiB needs an opt-in
    reserved_shared_bytes: int  # shared memory that the system takes for each resident block
    shared_unit_bytes: int  # shared memory is allocated in multiples of this
    shared_carveouts: tuple[int, ...]  # sizes that the SM's shared memory can be set to; one where it is fixed
    barriers_per_sm: int | None = None  # pool of named barriers; None where they are not counted
    float32_lanes: int  # multiply-adds of float32 in a clock
    tensor_cores: int | None = None  # number of Tensor Cores; None where unknown
    boards_without: bool = False  # whether some boards have chips without Tensor Cores
    tensor_dtypes: tuple[str, ...]  # types that Tensor Cores take
    # mma_fma, wgmma_fma: dense multiply-adds in a clock with mma.sync and with wgmma, for float16 and tf32; empty
    # without the instruction
    mma_fma: Mapping[str, int] = attrs.field(factory=dict)
    wgmma_fma: Mapping[str, int] = attrs.field(factory=dict)
    instructions: tuple[str, ...]  # available instructions, of those that kernels ask for
    target: str | None = None  # compiler target for wgmma; None where it is the architecture itself
    last_cuda: str | None = None  # last CUDA release that compiles for it; None is the newest
    surveyed: bool  # whether every kernel is compiled for it before a release
    # by kind of kernel, the first architecture for which the compiler makes the same PTX; without kinds that have none
    ptx: Mapping[str, str] = attrs.field(factory=dict)
    same_instructions: str | None = None  # architecture that executes the same machine code; None if there is none
    instruction_bytes: int | None = None  # size of a machine instruction; None where sizes differ
    kin: str  # name of the GPUs whose SMs issue instructions alike
    power_limited: bool  # whether small boards are assumed to stay below their boost clock
    tensor_measured: bool  # whether the published times of Tensor Cores include it
    source: str  # where the facts were published

    @property
    def arch(self) -> str:
        """The compiler's name of the architecture: "sm_70"."""
        return "sm_{}{}".format(*self.compute_capability)

    @property
    def number(self) -> int:
        """Compute capability times ten, as an integer: 90 for (9, 0)."""
        major, minor = self.compute_capability
        return 10 * major + minor

    @property
    def has_tensor_cores(self) -> bool | None:
        """Whether GPUs of this architecture have Tensor Cores; None if only some boards have them."""
        return None if self.boards_without else bool(self.tensor_dtypes)

    @property
    def is_compiled_for(self) -> bool:
        """Whether the CUDA release of cubatch[kernels] can compile for this architecture."""
        return self.last_cuda is None or _release(self.last_cuda) >= _release(every().cuda)


@attrs.frozen(kw_only=True)
class Every:
    """Limits of launches and registers that are the same for every architecture."""

    warp_threads: int  # threads of a warp
    threads_per_block: int  # threads_per_block, registers_per_thread, barriers_per_block: largest values of a launch
    registers_per_thread: int
    register_unit: int  # registers are allocated to a warp in multiples of this
    partitions_at_launch: int  # a launch is checked as if every SM had this number of partitions, even sm_60 with two
    barriers_per_block: int
    shared_bytes_without_opting_in: int  # shared memory of a block that needs no opt-in
    cuda: str  # release of the compiler that comes with cubatch[kernels]
    source: str  # where the limits were published


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
    """Return the architecture of a compute capability, (major, minor); raise UnknownName if the table lacks it."""
    given = tuple(compute_capability) if isinstance(compute_capability, list) else compute_capability
    try:
        return known()[given]  # type: ignore[index]
    except (KeyError, TypeError):
        text = ".".join(map(str, given)) if isinstance(given, tuple) else str(given)
        raise UnknownName("compute_capability", text, [f"{major}.{minor}" for major, minor in known()]) from None


@cache
def like(compute_capability: tuple[int, int]) -> Architecture:
    """
    Return the architecture of the highest known compute capability up to the given one; else the lowest known.

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
    Return the compiler's names of the architectures that every kernel is compiled for before a release.

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

"""
Device: the facts of one GPU or CPU, as a frozen record.

A Device says what a machine can do, not what it is doing: live figures (free memory, clocks,
power) come from `monitor`.  It is built by the catalogue, by the probe, or by hand in a test.
What is not known is None and stays None; nothing fills it with a guess.

SmLimits holds what one SM of an architecture can hold, which is the same for every GPU of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from attrs import field, validators

from cubatch.errors import UnknownName

DTYPES = ("float32", "tf32", "float16", "bfloat16")
HALF_RATE = frozenset({(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)})
"""Compute capabilities of 64 float32 lanes in an SM; all others from 5.0 on have 128."""
BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}

_positive = validators.optional(validators.gt(0))


class FrozenMapping(Mapping[str, Any]):
    """
    A mapping that cannot be changed, so that a record that has one can be a key of a cache.

    Example:
        >>> FrozenMapping({"float32": 1e12}), FrozenMapping({"float32": 1e12}) == {"float32": 1e12}
        ({'float32': 1000000000000.0}, True)
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = tuple(items.items())

    def __getitem__(self, key: str) -> Any:
        for name, value in self._items:
            if name == key:
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items))  # equal mappings may differ in order

    def __repr__(self) -> str:
        return repr(dict(self._items))


@attrs.frozen(kw_only=True, cache_hash=True)
class Device:
    """
    What one GPU or CPU can do; hashable, so that what follows from it can be kept by it.

    Attributes:
        name: The vendor's name, as the driver or the catalogue gives it.
        kind: "cuda" or "cpu".
        slug: The catalogue's name for it ("v100-sxm2-16gb"); empty for a device outside the catalogue.
        architecture: The vendor's name of the generation: "Volta".
        compute_capability: (major, minor); None on a CPU.
        num_sms: Streaming multiprocessors this process may use; None on a CPU or where unknown.
        peak_flops_per_second: FLOP per second by dtype at the boost clock, as `source` prints it.
            A dtype without an entry has no rate of its own that is known.
        peak_bytes_per_second: DRAM bandwidth by the data sheet.
        memory_bytes: Capacity of the device's memory.
        l2_bytes: L2 cache of a GPU; of a CPU, the L2 of one core.
        clock_hz: Boost clock.
        tensor_cores: Whether it has Tensor Cores; None where unknown.
        power_limit_watts: Board power by the data sheet, or the limit in force on a live device.
        uuid, mig, index: Identity of a live GPU; None or 0 otherwise.
        threads: CPU threads this process may use; None on a GPU.
        caches: Sizes of a CPU's caches in bytes by level: {"L1d": ..., "L2": ..., "L3": ...}.
        live: Whether the device is in this machine and may be measured on.
        source: Where the facts were printed.
    """

    name: str
    kind: str = field(default="cuda", validator=validators.in_(("cuda", "cpu")))
    slug: str = ""
    architecture: str = ""
    compute_capability: tuple[int, int] | None = None
    num_sms: int | None = field(default=None, validator=_positive)
    peak_flops_per_second: Mapping[str, float] = field(factory=dict, converter=FrozenMapping)
    peak_bytes_per_second: float | None = field(default=None, validator=_positive)
    memory_bytes: int | None = field(default=None, validator=_positive)
    l2_bytes: int | None = field(default=None, validator=_positive)
    clock_hz: float | None = field(default=None, validator=_positive)
    tensor_cores: bool | None = None
    power_limit_watts: float | None = field(default=None, validator=_positive)
    uuid: str | None = None
    mig: str | None = None
    index: int = 0
    threads: int | None = field(default=None, validator=_positive)
    caches: Mapping[str, int] = field(factory=dict, converter=FrozenMapping)
    live: bool = False
    source: str = ""

    @property
    def arch(self) -> str | None:
        """Architecture in the compiler's spelling: "sm_70"; None on a CPU."""
        return None if self.compute_capability is None else "sm_{}{}".format(*self.compute_capability)

    def __str__(self) -> str:
        return f"{self.name} (cuda:{self.index})" if self.live and self.kind == "cuda" else self.name

    def to_mapping(self) -> dict[str, Any]:
        """Give the facts as a plain mapping, for JSON."""
        facts = attrs.asdict(self)
        facts["compute_capability"] = list(self.compute_capability) if self.compute_capability else None
        facts["peak_flops_per_second"], facts["caches"] = dict(self.peak_flops_per_second), dict(self.caches)
        return facts


@attrs.frozen(kw_only=True)
class SmLimits:
    """
    What one SM of an architecture can hold; sizes in bytes, registers of 32 bits.

    Attributes:
        threads_per_sm, warps_per_sm, blocks_per_sm: Resident at most at a time.
        registers_per_sm: In the register file.
        registers_per_block: One block may use.
        shared_bytes_per_sm: Largest shared memory that all resident blocks divide.
        shared_bytes_per_block: Largest of one block, once it has opted in; 48 KiB need no opting in.
        reserved_shared_bytes: Taken by the system from the SM's share for each resident block.
        shared_unit_bytes: Shared memory is given out in multiples of this.
        shared_carveouts: Sizes that the SM's shared memory can be set to; one where it is fixed.
        partitions: Sub-partitions with a register file of their own; a warp lives in one of them.
    """

    threads_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int = 65536
    registers_per_block: int = 65536
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    reserved_shared_bytes: int
    shared_unit_bytes: int
    shared_carveouts: tuple[int, ...]
    partitions: int = 4


def _limits(
    warps: int, blocks: int, shared_kib: int, block_kib: int, carveouts_kib: tuple[int, ...], **others: int
) -> SmLimits:
    # From sm_80 on the system keeps 1 KiB per block and shared memory comes in units of 128 bytes.
    since_ampere = shared_kib - block_kib == 1
    return SmLimits(
        threads_per_sm=32 * warps,
        warps_per_sm=warps,
        blocks_per_sm=blocks,
        shared_bytes_per_sm=1024 * shared_kib,
        shared_bytes_per_block=1024 * block_kib,
        reserved_shared_bytes=1024 if since_ampere else 0,
        shared_unit_bytes=128 if since_ampere else 256,
        shared_carveouts=tuple(1024 * kib for kib in carveouts_kib),
        **others,
    )


_TO_64 = (0, 8, 16, 32, 64)
_TO_100 = (*_TO_64, 100)
_TO_164 = (*_TO_100, 132, 164)
_TO_228 = (*_TO_164, 196, 228)

SM_LIMITS: Mapping[tuple[int, int], SmLimits] = {
    (5, 0): _limits(64, 32, 64, 48, (64,)),
    (5, 2): _limits(64, 32, 96, 48, (96,)),
    (5, 3): _limits(64, 32, 64, 48, (64,), registers_per_block=32768),
    (6, 0): _limits(64, 32, 64, 48, (64,), partitions=2),
    (6, 1): _limits(64, 32, 96, 48, (96,)),
    (6, 2): _limits(64, 32, 64, 48, (64,), registers_per_block=32768),
    (7, 0): _limits(64, 32, 96, 96, (*_TO_64, 96)),
    (7, 5): _limits(32, 16, 64, 64, (32, 64)),
    (8, 0): _limits(64, 32, 164, 163, _TO_164),
    (8, 6): _limits(48, 16, 100, 99, _TO_100),
    (8, 7): _limits(48, 16, 164, 163, _TO_164),
    (8, 8): _limits(48, 16, 100, 99, _TO_100),
    (8, 9): _limits(48, 24, 100, 99, _TO_100),
    (9, 0): _limits(64, 32, 228, 227, _TO_228),
    (10, 0): _limits(64, 32, 228, 227, _TO_228),
    (10, 3): _limits(64, 32, 228, 227, _TO_228),
    (11, 0): _limits(48, 24, 228, 227, _TO_228),
    (12, 0): _limits(48, 24, 100, 99, _TO_100),
    (12, 1): _limits(48, 24, 100, 99, _TO_100),
}
"""Limits by compute capability, from NVIDIA's cuda_occupancy.h (CUDA 13.0) and CCCL's arch_traits.h (13.3)."""


def sm_limits(compute_capability: tuple[int, int]) -> SmLimits:
    """
    Look up what one SM of a compute capability can hold.

    Raises:
        UnknownName: If the limits of that compute capability are not in the table.

    Example:
        >>> sm_limits((9, 0)).shared_bytes_per_block
        232448
    """
    try:
        return SM_LIMITS[compute_capability]
    except (KeyError, TypeError):
        given = ".".join(map(str, compute_capability)) if isinstance(compute_capability, tuple) else compute_capability
        known = [f"{major}.{minor}" for major, minor in SM_LIMITS]
        raise UnknownName("compute_capability", str(given), known) from None

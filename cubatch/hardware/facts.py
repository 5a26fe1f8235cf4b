"""
Device: the facts of one GPU or CPU, as a frozen record.

It holds capabilities, not live figures such as free memory, clocks and power, which come from `nvml`. It is built by
the catalogue, by `probe`, or by hand in a test. Unknown facts are None; nothing replaces them with a guess. Facts that
every GPU of an architecture shares are in `architectures`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import attrs
from attrs import field, validators

from cubatch.errors import InvalidArgument

DTYPES = ("float32", "tf32", "float16", "bfloat16")
BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}

_positive = validators.optional(validators.gt(0))


def _capability(value: Sequence[int] | None) -> tuple[int, int] | None:
    """Convert a pair of whole numbers, of NumPy or JSON too, into Python's."""
    if value is None:
        return None
    if (
        isinstance(value, str | bytes)
        or not isinstance(value, Sequence)
        or [isinstance(part, Integral) for part in value] != [True] * 2
    ):
        raise InvalidArgument("compute_capability", value, "(major, minor), such as (8, 0)")
    return int(value[0]), int(value[1])


class FrozenMapping(Mapping[str, Any]):
    """
    A mapping that cannot be changed, so that a record with one can be a key of a cache.

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
    Facts of one GPU or CPU; hashable, so that results can be cached by device.

    Attributes:
        name: The vendor's name.
        kind: "cuda" or "cpu".
        slug: The catalogue's name ("v100-sxm2-16gb"); empty for a device outside the catalogue.
        architecture: The vendor's name of the generation: "Volta".
        compute_capability: (major, minor); None on a CPU.
        num_sms: Streaming multiprocessors that this process may use; None on a CPU or where unknown.
        peak_flops_per_second: Published FLOP per second by dtype at the boost clock; without a dtype of unknown rate.
        peak_bytes_per_second: Published DRAM bandwidth.
        memory_bytes: Capacity of the device's memory, less what the driver reserves for ECC.
        l2_bytes: L2 cache of a GPU; of a CPU, the L2 of one core.
        clock_hz: Boost clock.
        tensor_cores: Whether it has Tensor Cores; None where unknown.
        power_limit_watts: Board power by the data sheet, or the limit in force on a live device.
        uuid, mig, index: Identity of a live GPU; None or 0 otherwise.
        integrated: Whether a live GPU's memory is the host's.
        threads: CPU threads that this process may use; None on a GPU.
        caches: Sizes of a CPU's caches in bytes by level: {"L1d": ..., "L2": ..., "L3": ...}.
        live: Whether the device is in this machine and can be measured on.
        source: Where the facts were published.
    """

    name: str
    kind: str = field(default="cuda", validator=validators.in_(("cuda", "cpu")))
    slug: str = ""
    architecture: str = ""
    compute_capability: tuple[int, int] | None = field(default=None, converter=_capability)
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
    integrated: bool = False
    threads: int | None = field(default=None, validator=_positive)
    caches: Mapping[str, int] = field(factory=dict, converter=FrozenMapping)
    live: bool = False
    source: str = ""

    @property
    def arch(self) -> str | None:
        """The compiler's name of the architecture: "sm_70"; None on a CPU."""
        return None if self.compute_capability is None else "sm_{}{}".format(*self.compute_capability)

    @property
    def address(self) -> str:
        """
        The name by which another process on this machine finds a live device: "cpu", or a GPU's uuid.

        A number depends on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, and may mean another GPU there.

        Example:
            >>> Device(name="NVIDIA H200", uuid="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", index=1).address
            'GPU-8932f937-d72c-4106-c12f-20bd9faed9f6'
        """
        return "cpu" if self.kind == "cpu" else self.uuid or f"cuda:{self.index}"

    def __str__(self) -> str:
        return f"{self.name} (cuda:{self.index})" if self.live and self.kind == "cuda" else self.name

    def to_mapping(self) -> dict[str, Any]:
        """Return the facts as a plain mapping, for JSON."""
        facts = attrs.asdict(self)
        facts["compute_capability"] = list(self.compute_capability) if self.compute_capability else None
        facts["peak_flops_per_second"], facts["caches"] = dict(self.peak_flops_per_second), dict(self.caches)
        return facts

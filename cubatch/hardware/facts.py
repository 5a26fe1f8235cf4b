"""
Device: the facts of one GPU or CPU, as a frozen record.

It holds capabilities, not live figures such as free memory, clocks and power, which come from `nvml`. It is built by
the catalogue, by `probe`, or by hand in a test. Unknown facts are None; nothing replaces them with a guess. Facts that
every GPU of an architecture shares are in `architectures`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import attrs
from attrs import field, validators

from cubatch.errors import InvalidArgument

DTYPES = ("float32", "tf32", "float16", "bfloat16")
BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}

_positive = validators.optional(validators.gt(0))


def _capability(value: Sequence[int] | None) -> tuple[int, int] | None:
    """Return a sequence of two integers as Python ints, or None for None; raise InvalidArgument otherwise."""
    if value is None:
        return None
    if (
        isinstance(value, str | bytes)
        or not isinstance(value, Sequence)
        or [isinstance(part, Integral) for part in value] != [True] * 2
    ):
        raise InvalidArgument("compute_capability", value, "(major, minor), such as (8, 0)")
    return int(value[0]), int(value[1])


def _copied(facts: Mapping[str, Any]) -> dict[str, Any]:
    return dict(facts)


@attrs.frozen(kw_only=True, cache_hash=True)
class Device:
    """
    Facts of one GPU or CPU; hashable, so that results can be cached by device. An unknown number is None.

    Attributes:
        name: The vendor's name.
        kind: "cuda" or "cpu".
        slug: The catalogue's name ("v100-sxm2-16gb"); empty for a device outside the catalogue.
        architecture: The vendor's name of the generation: "Volta".
        compute_capability: (major, minor); None on a CPU.
        num_sms: Streaming multiprocessors that this process may use; None on a CPU or where unknown.
        peak_flops_per_second: Published FLOP per second by dtype at the boost clock; without a dtype of unknown rate.
        peak_bytes_per_second: Published DRAM bandwidth in bytes per second.
        memory_bytes: Capacity of the device's memory, less what the driver reserves for ECC.
        l2_bytes: Bytes of the L2 cache of a GPU; of a CPU, the L2 of one core.
        clock_hz: Boost clock in hertz.
        tensor_cores: Whether it has Tensor Cores; None where unknown.
        power_limit_watts: Board power by the data sheet, or the limit in force on a live device.
        uuid, mig, index: Of a live GPU: its uuid, the profile of its MIG slice (or None), its CUDA number. Otherwise
            None, None and 0.
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
    peak_flops_per_second: Mapping[str, float] = field(factory=dict, converter=_copied, hash=False)
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
    caches: Mapping[str, int] = field(factory=dict, converter=_copied, hash=False)
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
        """Return the attributes by name as a dict that JSON can hold."""
        return attrs.asdict(self) | {"compute_capability": self.compute_capability and [*self.compute_capability]}

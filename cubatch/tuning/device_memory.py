"""Whether a step fits into the memory of each of several devices, and the largest batch size that fits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from cubatch.checks import check_batch_size
from cubatch.choices import Mode
from cubatch.errors import DoesNotFit
from cubatch.frameworks.module_footprint import ModuleFootprint
from cubatch.hardware import memory_limit as hardware_memory
from cubatch.hardware.facts import Device
from cubatch.memory.step_footprint import Footprint
from cubatch.memory.thumb_rules import Rule
from cubatch.tuning import priced_devices, step_memory
from cubatch.tuning.step_memory import ModuleStep, NetworkStep
from cubatch.units import format_counted

_OF_TRAINING: Mapping[str, Any] = {"optimizer": "sgd", "loss": None, "accumulate": 1}


@attrs.frozen(kw_only=True)
class ModeMemory:
    """The memory of a step in one mode, "inference" or "training", and the largest batch size that fits."""

    footprint: Footprint | ModuleFootprint  # memory of a step by part, at the requested batch size
    fits: bool  # whether the footprint is within the limit
    max_batch_size: int  # the largest batch that fits; 0 if none does
    rules: Sequence[Rule] = ()  # rules of thumb, compared with the plan of a network

    def to_mapping(self) -> dict[str, Any]:
        """Return the record as plain mappings and lists, for JSON."""
        return {
            "footprint": self.footprint.to_mapping(),
            "fits": self.fits,
            "max_batch_size": self.max_batch_size,
            "rules_of_thumb": [rule.to_mapping() for rule in self.rules],
        }


@attrs.frozen(kw_only=True)
class DeviceMemory:
    """The memory of a step on one device in each mode, and the memory limit there."""

    device: Device  # the device
    limit: int  # bytes that a step may take
    why: str  # source of the limit; empty if it is the requested one
    modes: Mapping[Mode, ModeMemory]  # the memory of each mode
    price: float | None  # price of an hour, in the user's currency; None if unknown

    @property
    def fits(self) -> bool:
        """Whether the requested batch fits, in the first of `modes`."""
        return next(iter(self.modes.values())).fits

    def to_mapping(self) -> dict[str, Any]:
        """Return the record as plain mappings and lists, for JSON."""
        return {
            "device": self.device.slug or self.device.name,
            "memory": self.limit,
            "price_per_hour": self.price,
            "modes": {mode: taken.to_mapping() for mode, taken in self.modes.items()},
        }


def memory_on(
    spec: Any,  # spec, batches: as for `footprint`
    batches: Any = None,
    *,
    devices: Iterable[Device | str | None],  # names of the catalogue, or Devices; None is the device of this machine
    modes: Sequence[Mode],  # "inference", "training" or both, in this order
    batch_size: int,
    memory_limit: int | str | None = None,  # as for `autotune`: the memory of the device counts if it is less
    prices: Mapping[str, float] | None = None,  # price of an hour by the name of a device
    # called with the footprints done, their total, and the current step
    progress: Callable[[float, float, str], None] = lambda _done, _total, _now: None,
    **options: Any,  # the other arguments of `footprint`
) -> list[DeviceMemory]:
    """Return the memory of a step on each of several devices, and the largest batch that fits there."""
    size, gpus = check_batch_size(batch_size), priced_devices.distinct(devices)
    paid = priced_devices.prices_of(gpus, prices or {})
    limits: dict[str, tuple[int, str]] = {}
    taken: dict[str, dict[Mode, ModeMemory]] = {name: {} for name in gpus}
    for mode in modes:
        kind = {**options, "mode": mode}
        if mode == "inference" and "training" in modes:  # in which the options of a training step count
            kind |= {name: default for name, default in _OF_TRAINING.items() if name in options}
        with step_memory.step_of(spec, batches, kind) as step:
            for name, gpu in gpus.items():
                limits[name] = _limit(gpu, memory_limit, step)
                show = functools.partial(progress, sum(map(len, taken.values())), len(modes) * len(gpus))
                taken[name][mode] = _of_mode(step, size, gpu, limits[name][0], show)
    return [
        DeviceMemory(
            device=gpu,
            limit=limits[name][0],
            why=limits[name][1],
            modes=taken[name],
            price=paid.get(name),
        )
        for name, gpu in gpus.items()
    ]


def _limit(device: Device, requested: int | str | None, step: NetworkStep | ModuleStep) -> tuple[int, str]:
    """
    Return the bytes that a step may take on a device, and the limit's source; empty for the requested limit.

    `requested` None: all available memory.
    """
    limit = hardware_memory.memory_limit(device, requested)
    if requested is not None and not limit.is_lowered:
        return limit.bytes, ""
    if isinstance(step, ModuleStep) and limit.overhead_bytes:
        return limit.bytes + limit.overhead_bytes, "all that the GPU has, also for the CUDA context"
    return limit.bytes, limit.note


def _of_mode(
    step: NetworkStep | ModuleStep, batch_size: int, device: Device, limit: int, show: Callable[[str], None]
) -> ModeMemory:
    name = device.slug or device.name
    if isinstance(step, ModuleStep):
        step.module.on_trace = lambda size: show(f"tracing a step of {format_counted(size, 'sample')} for {name}")
    else:
        show(f"planning the memory of a step on {name}")
    footprint = step.footprint(batch_size, device)
    try:
        most = step.largest(limit, device)
    except DoesNotFit:
        most = 0
    rules: Sequence[Rule] = ()
    if isinstance(step, NetworkStep) and isinstance(footprint, Footprint):
        rules = step.rules(footprint, device, limit, most)
    return ModeMemory(footprint=footprint, fits=footprint.total <= limit, max_batch_size=most, rules=rules)

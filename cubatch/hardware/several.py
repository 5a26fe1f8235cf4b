"""What `devices=` means: the devices that the ranks of a data parallel run work on, one each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import attrs

from cubatch.errors import InvalidArgument
from cubatch.hardware import host, probe
from cubatch.hardware.facts import Device
from cubatch.units import shown

_REMEDY = 'Give their number, or a list such as ["cuda:0", "cuda:1"] or ["cpu", "cpu"].'


def several(
    devices: int | Sequence[Device | str] | None, device: Device | str | None = None
) -> tuple[Device, ...] | None:
    """
    Turn a `devices=` argument into the device of each rank.

    Ranks on a CPU share its threads evenly: `threads` is what each of them has.  A list may have more of them.

    Args:
        devices: How many, or which; None: there is one device, as `device` says.
        device: With a number: None is GPUs if there are any, else the CPU; or a name that says which of both.

    Returns:
        tuple[Device, ...]: At least two, in the order of the ranks; None where there is one device.

    Raises:
        InvalidArgument: If it is neither, there are too few, or one is named twice.
        DeviceNotAvailable: If one of them is not in this machine.

    Example:
        >>> several(None) is None
        True
    """
    if devices is None or (devices == 1 and devices is not True):
        return None
    if isinstance(devices, bool) or not isinstance(devices, int | list | tuple) or not devices:
        raise InvalidArgument("devices", devices, "a number of devices, or a list of them", _REMEDY)
    if isinstance(devices, int):
        return _numbered(devices, probe.resolve(device))
    if device is not None:
        raise InvalidArgument("device", shown(device), "None where devices is a list", _REMEDY)
    found = tuple(probe.resolve(one) for one in devices)
    if len(found) == 1:
        raise InvalidArgument("devices", devices, "two devices or more", "For one there is device=.")
    if {one.kind for one in found} == {"cpu"}:
        return _on_cpus(len(found), found[0])
    if len({one.kind for one in found}) > 1 or len({one.uuid for one in found}) < len(found):
        raise InvalidArgument("devices", [str(one) for one in found], "different GPUs, or all of them the CPU", _REMEDY)
    return found


def _numbered(count: int, device: Device) -> tuple[Device, ...]:
    most, what = host.cpu_threads(), "threads"
    gpus: list[Device] = []
    if device.kind != "cpu":
        gpus = [one for one in probe.devices() if one.kind != "cpu"]
        most, what = len(gpus), "GPUs"
    if not 1 < count <= most:
        raise InvalidArgument("devices", count, f"from 1 to the {most} {what} that this process may use", _REMEDY)
    return tuple(gpus[:count]) if gpus else _on_cpus(count, device)


def _on_cpus(count: int, device: Device) -> tuple[Device, ...]:
    return tuple(attrs.evolve(device, threads=len(share)) for share in cpu_shares(count))


def cpu_shares(count: int) -> list[list[int]]:
    """
    Deal the CPUs that this process may use out to so many ranks, neighbours together; more ranks take turns.

    Example:
        >>> len(cpu_shares(1))
        1
    """
    usable = sorted(os.sched_getaffinity(0))[: host.cpu_threads()]
    if count > len(usable):
        return [[usable[rank % len(usable)]] for rank in range(count)]
    bounds = [len(usable) * rank // count for rank in range(count + 1)]
    return [usable[begin:end] for begin, end in itertools.pairwise(bounds)]

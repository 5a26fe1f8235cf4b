"""The devices of the ranks of a data parallel run, from a `devices=` argument."""

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


def resolve_devices(
    devices: int | Sequence[Device | str] | None, device: Device | str | None = None
) -> tuple[Device, ...] | None:
    """
    Return the device of each rank of a data parallel run; None for a single device.

    Ranks on a CPU share its threads evenly: `threads` of each device is its share.

    Args:
        devices: Number of devices, or a list with the device of each rank; None and 1 are a single device.
        device: With a number, which kind of device: a GPU or the CPU; None: GPUs if there are any, else the CPU.

    Raises:
        InvalidArgument: If the list has one device, a GPU twice, or GPUs and the CPU.  Also if a number is out of
            range, or both a list and `device` are given.
        DeviceNotAvailable: If a device is not in this machine.
    """
    if devices is None or (devices == 1 and devices is not True):
        return None
    if isinstance(devices, bool) or not isinstance(devices, int | list | tuple) or not devices:
        raise InvalidArgument("devices", devices, "a number of devices, or a list of them", _REMEDY)
    if isinstance(devices, int):
        return _first(devices, probe.resolve(device))
    if device is not None:
        raise InvalidArgument("device", shown(device), "None where devices is a list", _REMEDY)
    ranks = tuple(probe.resolve(each) for each in devices)
    if len(ranks) == 1:
        raise InvalidArgument("devices", devices, "two devices or more", f"Or pass device='{devices[0]}'.")
    if {rank.kind for rank in ranks} == {"cpu"}:
        return _on_cpus(len(ranks), ranks[0])
    if len({rank.kind for rank in ranks}) > 1 or len({rank.uuid for rank in ranks}) < len(ranks):
        raise InvalidArgument("devices", [*map(str, ranks)], "different GPUs, or all of them the CPU", _REMEDY)
    return ranks


def _first(count: int, device: Device) -> tuple[Device, ...]:
    most, unit = host.cpu_threads(), "threads"
    gpus: list[Device] = []
    if device.kind != "cpu":
        gpus = [here for here in probe.devices() if here.kind != "cpu"]
        most, unit = len(gpus), "GPUs"
    if not 1 < count <= most:
        raise InvalidArgument("devices", count, f"from 1 to the {most} {unit} that this process may use", _REMEDY)
    return tuple(gpus[:count]) if gpus else _on_cpus(count, device)


def _on_cpus(count: int, device: Device) -> tuple[Device, ...]:
    return tuple(attrs.evolve(device, threads=len(share)) for share in cpu_shares(count))


def _usable_cpus() -> list[int]:
    """Return the numbers of CPUs that this process may use, as many as it may use at a time by its quota."""
    return sorted(os.sched_getaffinity(0))[: host.cpu_threads()]


def cpu_groups(threads: int) -> list[list[int]]:
    """
    Return as many disjoint lists of `threads` CPU numbers as the CPUs of this process allow.

    Example:
        >>> [len(group) for group in cpu_groups(1)] == [1] * host.cpu_threads()
        True
    """
    usable = _usable_cpus()
    return [usable[begin : begin + threads] for begin in range(0, len(usable) - threads + 1, threads)]


def cpu_shares(count: int) -> list[list[int]]:
    """
    Return for each of `count` ranks the numbers of the CPUs that it may use.

    The CPUs of this process are divided evenly, neighbors together.  If there are more ranks than CPUs, each rank gets
    one CPU, which it shares.

    Example:
        >>> len(cpu_shares(1))
        1
    """
    usable = _usable_cpus()
    if count > len(usable):
        return [[usable[rank % len(usable)]] for rank in range(count)]
    bounds = [len(usable) * rank // count for rank in range(count + 1)]
    return [usable[begin:end] for begin, end in itertools.pairwise(bounds)]

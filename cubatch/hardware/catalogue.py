"""
GPUs that cubatch knows from data sheets: `data/devices.toml`, looked up by name.

A name finds exactly one device or is an error. The error for a name that several boards share ("titan x", "v100",
"a100") lists the boards; the error for an unknown name lists similar names.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cubatch.errors import InvalidArgument, UnknownName
from cubatch.hardware import architectures
from cubatch.hardware.facts import Device

_PATH = Path(__file__).parents[1] / "data" / "devices.toml"
_VENDOR_WORDS = frozenset({"nvidia", "geforce", "tesla"})

# The driver reports less memory than a board has: it reserves some, and ECC may take a sixteenth. Data sheets round.
_LEAST_MEMORY_SHARE = 0.9
_SPEED_DIFFERENCE = 0.03


def names() -> tuple[str, ...]:
    """Return the catalogue's name of every device, in order of generation."""
    return tuple(_devices())


def all_devices() -> tuple[Device, ...]:
    """Return every device of the catalogue, in order of generation."""
    return tuple(_devices().values())


def find(name: str) -> Device:
    """
    Return a GPU by the catalogue's name, the driver's name or an alias.

    Letter case, punctuation and the words NVIDIA, GeForce and Tesla make no difference.

    Raises:
        InvalidArgument: If `name` is no text, or several devices have that name.
        UnknownName: If no device has that name.

    Example:
        >>> find("GeForce RTX 2080 Ti").num_sms
        68
    """
    if not isinstance(name, str):
        raise InvalidArgument("device", name, "the name of a GPU", "`cubatch devices` lists those of the catalog.")
    named = sharing(name)
    if not named:
        raise UnknownName("device", name, _suggestions(), "`cubatch devices` lists those of the catalog.")
    if len(named) > 1:
        slugs = ", ".join(device.slug for device in named)
        raise InvalidArgument("device", name, f"one of {slugs}", "Several devices go by that name.")
    return named[0]


def sharing(name: str) -> tuple[Device, ...]:
    """
    Return the devices of the catalogue that have this name; empty if no device has it.

    Example:
        >>> [found.slug for found in sharing("NVIDIA GeForce RTX 3060")]
        ['rtx-3060-8gb', 'rtx-3060-12gb']
    """
    return tuple(_devices()[slug] for slug in _named().get(_key(name), ()))


def board(
    name: str,
    compute_capability: tuple[int, ...],
    num_sms: int | None,
    memory_bytes: int | None,
    bytes_per_second: float | None = None,
) -> Device | None:
    """
    Return the board of the catalogue that matches the values reported by a driver; None unless exactly one matches.

    Different boards may report one name (RTX 3060, GTX 1650): they differ in chip, SMs and memory. `memory_bytes` is
    the capacity, `bytes_per_second` the bandwidth of the memory; None is unknown.

    Example:
        >>> board("NVIDIA GeForce RTX 3060", (8, 6), 28, 12 * 2**30).slug
        'rtx-3060-12gb'
    """
    named = sharing(name)
    alike = [device for device in named if device.compute_capability == compute_capability]
    same = [device for device in alike if device.num_sms is None or device.num_sms == num_sms]
    if len(named) > 1:
        same = [device for device in same if _has_memory(device, memory_bytes, bytes_per_second)]
    return same[0] if len(same) == 1 else None


def _has_memory(device: Device, memory_bytes: int | None, bytes_per_second: float | None) -> bool:
    if device.num_sms is None or device.memory_bytes is None or memory_bytes is None:
        return False
    speeds = device.peak_bytes_per_second, bytes_per_second
    as_fast = None in speeds or abs((speeds[0] or 0) - (speeds[1] or 0)) <= _SPEED_DIFFERENCE * (speeds[0] or 0)
    return as_fast and _LEAST_MEMORY_SHARE <= memory_bytes / device.memory_bytes <= 1


@cache
def _tables() -> dict[str, dict[str, Any]]:
    with _PATH.open("rb") as file:
        return tomllib.load(file)


@cache
def _devices() -> Mapping[str, Device]:
    return MappingProxyType({slug: device_of(facts, slug) for slug, facts in _tables().items()})


@cache
def _named() -> dict[str, tuple[str, ...]]:
    """Return the catalogue's names of devices by the normalized form of each of their names, see `_key`."""
    named: dict[str, tuple[str, ...]] = {}
    for slug, facts in _tables().items():
        texts = (slug, facts["name"], *facts.get("aliases", ()), *facts.get("shared_names", ()))
        for key in {_key(text) for text in texts}:
            named[key] = (*named.get(key, ()), slug)
    return named


def _suggestions() -> list[str]:
    listed = [*names()]
    for facts in _tables().values():
        listed += [*facts.get("aliases", ()), *facts.get("shared_names", ())]
    return list(dict.fromkeys(listed))


def _key(text: str) -> str:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return "".join(word for word in words if word not in _VENDOR_WORDS)


def device_of(facts: Mapping[str, Any], slug: str = "") -> Device:
    """Return the device of a row of `data/devices.toml`."""

    def scaled(field: str, factor: float) -> float | None:
        return facts[field] * factor if field in facts else None

    def whole_bytes(field: str, factor: int) -> int | None:
        return int(facts[field] * factor) if field in facts else None

    major, minor = facts["compute_capability"]
    cores = facts.get("tensor_cores")
    return Device(
        name=facts["name"],
        kind="cuda",
        slug=slug,
        architecture=facts["architecture"],
        compute_capability=(major, minor),
        num_sms=facts.get("num_sms"),
        peak_flops_per_second={dtype: rate * 1e12 for dtype, rate in facts.get("peak_tflops", {}).items()},
        peak_bytes_per_second=scaled("bandwidth_gb_per_second", 1e9),
        memory_bytes=whole_bytes("usable_mib", 2**20) or whole_bytes("memory_gib", 2**30),
        l2_bytes=whole_bytes("l2_mib", 2**20),
        clock_hz=scaled("boost_clock_mhz", 1e6),
        tensor_cores=architectures.like((major, minor)).has_tensor_cores if cores is None else cores > 0,
        power_limit_watts=scaled("tdp_watts", 1.0),
        source=facts["source"],
    )

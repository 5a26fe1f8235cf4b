"""
A device described by a user: one TOML file with the keys of a row of `data/devices.toml`.

It is for a GPU that the catalogue lacks, or lists with other figures. Such a device is in no machine: it can be planned
and predicted for, and not measured on.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from cubatch import files
from cubatch.errors import InvalidArgument, UnknownName
from cubatch.hardware import architectures, catalogue
from cubatch.hardware.facts import DTYPES, Device
from cubatch.units import is_visible, visible

SUFFIX = ".toml"
_LONGEST_TEXT = 1000
_LEAST, _MOST = 1e-6, 2**53  # plausible values of any figure, in the unit of its key


@attrs.frozen
class _Kind:
    """The allowed values of a key, in words and as a test."""

    allowed: str
    fits: Callable[[Any], bool]


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _LEAST <= value <= _MOST


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and [_is_whole(part, 0) for part in value] == [True, True]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value.strip()) <= _LONGEST_TEXT and is_visible(value)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_rates(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_positive, value.values()))


_TEXT = _Kind(f"a line of text that is not empty, of at most {_LONGEST_TEXT} characters", _is_text)
_TEXTS = _Kind("a list of texts", _is_texts)
_COUNT = _Kind("a whole number of at least 1", lambda value: _is_whole(value, 1))
_COUNT_OR_NONE = _Kind("a whole number, 0 for none", lambda value: _is_whole(value, 0))
_AMOUNT = _Kind("a number above 0", _is_positive)
_KINDS: Mapping[str, _Kind] = {
    "name": _TEXT,
    "aliases": _TEXTS,
    "shared_names": _TEXTS,
    "architecture": _TEXT,
    "chip": _TEXT,
    "compute_capability": _Kind("[major, minor], such as [8, 6]", _is_pair),
    "num_sms": _COUNT,
    "cuda_cores": _COUNT,
    "tensor_cores": _COUNT_OR_NONE,
    "base_clock_mhz": _AMOUNT,
    "boost_clock_mhz": _AMOUNT,
    "memory_gib": _AMOUNT,
    "usable_mib": _AMOUNT,
    "memory_type": _TEXT,
    "memory_bus_bits": _COUNT,
    "bandwidth_gb_per_second": _AMOUNT,
    "l2_mib": _AMOUNT,
    "peak_tflops": _Kind("a table of numbers above 0, such as { float32 = 12.7 }", _is_rates),
    "tdp_watts": _AMOUNT,
    "source": _TEXT,
    "note": _TEXT,
}
_RATE = "peak_flops_per_second["
_KEYS = {
    "clock_hz": "boost_clock_mhz",
    "memory_bytes": "memory_gib",
    "peak_bytes_per_second": "bandwidth_gb_per_second",
}
_REMEDY = "docs/reference/files.md describes such a file."


def read(name: str) -> Device:
    r"""
    Read a device from a file, which has the keys of a catalogue row at its top or in one table.

    Args:
        name: Path of a .toml file. It must have the key "compute_capability"; the default "name" is the file's.

    Returns:
        Device: Its facts; missing ones are None. It is not live, and the file is its source.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     place = Path(folder) / "my-gpu.toml"
        ...     _ = place.write_text("compute_capability = [8, 6]\nnum_sms = 20\n")
        ...     found = read(str(place))
        >>> found.name, found.num_sms, found.architecture
        ('my-gpu', 20, 'Ampere')
    """
    path = Path(name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            "device", name, f"a TOML file that can be read ({files.reason(error)})", _REMEDY
        ) from None
    facts = _row(name, table)
    for key, value in facts.items():
        if key not in _KINDS:
            raise UnknownName(f"key in {name}", key, _KINDS)
        if not _KINDS[key].fits(value):
            raise InvalidArgument(f"{key} in {name}", value, _KINDS[key].allowed, _REMEDY)
    for dtype in facts.get("peak_tflops", {}):
        if dtype not in DTYPES:
            raise UnknownName(f"key of peak_tflops in {name}", dtype, DTYPES)
    whole = 1024 * facts.get("memory_gib", 0)
    if not facts.get("usable_mib", 0) <= whole:
        allowed = (
            f"at most memory_gib, {whole:g} MiB: what nvidia-smi prints of it, less than all where ECC takes its share"
        )
        raise InvalidArgument(f"usable_mib in {name}", facts["usable_mib"], allowed, _REMEDY)
    if "compute_capability" not in facts:
        remedy = "It decides the resources of an SM: [7, 0] is a V100, [8, 6] an RTX 3090."
        raise InvalidArgument(f"compute_capability in {name}", None, "given as [major, minor]", remedy)
    major, minor = facts["compute_capability"]
    defaults = {
        "name": visible(path.stem[:_LONGEST_TEXT], keep=""),
        "architecture": architectures.like((major, minor)).name,
    }
    return catalogue.device_of(defaults | facts | {"source": name})


def lacks(device: Device, facts: Sequence[str]) -> str:
    """
    Return a sentence about the keys that a device's file lacks; empty where no file describes the device.

    Args:
        device: A device some of whose facts are not known.
        facts: The unknown facts as `Device` names them: "num_sms", "peak_flops_per_second['float32']".

    Example:
        >>> lacks(Device(name="mine", source="my-gpu.toml"), ["clock_hz", "peak_flops_per_second['float32']"])
        'my-gpu.toml lacks boost_clock_mhz, peak_tflops.float32.'
    """
    if device.slug or device.live or not device.source.lower().endswith(SUFFIX):
        return ""
    keys = (
        f"peak_tflops.{fact.removeprefix(_RATE)[1:-2]}" if fact.startswith(_RATE) else _KEYS.get(fact, fact)
        for fact in facts
    )
    return f"{device.source} lacks {', '.join(keys)}."


def _row(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    rows = {key: value for key, value in table.items() if isinstance(value, dict) and key not in _KINDS}
    if not rows:
        return dict(table)
    if len(table) > 1:
        raise InvalidArgument(
            f"tables in {name}", ", ".join(rows), "one, or none: a file describes one device", _REMEDY
        )
    return dict(*rows.values())

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

from cubatch import files
from cubatch.errors import InvalidArgument, UnknownName
from cubatch.hardware import architectures, catalogue
from cubatch.hardware.facts import DTYPES, Device
from cubatch.units import is_visible, visible

SUFFIX = ".toml"
_LEAST, _MOST = 1e-6, 2**53  # plausible values of any figure, in the unit of its key
_Fits = Callable[[Any], bool]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and is_visible(value)


def _is_amount(value: object, least: float = _LEAST) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= _MOST


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and _is_amount(value, least)


_KINDS: Mapping[str, tuple[str, _Fits]] = {
    **dict.fromkeys(
        ("name", "architecture", "chip", "memory_type", "source", "note"),
        ("a line of text that is not empty", _is_text),
    ),
    **dict.fromkeys(
        ("aliases", "shared_names"),
        ("a list of texts", lambda value: isinstance(value, list) and all(map(_is_text, value))),
    ),
    **dict.fromkeys(("num_sms", "cuda_cores", "memory_bus_bits"), ("a whole number of at least 1", _is_count)),
    **dict.fromkeys(
        ("base_clock_mhz", "boost_clock_mhz", "memory_gib", "usable_mib", "bandwidth_gb_per_second", "l2_mib",
         "tdp_watts"),
        ("a number above 0", _is_amount),
    ),
    "tensor_cores": ("a whole number, 0 for none", lambda value: _is_count(value, 0)),
    "compute_capability": (
        "[major, minor], such as [8, 6]",
        lambda value: isinstance(value, list) and [_is_count(part, 0) for part in value] == [True, True],
    ),
    "peak_tflops": (
        "a table of numbers above 0, such as { float32 = 12.7 }",
        lambda value: isinstance(value, dict) and all(map(_is_amount, value.values())),
    ),
}  # fmt: skip
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
        Device: The device; an attribute whose key is missing is None. It is not live, and `source` is the file.

    Raises:
        InvalidArgument: If the file cannot be read, describes several devices, or a value is missing or invalid.
        UnknownName: If it has an unknown key.

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
        allowed, fits = _KINDS[key]
        if not fits(value):
            raise InvalidArgument(f"{key} in {name}", value, allowed, _REMEDY)
    for dtype in facts.get("peak_tflops", {}):
        if dtype not in DTYPES:
            raise UnknownName(f"key of peak_tflops in {name}", dtype, DTYPES)
    whole = 1024 * facts.get("memory_gib", 0)
    if not facts.get("usable_mib", 0) <= whole:
        allowed = f"at most memory_gib, {whole:g} MiB (0 if the file lacks it): what nvidia-smi prints, less with ECC"
        raise InvalidArgument(f"usable_mib in {name}", facts["usable_mib"], allowed, _REMEDY)
    if "compute_capability" not in facts:
        remedy = "It decides the resources of an SM: [7, 0] is a V100, [8, 6] an RTX 3090."
        raise InvalidArgument(f"compute_capability in {name}", None, "given as [major, minor]", remedy)
    major, minor = facts["compute_capability"]
    defaults = {
        "name": visible(path.stem, keep=""),
        "architecture": architectures.like((major, minor)).name,
    }
    return catalogue.device_of(defaults | facts | {"source": name})


def lacks(device: Device, facts: Sequence[str]) -> str:
    """
    Return a sentence about the keys that a device's file lacks; empty where no file describes the device.

    Args:
        device: A device with unknown attributes.
        facts: The unknown attributes of `Device`: "num_sms", "peak_flops_per_second['float32']".

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

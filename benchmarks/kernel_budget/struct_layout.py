"""The layout of structs that the host passes to kernels by value, compared with the CUDA sources by the compiler."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cubatch.kernels.structs import STRUCTS
from cubatch.kernels.toolchain import nvrtc
from cubatch.kernels.variant import arch_number

HEADER = "common/structs.cuh"
FAMILIES = ("simt", "mma", "hopper", "winograd")
"""Families whose kernels take these structs."""


def assertions(structs: Mapping[str, np.dtype[np.void]] = STRUCTS) -> str:
    """
    Write what the compiler is to check: sizes of structs and fields, and the order of the fields by filling them in.

    Example:
        >>> print(assertions({"Point": np.dtype([("x", np.int32)])}))
        static_assert(sizeof(Point) == 4, "Point has 4 bytes in structs.py");
        constexpr Point OF_POINT{0};
        static_assert(OF_POINT.x == 0 && sizeof(Point::x) == 4, "Point::x is field 0, of 4 bytes, in structs.py");
    """
    lines = []
    for name, record in structs.items():
        fields = [(field, kind) for field, (kind, *_) in (record.fields or {}).items()]
        filled = f"OF_{name.upper()}"
        # Of a field that is a struct itself the first field stands for all.
        values = ", ".join(f"{{{number}}}" if kind.names else str(number) for number, (_, kind) in enumerate(fields))
        size = record.itemsize
        lines += [
            f'static_assert(sizeof({name}) == {size}, "{name} has {size} bytes in structs.py");',
            f"constexpr {name} {filled}{{{values}}};",
        ]
        for number, (field, kind) in enumerate(fields):
            read = f"{filled}.{field}" + (f".{kind.names[0]}" if kind.names else "")
            condition = f"{read} == {number} && sizeof({name}::{field}) == {kind.itemsize}"
            message = f"{name}::{field} is field {number}, of {kind.itemsize} bytes, in structs.py"
            lines.append(f'static_assert({condition}, "{message}");')
    return "\n".join(lines)


def mismatch(root: Path, arch: str, structs: Mapping[str, np.dtype[np.void]] = STRUCTS) -> str:
    """
    Compare the records with the structs of the CUDA sources.

    Args:
        root: Folder of the sources; one without the header has nothing to compare.
        arch: "sm_70"; layouts are the same for all.
        structs: The records, by the names of the structs.

    Returns:
        str: The line of the compiler about the first difference; empty if there is none.

    Raises:
        MissingDependency: If there is no NVRTC.
    """
    if not (root / HEADER).is_file():  # sources of other kernels
        return ""
    source = f'#include "{HEADER}"\n{assertions(structs)}\n'
    program = nvrtc.for_arch(arch_number(arch)).compile(
        source, "structs.cu", (f"-arch={arch}", "-std=c++17", f"-I{root}")
    )
    if not program.error:
        return ""
    return next((line for line in program.log.splitlines() if "error" in line), program.error)

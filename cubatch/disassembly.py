"""
Which instructions a compiled kernel is made of, read by NVIDIA's disassembler: needs no GPU.

That a source asks for tensor cores does not say that its machine code uses them: an assembler may do the same
with ordinary arithmetic, as that of sm_80 does with Volta's `mma.m8n8k4`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from cubatch.cubins import Cubin
from cubatch.errors import DeviceFailed, MissingDependency

WHEEL = "nvidia-cuda-nvdisasm"
OLDEST = 75
"""Compute capability times ten of the oldest code that the disassembler of CUDA 13 reads."""

_SECTION = re.compile(r"^\.text\.(\w+):", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE)


@cache
def find_nvdisasm() -> Path | None:
    """Find the disassembler: of its wheel, else on the PATH; None where there is none."""
    try:
        files = metadata.files(WHEEL) or ()
    except metadata.PackageNotFoundError:
        files = ()
    found = next((Path(str(file.locate())) for file in files if file.name == "nvdisasm"), None)
    on_path = shutil.which("nvdisasm")
    return found or (Path(on_path) if on_path else None)


def count_opcodes(cubin: Cubin) -> Mapping[str, Mapping[str, int]]:
    """
    Count the instructions of each entry; what was counted is kept beside the machine code.

    Args:
        cubin: With its code, of sm_75 or later.

    Returns:
        Mapping: By entry, how often each instruction stands there, without its modifiers: {"HMMA": 64, ...}.

    Raises:
        MissingDependency: If there is no disassembler.
        DeviceFailed: If it does not read the code.
    """
    digest = hashlib.sha256(cubin.path.read_bytes()).hexdigest()
    kept = cubin.path.with_suffix(".opcodes.json")
    try:
        facts = json.loads(kept.read_text(encoding="utf-8"))
        if facts["sha256"] == digest:
            return dict(facts["opcodes"])
    except (OSError, ValueError, LookupError, TypeError):
        pass
    found = {entry: dict(counts) for entry, counts in read_listing(_listing(cubin.path)).items()}
    kept.write_text(json.dumps({"sha256": digest, "opcodes": found}), encoding="utf-8")
    return found


def read_listing(listing: str) -> dict[str, Counter[str]]:
    r"""
    Count the instructions in a disassembler's text.

    Example:
        >>> counts = read_listing(".text.k:\n /*0000*/ @!P0 HMMA.16816.F32 R4, R8, R12, R4 ;\n")
        >>> dict(counts["k"])
        {'HMMA': 1}
    """
    parts = _SECTION.split(listing)[1:]
    return {entry: Counter(_INSTRUCTION.findall(text)) for entry, text in zip(parts[::2], parts[1::2], strict=True)}


def _listing(path: Path) -> str:
    program = find_nvdisasm()
    if program is None:
        raise MissingDependency(f"nvdisasm ({WHEEL})", "reading machine code", "kernels")
    done = subprocess.run([program, "-c", path], capture_output=True, text=True, check=False)  # noqa: S603 - our files
    if done.returncode != 0 or ".text." not in done.stdout:
        raise DeviceFailed("nvdisasm", done.stderr.strip() or "no code in its output")
    return done.stdout

"""
Instructions of a compiled kernel, read from its machine code; needs no GPU.

The machine code of a source for tensor cores may not use them.  An assembler may use ordinary arithmetic instead, as
that of sm_80 does for Volta's `mma.m8n8k4`.  Since Volta an instruction has 16 bytes, whose lowest 12 bits are its
opcode and the form of its operands.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping

from cubatch.errors import InvalidData

INSTRUCTION_BYTES = 16
"""Bytes of an instruction on architectures with this layout, which `architectures` lists."""

OPCODES = {
    0x236: "HMMA", 0x23C: "HMMA", 0x9F0: "HGMMA", 0x3B4: "UTMALDG", 0x5B4: "UTMALDG", 0x3B5: "UTMASTG", 0x83B: "LDSM",
    0xFAE: "LDGSTS", 0x387: "STL", 0x983: "LDL", 0x82E: "ACQBULK",
}  # fmt: skip
"""Instructions that are counted, as NVIDIA's disassembler names them."""

_OPCODE = 0xFFF
_SECTION = struct.Struct("<IIQQQQ")  # of a 64-bit ELF file: name, type, flags, address, offset, size


def count_opcodes(code: bytes) -> Mapping[str, Mapping[str, int]]:
    """
    Count the instructions of OPCODES in each entry.

    Args:
        code: A cubin, of sm_70 or later.

    Returns:
        Mapping: By entry, how often each instruction stands there: {"gemm_nt": {"HMMA": 32, "LDSM": 12}}.

    Raises:
        InvalidData: If it is no cubin, or ends too early.
    """
    try:
        return {entry: _count(text) for entry, text in texts(code).items()}
    except (struct.error, ValueError, IndexError) as error:
        raise InvalidData("cubin", f"it is no machine code that could be read: {error}") from error


def texts(code: bytes) -> dict[str, bytes]:
    """
    Return the instructions of each entry, from the sections .text.ENTRY.

    Raises:
        ValueError, IndexError, struct.error: If it is no cubin, or ends too early.
    """
    if code[:4] != b"\x7fELF":
        raise ValueError("it does not begin as an ELF file")
    (first,), (size, count, names) = struct.unpack_from("<Q", code, 0x28), struct.unpack_from("<3H", code, 0x3A)
    sections = [_SECTION.unpack_from(code, first + number * size) for number in range(count)]
    start = sections[names][4]
    entries = {}
    for name, _, _, _, offset, length in sections:
        begin = start + name
        label = code[begin : code.index(b"\0", begin)].decode()
        if label.startswith(".text."):
            entries[label.removeprefix(".text.")] = code[offset : offset + length]
    return entries


def _count(text: bytes) -> dict[str, int]:
    opcodes = (
        word & _OPCODE
        for word, _ in struct.iter_unpack("<QQ", text[: len(text) // INSTRUCTION_BYTES * INSTRUCTION_BYTES])
    )
    return dict(Counter(OPCODES[opcode] for opcode in opcodes if opcode in OPCODES))

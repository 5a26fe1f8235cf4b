"""
What is written for tensor cores is compiled to their instructions, and to nothing that stands in for them.

The machine code is read itself, for want of a disassembler: since Volta an instruction is 16 bytes, of which the lowest
12 bits say what it does.
"""

from __future__ import annotations

import struct
from collections import Counter

import pytest

from cubatch import compile as compiler
from cubatch import kernel

# As nvdisasm 12.8 names them: HMMA (of Volta HMMA.884, in steps), LDSM, LDGSTS; stores to local memory and loads.
VOLTA_HMMA, HMMA, LDSM, LDGSTS = 0x236, 0x23C, 0x83B, 0xFAE
STL, LDL = 0x387, 0x983

TILES = {"float16": "128x128x32", "bfloat16": "128x128x32", "tf32": "128x128x16"}


def opcodes(code, entry):
    """Count the instructions of a kernel in a cubin, by opcode."""
    first, size, count, names = (*struct.unpack_from("<Q", code, 0x28), *struct.unpack_from("<3H", code, 0x3A))
    headers = [struct.unpack_from("<IIQQQQ", code, first + i * size) for i in range(count)]
    text = headers[names][4]
    for name, _, _, _, offset, length in headers:
        if code[text + name :].split(b"\0", 1)[0].decode() == f".text.{entry}":
            return Counter(struct.unpack_from("<Q", code, offset + i)[0] & 0xFFF for i in range(0, length, 16))
    raise AssertionError(f"no {entry} in the cubin")


CASES = [(arch, "float16") for arch in (70, 75, 80, 86, 89, 90, 100, 120)] + [
    (arch, dtype) for arch in (80, 90, 120) for dtype in ("bfloat16", "tf32")
]


@pytest.mark.parametrize(("arch", "dtype"), CASES)
def test_a_product_is_of_hmma_instructions(arch, dtype, tmp_path):
    """A warp's 64 x 32 x 32 are 32 of 16 x 8 x 16: 64 of half the depth, or 8 x 8 x 4 in four steps, four at a time."""
    tile = f"{TILES[dtype]}_s2" if arch < 80 else TILES[dtype]
    found = kernel.find("gemm_nt", dtype, family="mma", tile=tile)
    code = compiler.compile_kernel(found, f"sm_{arch}", folder=tmp_path).path.read_bytes()
    seen = opcodes(code, found.entry)
    want = {70: 4 * 64, 75: 64}.get(arch, 32)
    assert seen[VOLTA_HMMA if arch == 70 else HMMA] == want
    assert seen[LDSM] >= (0 if arch == 70 else 12)
    assert (seen[LDGSTS] > 0) == (arch >= 80)
    assert seen[STL] == seen[LDL] == 0

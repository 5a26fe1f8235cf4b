"""
Instructions of a kernel's main loop, read from its machine code; needs no GPU.

A loop lies between a branch and an earlier target.  The main loop is the shortest one with the most products: wgmma, or
else mma, or else multiply-adds.  Unlike the number of registers, it shows fences and elements that are taken apart.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping

import attrs

from benchmarks.kernel_budget import sass
from cubatch.errors import InvalidData

_OPCODES = {0x236: "HMMA", 0x23C: "HMMA", 0x9F0: "HGMMA", 0x83B: "LDSM", 0x947: "BRA", 0x98F: "CCTL", 0x992: "MEMBAR"}
_ARITHMETIC = {0x023: "FFMA", 0x016: "PRMT"}  # for all operands, which the three bits above state
_PRODUCTS = ("HGMMA", "HMMA", "FFMA")
_WIDE_FENCE = 2 << 12  # of MEMBAR's scope: 0 the block's, 2 the GPU's, 3 the system's
_NEAR = 90  # from this architecture on the lowest bits of a branch's distance lie apart from the others
_TEXT = re.compile(r"(\d+)/(\d+)\+(\d+)\+(\d+)")


@attrs.frozen
class Loop:
    """
    An iteration of a main loop.

    Attributes:
        instructions: All of it.
        products: HGMMA, or else HMMA, or else FFMA.
        matrix_loads: LDSM.
        permutations: PRMT: elements that are put into registers, or taken from them.
        fences: MEMBAR beyond the block, and CCTL, of any loop around these products; not part of the text.
    """

    instructions: int
    products: int
    matrix_loads: int = 0
    permutations: int = 0
    fences: int = 0

    def __str__(self) -> str:
        return f"{self.instructions}/{self.products}+{self.matrix_loads}+{self.permutations}"

    @classmethod
    def parse(cls, text: str) -> Loop:
        """
        Read what str() writes.

        Raises:
            ValueError: If the text is none of that.

        Example:
            >>> Loop.parse("126/64+16+0").matrix_loads
            16
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(text)
        return cls(*map(int, match.groups()))

    def excess(self, limit: Loop) -> list[str]:
        """
        Return where it has more per product than another loop.

        Example:
            >>> Loop.parse("160/64+16+8").excess(Loop.parse("63/32+8+0"))
            ['160 instructions for 64 products in a main loop, the budget allows 63 for 32', \
'8 PRMT for 64 products in a main loop, the budget allows 0 for 32']
        """
        compared = (
            (self.instructions, limit.instructions, "instructions"),
            (self.matrix_loads, limit.matrix_loads, "LDSM"),
            (self.permutations, limit.permutations, "PRMT"),
        )
        return [
            f"{count} {what} for {self.products} products in a main loop, the budget allows {most} for {limit.products}"
            for count, most, what in compared
            if count * limit.products > most * self.products
        ]


def main_loops(code: bytes, arch: int) -> Mapping[str, Loop]:
    """
    Read the main loop of each entry that has one.

    Args:
        code: A cubin, of sm_70 or later.
        arch: Compute capability times ten.

    Raises:
        InvalidData: If it is no cubin, or ends too early.
    """
    try:
        loops = {entry: _main_loop(list(_instructions(text, arch))) for entry, text in sass.texts(code).items()}
    except (struct.error, ValueError, IndexError) as error:
        raise InvalidData("cubin", f"it is no machine code that could be read: {error}") from error
    return {entry: loop for entry, loop in loops.items() if loop is not None}


def _instructions(text: bytes, arch: int) -> Iterator[tuple[str, int]]:
    """List name, empty where it is not known here, and for a branch how many instructions its target is further on."""
    size = sass.INSTRUCTION_BYTES
    for low, high in struct.iter_unpack("<QQ", text[: len(text) // size * size]):
        name = _OPCODES.get(low & 0xFFF) or _ARITHMETIC.get(low & 0x1FF, "")
        if name == "MEMBAR" and not high & _WIDE_FENCE:
            name = ""
        distance = 0
        if name == "BRA":
            far = (low >> 32) - (1 << 32 if low >> 63 else 0)
            distance = ((far >> 2 << 8) + (low >> 16 & 0xFF)) * 4 if arch >= _NEAR else far
        yield name, distance // size


def _main_loop(instructions: list[tuple[str, int]]) -> Loop | None:
    names = [name for name, _ in instructions]
    backward = [(at + 1 + by, at + 1) for at, (name, by) in enumerate(instructions) if name == "BRA" and by < -1]
    loops = [(end - begin, Counter(names[begin:end])) for begin, end in backward if begin >= 0]
    product = next((kind for kind in _PRODUCTS if any(counts[kind] for _, counts in loops)), None)
    if product is None:
        return None
    size, counts = max(loops, key=lambda loop: (loop[1][product], -loop[0]))
    fences = max(around["MEMBAR"] + around["CCTL"] for _, around in loops if around[product])
    return Loop(size, counts[product], counts["LDSM"], counts["PRMT"], fences)

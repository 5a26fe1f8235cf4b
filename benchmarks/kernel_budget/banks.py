"""
Register-bank conflicts among the multiply-adds of a main loop, read from machine code: needs no GPU.

A multiply-add reads three registers.  Up to sm_6x registers lie in four banks of one register a clock (maxas,
"SGEMM").  From sm_70 on they lie in two banks of two registers a clock.  The source is Jia et al., "Dissecting the
NVIDIA Volta GPU Architecture via Microbenchmarking", 2018.  Operands in the reuse cache are not read.  Each extra
clock is a conflict.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator

import attrs

_VOLTA = 70
_NEAR = 40  # instructions between multiply-adds of one loop, at most: copies and address arithmetic
_ZERO = 255  # the register that reads as zero, and lies in no bank
_MAXWELL_FFMA, _MAXWELL_MASK = 0x5980, 0xFF80  # with three registers, in the upper 16 bits
_FFMA, _ALL_REGISTERS = 0x023, 1  # in the lower 9 bits, and the 3 bits above
_TEXT = re.compile(r"(\d+)/(\d+)")

_Operands = tuple[tuple[int, int, int], int] | None


@attrs.frozen
class BankConflicts:
    """
    Conflicts of one iteration of a main loop.

    Attributes:
        clocks: Extra clocks.
        products: Multiply-adds.
    """

    clocks: int
    products: int

    @property
    def share(self) -> float:
        """Extra clocks for each multiply-add."""
        return self.clocks / self.products

    def excess(self, limit: BankConflicts) -> list[str]:
        """
        Return what is wrong if there are more conflicts for each multiply-add than in another loop.

        Example:
            >>> BankConflicts(449, 512).excess(BankConflicts(57, 512))
            ['449 bank conflicts for 512 FFMA in a main loop, the budget allows 57 for 512']
        """
        if self.clocks * limit.products <= limit.clocks * self.products:
            return []
        allowed = f"the budget allows {limit.clocks} for {limit.products}"
        return [f"{self.clocks} bank conflicts for {self.products} FFMA in a main loop, {allowed}"]

    def __str__(self) -> str:
        return f"{self.clocks}/{self.products}"

    @classmethod
    def parse(cls, text: str) -> BankConflicts:
        """
        Read what str() writes.

        Raises:
            ValueError: If the text has another form.

        Example:
            >>> BankConflicts.parse("51/512").share < 0.1
            True
        """
        match = _TEXT.fullmatch(text)
        if match is None or int(match[2]) == 0:
            raise ValueError(text)
        return cls(int(match[1]), int(match[2]))


def bank_conflicts(text: bytes, arch: int) -> BankConflicts | None:
    """
    Count the bank conflicts of an entry's main loop: the longest run of multiply-adds; None where there is none.

    Args:
        text: Machine code of the entry.
        arch: Compute capability times ten.
    """
    operands = list(_maxwell(text) if arch < _VOLTA else _volta(text))
    run = _longest_run([place for place, operand in enumerate(operands) if operand is not None])
    if not run:
        return None
    banks, width = (4, 1) if arch < _VOLTA else (2, 2)
    clocks, cached = 0, (-1, -1, -1)
    for place in range(run[0], run[-1] + 1):
        operand = operands[place]
        if operand is None:
            cached = (-1, -1, -1)
            continue
        registers, reuse = operand
        read = {register for slot, register in enumerate(registers) if register not in (_ZERO, cached[slot])}
        busiest = max(Counter(register % banks for register in read).values(), default=1)
        clocks += -(-busiest // width) - 1
        first, second, third = (register if reuse >> slot & 1 else -1 for slot, register in enumerate(registers))
        cached = first, second, third
    return BankConflicts(clocks, len(run))


def _longest_run(places: list[int]) -> list[int]:
    runs: list[list[int]] = [[]]
    for place in places:
        if runs[-1] and place - runs[-1][-1] >= _NEAR:
            runs.append([])
        runs[-1].append(place)
    return max(runs, key=len)


def _maxwell(text: bytes) -> Iterator[_Operands]:
    """List the operands and reuse flags of multiply-adds; None for others. A group is a control word and three more."""
    for control, *words in struct.iter_unpack("<4Q", text[: len(text) // 32 * 32]):
        for place, word in enumerate(words):
            is_product = word >> 48 & _MAXWELL_MASK == _MAXWELL_FFMA
            registers = word >> 8 & 0xFF, word >> 20 & 0xFF, word >> 39 & 0xFF
            yield (registers, control >> 21 * place + 17 & 0xF) if is_product else None


def _volta(text: bytes) -> Iterator[_Operands]:
    """List the same of 16-byte instructions."""
    for low, high in struct.iter_unpack("<2Q", text[: len(text) // 16 * 16]):
        is_product = low & 0x1FF == _FFMA and low >> 9 & 7 == _ALL_REGISTERS
        registers = low >> 24 & 0xFF, low >> 32 & 0xFF, high & 0xFF
        yield (registers, high >> 58 & 0xF) if is_product else None

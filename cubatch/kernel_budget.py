"""
What kernels may take: registers, shared memory and spills of every variant, as they were when last looked at.

`kernels/resources.toml` holds one line for each variant.  The figures are those of one build of NVRTC and
bind under no other; they change by `cubatch kernels --update-budget` alone, so that a change is seen in review.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import attrs

from cubatch.errors import InvalidData

_FIGURES = re.compile(r"(\d+)(?:/(\d+))?(?:\+(\d+))?")
_HEAD = """\
# What each kernel variant takes per architecture, as the assembler reports it:
#   architecture=registers[/static shared bytes][+spilled bytes]
# Written by `cubatch kernels --update-budget`; checked by `cubatch kernels --check` under this NVRTC alone.
"""


@attrs.frozen
class Figures:
    """
    What one variant takes on one architecture.

    Attributes:
        registers: Per thread.
        shared_bytes: Static shared memory of a block.
        spill_bytes: Spilled per thread.
    """

    registers: int
    shared_bytes: int = 0
    spill_bytes: int = 0

    def __str__(self) -> str:
        shared = f"/{self.shared_bytes}" if self.shared_bytes else ""
        spills = f"+{self.spill_bytes}" if self.spill_bytes else ""
        return f"{self.registers}{shared}{spills}"

    @classmethod
    def parse(cls, text: str) -> Figures:
        """
        Read what str() writes.

        Raises:
            ValueError: If the text is none of that.

        Example:
            >>> Figures.parse("128/16896+24")
            Figures(registers=128, shared_bytes=16896, spill_bytes=24)
        """
        found = _FIGURES.fullmatch(text)
        if found is None:
            raise ValueError(text)
        return cls(*(int(part or 0) for part in found.groups()))


@attrs.frozen
class Budget:
    """
    The checked-in figures.

    Attributes:
        nvrtc: The build they are of.
        may_spill: Variants that are allowed to, each with the reason; written by hand.
        figures: By variant and architecture (compute capability times ten).
    """

    nvrtc: str
    may_spill: Mapping[str, str]
    figures: Mapping[str, Mapping[int, Figures]]


def read(path: Path) -> Budget:
    """
    Read resources.toml.

    Raises:
        InvalidData: If it is not there, or not as `write` leaves it.
    """
    try:
        with path.open("rb") as file:
            data = tomllib.load(file)
        figures = {name: dict(_entry(word) for word in line.split()) for name, line in data["figures"].items()}
        return Budget(data["nvrtc"], data.get("may_spill", {}), figures)
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise InvalidData(str(path), f"is no budget of kernels: {error!r}") from error


def write(path: Path, budget: Budget) -> None:
    """Write resources.toml, one line for each variant, in the order given."""
    lines = [_HEAD + f'nvrtc = "{budget.nvrtc}"', "", "[may_spill] # by hand: variant = reason"]
    lines += [f"{name} = {json.dumps(reason)}" for name, reason in budget.may_spill.items()]
    lines += ["", "[figures]"]
    for name, figures in budget.figures.items():
        words = " ".join(f"{arch}={figures[arch]}" for arch in sorted(figures))
        lines.append(f'{name} = "{words}"')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _entry(word: str) -> tuple[int, Figures]:
    arch, figures = word.split("=")
    return int(arch), Figures.parse(figures)

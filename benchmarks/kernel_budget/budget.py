"""
The budget of the kernels in kernels/resources.toml: what each variant may take, and how it is compared and written.

The package reads its figures (`cubatch.kernels.resources`); main loops, bank conflicts and the digest of the sources
are for this check alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from benchmarks.kernel_budget.banks import BankConflicts
from benchmarks.kernel_budget.loops import Loop
from cubatch.errors import InvalidArgument, InvalidData
from cubatch.kernels import resources, survey
from cubatch.kernels.resources import Figures, Recorded, by_arch
from cubatch.kernels.survey import Row
from cubatch.kernels.toolchain import nvrtc
from cubatch.kernels.variant import Kernel, arch_number

_SOURCES = (".cu", ".cuh")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_HEAD = """\
# Resources of each kernel variant per architecture, as the assembler reports them:
#   architecture=registers[/static shared bytes][+spilled bytes]
# Under [loops] one iteration of the main loop, of one variant of each tiled family:
#   architecture=instructions/products on tensor cores, else FFMA+LDSM+PRMT
# Under [banks] the clocks that FFMA instructions wait for registers of one bank:
#   architecture=extra clocks/FFMA
# Written by `python -m benchmarks.kernel_budget --update` and checked without --update, under this NVRTC alone.
"""


@attrs.frozen
class Budget:
    """
    The limits of the kernels.

    Attributes:
        recorded: Registers, shared memory and spills, the build of NVRTC, and variants that may spill.
        sources: Digest of the sources that were compiled (see `digest`); empty if unknown.
        loops: Main loops, by variant and architecture.
        banks: Register-bank conflicts of main loops without tensor cores, by variant and architecture.
    """

    recorded: Recorded
    sources: str = ""
    loops: Mapping[str, Mapping[int, Loop]] = attrs.field(factory=dict)
    banks: Mapping[str, Mapping[int, BankConflicts]] = attrs.field(factory=dict)


@attrs.frozen
class Checked:
    """A compiled variant with its machine code's main loop and conflicts; None if these are not held to the budget."""

    row: Row
    loop: Loop | None = None
    conflicts: BankConflicts | None = None


def read(path: Path) -> Budget:
    """
    Read resources.toml.

    Raises:
        InvalidData: If the file is missing or has another form.
    """
    recorded = resources.read(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        loops = by_arch(data.get("loops", {}), Loop.parse)
        return Budget(recorded, data.get("sources", ""), loops, by_arch(data.get("banks", {}), BankConflicts.parse))
    except (ValueError, LookupError, AttributeError) as error:
        raise InvalidData(str(path), f"is no budget of kernels: {error!r}") from error


def write(path: Path, budget: Budget) -> None:
    """Write resources.toml, one line for each variant, in the order given."""
    recorded = budget.recorded
    lines = [
        _HEAD + f'nvrtc = "{recorded.nvrtc}"',
        f'sources = "{budget.sources}"',
        "",
        "[may_spill] # by hand: variant = reason",
    ]
    lines += [f"{name} = {json.dumps(reason)}" for name, reason in recorded.may_spill.items()]
    tables: Mapping[str, Mapping[str, Mapping[int, object]]] = {
        "loops": budget.loops, "banks": budget.banks, "figures": recorded.figures,
    }  # fmt: skip
    for table, values in tables.items():
        lines += ["", f"[{table}]"]
        for name, of_archs in values.items():
            words = " ".join(f"{arch}={of_archs[arch]}" for arch in sorted(of_archs))
            lines.append(f'{name} = "{words}"')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def digest(root: Path) -> str:
    """
    Return a digest of what the figures follow from: the code of all sources, without comments, and configs.toml.

    Args:
        root: Folder of the sources.
    """
    state = hashlib.sha256((root / "configs.toml").read_bytes())
    for path in sorted(path for path in root.rglob("*") if path.suffix in _SOURCES):
        code = _COMMENT.sub(" ", path.read_text(encoding="utf-8")).split()
        state.update(f"\0{path.relative_to(root).as_posix()}\0{' '.join(code)}".encode())
    return state.hexdigest()[:16]


def excesses(checked: Iterable[Checked], budget: Budget) -> list[Row]:
    """Return the rows with a problem added for each figure that exceeds the budget or is missing from it."""
    rows = []
    for each in checked:
        row, arch = each.row, arch_number(each.row.arch)
        if row.figures is not None and row.nvrtc == budget.recorded.nvrtc:
            over = _excess(row.figures, budget.recorded.figures.get(row.kernel.name, {}).get(arch))
            if each.loop is not None:
                most = budget.loops.get(row.kernel.name, {}).get(arch)
                over += ["the budget has no main loop of it"] if most is None else each.loop.excess(most)
            if each.conflicts is not None:
                limit = budget.banks.get(row.kernel.name, {}).get(arch)
                over += ["the budget has no bank conflicts of it"] if limit is None else each.conflicts.excess(limit)
            row = attrs.evolve(row, problems=(*row.problems, *over))
        rows.append(row)
    return rows


def _excess(figures: Figures, limit: Figures | None) -> list[str]:
    if limit is None:
        return ["the budget has no figures of it"]
    compared = (
        (figures.registers, limit.registers, "registers"),
        (figures.shared_bytes, limit.shared_bytes, "bytes of static shared memory"),
        (figures.spill_bytes, limit.spill_bytes, "bytes spilled"),
    )
    return [f"{value} {what}, the budget allows {most}" for value, most, what in compared if value > most]


def leftovers(known: Iterable[Kernel], budget: Budget) -> list[str]:
    """Return the names in the budget that no variant has, as after a renaming."""
    names = {kernel.name for kernel in known}
    return sorted({*budget.recorded.figures, *budget.recorded.may_spill} - names)


def savings(rows: Iterable[Row], budget: Budget) -> list[str]:
    """Return the variants that take less than the budget allows on any architecture."""
    names: dict[str, None] = {}  # an ordered set
    for row in rows:
        limit = budget.recorded.figures.get(row.kernel.name, {}).get(arch_number(row.arch))
        if row.figures is None or limit is None or row.nvrtc != budget.recorded.nvrtc:
            continue
        if _excess(limit, row.figures):
            names[row.kernel.name] = None
    return list(names)


def require_compiler(budget: Budget) -> None:
    """
    Check that NVRTC is the build of the budget, before minutes of compiling.

    Raises:
        InvalidArgument: If another build would compile for any of the architectures.
    """
    for arch in survey.ARCHS:
        version = nvrtc.for_arch(arch_number(arch)).version
        if version != budget.recorded.nvrtc:
            raise InvalidArgument(f"NVRTC for {arch}", version, f"{budget.recorded.nvrtc}, the build of the budget")


def budget_of(checked: Iterable[Checked], previous: Budget, sources: str) -> Budget:
    """
    Return a budget of what a check of all variants measured, with the exemptions of the previous budget.

    Args:
        checked: All variants.
        previous: The budget that it replaces.
        sources: Digest of the compiled sources.
    """
    figures: dict[str, dict[int, Figures]] = {}
    loops: dict[str, dict[int, Loop]] = {}
    banks: dict[str, dict[int, BankConflicts]] = {}
    for each in checked:
        name, arch = each.row.kernel.name, arch_number(each.row.arch)
        if each.row.figures is not None:
            figures.setdefault(name, {})[arch] = each.row.figures
        if each.loop is not None:
            loops.setdefault(name, {})[arch] = each.loop
        if each.conflicts is not None:
            banks.setdefault(name, {})[arch] = each.conflicts
    return Budget(attrs.evolve(previous.recorded, figures=figures), sources, loops, banks)

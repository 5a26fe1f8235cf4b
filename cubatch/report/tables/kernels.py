"""Tables of `cubatch kernels`: one line for each variant, and their problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs

from cubatch.kernels.survey import Row
from cubatch.report.grid import Cell, Grid
from cubatch.report.tables.common import span
from cubatch.units import format_bytes, format_count, format_percent

_GRAMMAR = (
    "A name has operation, algorithm, storage type, family, tile (m x n x k of the matrix product) and, after v, the "
    "elements of a load. Numbers that differ between architectures are ranges."
)


def table(rows: Sequence[Row]) -> list[Grid]:
    """
    Return a table for each family of kernels, with a row for each variant.

    A note counts the variants that run on other architectures only.
    """
    everything = {row.kernel.name for row in rows}
    rows = [row for row in rows if row.status != "not_applicable"]
    elsewhere = len(everything) - len({row.kernel.name for row in rows})
    archs = list(dict.fromkeys(row.arch for row in rows))
    where = archs[0] if len(archs) == 1 else f"{archs[0]} to {archs[-1]}" if archs else ""
    by_family: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        by_family.setdefault(row.kernel.family, {}).setdefault(row.kernel.name, []).append(row)
    grids = [Grid.of(variants.values(), _COLUMNS, title=f"{family}, {where}") for family, variants in by_family.items()]
    compilers = ", ".join(sorted({row.nvrtc for row in rows if row.nvrtc}))
    notes = (
        [f"Compiled by NVRTC {compilers}. {_GRAMMAR}"]
        if compilers
        else ["Registers and shared memory are unknown."]
        if rows
        else []
    )
    if elsewhere:
        notes.append(
            f"Not listed, since they run on other architectures only: {elsewhere} variant{'s'[: elsewhere > 1]}."
        )
    return [*grids[:-1], attrs.evolve(grids[-1] if grids else Grid(), notes=notes)]


def _of_figures(name: str) -> Callable[[Sequence[Row]], str | None]:
    return lambda rows: span(str, [getattr(row.figures, name) for row in rows if row.figures is not None])


def _of_occupancy(name: str, write: Callable[[Any], str]) -> Callable[[Sequence[Row]], str | None]:
    return lambda rows: span(write, [getattr(row.occupancy, name) for row in rows if row.occupancy is not None])


_COLUMNS: Mapping[str, Callable[[Sequence[Row]], Cell]] = {
    "variant": lambda rows: rows[0].kernel.name,
    "runs on": lambda rows: rows[0].kernel.where,
    "threads": lambda rows: rows[0].kernel.threads,
    "registers": _of_figures("registers"),
    "spills": _of_figures("spill_bytes"),
    "shared": lambda rows: span(format_bytes, [row.shared_bytes for row in rows if row.shared_bytes is not None]),
    "blocks/SM": _of_occupancy("blocks_per_sm", str),
    "occupancy": _of_occupancy("occupancy", format_percent),
}


def problems(rows: Sequence[Row]) -> list[Grid]:
    """Return a table of the problems in rows of a survey, each with its architectures, and a note with counts."""
    archs_of: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for problem in row.problems:
            archs_of.setdefault((row.kernel.name, problem), []).append(row.arch)
    archs_of_rows = {row.arch for row in rows}
    lines: list[list[Any]] = [
        [name, problem, ", ".join(archs) if set(archs) < archs_of_rows else "all"]
        for (name, problem), archs in archs_of.items()
    ]
    compiled = format_count(sum(row.figures is not None for row in rows))
    builds = sorted({row.nvrtc for row in rows if row.nvrtc})
    kernels = format_count(len({row.kernel.name for row in rows}))
    counted = f"{kernels} variants on {len(archs_of_rows)} architectures, {compiled} compiled"
    verdict = f"{len(lines) or 'no'} problem{'' if len(lines) == 1 else 's'}"
    notes = [f"{counted} by NVRTC {', '.join(builds) or 'none'}: {verdict}."]
    if not lines:
        return [Grid(notes=notes)]
    return [Grid(title="Problems", columns=["variant", "problem", "on"], rows=lines, notes=notes)]


def mapping(rows: Iterable[Row]) -> dict[str, Any]:
    """Return the rows of a survey, grouped by kernel, in the JSON form of docs/reference/api.md."""
    listed = []
    order = sorted(rows, key=_identity)  # stable: variants stay in their order
    for (operation, _, dtype, family), group in groupby(order, key=_identity):
        variants = [_variant(row) for row in group]
        name = variants[0]["name"].partition(f"_{family}")[0] + f"_{family}"  # `occupancy` accepts it for all of them
        listed.append({"name": name, "family": family, "operation": operation, "dtype": dtype, "variants": variants})
    return {"schema": 1, "kernels": listed}


def _identity(row: Row) -> tuple[str, str, str, str]:
    return row.kernel.operation, row.kernel.source, row.kernel.dtype, row.kernel.family


def _variant(row: Row) -> Mapping[str, Any]:
    kernel, figures, held = row.kernel, row.figures, row.occupancy
    return {
        "name": kernel.name,
        "arch": row.arch,
        "status": row.status,
        "nvrtc": row.nvrtc,
        "tile": kernel.tile_name or None,
        "vector": kernel.vector,
        "registers": figures and figures.registers,
        "spill_bytes": figures and figures.spill_bytes,
        "shared_bytes": row.shared_bytes,
        "threads": kernel.threads,
        "blocks_per_sm": held and held.blocks_per_sm,
        "occupancy": held and held.occupancy,
        "problems": list(row.problems),
        "log": row.error and row.error.log,
    }

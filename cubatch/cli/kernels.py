"""`cubatch kernels`: registers and memory of the CUDA kernels, and whether they compile for every GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from cubatch.cli import console
from cubatch.cli.options import JsonOption

if TYPE_CHECKING:
    from cubatch.kernels.resources import Recorded
    from cubatch.kernels.survey import Row
    from cubatch.kernels.variant import Kernel


def kernels(
    *,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch", metavar="sm_XX", help="Compile for this architecture; repeat for more. Default: the GPU here."
        ),
    ] = None,
    family: Annotated[str | None, typer.Option("--family", help="Show only this family: simt, misc, ...")] = None,
    operation: Annotated[
        str | None, typer.Option("--operation", help="Show only this operation: conv2d_fprop, ...")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compile for every architecture; fail on errors, warnings and spills.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """
    List the CUDA kernels with registers and occupancy.

    The list also has shared memory and spilled bytes.

    With --arch, or on a machine with a GPU, NVRTC compiles them; this needs no GPU. Otherwise, or if NVRTC is missing
    or too old for an --arch, the list has the figures recorded with the sources.

    Example: cubatch kernels --arch sm_70 --operation conv2d_fprop
    """
    from cubatch.kernels import resources, survey
    from cubatch.report.tables import kernels as kernels_table

    console.check_writable(json=json)
    chosen = _chosen(family, operation)
    figures = resources.recorded_figures()
    archs = _known(arch or []) or (survey.ARCHS if check else _here())
    rows = _compiled(chosen, archs, figures, must_compile=check) if archs else survey.recorded(chosen, figures)
    _show_logs(rows)
    console.emit(
        kernels_table.problems(rows) if check else kernels_table.table(rows), kernels_table.mapping(rows), json
    )
    if any(row.error for row in rows) or (check and any(row.problems for row in rows)):
        raise typer.Exit(1)


def _compiled(chosen: Sequence[Kernel], archs: Sequence[str], budget: Recorded, *, must_compile: bool) -> list[Row]:
    """
    Compile the kernels and return a row per kernel and architecture.

    Without a compiler, rows from `budget`, the recorded figures, are returned; with `must_compile` the error is raised.
    """
    from cubatch.errors import InvalidArgument, MissingDependency
    from cubatch.kernels import survey

    try:
        with console.progress_bar("compiling kernels") as show:
            return survey.survey(chosen, archs, may_spill=budget.may_spill, progress=show)
    except (MissingDependency, InvalidArgument) as error:
        rows = survey.recorded(chosen, budget, archs)
        if must_compile or {row.arch for row in rows if row.status == "unknown"}:
            raise
        console.say(f"not compiled, the figures are those recorded with the sources: {error}")
        return rows


def _chosen(family: str | None, operation: str | None) -> Sequence[Kernel]:
    from cubatch.errors import InvalidArgument, UnknownName
    from cubatch.kernels import variant

    known = variant.kernels()
    for field, value, names in (
        ("--family", family, {each.family for each in known}),
        ("--operation", operation, {each.operation for each in known}),
    ):
        if value is not None and value not in names:
            raise UnknownName(field, value, sorted(names))
    chosen = [each for each in known if family in (None, each.family) and operation in (None, each.operation)]
    if known and not chosen:
        families = ", ".join(sorted({each.family for each in known if each.operation == operation}))
        raise InvalidArgument("--family", family, f"one with the operation {operation}: {families}")
    return chosen


def _known(archs: Sequence[str]) -> Sequence[str]:
    from cubatch.errors import UnknownName
    from cubatch.hardware import architectures
    from cubatch.kernels.variant import arch_number

    known = [each.number for each in architectures.known().values() if each.is_compiled_for]
    for arch in archs:
        if arch_number(arch) not in known:
            raise UnknownName("--arch", arch, [f"sm_{number}" for number in known])
    # sm_90a counts as sm_90: the families that need the features of sm_90a are compiled for it anyway.
    return list(dict.fromkeys(f"sm_{arch_number(arch)}" for arch in archs))


def _here() -> Sequence[str]:
    from cubatch.hardware import probe

    arch = probe.device().arch
    return () if arch is None else (arch,)


def _show_logs(rows: Sequence[Row]) -> None:
    """Print the compiler's log of the first failure of each source; the other logs are mostly equal."""
    shown: set[str] = set()
    for row in rows:
        if row.error is not None and row.kernel.source not in shown:
            shown.add(row.kernel.source)
            console.say(f"cubatch: {row.error}")

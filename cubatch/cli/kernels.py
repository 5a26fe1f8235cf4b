"""`cubatch kernels`: what the hand-written kernels take, and whether all of them compile for every GPU."""

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
        typer.Option("--arch", metavar="sm_XX", help="Compile for this; may be given again. Default: the GPU here."),
    ] = None,
    family: Annotated[str | None, typer.Option("--family", help="Only this family: simt, misc, ...")] = None,
    operation: Annotated[str | None, typer.Option("--operation", help="Only this: conv2d_fprop, ...")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compile for every architecture; errors, warnings and spills fail.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """
    List the kernels with their registers, spills and occupancy.

    Of each: what it does, where it runs, its shared memory too.

    Compiling needs no GPU. Without one and without --arch, without a compiler, or with one that does not know each
    --arch, the figures are those recorded with the sources.

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
    """Compile, or give the recorded figures where there is no compiler, or none for these, and they do."""
    from cubatch.errors import InvalidArgument, MissingDependency
    from cubatch.kernels import survey

    try:
        with console.progress_bar("compiling kernels") as show:
            return survey.survey(chosen, archs, may_spill=budget.may_spill, progress=show)
    except (MissingDependency, InvalidArgument) as error:
        rows = survey.recorded(chosen, budget, archs)
        if must_compile or {row.arch for row in rows if row.status == "unknown"}:
            raise
        console.say(f"These are the figures recorded with the sources: {error}")
        return rows


def _chosen(family: str | None, operation: str | None) -> Sequence[Kernel]:
    from cubatch.errors import InvalidArgument, UnknownName
    from cubatch.kernels import variant

    known = variant.kernels()
    for field, value, names in (
        ("family", family, {one.family for one in known}),
        ("operation", operation, {one.operation for one in known}),
    ):
        if value is not None and value not in names:
            raise UnknownName(field, value, sorted(names))
    chosen = [one for one in known if family in (None, one.family) and operation in (None, one.operation)]
    if known and not chosen:
        families = ", ".join(sorted({one.family for one in known if one.operation == operation}))
        raise InvalidArgument("family", family, f"one that has {operation}: {families}")
    return chosen


def _known(archs: Sequence[str]) -> Sequence[str]:
    from cubatch.errors import UnknownName
    from cubatch.hardware import architectures
    from cubatch.kernels.variant import arch_number

    known = [one.number for one in architectures.known().values() if one.is_compiled_for]
    for arch in archs:
        if arch_number(arch) not in known:
            raise UnknownName("arch", arch, [f"sm_{number}" for number in known])
    # Each once, and sm_90a as sm_90: a family that needs it is compiled for it.
    return list(dict.fromkeys(f"sm_{arch_number(arch)}" for arch in archs))


def _here() -> Sequence[str]:
    """Give the architecture of this machine's first GPU; none without one."""
    from cubatch.hardware import probe

    arch = probe.device().arch
    return () if arch is None else (arch,)


def _show_logs(rows: Sequence[Row]) -> None:
    """Tell the compiler's log of the first failure of each source; the others are mostly the same."""
    shown: set[str] = set()
    for row in rows:
        if row.error is not None and row.kernel.source not in shown:
            shown.add(row.kernel.source)
            console.say(f"cubatch: {row.error}")

"""`cubatch store`: look at the kept results, and forget them."""

from __future__ import annotations

from typing import Annotated

import typer

from cubatch.cli import console
from cubatch.cli.options import JsonOption, StoreOption

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Results kept from earlier runs.\n\nExample: cubatch store list",
)


@app.command("list")
def list_runs(*, store: StoreOption = None, json: JsonOption = None) -> None:
    """
    List the kept runs.

    Example: cubatch store list --json -
    """
    from cubatch import sqlite_file
    from cubatch.report.tables import common
    from cubatch.report.tables import store as store_table
    from cubatch.tuning import store as kept

    console.check_writable(json=json)
    path = store or sqlite_file.default_path()
    runs = [common.plain(run) for run in kept.list_runs(path)]
    console.emit([store_table.runs(runs, str(path))], {"schema": 1, "path": str(path), "runs": runs}, json)


@app.command("show")
def show_run(
    run: Annotated[int, typer.Argument(metavar="ID", help="The run's number in `cubatch store list`.")],
    *,
    store: StoreOption = None,
    json: JsonOption = None,
) -> None:
    """
    Show one kept run: what was asked, under what conditions, and every timing.

    Example: cubatch store show 3
    """
    from cubatch import sqlite_file
    from cubatch.report.tables import common
    from cubatch.report.tables import store as store_table
    from cubatch.tuning import store as kept

    console.check_writable(json=json)
    stored, measured = kept.show(store or sqlite_file.default_path(), run)
    facts, timings = common.plain(stored), common.plain(measured)
    console.emit(store_table.run(facts, timings), {"schema": 1, "run": facts, "measured": timings}, json)


@app.command("clear")
def clear_runs(
    run: Annotated[int | None, typer.Argument(metavar="[ID]", help="One run's number.")] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Forget all of them, and which kernels won.")] = False,
    store: StoreOption = None,
    json: JsonOption = None,
) -> None:
    """
    Forget one kept run, or all of them and which kernels won on a GPU.

    Example: cubatch store clear 3
    """
    from cubatch import sqlite_file
    from cubatch.kernels import choice
    from cubatch.report.grid import Grid
    from cubatch.tuning import store as kept

    if (run is None) != everything:
        raise typer.BadParameter("give one run's number, or --all to forget them all")
    console.check_writable(json=json)
    path = store or sqlite_file.default_path()
    cleared = kept.clear(path, run)
    winners = choice.delete_winners(choice.winners_path(path)) if everything else 0
    said = f"Forgot {_count(cleared, 'run')} of {path}"
    said += f" and {_count(winners, 'kernel choice')} beside it" if everything else ""
    facts = {"schema": 1, "path": str(path), "cleared": cleared, "winners": winners}
    console.emit([Grid(notes=[f"{said}."])], facts, json)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)

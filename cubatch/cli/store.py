"""`cubatch store`: list, show and delete cached timings."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from cubatch.cli import console
from cubatch.cli.options import JsonOption, StoreOption

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, show or delete cached timings.\n\nExample: cubatch store list",
)


@app.command("list")
def list_runs(*, store: StoreOption = None, json: JsonOption = None) -> None:
    """
    List the cached runs.

    Example: cubatch store list --json -
    """
    from cubatch.report.tables import common, store as store_table
    from cubatch.tuning import store as cache

    console.check_writable(json=json)
    path = _path(store)
    runs = [common.plain(run) for run in cache.list_runs(path)]
    console.emit([store_table.runs(runs, str(path))], {"schema": 1, "path": str(path), "runs": runs}, json)


@app.command("show")
def show_run(
    run: Annotated[int, typer.Argument(metavar="ID", help="The run's number in `cubatch store list`.")],
    *,
    store: StoreOption = None,
    json: JsonOption = None,
) -> None:
    """
    Show one cached run: its options, its conditions and its timings.

    Example: cubatch store show 3
    """
    from cubatch.report.tables import common, store as store_table
    from cubatch.tuning import store as cache

    console.check_writable(json=json)
    stored, measured = cache.show(_path(store), run)
    facts, timings = common.plain(stored), common.plain(measured)
    console.emit(store_table.run(facts, timings), {"schema": 1, "run": facts, "measured": timings}, json)


@app.command("clear")
def clear_runs(
    run: Annotated[int | None, typer.Argument(metavar="[ID]", help="The run's number in `cubatch store list`.")] = None,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Delete all runs, and the timings that chose kernels.")
    ] = False,
    store: StoreOption = None,
    json: JsonOption = None,
) -> None:
    """
    Delete one cached run, or all of them.

    Example: cubatch store clear 3
    """
    from cubatch.kernels import choice
    from cubatch.report.grid import Grid
    from cubatch.tuning import store as cache
    from cubatch.units import format_counted

    if (run is None) != everything:
        raise typer.BadParameter("give the number of one run, or --all to delete every run")
    console.check_writable(json=json)
    path = _path(store)
    cleared = cache.clear(path, run)
    winners = choice.delete_winners(choice.winners_path(path)) if everything else 0
    deleted = format_counted(cleared, "run") + (
        f" and {format_counted(winners, 'kernel choice')}" if everything else ""
    )
    facts = {"schema": 1, "path": str(path), "cleared": cleared, "winners": winners}
    console.emit([Grid(notes=[f"Deleted {deleted} from {path}."])], facts, json)


def _path(store: Path | None) -> Path:
    """Return the file of the store, None being the default one; raise StoreError for another that does not exist."""
    from cubatch import sqlite_file
    from cubatch.errors import StoreError

    with contextlib.suppress(OSError):  # opening the file reports it
        if store is not None and not sqlite_file.place(store).exists():
            raise StoreError(str(store), "there is no such file", "Name the file of `cubatch tune --store`.")
    return store or sqlite_file.default_path()

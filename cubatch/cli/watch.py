"""`cubatch watch`: what the GPUs of this machine do now, and the most that was seen."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cubatch.cli import console
from cubatch.cli.options import JsonOption
from cubatch.errors import InvalidArgument

if TYPE_CHECKING:
    from cubatch.hardware.watch import Watch
    from cubatch.report.grid import Grid


def watch(
    *,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", metavar="S", help="End after so long. Default: Ctrl-C on a terminal, else one look."),
    ] = None,
    interval: Annotated[float, typer.Option("--interval", metavar="S", help="Seconds between looks.")] = 1.0,
    json: JsonOption = None,
) -> None:
    """
    Show memory, load, clocks and processes of all GPUs, live.

    Example: cubatch watch --seconds 60 --json peaks.json
    """
    from cubatch.hardware.watch import Watch

    for option, value in (("--interval", interval), ("--seconds", seconds)):
        if value is not None and not (0 <= value < math.inf):
            raise InvalidArgument(option, value, "a number of seconds, at least 0")
    console.check_writable(json=json)
    gpus, is_live = Watch(), json != console.STDOUT and console.is_terminal()
    found: dict[str, Any] = {}
    try:
        with _screen(is_live=is_live) as show:
            for found in _looks(gpus, (math.inf if is_live else 0.0) if seconds is None else seconds, interval):
                show(_grid(found))
    finally:  # Ctrl-C is how watching ends, and what was seen is kept
        if found:
            console.emit([_grid(found)], found, json)


def _looks(gpus: Watch, seconds: float, interval: float) -> Iterator[dict[str, Any]]:
    """Look at the GPUs, once at least, until so long has passed."""
    began, looks, passed = time.monotonic(), 0, 0.0
    while not looks or passed < seconds:
        if looks:
            time.sleep(min(interval, seconds - passed))
        seen, looks, passed = gpus.look(), looks + 1, time.monotonic() - began
        yield {"schema": 1, "looks": looks, "seconds": passed, "gpus": [one.to_mapping() for one in seen]}


@contextlib.contextmanager
def _screen(*, is_live: bool) -> Iterator[Callable[[Grid], None]]:
    """Give what shows a grid in the place of the one before; it shows nothing where nobody looks."""
    if not is_live:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.live import Live

    width = console.line_width()
    with Live(console=Console(width=width), auto_refresh=False, transient=True) as screen:
        yield lambda grid: screen.update(grid.rich(width), refresh=True)


def _grid(found: Mapping[str, Any]) -> Grid:
    from cubatch.report.tables import watch as table

    looks = f"{found['looks']} looks in {found['seconds']:.0f} s" if found["looks"] > 1 else "one look"
    return table.watched(found["gpus"], title=f"GPUs of this machine, {looks}").fit(
        console.line_width(), table.DISPENSABLE
    )

"""`cubatch watch`: load of this machine's GPUs, now and at most."""

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
    from cubatch.hardware.gpu_history import GpuHistory
    from cubatch.report.grid import Grid


def watch(
    *,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            metavar="S",
            help="Stop after this time. Default: at Ctrl-C on a terminal, else after one query.",
        ),
    ] = None,
    interval: Annotated[float, typer.Option("--interval", metavar="S", help="Seconds between two queries.")] = 1.0,
    json: JsonOption = None,
) -> None:
    """
    Show memory, load and clocks of this machine's GPUs.

    Live on a terminal, with the maximum of each quantity, and the processes that hold memory.

    Example: cubatch watch --seconds 60 --json peaks.json
    """
    from cubatch.hardware.gpu_history import GpuHistory

    for option, value in (("--interval", interval), ("--seconds", seconds)):
        if value is not None and not (0 <= value < math.inf):
            raise InvalidArgument(option, value, "a finite number of seconds, at least 0")
    console.check_writable(json=json)
    gpus, is_live = GpuHistory(), json != console.STDOUT and console.is_terminal()
    state: dict[str, Any] = {}
    try:
        with _screen(is_live=is_live) as show:
            for state in _looks(gpus, (math.inf if is_live else 0.0) if seconds is None else seconds, interval):
                show(_grid(state))
    finally:  # Ctrl-C is the usual end: show what was read
        if state:
            console.emit([_grid(state)], state, json)


def _looks(gpus: GpuHistory, seconds: float, interval: float) -> Iterator[dict[str, Any]]:
    """Yield the state of the GPUs in JSON form every `interval` seconds until `seconds` are over, at least once."""
    began, looks, passed = time.monotonic(), 0, 0.0
    while not looks or passed < seconds:
        if looks:
            time.sleep(min(interval, seconds - passed))
        seen, looks, passed = gpus.read(), looks + 1, time.monotonic() - began
        yield {"schema": 1, "looks": looks, "seconds": passed, "gpus": [gpu.to_mapping() for gpu in seen]}


@contextlib.contextmanager
def _screen(*, is_live: bool) -> Iterator[Callable[[Grid], None]]:
    """Yield a function that replaces the table on the terminal; it does nothing unless `is_live`."""
    if not is_live:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), auto_refresh=False, transient=True) as screen:
        yield lambda grid: screen.update(grid, refresh=True)


def _grid(state: Mapping[str, Any]) -> Grid:
    from cubatch.report.tables import watch as table

    queries = f"{state['looks']} queries in {state['seconds']:.0f} s" if state["looks"] > 1 else "one query"
    return table.watched(state["gpus"], title=f"GPUs of this machine, {queries}")

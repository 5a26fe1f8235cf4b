"""
Output of the commands: tables, JSON, progress and messages.

Results go to stdout, everything else to stderr.  With `--json -` stdout holds the JSON and nothing else.  Color and
progress bars appear on terminals only; a log gets a line of progress every few seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cubatch import files, whole_file
from cubatch.errors import InvalidArgument, InvalidData
from cubatch.report.grid import NARROWEST, Grid
from cubatch.units import visible

if TYPE_CHECKING:
    from rich.progress import Progress

    from cubatch.search.events import Event


STDOUT = "-"
INTERRUPTED = 130  # the exit code
Show = Callable[[float, float, str], None]

LINE_SECONDS = 5.0
"""Seconds between lines of progress, and before the first one."""


def say(text: str) -> None:
    """Write a line to stderr; do nothing if that fails or stderr was closed before the program started."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(visible(text) + "\n")
        sys.stderr.flush()


def emit(grids: Sequence[Grid], payload: Mapping[str, Any], json_path: str | None) -> None:
    """
    Write a command's result: tables to stdout, and JSON to a file; if one fails, the other is still written.

    `json_path` "-" is stdout, without the tables; None: no JSON.
    """
    if json_path == STDOUT:
        _write(_as_json(payload, _encoding()))
        return
    try:
        _write(_as_text(grids))
    finally:
        if json_path is not None:
            write_text("--json", json_path, _as_json(payload))


def _as_json(payload: Mapping[str, Any], encoding: str = "utf-8") -> str:
    text = json.dumps(payload, allow_nan=False, ensure_ascii=False, indent=1) + "\n"
    if encoding.lower() in {"utf-8", "utf8"} and visible(text) == text:
        return text
    return json.dumps(payload, allow_nan=False, indent=1) + "\n"


def _as_text(grids: Sequence[Grid]) -> str:
    if not is_terminal():
        return "\n\n".join(grid.text() for grid in grids) + "\n"
    from rich.console import Console

    console = Console(width=max(NARROWEST, shutil.get_terminal_size().columns))
    with console.capture() as captured:
        for index, grid in enumerate(grids):
            console.print(*([""] if index else []), grid, sep="\n")
    return captured.get()


def _write(text: str) -> None:
    """Write a text to stdout and flush, so that a closed pipe raises here and not when the interpreter ends."""
    if sys.stdout is not None:  # it was closed before the start
        sys.stdout.write(text.encode(_encoding(), "replace").decode(_encoding()))
        sys.stdout.flush()


def abandon_stdout() -> None:
    """Redirect stdout to the null device: otherwise the interpreter would try to flush it at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def is_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def write_text(option: str, path: str, text: str) -> None:
    """
    Write a text to the file `path` of an option such as "--json"; a failure raises InvalidData, which names the option.

    The file is replaced once the text is complete; a device or pipe is written directly.
    """
    with writing(option, path) as place:
        there = Path(os.path.realpath(place))
        if files.is_special(place) or not os.access(there.parent, os.W_OK):
            place.write_text(text, encoding="utf-8")
            return
        with whole_file.replacing(there) as partial:
            partial.write_text(text, encoding="utf-8")
            if there.exists():
                shutil.copymode(there, partial)


@contextlib.contextmanager
def writing(option: str, path: str) -> Iterator[Path]:
    """
    Yield the path of an option's file; raise errors of writing it in the block with the option and the reason.

    Raises:
        InvalidData: If the file cannot be written.
    """
    try:
        yield Path(path)
    except (OSError, InvalidArgument) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        raise InvalidData(path, f"{option} cannot be written: {files.reason(cause)}") from error


def check_writable(**paths: str | None) -> None:
    """
    Reject output files that cannot be written, or are the same file, before anything is measured.

    Args:
        paths: By option name without dashes, the path of its file; None is accepted, and "-" (stdout) for `json`.

    Raises:
        InvalidArgument: If a file is rejected; the error names the option and the reason.
    """
    places: dict[str, str] = {}
    for option, path in paths.items():
        if path is None or (path == STDOUT and option == "json"):
            continue
        if path == STDOUT:
            raise InvalidArgument(f"--{option}", path, "a file", "Only --json writes to stdout.")
        if not files.is_folder(Path(path).parent):
            raise InvalidArgument(f"--{option}", path, "a file in a folder that exists", "Create the folder first.")
        if files.is_folder(path):
            raise InvalidArgument(f"--{option}", path, "a file, not a folder")
        if trouble := files.trouble(path):
            raise InvalidArgument(f"--{option}", path, "a file that can be written", f"{trouble}.")
        if not files.is_writable(path):
            raise InvalidArgument(f"--{option}", path, "a file that this user may write")
        first = places.setdefault(os.path.realpath(path), option)
        if first != option and path != os.devnull:
            raise InvalidArgument(f"--{option}", path, f"another file than that of --{first}")


def plain_warnings() -> None:
    """Show warnings as one line, without the source line that raised them."""
    warnings.formatwarning = lambda message, *_, **__: visible(f"warning: {message}\n")


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[Show | None]:
    """
    Show a progress bar with the remaining time on stderr, if that is a terminal.

    Yields:
        A function of (amount done, total amount, current step as text); None without a terminal.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar: Progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[now]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(visible(description, keep=""), total=None, now="")

        def show(done: float, total: float, now: str) -> None:
            bar.update(task, completed=done, total=total, now=visible(now, keep=""))

        yield show


def progress_lines(*, now: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """Return a function that logs progress to stderr: at most one line per LINE_SECONDS, the others are dropped."""
    began = last = now()

    def show(text: str) -> None:
        nonlocal last
        moment = now()
        if moment - last < LINE_SECONDS:
            return
        last = moment
        say(f"cubatch: {moment - began:.0f} s, {text}")

    return show


@contextlib.contextmanager
def progress(
    description: str, *, is_counted: bool = False, now: Callable[[], float] = time.monotonic
) -> Iterator[Callable[..., None]]:
    """
    Show the progress of a job: as a bar on a terminal, else as lines.

    Args:
        description: Text in front of the bar.
        is_counted: Whether the lines also have the amount done, the total and the remaining seconds.
        now: The clock, in seconds.

    Yields:
        A function of (amount done, total amount, current step, unit of the amounts). The remaining time is based on the
        amount since its first call.
    """
    with progress_bar(description) as bar:
        line, first = progress_lines(now=now), None

        def show(done: float, total: float, text: str, unit: str = "") -> None:
            nonlocal first
            if bar is not None:
                bar(done, total, text)
                return
            if not is_counted:
                line(text)
                return
            moment = now()
            if first is None:
                first = done, moment
            made = done - first[0]
            left = f", about {(moment - first[1]) / made * (total - done):.0f} s left" if made > 0 else ""
            line(f"{round(done, 2):g} of {round(total, 2):g}{unit and f' {unit}'}: {text}{left}")

        yield show


@contextlib.contextmanager
def watching(model: str) -> Iterator[Callable[[Event], None]]:
    """Yield a function that shows each event of tuning the network named `model` as progress on stderr."""
    with progress(f"tuning {model}") as show:
        yield lambda event: None if event.kind == "end" else show(event.done, event.total, event.so_far)

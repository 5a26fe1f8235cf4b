"""
What the commands share: where output goes, progress, errors as one line.

Results go to stdout, everything else to stderr.  With `--json -` stdout holds the JSON and
nothing else; colour and bars appear only where a person is looking, a line now and then elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cubatch import files, whole_file
from cubatch.errors import InvalidArgument, InvalidData
from cubatch.report import letters
from cubatch.report.grid import NARROWEST, WIDTH, Grid
from cubatch.units import visible

if TYPE_CHECKING:
    from rich.progress import Progress

    from cubatch.search.events import Event


STDOUT = "-"
INTERRUPTED = 130  # the exit code
Show = Callable[[float, float, str], None]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of a disk that was to take a file

LINE_SECONDS = 5.0
"""Where there is no terminal, progress is a line per so many seconds, and none before that."""


def say(text: str) -> None:
    """Tell the person at the terminal something that is no result, on stderr; where it cannot be, nobody is told."""
    if sys.stderr is not None:  # as where it was closed before we began
        try:
            sys.stderr.write(visible(text) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            _let_go(sys.stderr)


def emit(grids: Sequence[Grid], payload: Mapping[str, Any], json_path: str | None) -> None:
    """
    Give a command's result: grids on stdout, JSON where it was asked for; where either cannot be, the other still is.

    Args:
        grids: What a person reads, top to bottom.
        payload: The same for a program; holds no NaN.
        json_path: A file, "-" for stdout instead of the grids, or None.

    Raises:
        InvalidArgument: If the file cannot be written.
        InvalidData: If stdout cannot be, or the disk of the file is full or fails.
    """
    if json_path == STDOUT:
        _write(_as_json(payload, _encoding()))
        return
    try:
        _show(grids)
    finally:
        if json_path is not None:
            write_text("--json", json_path, _as_json(payload, "utf-8"))


def _as_json(payload: Mapping[str, Any], encoding: str | None) -> str:
    text = json.dumps(payload, allow_nan=False, ensure_ascii=False, indent=1) + "\n"
    if letters.can_write(text, encoding) and visible(text) == text:
        return text
    return json.dumps(payload, allow_nan=False, indent=1) + "\n"


def _show(grids: Sequence[Grid]) -> None:
    width = line_width()
    room = max(width, _columns()) if is_terminal() else None
    spelled = not letters.can_write("\n".join(content.text(width) for content in grids), _encoding())
    grids = [letters.ascii_grid(content) for content in grids] if spelled else grids
    if spelled:
        _write(letters.spelled("\n\n".join(content.text(width, room or math.inf) for content in grids)) + "\n")
    elif room is not None:
        from rich.console import Console

        console = Console(width=room)
        with console.capture() as captured:
            for index, content in enumerate(grids):
                console.print(*([""] if index else []), content.rich(width, room), sep="\n")
        _write(captured.get())
    else:
        _write("\n\n".join(content.text(width) for content in grids) + "\n")


def _write(text: str) -> None:
    """Write at once, so that a reader who has gone away is noticed here and not when the interpreter ends."""
    if sys.stdout is None:  # as where it was closed before we began
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:  # whose reader has seen enough
            raise
        raise lost(error) from error


def lost(error: OSError) -> InvalidData:
    """Let go of a stdout that cannot be written, and say what it met."""
    _let_go(sys.stdout)
    return InvalidData("stdout", f"cannot be written: {files.reason(error)}")


def _let_go(stream: TextIO) -> None:
    """Lead a stream nowhere: what could not be written would be tried again when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _encoding() -> str | None:
    return "utf-8" if sys.stdout is None else sys.stdout.encoding


def is_terminal() -> bool:
    """Say whether a person reads stdout, which may have been closed before we began."""
    return sys.stdout is not None and sys.stdout.isatty()


def line_width() -> int:
    """Give the characters per line: the terminal's, or the report's own in a pipe."""
    if not is_terminal():
        return WIDTH
    return max(NARROWEST, min(_columns(), WIDTH))


def _columns() -> int:
    return shutil.get_terminal_size().columns


def write_text(option: str, path: str, text: str) -> None:
    """
    Write a file whole or not at all; what no other file can be put in the place of, such as a device, as it is.

    Raises:
        InvalidArgument, InvalidData: As of `writing`.
    """
    with writing(option, path) as place:
        if not files.is_special(place):
            there = Path(os.path.realpath(place))
            try:
                with whole_file.replacing(there) as partial:
                    partial.write_text(text, encoding="utf-8")
                    if files.is_file(there):
                        shutil.copymode(there, partial)
            except OSError as error:
                if error.errno in _FULL:
                    raise
            else:
                return
        place.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def writing(option: str, path: str) -> Iterator[Path]:
    """
    Name the option and the reason where a file cannot be written.

    Raises:
        InvalidData: If the disk is full or fails, which is no mistake of the option.
        InvalidArgument: If anything else is in the way.
    """
    try:
        yield Path(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        cause = error.__cause__ if isinstance(error, InvalidArgument) else error
        if isinstance(cause, OSError) and cause.errno in _FULL:
            raise InvalidData(path, f"{option} cannot be written: {files.reason(cause)}") from error
        if isinstance(error, InvalidArgument):
            raise InvalidArgument(option, path, error.allowed, error.remedy) from error
        raise InvalidArgument(option, path, "a file that can be written", f"{files.reason(error)}.") from error


def check_writable(**paths: str | None) -> None:
    """
    Refuse output files that cannot be written, or are one, before minutes of measuring are spent on them.

    Args:
        paths: Path by option name, without dashes; None passes, and of `json` also "-".

    Raises:
        InvalidArgument: Naming the option, and what is in the way.
    """
    places: dict[str, str] = {}
    for option, path in paths.items():
        if path is None or (path == STDOUT and option == "json"):
            continue
        if path == STDOUT:
            raise InvalidArgument(f"--{option}", path, "a file", "Only --json writes to stdout.")
        if not files.is_folder(Path(path).parent):
            raise InvalidArgument(f"--{option}", path, "a file in a folder that exists", "Make the folder first.")
        if files.is_folder(path):
            raise InvalidArgument(f"--{option}", path, "a file, not a folder")
        if trouble := files.trouble(path):
            raise InvalidArgument(f"--{option}", path, "a file that can be written", f"{trouble}.")
        if not files.is_writable(path):
            raise InvalidArgument(f"--{option}", path, "a file that this user may write")
        first = places.setdefault(os.path.realpath(path), option)
        if first != option and not files.is_special(path):  # as /dev/null, which takes all
            raise InvalidArgument(f"--{option}", path, f"another file than that of --{first}")


def plain_warnings() -> None:
    """Show warnings as one line without the place in our code that raised them."""

    def formatted(message: object, *_: object, **__: object) -> str:
        return visible(f"warning: {message}\n")

    warnings.formatwarning = formatted


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[Show | None]:
    """
    Show a bar with the time left on stderr while the block runs; nothing unless stderr is a terminal.

    Args:
        description: What is going on.

    Yields:
        A function of (done, total, what is being done), None where nobody looks.
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
    """
    Tell of progress where no bar can be drawn, as in a log: lines, seldom, and none of a short run.

    Args:
        now: The clock, which begins with this call.

    Returns:
        A function of what there is to say; most calls of it say nothing.  It never fails: a log that
        cannot be written is no reason to stop measuring.
    """
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
def steps(description: str, *, now: Callable[[], float] = time.monotonic) -> Iterator[Callable[..., None]]:
    """
    Show how far a job of known length is: a bar on a terminal, elsewhere a line now and then, with the time left.

    Args:
        description: What is going on.
        now: The clock.

    Yields:
        A function of (done, total, what is being done, the unit); what was done when it is first called took no time.
    """
    with progress_bar(description) as bar:
        line, first = progress_lines(now=now), None

        def show(done: float, total: float, text: str, unit: str = "") -> None:
            nonlocal first
            if bar is not None:
                bar(done, total, text)
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
    """Let tuning's events move a bar on a terminal, and elsewhere write a line now and then."""
    with progress_bar(f"tuning {model}") as bar:
        line = progress_lines()

        def show(event: Event) -> None:
            if bar is not None:
                bar(event.done, event.total, event.so_far)
            elif event.kind != "end":  # the answer comes next
                line(event.so_far)

        yield show

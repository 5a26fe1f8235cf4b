"""The command line in the process of a test."""

from __future__ import annotations

import contextlib
import functools
import os
import pty
import select
import signal
import sys

import pytest
import typer

from cubatch.cli import app

get_command = functools.cache(typer.main.get_command)  # building it takes longer than most commands


def in_process(monkeypatch, capfd, *command):
    """Give a function that runs `cubatch COMMAND ARGUMENTS` and gives (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["cubatch", *command, *map(str, arguments)])
        monkeypatch.setattr(typer.main, "get_command", get_command)
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as ended:
                app.main()
        finally:
            signal.signal(signal.SIGTERM, before)
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return call


@contextlib.contextmanager
def as_nobody():
    """Be a user who is not root, to whom the rights of a file mean nothing."""
    before = os.getresuid()
    if before[0] == 0:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(*before)


def on_a_terminal(monkeypatch, work):
    """Call with stderr a terminal, and give what it shows."""
    main, other = pty.openpty()
    with os.fdopen(other, "w") as terminal:
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setattr(sys, "stderr", terminal)
        work()
        terminal.flush()
        shown = ""
        while select.select([main], [], [], 0)[0]:  # a terminal hands out what was written in pieces
            shown += os.read(main, 10_000).decode()
    os.close(main)
    return shown

"""The command line in the process of a test."""

from __future__ import annotations

import signal
import sys

import pytest

from cubatch.cli import app


def in_process(monkeypatch, capfd, *command):
    """Give a function that runs `cubatch COMMAND ARGUMENTS` and gives (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["cubatch", *command, *map(str, arguments)])
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as ended:
                app.main()
        finally:
            signal.signal(signal.SIGTERM, before)
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return call

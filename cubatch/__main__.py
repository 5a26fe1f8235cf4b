"""
`python -m cubatch`: the command line.

Before anything is imported it is settled what Ctrl-C and SIGTERM do: until a command runs there is nothing to keep, so
that they end the process at once, with a line and without a traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal

_INTERRUPTED = 130  # as console.INTERRUPTED, which is not imported yet
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Run the command line; the entry point of `cubatch`."""
    _answer(_end)
    from cubatch.cli import app

    try:
        app.main()
    finally:
        _answer(signal.SIG_IGN)  # what is left is to end


def _answer(handler: signal._HANDLER) -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of a job that a shell began in the background
            signal.signal(number, handler)


def _end(*_: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"cubatch: interrupted\n")
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()

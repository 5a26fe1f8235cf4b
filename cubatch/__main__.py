"""
`python -m cubatch`: the command line.

Handlers of Ctrl-C and SIGTERM are set before other imports. Until a command runs there is nothing to save, so they end
the process at once, with a line and without a traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal

_INTERRUPTED = 130  # as console.INTERRUPTED, which is not imported yet
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Run the command line; the entry point of `cubatch`."""
    _handle(_end)
    from cubatch.cli import app

    try:
        app.main()
    finally:
        _handle(signal.SIG_IGN)  # the process is about to end


def _handle(handler: signal._HANDLER) -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # for a background job of a shell
            signal.signal(number, handler)


def _end(*_: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"cubatch: interrupted\n")
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()

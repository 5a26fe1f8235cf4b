"""Setup of a worker process, which may be killed at any time."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)


def set_up_worker() -> None:
    """
    Set up this process as a worker.

    Output of libraries goes to standard error, and a crash prints its stack.  The process ends after its parent, also
    while it is suspended.  The kernel kills it first if memory runs out.
    """
    os.dup2(2, 1)
    faulthandler.enable()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")

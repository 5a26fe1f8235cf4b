"""A process that may die: it goes first when memory runs out, tells where it crashed, and ends after its parent."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)


def expendable() -> None:
    """Make this process one; what libraries print goes to standard error from now on."""
    os.dup2(2, 1)
    faulthandler.enable()
    with contextlib.suppress(AttributeError, OSError):  # suspended, it could not end itself after its parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    with contextlib.suppress(OSError):  # when memory runs out, the kernel is to take this process
        Path("/proc/self/oom_score_adj").write_text("1000")

"""Running Python in the simulation, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

from tests.cudasim import building, environment

ASKED = "CUBATCH_CUDASIM"
_HINT = f"`python -m tests.cudasim` or {ASKED}=1 runs these"
_REASON = building.reason_to_skip() or ("" if ASKED in os.environ else _HINT)
NEEDS = pytest.mark.skipif(bool(_REASON), reason=_REASON or "never")
SECONDS = 300  # of one process, before it counts as hung


@cache
def home() -> Path:
    """Give the simulation's folder, set up if need be."""
    return building.built()


def run(
    *command: str, devices: str = "h100", late: bool = False, faults: str = "", check: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """
    Run Python in the simulation.

    Args:
        command: What follows `python`.
        devices, late, faults: As `environment.of` takes them.
        check: Whether it must end well.
        variables: Further variables of the environment.
    """
    done = subprocess.run(
        [sys.executable, *command],
        env={**environment.of(home(), devices=devices, late=late, faults=faults), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        cwd=environment.ROOT,
    )
    assert done.returncode == 0 or not check, done.stderr[-3000:] + done.stdout[-3000:]
    return done


def python(code: str, **options: str | bool) -> str:
    """Run code in the simulation and give what it printed."""
    return run("-c", textwrap.dedent(code), **options).stdout.strip()


def cubatch(*arguments: str, **options: str | bool) -> subprocess.CompletedProcess[str]:
    """Run a command of cubatch in the simulation."""
    return run("-m", "cubatch", *arguments, **options)

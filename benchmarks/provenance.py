"""Date, commit and device of a result, for its JSON."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
from typing import Any

from cubatch.engine.conditions import environment
from cubatch.hardware import probe
from cubatch.hardware.facts import Device


def provenance(commit: str = "") -> dict[str, str]:
    """
    Return today's date and the commit: the given one, else $CUBATCH_COMMIT, else the checkout's.

    The commit is empty in a copy of the tree without git and without $CUBATCH_COMMIT.
    """
    commit = commit or os.environ.get("CUBATCH_COMMIT", "") or _of_checkout()
    return {"date": dt.datetime.now(dt.UTC).date().isoformat(), "commit": commit}


def on_cpu(benchmark: str) -> dict[str, Any]:
    """Return the first keys of the result of a benchmark on this CPU."""
    return run_on(probe.device("cpu"), benchmark)


def run_on(device: Device, benchmark: str) -> dict[str, Any]:
    """Return the first keys of the result of a benchmark: name, date, commit, device, versions."""
    return {
        "schema": 1, "benchmark": benchmark, **provenance(), "device": device.name, "threads": device.threads,
        "environment": environment(device),
    }  # fmt: skip


def _of_checkout() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return ""
    return done.stdout.strip()

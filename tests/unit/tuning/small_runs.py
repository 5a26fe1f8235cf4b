"""Runs of `autotune` that take little: what most tests ask, and what they read of the result and the store."""

from __future__ import annotations

import functools
import os
import sqlite3
from pathlib import Path

import cubatch
from cubatch.tuning.tune import autotune

CHECKOUT = {**os.environ, "PYTHONPATH": str(Path(cubatch.__file__).parents[1])}  # for scripts: the one under test
tune = functools.partial(autotune, "mlp", device="cpu", batch_sizes=[4, 32], budget=30.0, store=False, isolate=False)


def statuses(result):
    return {m.batch_size: m.status for m in result.measurements}


def rows(path):
    """Read every timing that is kept, as the file has it."""
    if not path.exists():
        return {}
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            found = {
                row[:2]: row[2:] for row in database.execute("SELECT batch_size, round, seconds, facts FROM timings")
            }
    except sqlite3.OperationalError:  # the file has just been made, its tables have not
        return {}
    finally:
        if "database" in locals():
            database.close()
    return found

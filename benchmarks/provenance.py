"""Where a result comes from: the date and the commit that go into its JSON."""

from __future__ import annotations

import datetime as dt
import os
import subprocess


def provenance(commit: str = "") -> dict[str, str]:
    """
    Give today's date and the commit: the one that is named, else $CUBATCH_COMMIT, else the checkout's.

    It is empty where a copy of the tree names none, with or without git.
    """
    commit = commit or os.environ.get("CUBATCH_COMMIT", "") or _of_checkout()
    return {"date": dt.datetime.now(dt.UTC).date().isoformat(), "commit": commit}


def _of_checkout() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return ""
    return found.stdout.strip()

"""Where a result comes from: the date and the commit that go into its JSON."""

from __future__ import annotations

import datetime as dt
import subprocess


def provenance() -> dict[str, str]:
    """Give today's date and the checkout's commit, empty outside a repository."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"date": dt.datetime.now(dt.UTC).date().isoformat(), "commit": found.stdout.strip()}

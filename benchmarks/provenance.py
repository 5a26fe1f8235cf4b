"""Result files: date, commit and device of a result, its JSON, and going on with one that was begun."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cubatch import whole_file
from cubatch.engine.conditions import environment
from cubatch.hardware import probe
from cubatch.hardware.facts import Device
from cubatch.report.tables.common import plain

ROOT = Path(__file__).parent.parent


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


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a result file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole_file.write(path, f"{json.dumps(plain(content), indent=1, allow_nan=False)}\n".encode())


def begun(
    path: Path | None, benchmark: str, rows: str, *, sources: Iterable[Path] = (), packages: Iterable[str] = (),
    **conditions: Any,
) -> dict[str, Any]:  # fmt: skip
    """
    Return the content of a result file on this CPU that was begun under the same conditions, or new content.

    Exits if the file is of something else.

    Args:
        path: The file; `None` for none.
        benchmark: Its name.
        rows: Key of the results, at first an empty list.
        sources: Files besides the package that decide the results: a commit does not name uncommitted changes.
        packages: Packages whose versions are part of the environment, if they are installed.
        conditions: Options that decide the results.
    """
    about = on_cpu(benchmark)
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            about["environment"][name] = importlib.metadata.version(name)
    files = sorted([*ROOT.joinpath("cubatch").rglob("*.py"), *sources])
    source = hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:12]
    conditions = {"source": source, **conditions}
    new = {**about, **conditions, rows: []}
    if path is None or not path.exists():
        return new
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    different = [key for key in ("benchmark", "commit", "device", *conditions) if content.get(key) != new[key]]
    if different:
        sys.exit(f"{path} differs in {', '.join(different)}. Name another file, or delete this one.")
    return content


def _of_checkout() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return ""
    return done.stdout.strip()

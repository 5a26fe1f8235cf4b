"""What a study has found so far, in a file of its folder: a killed study goes on with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cubatch import whole_file
from cubatch.errors import InvalidArgument
from cubatch.report.tables.common import plain


class Kept:
    """
    Findings by name, which hold for one question under the same conditions.

    Args:
        path: The file. What another question or other conditions left there, or cannot be read, counts as nothing.
        known: All that a finding depends on.

    Example:
        >>> import tempfile
        >>> place = tempfile.TemporaryDirectory()
        >>> path = Path(place.name, "cells.json")
        >>> Kept(path, {"seed": 0}).keep("batch 16", {"seconds": 2.5})
        >>> Kept(path, {"seed": 0}).found, Kept(path, {"seed": 1}).found
        ({'batch 16': {'seconds': 2.5}}, {})
        >>> place.cleanup()
    """

    def __init__(self, path: Path, known: Mapping[str, Any]) -> None:
        self._path, self._known = path, json.loads(json.dumps(plain(known)))  # as it is read back
        self.found: dict[str, Any] = {}
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        if isinstance(kept, dict) and kept.get("known") == self._known and isinstance(kept.get("found"), dict):
            self.found = kept["found"]

    def keep(self, name: str, finding: Mapping[str, Any]) -> None:
        """
        Add a finding, and have it on the disk when this returns.

        Raises:
            InvalidArgument: If the file cannot be written.
        """
        self.found[name] = plain(finding)
        content = json.dumps({"known": self._known, "found": self.found})
        try:
            whole_file.write(self._path, content.encode())
        except OSError as error:
            raise not_writable(self._path.parent, error) from error


def not_writable(folder: Path, error: OSError) -> InvalidArgument:
    """Make the error of a study's folder in which a file cannot be written."""
    return InvalidArgument("out", str(folder), "a folder to write to", f"{error.strerror or error}.")

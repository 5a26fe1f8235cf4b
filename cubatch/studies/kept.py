"""What a study has found so far, in a file of its folder: a killed study goes on with it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cubatch import sqlite_file, whole_file
from cubatch.errors import InvalidArgument
from cubatch.report.tables.common import plain

_LOCK_SECONDS = 30.0  # another process that runs the same study holds it for as long as a small file takes to write


class Kept:
    """
    Findings by name, which hold for one question under the same conditions.

    Args:
        path: The file. What was found of other questions, or under other conditions, stays there; what cannot be read
            counts as nothing.
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
        self._take()

    def keep(self, name: str, finding: Mapping[str, Any]) -> None:
        """
        Add a finding, and have it on the disk when this returns, beside what others have kept there meanwhile.

        Raises:
            InvalidArgument: If the file cannot be written.
        """
        self.found[name] = plain(finding)
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):  # file systems without locks; two runs on one of these are rarer still
                held.enter_context(sqlite_file.locked(self._path, "keep", _LOCK_SECONDS))
            others = self._take()
            content = json.dumps({"known": self._known, "found": self.found, "others": others})
            try:
                whole_file.write(self._path, content.encode())
            except OSError as error:
                raise not_writable(self._path.parent, error) from error

    def _take(self) -> list[dict[str, Any]]:
        """Add what the file has of this question, and give what it has of others."""
        there = _read(self._path)
        for one in there:
            if one["known"] == self._known:
                self.found = one["found"] | self.found
        return [one for one in there if one["known"] != self._known]


def _read(path: Path) -> list[dict[str, Any]]:
    """Give what a file has of each question: that which was asked last, and the others."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    others = kept.get("others") if isinstance(kept, dict) else None
    return [
        {"known": one["known"], "found": one["found"]}
        for one in (kept, *(others if isinstance(others, list) else ()))
        if isinstance(one, dict) and "known" in one and isinstance(one.get("found"), dict)
    ]


def not_writable(folder: Path, error: OSError) -> InvalidArgument:
    """Make the error of a study's folder in which a file cannot be written."""
    return InvalidArgument("out", str(folder), "a folder to write to", f"{error.strerror or error}.")

"""Cache of a study's findings: a file of JSON lines in its folder, from which a killed study continues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cubatch import files
from cubatch.errors import InvalidArgument, InvalidData
from cubatch.report.tables.common import plain


class StudyCache:
    """
    A file of measured findings by name, which are valid for one question under the same conditions.

    Each finding is one line that is appended, so that concurrent runs and other questions share a file.  Lines that
    cannot be read are ignored.

    Args:
        path: The file of JSON lines, in an existing folder.
        key: All settings and versions that a finding depends on; other findings of the file are ignored.

    Raises:
        InvalidArgument: If the file exists and cannot be read.
    """

    def __init__(self, path: Path, key: Mapping[str, Any]) -> None:
        self._path = path
        self._key = hashlib.sha256(json.dumps(plain(key), sort_keys=True).encode()).hexdigest()
        self.findings: dict[str, Any] = {}
        try:
            content = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        except OSError as error:
            raise InvalidArgument("out", str(path), "a file that can be read", f"{files.reason(error)}.") from error
        for line in content.splitlines():
            try:
                entry = json.loads(line)
                if entry["key"] == self._key:
                    self.findings[entry["name"]] = dict(entry["finding"])
            except (ValueError, TypeError, KeyError):  # a line that a kill cut off
                continue

    def get(self, name: str, measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """
        Return the finding `name` in JSON form; if it is not cached, call `measure` and append the result.

        InvalidData is raised if the file cannot be written.
        """
        if name not in self.findings:
            self.findings[name] = plain(measure())
            line = json.dumps({"key": self._key, "name": name, "finding": self.findings[name]})
            try:
                with self._path.open("ab") as file:
                    file.write(f"\n{line}\n".encode())  # the first newline ends a line that a kill cut off
            except OSError as error:
                raise not_writable(self._path.parent, error) from error
        return dict(self.findings[name])


def not_writable(folder: Path, error: OSError) -> InvalidData:
    """Return the InvalidData for a study's folder in which writing a file failed with `error`."""
    return InvalidData(str(folder), f"cannot be written: {error.strerror or error}")

"""Wheels that are said to be installed, with the files they hold."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


class File(PurePosixPath):
    """A file of a wheel."""

    def locate(self):
        return Path("/site") / self


class Distribution:
    """A wheel's list of files."""

    def __init__(self, *files):
        self.files = [File(file) for file in files]

"""What is on its way into the store: written at once, or, while the disk is full, held back and tried again."""

from __future__ import annotations

import errno
import sqlite3
import time
from collections.abc import Callable

from cubatch import sqlite_file

AGAIN_SECONDS = 3.0  # between two tries


class Writer:
    """
    Writes what is kept of one run, in the order in which it comes.

    Args:
        database: The open file.
        run: The run's number in it.

    Attributes:
        trouble: Why what came last is held back; None while everything is written.
    """

    def __init__(self, database: sqlite_file.Database, run: int) -> None:
        self.trouble: str | None = None
        self._database, self._run = database, run
        self._held: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self._next_try = 0.0

    def write(self, statement: Callable[..., None], *values: object) -> None:
        """
        Write, with all that was held back before, or hold it back too.

        Raises:
            sqlite3.DatabaseError: If the file fails in a way that does not pass.
            OSError: The same, or if another file is in its place.
        """
        self._held.append((statement, values))
        if self.trouble is None or time.monotonic() >= self._next_try:
            self.flush()

    def turn_to(self, begin: Callable[[], int]) -> None:
        """
        Write what comes from now on to another run, which is begun here.

        Args:
            begin: Inserts it, and gives its number.

        Raises:
            sqlite3.DatabaseError: As `write`, and where what came before is held back.
            OSError: As `write`.
        """
        self.flush(is_last=True)
        with sqlite_file.transaction(self._database):
            self._run = begin()

    def flush(self, *, is_last: bool = False) -> None:
        """
        Write what is held back.

        Args:
            is_last: Nothing more comes, so that there is no other try.

        Raises:
            sqlite3.DatabaseError: As `write`; if it is the last time whatever fails.
            OSError: As `write`.
        """
        if not self._held:
            return
        try:
            with sqlite_file.transaction(self._database):
                for statement, values in self._held:
                    statement(self._database, self._run, *values)
        except sqlite3.DatabaseError as error:
            if is_last or not sqlite_file.is_passing(error):
                raise
            self.trouble, self._next_try = sqlite_file.reason(error), time.monotonic() + AGAIN_SECONDS
            return
        self._held, self.trouble = [], None
        if self._database.has_moved():
            words = "it was moved or removed while in use, with what was kept in it so far"
            raise OSError(errno.ESTALE, words)

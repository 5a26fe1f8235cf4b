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
        self._held: list[tuple[Callable[..., int | None], tuple[object, ...]]] = []
        self._next_try = 0.0

    def write(self, statement: Callable[..., int | None], *values: object) -> None:
        """
        Write, with all that was held back before, or hold it back too.

        Args:
            statement: What writes into a database, about a run; what gives a run's number has begun it, and what comes
                later is about that.
            values: More that it is given.

        Raises:
            sqlite3.DatabaseError: If the file fails in a way that does not pass.
            OSError: The same, or if another file is in its place.
        """
        self._held.append((statement, values))
        if self.trouble is None or time.monotonic() >= self._next_try:
            self.flush()

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
        run = self._run
        try:
            with sqlite_file.transaction(self._database):
                for statement, values in self._held:
                    run = statement(self._database, run, *values) or run
        except sqlite3.DatabaseError as error:
            if is_last or not sqlite_file.is_passing(error):
                raise
            self.trouble, self._next_try = sqlite_file.reason(error), time.monotonic() + AGAIN_SECONDS
            return
        self._held, self.trouble, self._run = [], None, run
        if self._database.has_moved():
            words = "it was moved or removed while in use, with what was kept in it so far"
            raise OSError(errno.ESTALE, words)

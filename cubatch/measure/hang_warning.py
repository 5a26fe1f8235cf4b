"""Warn about a step in the user's process that does not return."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import attrs

from cubatch.units import format_seconds

_log = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # long enough that no timing is affected


@attrs.frozen(eq=False)
class _Block:
    what: str
    seconds: float
    deadline: float


class HangWarning:
    """
    A thread that logs one warning for each block of code that takes too long; a context manager.

    A step in the user's process cannot be ended from within, except by Ctrl-C.

    Example:
        >>> with HangWarning() as watch, watch.over("a step of batch size 8", 30.0):
        ...     sum(range(10))
        45
    """

    def __init__(self) -> None:
        self._block: _Block | None = None
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="cubatch hang warning", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_done.set()
        self._thread.join()

    @contextlib.contextmanager
    def over(self, what: str, seconds: float) -> Iterator[None]:
        """Warn if the block takes longer than `seconds`."""
        self._block = _Block(what, seconds, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._block = None

    def _poll(self) -> None:
        warned: _Block | None = None
        while not self._is_done.wait(POLL_SECONDS):
            block = self._block
            if block is not None and block is not warned and time.monotonic() >= block.deadline:
                warned = block
                _log.warning(
                    "%s has not returned for %s. Press Ctrl-C to end the run, or use isolation, which ends such steps.",
                    block.what,
                    format_seconds(block.seconds),
                )

"""Says what is waited for, where nobody can be asked: a step in this process that does not come back."""

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

LOOK_SECONDS = 1.0  # seldom enough that no reading notices


@attrs.frozen(eq=False)
class _Job:
    what: str
    seconds: float
    deadline: float


class Watch:
    """
    A thread that looks now and then whether something takes too long, and says so once; a context manager.

    It cannot end what hangs: nothing can, in one's own process, but Ctrl-C.

    Example:
        >>> with Watch() as watch, watch.over("a step of batch size 8", 30.0):
        ...     sum(range(10))
        45
    """

    def __init__(self) -> None:
        self._job: _Job | None = None
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="cubatch watch", daemon=True)

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
        """Watch over the block, which should be through after so many seconds."""
        self._job = _Job(what, seconds, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._job = None

    def _look(self) -> None:
        said: _Job | None = None
        while not self._is_done.wait(LOOK_SECONDS):
            job = self._job
            if job is not None and job is not said and time.monotonic() >= job.deadline:
                said = job
                _log.warning(
                    "%s has not come back for %s; it cannot be ended from here: Ctrl-C, or a process that may die",
                    job.what,
                    format_seconds(job.seconds),
                )

"""Ctrl-C that waits until what is being done can be kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """
    Notes signals that would raise somewhere in the middle of a step, until they are asked for; a second one raises.

    Those that Python does not handle stay as they are, and so do all in a thread that is not the main one, which
    signals never reach.

    Args:
        are_held: Whether to note them at all.

    Attributes:
        is_asked: Whether one has come.

    Example:
        >>> with Interrupts() as stop:
        ...     stop.is_asked
        False
    """

    def __init__(self, *, are_held: bool = True) -> None:
        self._are_held = are_held and threading.current_thread() is threading.main_thread()
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: int | None = None
        self._are_through = False

    def __enter__(self) -> Self:
        for number in _SIGNALS if self._are_held else ():
            if callable(handler := signal.getsignal(number)):
                self._handlers[number] = handler
                signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.deliver()  # also after an error: whoever goes on is to hear it

    @property
    def is_asked(self) -> bool:
        """As above."""
        return self._came is not None

    def deliver(self) -> None:
        """
        Handle what came, now.

        Raises:
            KeyboardInterrupt: If one came, or whatever its handler raises.
        """
        came, self._came = self._came, None
        if came is not None:
            self._handlers[came](came, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is None and not self._are_through:
            self._came = number
            return
        self._are_through = True
        self.deliver()  # whoever holds signals around this must know that the next is not the first
        self._handlers[number](number, frame)

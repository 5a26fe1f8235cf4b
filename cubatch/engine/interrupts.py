"""Delay of Ctrl-C (SIGINT) and SIGTERM until the running step has ended and can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """
    Delays SIGINT and SIGTERM until `deliver` or the end of the context; a second signal is handled at once.

    Signals without a Python handler are not touched. Nor is any signal outside the main thread, since signals reach no
    other thread.

    Args:
        are_held: Whether to delay signals; if False, their handlers are called at once.

    Attributes:
        has_come: Whether a signal has come that was not delivered yet.
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

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.deliver()  # also after an error, which the caller may handle

    @property
    def has_come(self) -> bool:
        """Whether a signal has come that was not delivered yet."""
        return self._came is not None

    def deliver(self) -> None:
        """Call the handler of the delayed signal, if one has come."""
        came, self._came = self._came, None
        if came is not None:
            self._handlers[came](came, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is None and not self._are_through:
            self._came = number
            return
        self._are_through = True
        self.deliver()  # an outer `Interrupts` counts it as its first
        self._handlers[number](number, frame)

"""A step in this process that does not come back is told of, from a thread that goes when it is done."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from cubatch.measure import hang_warning, stopwatch
from cubatch.measure.hang_warning import HangWarning
from cubatch.tuning.tune import autotune_callable


class Told(logging.Handler):
    """Sets an event when something is said, so that no test waits by the clock."""

    def __init__(self, words=""):
        super().__init__()
        self.words, self.event, self.messages = words, threading.Event(), []

    def emit(self, record):
        if self.words in record.getMessage():
            self.messages.append(record.getMessage())
            self.event.set()


@pytest.fixture
def told(monkeypatch):
    """Listen to what is said, and look often."""
    monkeypatch.setattr(hang_warning, "POLL_SECONDS", 0.001)
    handlers = []

    def listen(words=""):
        handlers.append(Told(words))
        hang_warning._log.addHandler(handlers[-1])
        return handlers[-1]

    yield listen
    for handler in handlers:
        hang_warning._log.removeHandler(handler)


def test_what_takes_too_long_is_told_once(told):
    """By name and limit; what is through in time is not told, and the thread is gone with its block."""
    listener, before = told(), threading.active_count()
    with HangWarning() as watching:
        with watching.over("a short step", 1e6):
            pass
        with watching.over("a step of batch size 8", 0.0):
            assert listener.event.wait(60)
            time.sleep(0.05)  # many looks more
        with watching.over("another", 1e6):
            pass
    assert threading.active_count() == before
    (message,) = listener.messages
    assert message.startswith("a step of batch size 8 has not returned for ")
    assert "Ctrl-C" in message


@pytest.mark.parametrize("where", ["step", "make_step"])
def test_a_callable_that_hangs_is_told(told, monkeypatch, where):
    """The one that does not come back, while it does not; nothing ends it, and once it is back the run goes on."""
    monkeypatch.setattr(stopwatch, "HANG_SECONDS", 0.01)
    listener = told("batch size 4")

    def hang():
        assert listener.event.wait(60)

    def make_step(n):
        if n == 4 and where == "make_step":
            hang()
        return hang if n == 4 and where == "step" else lambda: sum(range(100 * n))

    result = autotune_callable(make_step, max_batch_size=8, batch_sizes=[1, 4, 8], device="cpu", budget=5.0)
    assert listener.messages[0].startswith(
        f"{'a step of' if where == 'step' else 'preparing'} batch size 4 has not returned for "
    )
    assert result.batch_size in {1, 4, 8}

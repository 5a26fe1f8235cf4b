"""Who is shown the progress of a run: the caller's function, a notebook's reader, or nobody."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import attrs
import pytest

from cubatch.search.events import Event
from cubatch.tuning import progress

EVENT = Event(kind="timing", round=0, batch_size=8, done=3.0, total=10.0, seconds_left=7.0, message="8 samples: 1 ms")


class Handle:
    """A display of IPython's: what it showed, in turn."""

    def __init__(self, first):
        self.shown = [first]

    def update(self, data, *, raw):
        """Show something else."""
        assert raw
        self.shown.append(data)


@pytest.fixture
def notebook(monkeypatch):
    """Cells are run by a kernel; gives the displays that were made."""
    made = []

    def display(data, *, raw, display_id):
        assert raw
        assert display_id
        made.append(Handle(data))
        return made[-1]

    ipython, shown = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython, shown.display = (lambda: SimpleNamespace(kernel=object())), display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    return made


def test_a_notebook_has_a_bar_that_moves_and_goes(notebook):
    """One display: empty, then how far it is and what is known, and empty when the run is done."""
    times = iter([0.0, 1.0])
    with progress.shown(None, now=lambda: next(times)) as told:
        told(EVENT)
    ((before, during, after),) = (one.shown for one in notebook)
    assert before["text/html"] == after["text/html"] == ""
    assert 'value="3.000" max="10.000"' in during["text/html"]
    assert during["text/plain"] == "8 samples: 1 ms"


def test_a_bar_moves_no_faster_than_it_is_seen(notebook):
    """A thousand events in a second are five pictures or so, not a thousand messages to the browser."""
    moments = iter(k / 1000 for k in range(1001))
    with progress.shown(None, now=lambda: next(moments)) as told:
        for _ in range(1000):
            told(EVENT)
    (bar,) = notebook
    assert 4 <= len(bar.shown) - 2 <= 6


def test_a_bar_goes_where_a_run_fails(notebook):
    """An error is what the reader is to see."""
    run = progress.shown(None, now=lambda: 0.0)
    run.__enter__()(EVENT)
    assert not run.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert notebook[0].shown[-1]["text/html"] == ""


def test_whoever_asked_is_told_and_nobody_else(notebook):
    """A function of the caller's takes the place of the bar."""
    seen = []
    with progress.shown(seen.append) as told:
        told(EVENT)
    assert (seen, notebook) == ([EVENT], [])


@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_without_a_notebook_nobody_is_told(monkeypatch, shell):
    """Not where IPython was imported by something, nor in its terminal, which has no kernel."""
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with progress.shown(None) as told:
        assert told is None
    monkeypatch.delitem(sys.modules, "IPython")
    with progress.shown(None) as told:
        assert told is None


def test_what_is_told_so_far():
    """Before there is a best size what happened, then the size, its rate and what may still be gained."""
    found = attrs.evolve(EVENT, best_batch_size=64, best_rate=1234.5, could_gain=0.031)
    unknown = attrs.evolve(found, could_gain=None)
    assert EVENT.so_far == "8 samples: 1 ms"
    assert found.so_far == "64 best so far (1 234 samples/s), up to 4 % more possible"
    assert unknown.so_far == "64 best so far (1 234 samples/s)"

"""Who is shown the progress of a run: whoever asked for it, else in a notebook the reader of the cell."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from cubatch.report import html
from cubatch.search.events import Event

Show = Callable[[Event], None]

_SECONDS = 0.2  # between two pictures of the bar: each is a message to the browser


@contextlib.contextmanager
def shown(progress: Show | None, *, now: Callable[[], float] = time.monotonic) -> Iterator[Show | None]:
    """
    Say who is told of events while the block runs.

    Args:
        progress: Who asked for it.
        now: A clock.

    Yields:
        `progress`; where that is None and this is a notebook, what moves a bar beneath the cell, which is gone in the
        end; else None.
    """
    if progress is not None or not _is_notebook():
        yield progress
        return
    from IPython.display import display

    def picture(event: Event | None) -> dict[str, str]:
        text = "" if event is None else event.so_far
        drawn = "" if event is None else html.progress(event.done, event.total, text)
        return {"text/plain": text, "text/html": drawn}

    bar: Any = display(picture(None), raw=True, display_id=True)
    last = now() - _SECONDS

    def show(event: Event) -> None:
        nonlocal last
        if (moment := now()) - last >= _SECONDS:
            last = moment
            bar.update(picture(event), raw=True)

    try:
        yield show
    finally:
        bar.update(picture(None), raw=True)


def _is_notebook() -> bool:
    """Say whether cells are run for somebody: by a kernel, not in a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None

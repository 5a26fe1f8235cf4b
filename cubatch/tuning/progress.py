"""Progress of a run: the user's function, else a bar in a notebook."""

from __future__ import annotations

import contextlib
import html
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from cubatch.search.events import Event

Show = Callable[[Event], None]

_SECONDS = 0.2  # between updates of the bar: each is a message to the browser


@contextlib.contextmanager
def shown(progress: Show | None, *, now: Callable[[], float] = time.monotonic) -> Iterator[Show | None]:
    """Yield the progress function; if it is None, a function that moves a bar in a notebook, or None elsewhere."""
    if progress is not None or not _is_notebook():
        yield progress
        return
    from IPython.display import display

    def picture(event: Event | None) -> dict[str, str]:
        text = "" if event is None else event.so_far
        bar_of = "" if event is None else f'<progress value="{event.done:.3f}" max="{event.total:.3f}"></progress> '
        drawn = f"{bar_of}{html.escape(text)}"
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
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None

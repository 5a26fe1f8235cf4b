"""Garbage is collected before memory is read, which takes an instant where what was there before is set aside."""

from __future__ import annotations

import gc
from collections.abc import Callable

_INTERPRETERS = 1000
"""Objects that an interpreter may have set aside when it starts: 375 in Python 3.12.1, none in 3.11 and 3.13."""


def set_aside() -> Callable[[], None]:
    """
    Collect garbage, and have later collections pass over all that there is by now; gives what undoes it.

    PyTorch and torchvision are 300 000 objects, through which a collection goes in 0.14 s, at each visit to a size.
    A process that has set objects aside itself keeps them so, and its collections take as long as they do.
    """
    if gc.get_freeze_count() > _INTERPRETERS:
        return lambda: None
    gc.collect()
    gc.freeze()
    return gc.unfreeze

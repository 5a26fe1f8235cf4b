"""Exclude existing objects from garbage collection, so that collecting before each query of memory is fast."""

from __future__ import annotations

import gc
from collections.abc import Callable

_INTERPRETERS = 1000
"""Most frozen objects of an interpreter at its start: 375 in Python 3.12.1, none in 3.11 and 3.13."""


def freeze_objects() -> Callable[[], None]:
    """
    Collect garbage, exclude all objects from later collections, and return a function that undoes the exclusion.

    PyTorch and torchvision have 300 000 objects, and a collection takes 0.14 s in each trial.  In a process that has
    frozen objects itself, neither call changes anything.
    """
    if gc.get_freeze_count() > _INTERPRETERS:
        return lambda: None
    gc.collect()
    gc.freeze()
    return gc.unfreeze

"""PyTorch's log of operators that fail on fake tensors, which repeats the error that is raised."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_LOGGER = "torch._subclasses.fake_tensor"


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """
    Disable PyTorch's log of operators that fail on fake tensors; each entry prints a stack of thirty lines.

    Example:
        >>> with silent():
        ...     logging.getLogger("torch._subclasses.fake_tensor").isEnabledFor(logging.ERROR)
        False
    """
    logger = logging.getLogger(_LOGGER)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before

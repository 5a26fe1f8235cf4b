"""PyTorch's log of what operators raise on tensors without data: the error itself is told."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_LOGGER = "torch._subclasses.fake_tensor"


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """
    Keep it from logging a stack of thirty lines for each operator that refuses its arguments.

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

"""How a rival's library may fail without ending what is measured of ours: by refusing, for want of memory, or later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cubatch.bench.target import Target
from cubatch.errors import is_out_of_memory

T = TypeVar("T")
ERRORS = (RuntimeError, MemoryError)
"""What libraries raise: PyTorch's and CuPy's errors are RuntimeErrors, CuPy's of memory a MemoryError."""


def twice(make: Callable[[], T], target: Target) -> T:
    """
    Do what may run out of memory; if it does, once more with all that the libraries' pools keep given back.

    Neither library can make the other give back what it has freed.

    Args:
        make: What is done, and gives a result.
        target: Whose pools.

    Raises:
        Exception: What the first try raised that was not about memory, or the second.
    """
    try:
        return make()
    except ERRORS as error:
        if not is_out_of_memory(error):
            raise
    target.free_pools()
    return make()


def begun(bind: Callable[[], Callable[[], object]], target: Target) -> Guarded | str:
    """
    Bind a rival's step and take it once, before anything is timed.

    Args:
        bind: Gives the step.
        target: Where.

    Returns:
        Guarded | str: The step, guarded from then on; or why it cannot be taken.

    Raises:
        Exception: What broke the GPU's context, before it or in it: nothing more runs in this process.
    """

    def make() -> Callable[[], object]:
        step = bind()
        step()
        target.synchronize()
        return step

    target.synchronize()  # an error of ours is none of theirs
    try:
        return Guarded(twice(make, target), target)
    except ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
    target.synchronize()  # raises where the context is broken
    return reason


class Guarded:
    """
    A rival's step that fails once and is then no longer taken, while the others go on.

    Args:
        step: Does it once, or enqueues it.
        target: Where: an error that broke the GPU's context is raised again by whatever comes next there.

    Attributes:
        failure: What it raised; empty as long as it did not.
    """

    def __init__(self, step: Callable[[], object], target: Target) -> None:
        self._step, self._target, self.failure = step, target, ""

    def __call__(self) -> None:
        """Take it, unless it failed before."""
        if self.failure:
            return
        try:
            self._step()
        except ERRORS as error:
            self.failure = f"{type(error).__name__}: {error}"
            self._target.synchronize()

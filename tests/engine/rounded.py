"""
The operations on 16-bit arrays as kernels compute them, spelt on `functional`: what the kernels are tested against.

Inputs are what their storage holds, arithmetic and sums are float32, and a result is rounded once, when it is
stored.  That is done here, around every operation alike: its 16-bit arrays are copied to float32, and its results
back.  The copies are no part of the memory plan, which is why the package has no such thing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from cubatch.engine import backend, functional

RESULTS = frozenset(
    {"out", "outs", "dw", "db", "dx", "ds", "dgamma", "dbeta", "dlogits", "dtoken", "dposition"}
    | {"keep", "dw_in", "dw_out", "db_in", "db_out"}
)
"""Keywords by which operations are given what they write elements to."""

_KNOW_STORAGE = frozenset({"adam", "momentum", "sgd", "update_loss_scale"})  # have master weights to step on
_STORED_BYTES = 2


def operations() -> SimpleNamespace:
    """
    Give every operation of `functional`, taking 16-bit arrays too; all results must be given.

    Example:
        >>> x, y = np.array([1.0, 2.0**-11], np.float16), np.empty(2, np.float16)
        >>> operations().add([x, x], out=y)
        >>> y.tolist() == [2.0, 2.0**-10]
        True
    """
    names = functional.__all__
    return SimpleNamespace(**{name: _of_storage(getattr(functional, name), name) for name in names})


def _of_storage(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    if name in _KNOW_STORAGE:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        backend.call(_run, function, args, kwargs)

    return call


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call a function on float32 copies of its inputs, and round what it writes to where that belongs."""
    rounded: list[tuple[Any, Any]] = []

    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(part) for part in value]
        return value.astype(np.float32) if _is_narrow(value) else value

    def written(value: Any) -> Any:
        if isinstance(value, list):
            return [written(part) for part in value]
        if not _is_narrow(value):
            return value
        rounded.append((value, backend.of(value).empty(value.shape, np.float32)))
        return rounded[-1][1]

    options = {name: (written if name in RESULTS else copied)(value) for name, value in kwargs.items()}
    function(*map(copied, args), **options)
    for stored, wide in rounded:
        with np.errstate(over="ignore"):  # what is beyond float16 becomes infinite, as in a kernel
            stored[...] = wide


def _is_narrow(value: Any) -> bool:
    return getattr(value, "itemsize", None) == _STORED_BYTES

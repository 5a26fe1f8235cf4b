"""The calling convention of the native operations: arguments, defaults and results are those of `functional`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from cubatch.engine import functional
from cubatch.engine.backend import of
from cubatch.engine.native.arrays import check

_Result = TypeVar("_Result")


def operation(
    out: Callable[[SimpleNamespace], Sequence[int]] | None = None,
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """
    Return a decorator that gives a function on kernels the parameters of its namesake in `functional`, after a context.

    The function receives the context and a namespace of the arguments, with the defaults of `functional`. Arguments
    that `functional` does not have are passed on by name.

    Args:
        out: Returns the shape of `out` from the namespace. `out` is then checked, or allocated if it is None, with the
            type of the first argument.
    """

    def decorate(function: Callable[..., _Result]) -> Callable[..., _Result]:
        signature = inspect.signature(getattr(functional, function.__name__))

        @functools.wraps(function)
        def call(context: Any, *args: Any, **options: Any) -> _Result:
            more = {name: options.pop(name) for name in options.keys() - signature.parameters.keys()}
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            given = SimpleNamespace(**bound.arguments)
            if out is not None:
                first = next(iter(bound.arguments.values()))
                like = first[0] if isinstance(first, Sequence) else first
                shape = tuple(out(given))
                given.out = of(like).empty(shape, dtype=like.dtype) if given.out is None else given.out
                check(like.dtype, shape, out=given.out)
            return function(context, given, **more)

        return call

    return decorate

"""
The array module of an array, and the recording of its calls.

The engine is written once, for NumPy and CuPy. Every function asks `of()` for the module of its arrays, and writes all
results with that module's calls into existing arrays. So the calls of a layer are the same in every step. `prepare()`
records them once, with their views of the arrays, to be replayed. Python then takes half a microsecond per call instead
of several. That decides the speed of small batches, and of several threads that share the interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import numpy as np

from cubatch.errors import InvalidArgument
from cubatch.hardware import gpu_library
from cubatch.memory.blocks import Need, workspace_bytes
from cubatch.memory.process_overhead import MOST_RECORDED_CALLS
from cubatch.memory.workspace import CPU_TILE_BYTES, GPU_TILE_BYTES

Call = tuple["Callable[..., object]", tuple[Any, ...]]

_NOT_RECORDED = frozenset(
    ("empty", "empty_like", "asarray", "arange", "ndarray", "random", "inf", "uint8", "bool_", "float32", "float64")
)
_recording: ContextVar[list[Call] | None] = ContextVar("recording", default=None)
_most_recorded: ContextVar[float] = ContextVar("most_recorded", default=MOST_RECORDED_CALLS)


def of(array: Any) -> Any:
    """Return the module that owns an array, NumPy or CuPy; inside `prepare()`, one that records its calls."""
    module = np if isinstance(array, np.ndarray) else gpu_library.cupy()
    calls = _recording.get()
    return module if calls is None else _RecordingModule(module, calls)


class Replay:
    """
    A list of recorded calls; calling the object makes all of them again.

    Args:
        calls: Functions with their arguments, in order.
    """

    __slots__ = ("_calls",)

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def __len__(self) -> int:
        """Return the number of recorded calls; with hand-written kernels each one is a launch."""
        return len(self._calls)

    @property
    def calls(self) -> Sequence[Call]:
        """The recorded functions with their arguments, in order."""
        return self._calls

    def __call__(self) -> None:
        """Make the recorded calls again, in order."""
        for array_call, arguments in self._calls:
            array_call(*arguments)


def prepare(function: Callable[..., object], *args: Any, **kwargs: Any) -> Callable[[], object]:
    """
    Return a function that repeats, on the same arrays, the calls that `function` makes.

    Nothing is computed yet. Every array must be given, results included, and must stay at its address. Numbers such as
    a learning rate or a seed are recorded as they are; random numbers continue from repetition to repetition. For more
    than MOST_RECORDED_CALLS calls, the result calls `function` itself.
    """
    calls: list[Call] = []
    token = _recording.set(calls)
    try:
        function(*args, **kwargs)
    except _TooLong:
        return functools.partial(function, *args, **kwargs)
    finally:
        _recording.reset(token)

    return Replay(calls)


@contextlib.contextmanager
def whole_recordings() -> Iterator[None]:
    """Lift the limit on recorded calls inside the context, so that each call of a step can be examined."""
    token = _most_recorded.set(math.inf)
    try:
        yield
    finally:
        _most_recorded.reset(token)


def call(function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Call a function, or record the call inside `prepare()`; for functions that are not of an array module."""
    calls = _recording.get()
    if calls is None:
        function(*args, **kwargs)
    else:
        _record(calls, function, args, kwargs)


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """Return an array in the host's memory: a copy, or the array itself if it is a NumPy array."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())


def view(base: Any, shape: tuple[int, ...], dtype: Any, *, offset: int = 0, strides: Any = None) -> Any:
    """
    Return a view of part of a contiguous array's memory, with another shape, type and strides.

    `offset` and `strides` are in bytes; strides None: C order.

    Example:
        >>> view(np.arange(4.0), (2, 3), np.float64, strides=(8, 8))
        array([[0., 1., 2.],
               [1., 2., 3.]])
    """
    if isinstance(base, np.ndarray):
        return np.ndarray(shape, dtype, base, offset, strides)
    return gpu_library.cupy().ndarray(shape, dtype, memptr=base.data + offset, strides=strides)


def take_workspace(workspace: Any, like: Any, need: Need, samples: int) -> Any:
    """
    Return the given workspace, or a new one for at most `samples` at a time if it is None.

    `like` is an array of the module that allocates. InvalidArgument is raised for a workspace of fewer bytes than
    `need.least`.
    """
    if workspace is None:
        usual = CPU_TILE_BYTES if isinstance(like, np.ndarray) else GPU_TILE_BYTES
        return of(like).empty(workspace_bytes([need], samples, usual), dtype=np.uint8)
    if workspace.nbytes < need.least:
        raise InvalidArgument("workspace", workspace.nbytes, f"at least {need.least} bytes")
    return workspace


def areas(workspace: Any, need: Need, block: tuple[int, int], *views: tuple[tuple[int, ...], Any]) -> list[Any]:
    """
    Return views of the scratch areas of a block (samples, rows), one for each (shape, type) of `views`.

    `need` has the offsets of the areas in the workspace.
    """
    offsets = need.offsets(*block)
    return [view(workspace, *each, offset=offset) for each, offset in zip(views, offsets, strict=True)]


def gate(values: Any, passing: Any, out: Any) -> None:
    """
    Write `values` to `out` where `passing` is true, and zero elsewhere; `out` may be `values`.

    The bits of the values, as whole numbers, are multiplied by 1 or 0. So the result is zero even for infinity, and
    NumPy takes less than a tenth of the time of a copy under a mask.
    """
    bits = f"i{values.itemsize}"
    of(values).multiply(values.view(bits), passing, out=out.view(bits))


def is_preparing() -> bool:
    """Return whether calls are being recorded, not made: results do not hold the values of a step yet."""
    return _recording.get() is not None


def random_generator(like: Any, seed: Any) -> Any:
    """
    Return a random generator with this seed of the module that owns `like`, NumPy or CuPy.

    Callers must give the size of the draw: with `out` alone, CuPy draws one number and fills the array with it.
    """
    if isinstance(like, np.ndarray):
        return np.random.Generator(np.random.SFC64(seed))
    random = gpu_library.cupy().random
    return random.Generator(random.XORWOW(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])))


class _RecordingModule:
    """Takes the place of the array module inside `prepare()`: calls are recorded, not made."""

    __slots__ = ("__name__", "_calls", "_module")

    def __init__(self, module: ModuleType, calls: list[Call]) -> None:
        self.__name__ = module.__name__
        self._module, self._calls = module, calls

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._module, name)
        if name in _NOT_RECORDED:
            return attribute

        def record(*args: Any, **kwargs: Any) -> None:
            if name != "copyto" and kwargs.get("out") is None:
                raise TypeError(f"{name} cannot be recorded without out=: its result would be lost")
            _record(self._calls, attribute, args, kwargs)

        return record


class _TooLong(Exception):
    pass


def _record(calls: list[Call], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if len(calls) >= _most_recorded.get():
        calls.clear()
        raise _TooLong
    takes_out = isinstance(function, np.ufunc) and function not in {np.maximum, np.minimum}  # not by position
    if takes_out and list(kwargs) == ["out"] and len(args) == function.nin:
        calls.append((function, (*args, kwargs["out"])))  # a mapping for each of thousands of calls takes memory
    else:
        calls.append((functools.partial(function, **kwargs) if kwargs else function, args))

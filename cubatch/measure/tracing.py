"""
Record the calls of a step: function of the engine, kind of the call, begin and end.

On the host a call lies between two reads of the clock.  On a GPU it lies between two events of the stream, so its time
is that of the GPU and not that of enqueueing.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import attrs

from cubatch.engine import backend
from cubatch.engine.native.context import Context, Grid
from cubatch.engine.program import Work
from cubatch.errors import is_out_of_memory
from cubatch.kernels.variant import Kernel

PRODUCTS, COPIES, ELEMENTWISE, WAITING = "products", "copies", "elementwise", "waiting"
"""Kinds of calls: matrix products, copies that only change the layout, all others, and waits for other threads."""

_PRODUCT_CALLS = frozenset({"matmul", "dot", "tensordot", "einsum"})
_COPY_CALLS = frozenset({"copyto", "copy"})
_PRODUCT_KERNELS = ("conv2d_", "gemm_", "heads_", "winograd_", "split_k_")
_COPY_KERNELS = ("copy_", "transpose")
_FILLER_BYTES, _MOST_FILLERS = 1 << 27, 1000


@attrs.frozen
class Call:
    """A call of an array function, a launch of a kernel, or a wait, within a step."""

    rank: int  # number of the thread that makes it
    operation: int  # number of its operation in the schedule
    function: str  # function of the engine, such as "conv2d_wgrad"; empty if unknown
    name: str  # array function or kernel: "matmul"
    what: str  # PRODUCTS, COPIES, ELEMENTWISE or WAITING
    begin: float  # begin, end: seconds since the begin of the step
    end: float
    seconds: float  # duration without waits, which are separate records


@attrs.frozen(eq=False)
class Named:
    """A marker in a list of recorded calls: the name of the engine's function that made the calls after it."""

    name: str

    def __call__(self) -> None:
        """Do nothing, since the marker stands in a list of calls."""


@attrs.frozen(eq=False)
class Launch:
    """A kernel launch with its arguments, which runs when it is called; `kernel` is the variant that it launches."""

    kernel: Kernel
    launch: Callable[[], None]

    def __call__(self) -> None:
        """Launch the kernel."""
        self.launch()


class NamedOperations:
    """The engine's functions; each puts a marker with its name before the calls that it records."""

    def __init__(self, operations: Any) -> None:
        self._operations = operations

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._operations, name)

        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            backend.call(Named(name))
            return function(*args, **kwargs)

        return named


class NamedLauncher:
    """A launcher that records in each launch which kernel it runs."""

    def __init__(self, launcher: Any) -> None:
        self._launcher = launcher

    @property
    def module(self) -> ModuleType:
        """The array module, such as CuPy, whose arrays the launcher takes."""
        module: ModuleType = self._launcher.module
        return module

    def bind(self, kernel: Kernel, grid: Grid, arguments: Any) -> Launch:
        """Return a launch of a kernel on these arguments, which runs when it is called."""
        return Launch(kernel, self._launcher.bind(kernel, grid, arguments))


def add_names(context: Context) -> Context:
    """Return a context whose launches record which kernel they run."""
    return attrs.evolve(context, launcher=NamedLauncher(context.launcher))


def classify(function: Any) -> tuple[str, str]:
    """
    Return the name of a recorded function and its kind: PRODUCTS, COPIES or ELEMENTWISE.

    Example:
        >>> import numpy as np
        >>> classify(np.matmul), classify(functools.partial(np.copyto, where=True)), classify(np.add)
        (('matmul', 'products'), ('copyto', 'copies'), ('add', 'elementwise'))
    """
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, Launch):
        name, operation = function.kernel.name, function.kernel.operation
        if operation.startswith(_PRODUCT_KERNELS):
            return name, PRODUCTS
        return name, COPIES if operation.startswith(_COPY_KERNELS) else ELEMENTWISE
    name = str(getattr(function, "__name__", type(function).__name__))
    what = PRODUCTS if name in _PRODUCT_CALLS else COPIES if name in _COPY_CALLS else ELEMENTWISE
    return name, what


class HostTrace:
    """
    Records the start and end of each function call that a step makes on the CPU.

    An operation without a list of its calls (`backend.Replay`) is recorded as one call.

    Args:
        members: Number of threads that run the step.
    """

    def __init__(self, members: int) -> None:
        self.operations: list[list[tuple[int, float, float]]] = [[] for _ in range(members)]
        self._calls: list[list[tuple[int, str, Any, float, float, float]]] = [[] for _ in range(members)]
        self._waits: list[list[tuple[int, float, float]]] = [[] for _ in range(members)]
        self._now, self._waited = [0] * members, [0.0] * members

    def run(self, rank: int, number: int, work: Work) -> None:
        """Run `work`, operation `number` of the schedule, in thread number `rank`, and time each of its calls."""
        now, calls, waited, function = time.perf_counter, self._calls[rank], self._waited, ""
        self._now[rank] = number
        began = now()
        for call, arguments in work.calls if isinstance(work, backend.Replay) else [(work, ())]:
            if isinstance(call, Named):
                function = call.name
                continue
            before, begin = waited[rank], now()
            call(*arguments)
            calls.append((number, function, call, begin, now(), waited[rank] - before))
        self.operations[rank].append((number, began, now()))

    def wait(self, rank: int, meet: Work) -> None:
        """Wait for the other threads by calling `meet`, and record the seconds as waiting of thread number `rank`."""
        begin = time.perf_counter()
        meet()
        end = time.perf_counter()
        self._waited[rank] += end - begin
        self._waits[rank].append((self._now[rank], begin, end))

    def calls(self, began: float) -> Iterator[Call]:
        """Yield the recorded calls, then waits, of each thread; their times are seconds since `began`."""
        for rank, (made, waits) in enumerate(zip(self._calls, self._waits, strict=True)):
            for number, function, call, begin, end, waited in made:
                yield Call(rank, number, function, *classify(call), begin - began, end - began, end - begin - waited)
            for number, begin, end in waits:
                yield Call(rank, number, "", "wait", WAITING, begin - began, end - began, end - begin)


class DeviceTrace:
    """
    Record a step on a GPU, with an event of the stream after each launch.

    The GPU runs filler work first, so that it does not wait for Python between launches.

    Args:
        xp: The module CuPy.
        head_start: Least seconds of the filler work: those of enqueueing a step; 0: no filler work.
    """

    def __init__(self, xp: Any, head_start: float) -> None:
        self._xp = xp
        self._marks: list[tuple[int, str, Any, Any]] = []
        self._start = xp.cuda.Event()
        if head_start:
            try:
                self._keep_busy(head_start)
            except Exception as error:
                if not is_out_of_memory(error):  # the batch may fill the memory of the GPU
                    raise
        self._start.record()

    def run(self, rank: int, number: int, work: Work) -> None:  # noqa: ARG002 - a GPU's team is one
        """Enqueue `work`, operation `number` of the schedule, with an event after each of its launches."""
        function = ""
        calls = work.calls if isinstance(work, backend.Replay) else [(work, ())]
        for call, arguments in calls:
            if isinstance(call, Named):
                function = call.name
                continue
            call(*arguments)
            mark = self._xp.cuda.Event()
            mark.record()
            self._marks.append((number, function, call, mark))

    def wait(self, rank: int, meet: Work) -> None:  # noqa: ARG002 - a GPU's team is one
        """Call `meet`; no time is recorded, since a GPU has no other threads."""
        meet()

    def calls(self) -> Iterator[Call]:
        """Wait for the end of the step and yield its launches."""
        self._xp.cuda.get_current_stream().synchronize()
        begin = 0.0
        for number, function, call, mark in self._marks:
            end = float(self._xp.cuda.get_elapsed_time(self._start, mark)) * 1e-3
            yield Call(0, number, function, *classify(call), begin, end, end - begin)
            begin = end

    def _keep_busy(self, seconds: float) -> None:
        xp = self._xp
        source, target = (xp.empty(_FILLER_BYTES, dtype=xp.uint8) for _ in range(2))
        before, after = xp.cuda.Event(), xp.cuda.Event()
        before.record()
        xp.copyto(target, source)
        after.record()
        after.synchronize()
        copy_seconds = float(xp.cuda.get_elapsed_time(before, after)) * 1e-3
        for _ in range(min(_MOST_FILLERS, math.ceil(seconds / max(copy_seconds, 1e-6)))):
            xp.copyto(target, source)

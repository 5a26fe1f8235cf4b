"""
What happens inside a step, call by call: which function of the engine, what it does with memory, from when to when.

On the host a call is between two looks at the clock.  On a GPU it is between two events of the stream, so that what
the GPU does is seen, and not what Python enqueues.
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
"""What a call is: matrix products, copies that only lay data out anew, all else, and waits for other threads."""

_PRODUCT_CALLS = frozenset({"matmul", "dot", "tensordot", "einsum"})
_COPY_CALLS = frozenset({"copyto", "copy"})
_PRODUCT_KERNELS = ("conv2d_", "gemm_", "heads_", "winograd_", "split_k_")
_COPY_KERNELS = ("copy_", "nchw_to_", "nhwc_to_", "encode", "decode", "pack")
_FILLER_BYTES, _MOST_FILLERS = 1 << 27, 1000


@attrs.frozen
class Call:
    """
    A call of a step.

    Attributes:
        rank: The member of the team that makes it.
        operation: Number of the schedule's operation that it belongs to.
        function: Of the engine: "conv2d_wgrad", ...; empty where none says.
        name: What is called: "matmul", or a kernel's name.
        what: PRODUCTS, COPIES, ELEMENTWISE or WAITING.
        begin, end: Seconds from the step's begin.
        seconds: It took, without waits that are calls of their own.
    """

    rank: int
    operation: int
    function: str
    name: str
    what: str
    begin: float
    end: float
    seconds: float


@attrs.frozen(eq=False)
class Named:
    """Says which function of the engine the recorded calls after it belong to; called, it does nothing."""

    name: str

    def __call__(self) -> None:
        """Do nothing."""


@attrs.frozen(eq=False)
class Launch:
    """A launch that knows its kernel."""

    kernel: Kernel
    launch: Callable[[], None]

    def __call__(self) -> None:
        """Launch it."""
        self.launch()


class NamedOperations:
    """The engine's functions, each of which leaves its name before the calls that it records."""

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
    """A launcher whose launches know their kernels."""

    def __init__(self, launcher: Any) -> None:
        self._launcher = launcher

    @property
    def module(self) -> ModuleType:
        """The array module whose arrays it takes."""
        found: ModuleType = self._launcher.module
        return found

    def bind(self, kernel: Kernel, grid: Grid, arguments: Any) -> Launch:
        """Prepare a launch."""
        return Launch(kernel, self._launcher.bind(kernel, grid, arguments))


def named(context: Context) -> Context:
    """Return a context whose launches know their kernels."""
    return attrs.evolve(context, launcher=NamedLauncher(context.launcher))


def told(function: Any) -> tuple[str, str]:
    """
    Return a recorded call, and say what it does.

    Example:
        >>> import numpy as np
        >>> told(np.matmul), told(functools.partial(np.copyto, where=True)), told(np.add)
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
    Sees a step on the host.  Work that is not recorded is one call.

    Args:
        members: Of the team.
    """

    def __init__(self, members: int) -> None:
        self.operations: list[list[tuple[int, float, float]]] = [[] for _ in range(members)]
        self._calls: list[list[tuple[int, str, Any, float, float, float]]] = [[] for _ in range(members)]
        self._waits: list[list[tuple[int, float, float]]] = [[] for _ in range(members)]
        self._now, self._waited = [0] * members, [0.0] * members

    def run(self, rank: int, number: int, work: Work) -> None:
        """Do an operation, each of its calls between two looks at the clock."""
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
        """Wait for the other members."""
        begin = time.perf_counter()
        meet()
        end = time.perf_counter()
        self._waited[rank] += end - begin
        self._waits[rank].append((self._now[rank], begin, end))

    def calls(self, began: float) -> Iterator[Call]:
        """List what was called, in the order of members; times count from `began`."""
        for rank, (made, waits) in enumerate(zip(self._calls, self._waits, strict=True)):
            for number, function, call, begin, end, waited in made:
                yield Call(rank, number, function, *told(call), begin - began, end - began, end - begin - waited)
            for number, begin, end in waits:
                yield Call(rank, number, "", "wait", WAITING, begin - began, end - began, end - begin)


class DeviceTrace:
    """
    Sees a step on a GPU: an event of the stream after each launch.

    The GPU is given something else to do first, so that it never waits for Python in between.

    Args:
        xp: CuPy.
        head_start: Seconds that Python needs to enqueue a step.
    """

    def __init__(self, xp: Any, head_start: float) -> None:
        self._xp = xp
        self._marks: list[tuple[int, str, Any, Any]] = []
        self._start = xp.cuda.Event()
        if head_start:
            try:
                self._keep_busy(head_start)
            except Exception as error:
                if not is_out_of_memory(error):  # beside a batch that fills the GPU there is no room for it
                    raise
        self._start.record()

    def run(self, rank: int, number: int, work: Work) -> None:  # noqa: ARG002 - a GPU's team is one
        """Enqueue an operation, an event after each of its launches."""
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

    def wait(self, rank: int, meet: Work) -> None:  # noqa: ARG002 - as above
        """Meet nobody."""
        meet()

    def calls(self) -> Iterator[Call]:
        """Wait for the step, and list what it launched."""
        self._xp.cuda.get_current_stream().synchronize()
        begin = 0.0
        for number, function, call, mark in self._marks:
            end = float(self._xp.cuda.get_elapsed_time(self._start, mark)) * 1e-3
            yield Call(0, number, function, *told(call), begin, end, end - begin)
            begin = end

    def _keep_busy(self, seconds: float) -> None:
        xp = self._xp
        source, target = (xp.empty(_FILLER_BYTES, dtype=xp.uint8) for _ in range(2))
        before, after = xp.cuda.Event(), xp.cuda.Event()
        before.record()
        xp.copyto(target, source)
        after.record()
        after.synchronize()
        one = float(xp.cuda.get_elapsed_time(before, after)) * 1e-3
        for _ in range(min(_MOST_FILLERS, math.ceil(seconds / max(one, 1e-6)))):
            xp.copyto(target, source)

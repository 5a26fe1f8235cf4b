"""The runner of a user's callable."""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from cubatch.errors import InvalidArgument, OutOfMemory
from cubatch.measure import clocks
from cubatch.user_code import takes

_NOT_RUN = "which cannot be called: return the step as a function, and do not run it"


class CallableRunner:
    """
    Run the steps of a user's callable.

    Args:
        make_step: Function that returns a step of a batch size: a callable without arguments.
        memory_limit: Bytes that PyTorch and CuPy may hold for a step; None: no limit.
        index: Number of the GPU that both use until `close`; None: the current one.
    """

    def __init__(
        self,
        make_step: Callable[[int], Callable[[], object]],
        memory_limit: int | None = None,
        index: int | None = None,
    ) -> None:
        self._make_step, self._memory_limit, self._index = make_step, memory_limit, index
        self._step: Callable[[], object] | None = None
        self._batch_size = 0
        self._moved, self._undone = set[str](), contextlib.ExitStack()
        with contextlib.ExitStack() as failed:
            failed.callback(self._undone.close)
            self._move()
            self.clock = clocks.callable_clock()
            failed.pop_all()

    @property
    def peak_bytes(self) -> int | None:
        """Peak bytes in the pools of PyTorch and CuPy since `prepare`; None if neither is loaded or has a GPU."""
        torch, cupy = _gpu_libraries()
        held = [int(torch.cuda.max_memory_reserved())] if torch else []
        held += [int(cupy.get_default_memory_pool().total_bytes())] if cupy else []
        return sum(held) if held else None

    @property
    def peak_device_bytes(self) -> int | None:
        """Always None: the device memory is unknown, since a callable may use any device."""
        return None

    def prepare(self, batch_size: int) -> None:
        """
        Release the previous step, and make the step of this batch size.

        Raises:
            InvalidArgument: If `make_step` returns no callable, or one that needs arguments.
            OutOfMemory: If PyTorch and CuPy held more than `memory_limit` bytes while the step ran once.
        """
        self.release()
        step = self._make_step(batch_size)
        if self._move():  # make_step imported a library and put its arrays on another GPU
            del step
            step = self._make_step(batch_size)
        if not callable(step) or not takes(step, 0, follow_wrapped=False):
            fix = "which needs arguments: bind them, as in `lambda: step(x)`" if callable(step) else _NOT_RUN
            remedy = f"make_step returned this value, {fix}."
            raise InvalidArgument("make_step", step, "a function that returns a callable without arguments", remedy)
        self._step, self._batch_size = step, batch_size
        # make_step may have imported the library whose events time the step.
        if type(self.clock) is clocks.HostClock and type(clock := clocks.callable_clock()) is not clocks.HostClock:
            self.clock = clock
        if self._memory_limit is not None:
            self.clock.time(self.step, 1)
            held = self.peak_bytes
            if held is not None and held > self._memory_limit:
                raise OutOfMemory(f"a step of batch size {batch_size}", held, self._memory_limit)

    def hold_reference(self, repeats: int) -> bool:
        """
        Keep the prepared step as the reference step; return False without a prepared step, or if events time steps.

        `repeats` reference steps run before and after each timing.
        """
        if type(self.clock) is not clocks.HostClock or self._step is None:
            return False
        self.clock.hold_reference(self._step, repeats)
        self._step = None
        return True

    def step(self) -> object:
        """
        Call the step and return its result, for which the clock may have to wait.

        Raises:
            InvalidArgument: If the result is a coroutine, future or iterator, which shows that the step has only begun.
                Also if the step raises StopIteration, since its data have ended.
        """
        try:
            result = None if self._step is None else self._step()
        except StopIteration as end:
            given = f"a step that raises StopIteration at batch size {self._batch_size}"
            allowed = "a function whose steps can be repeated, as with itertools.cycle() around their data"
            raise InvalidArgument("make_step", given, allowed) from end
        if hasattr(type(result), "__next__") or inspect.isawaitable(result) or isinstance(result, Future):
            allowed = "a function whose steps wait for their work, as by asyncio.run(), future.result() or list()"
            raise InvalidArgument("make_step", f"a step that returns a {type(result).__name__}", allowed)
        return result

    def release(self) -> None:
        """Release the step and empty the pools of PyTorch and CuPy."""
        try:
            before = weakref.ref(self._step) if self._step is not None else None
        except TypeError:  # no weak references to its type
            before = None
        self._step = None
        torch, cupy = _gpu_libraries()
        # Only the collector frees cycles: it runs if they may hold device memory, or if the step still exists.
        if torch or cupy or (before is not None and before() is not None):
            gc.collect()
        # After a GPU error every call fails, and the caller has that error already.
        with contextlib.suppress(Exception):
            if torch:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            if cupy:
                cupy.get_default_memory_pool().free_all_blocks()

    def close(self) -> None:
        """Release everything and restore the GPU that was current in PyTorch and CuPy before."""
        self.release()
        self._undone.close()

    def _move(self) -> bool:
        """
        Make GPU `index` current in PyTorch and CuPy if they are loaded; return whether that changed one of them now.

        Libraries may share the current GPU through the driver, so `close` restores them in reverse order.
        """
        if self._index is None:
            return False
        torch, cupy = _gpu_libraries()
        before = len(self._moved)
        if torch and "torch" not in self._moved:
            self._undone.callback(torch.cuda.set_device, torch.cuda.current_device())
            torch.cuda.set_device(self._index)
            self._moved.add("torch")
        if cupy and "cupy" not in self._moved:
            self._undone.callback(cupy.cuda.Device().use)
            cupy.cuda.Device(self._index).use()
            self._moved.add("cupy")
        return len(self._moved) > before


def _gpu_libraries() -> tuple[Any, Any]:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    return (
        torch if torch is not None and torch.cuda.is_available() else None,
        cupy if cupy is not None and cupy.cuda.is_available() else None,
    )

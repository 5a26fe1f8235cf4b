"""
The runners that there are: a network on our engine, and a user's callable.

Both take random data: zeros draw less power, so a GPU runs them at clocks that real data never sees.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cubatch import clocks, models, probe, select
from cubatch.engine.network import Model
from cubatch.errors import InvalidArgument, OutOfMemory
from cubatch.runner import Clock

if TYPE_CHECKING:
    from cubatch.monitor import Monitor


class NetworkRunner:
    """
    Steps of a network on our engine.

    Args:
        model: The network with its parameters, on a device.
        clock: How its time is told.
        monitor: Reads what the process holds of the GPU; None on a CPU.
    """

    def __init__(self, model: Model, clock: Clock, monitor: Monitor | None = None) -> None:
        self.clock = clock
        self._model, self._monitor = model, monitor

    @property
    def peak_bytes(self) -> int | None:
        """Bytes that the engine took for parameters and the prepared batch."""
        return self._model.held_bytes

    @property
    def peak_device_bytes(self) -> int | None:
        """What the driver says this process holds; None on a CPU or where it does not tell."""
        return self._monitor.process_bytes(os.getpid()) if self._monitor else None

    def prepare(self, batch_size: int) -> None:
        """Lay out memory for the batch and fill it with random data."""
        self._model.prepare(batch_size)
        self._model.load_random()

    def step(self) -> None:
        """Run one step, or enqueue it on a GPU."""
        self._model.step()

    def release(self) -> None:
        """Give the batch's memory back, pools included."""
        self._model.release()

    def close(self) -> None:
        """Give everything back."""
        self._model.close()


def network_runner(
    *,
    spec: Mapping[str, Any],
    device: str,
    mode: str,
    dtype: str,
    optimizer: str,
    library: str,
    recompute: bool,
    seed: int,
    choice_seconds: float = 0.0,
    winners: str | None = None,
) -> NetworkRunner:
    """
    Build the runner of a network from what JSON can hold: the factory that a worker is given.

    Args:
        spec: Network or layer as a mapping.
        device: "cpu", or "cuda:1" as this process numbers them.
        mode, dtype, optimizer, library, recompute, seed: As for `autotune`; the library is "cubatch" or "im2col".
        choice_seconds: How long timing kernel variants may take.
        winners: File of the variants that won before; None keeps them for this process only.
    """
    found = probe.resolve(device)
    context = None
    if library == "cubatch":
        path = None if winners is None else Path(winners)
        context = select.kernel_context(found, dtype, seconds=choice_seconds, path=path)
    model = Model(
        models.resolve(spec),
        device=found,
        mode=mode,
        dtype=dtype,
        optimizer=optimizer,
        context=context,
        learning_rate=0.0,  # every step does the same work on the same parameters; random data would drive them to NaN
        recompute=recompute,
        seed=seed,
    )
    if found.kind == "cpu":
        return NetworkRunner(model, clocks.HostClock())
    return NetworkRunner(model, clocks.cupy_clock(found.uuid), clocks.monitor_of(found.uuid))


class CallableRunner:
    """
    Steps of anything that a user can call.

    Args:
        make_step: make_step(n) gives a step of batch size n: a callable without arguments.
        memory_limit: Bytes that PyTorch or CuPy may hold for a step; None for no limit.
    """

    def __init__(self, make_step: Callable[[int], Callable[[], object]], memory_limit: int | None = None) -> None:
        self._make_step, self._memory_limit = make_step, memory_limit
        self._step: Callable[[], object] | None = None
        self.clock = clocks.callable_clock()

    @property
    def peak_bytes(self) -> int | None:
        """High water of PyTorch's or CuPy's pools since `prepare`; None with neither."""
        torch, cupy = _gpu_libraries()
        if torch:
            return int(torch.cuda.max_memory_reserved())
        if cupy:
            return int(cupy.get_default_memory_pool().total_bytes())
        return None

    @property
    def peak_device_bytes(self) -> int | None:
        """Unknown: a callable may use any device."""
        return None

    def prepare(self, batch_size: int) -> None:
        """Ask for the step of this batch size; the one before is let go of first."""
        self.release()
        torch, _ = _gpu_libraries()
        if torch:
            torch.cuda.reset_peak_memory_stats()
        step = self._make_step(batch_size)
        if not callable(step):
            raise InvalidArgument("make_step", step, "a function that returns a step: a callable without arguments")
        self._step = step
        # make_step may be what imported the library whose events time it.
        if type(self.clock) is clocks.HostClock:
            self.clock = clocks.callable_clock()
        if self._memory_limit is not None:
            self.clock.time(self.step, 1)
            held = self.peak_bytes
            if held is not None and held > self._memory_limit:
                raise OutOfMemory(f"a step of batch size {batch_size}", held, self._memory_limit)

    def step(self) -> None:
        """Call the step."""
        if self._step is not None:
            self._step()

    def release(self) -> None:
        """Let go of the step, and empty the pools of PyTorch and CuPy."""
        try:
            before = weakref.ref(self._step) if self._step is not None else None
        except TypeError:  # no weak references to its type
            before = None
        self._step = None
        torch, cupy = _gpu_libraries()
        # What is in a cycle only the collector finds: looked for where device memory hangs on it, or the step is seen.
        if torch or cupy or (before is not None and before() is not None):
            gc.collect()
        # After a failed GPU every call fails; whoever asked already knows.
        with contextlib.suppress(Exception):
            if torch:
                torch.cuda.empty_cache()
            if cupy:
                cupy.get_default_memory_pool().free_all_blocks()

    def close(self) -> None:
        """Let go of everything."""
        self.release()


def _gpu_libraries() -> tuple[Any, Any]:
    """Give PyTorch and CuPy, each if it is loaded and has a GPU, else None."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    return (
        torch if torch is not None and torch.cuda.is_available() else None,
        cupy if cupy is not None and cupy.cuda.is_available() else None,
    )

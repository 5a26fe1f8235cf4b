"""The runner of a network on cubatch's engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cubatch.engine.data_parallel import DataParallel
from cubatch.engine.exchange import Exchange
from cubatch.engine.network import Model
from cubatch.hardware import context_overhead, host, probe
from cubatch.hardware.nvml import Monitor
from cubatch.measure import clocks, kernel_context
from cubatch.measure.resident_meter import ResidentMeter
from cubatch.measure.runner import REFERENCE_SHARE
from cubatch.network import models


class NetworkRunner:
    """
    Run the steps of a network on cubatch's engine.

    Args:
        model: The network with its parameters, on a device.
        clock: Clock of its steps.
        monitor: Reads the GPU memory of the process; None on a CPU.
        meter: Reads the growth of main memory since before the model was made; None on a GPU.
        make_model: Makes another model of the same network when the first becomes the reference; None: no reference
            is held, as on a GPU.
        learns: Whether all GPU memory of the process is for the model.  The largest overhead is then recorded for the
            memory limits of later runs.

    Attributes:
        model, clock: The arguments of these names.
    """

    def __init__(
        self, model: Model, clock: clocks.HostClock, monitor: Monitor | None = None,
        meter: ResidentMeter | None = None, *, learns: bool = False, make_model: Callable[[], Model] | None = None,
    ) -> None:  # fmt: skip
        self.clock, self._make_model = clock, make_model
        self._reference: Model | None = None
        self.model, self._monitor, self._meter, self._learns = model, monitor, meter, learns
        self._launch: dict[str, Any] | None = None

    @property
    def peak_bytes(self) -> int | None:
        """Bytes that the engine holds for parameters and the prepared batch; never None."""
        return self.model.held_bytes

    @property
    def peak_device_bytes(self) -> int | None:
        """
        Bytes of GPU memory that this process holds by the driver, context included; None if unknown.

        On a CPU, the largest growth of the resident set since before the model was made, including buffers of BLAS.
        """
        if self._meter is not None:
            peak = self._meter.peak()
            held = 0 if self._reference is None else self._reference.held_bytes
            return None if peak is None else max(0, peak - held)
        return self._monitor.process_bytes(os.getpid()) if self._monitor else None

    @property
    def launch(self) -> dict[str, Any] | None:
        """
        How the steps of the last batch size were launched, as `Model.launch`; also after its release.

        None on a CPU, and before the first `prepare`.
        """
        return self.model.launch or self._launch

    def prepare(self, batch_size: int) -> None:
        """Plan and allocate memory for the batch, and fill it with random data."""
        self.release()
        if self._meter is not None:
            self._meter.restart()
        self.model.prepare(batch_size)
        self.model.load_random()

    def hold_reference(self, repeats: int) -> bool:
        """
        Keep the prepared model for reference steps; return False on a GPU.

        The result is also False if the model holds more than REFERENCE_SHARE of the free memory.

        `repeats` reference steps run before and after each timing.
        """
        if self._make_model is None:
            return False
        free = None if isinstance(self.model, DataParallel) else host.available_memory_bytes()  # ranks decide alike
        if free is not None and self.model.held_bytes > REFERENCE_SHARE * free:
            return False
        model = self._make_model()
        self._drop_reference()
        self._reference, self.model = self.model, model
        self.clock.hold_reference(self._reference.step, repeats)
        return True

    def step(self) -> None:
        """Run one step, or enqueue it on a GPU."""
        self.model.step()

    def release(self) -> None:
        """Free the batch and empty memory pools; if `learns`, first record the GPU memory outside of the pools."""
        self._launch = self.launch
        if self._learns and self._monitor and self.model.plan is not None and (held := self._monitor.process_bytes()):
            context_overhead.record(self.model.device, held - self.model.held_bytes)
        self.model.release()

    def close(self) -> None:
        """Free all memory, that of the reference step too; the runner cannot be used afterwards."""
        self.release()
        self.model.close()
        self._drop_reference()

    def _drop_reference(self) -> None:
        if self._reference is not None:
            self._reference.release()
            self._reference.close()


def network_runner(
    *,
    spec: Mapping[str, Any],  # network or layer as a mapping
    device: str,  # "cpu", or "cuda:1" by the numbers of this process
    # mode, dtype, optimizer, library, recompute, seed: as for `autotune`; the library is "cubatch" or "im2col"
    mode: str,
    dtype: str,
    optimizer: str,
    library: str,
    recompute: bool,
    seed: int,
    choice_seconds: float = 0.0,  # most seconds of timing kernel variants
    winners: str | None = None,  # file of the fastest kernel variants; None: they are kept for this process only
    exchange: Exchange | None = None,  # exchange of the ranks of a data parallel run; None: a single process
) -> NetworkRunner:
    """Return the runner of a network; all arguments but `exchange` can be JSON, so that a worker can call this."""
    resolved = probe.resolve(device)
    meter, context, monitor = ResidentMeter(), None, clocks.monitor_of(resolved.uuid)
    meter.start()
    # Otherwise the process also holds arrays of the user, or buffers of the exchange.
    learns = monitor is not None and not monitor.process_bytes()
    if library == "cubatch":
        path = None if winners is None else Path(winners)
        overlaps = mode == "inference" or exchange is not None  # ranks launch kernels one by one
        context = kernel_context.kernel_context(resolved, dtype, overlaps=overlaps, seconds=choice_seconds, path=path)
    options: dict[str, Any] = {
        "device": resolved, "dtype": dtype, "optimizer": optimizer, "context": context, "recompute": recompute,
        "learning_rate": 0.0,  # every step does the same work on the same parameters; random data would drive them away
        "seed": seed,
    }  # fmt: skip
    network = models.resolve(spec)

    def make_model() -> Model:
        if exchange is None:
            return Model(network, mode=mode, **options)
        return DataParallel(network, exchange=exchange, **options)

    if resolved.kind == "cpu":
        return NetworkRunner(make_model(), clocks.HostClock(), meter=meter, make_model=make_model)
    return NetworkRunner(make_model(), clocks.cupy_clock(resolved.uuid), monitor, learns=learns)

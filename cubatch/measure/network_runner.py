"""A network on our engine, as something that can be stepped."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cubatch.engine.data_parallel import DataParallel
from cubatch.engine.exchange import Exchange
from cubatch.engine.network import Model
from cubatch.hardware import host, probe, reserve
from cubatch.measure import clocks, kernel_choice
from cubatch.measure.memory_meter import ResidentMeter
from cubatch.measure.runner import REFERENCE_SHARE
from cubatch.network import models

if TYPE_CHECKING:
    from cubatch.hardware.nvml import Monitor


class NetworkRunner:
    """
    Steps of a network on our engine.

    Args:
        model: The network with its parameters, on a device.
        clock: How its time is told.
        monitor: Reads what the process holds of the GPU; None on a CPU.
        meter: Reads what the process has taken of main memory since before there was a model; None on a GPU.
        make_model: Makes another model of the same network, so that the first can be held as the reference; None: no
            reference is held, as on a GPU.
        learns: Whether what the process holds of the GPU beside the model is there for it alone: the most of it is kept
            for the limits of later runs.

    Attributes:
        model, clock: As given.
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
        """Bytes that the engine took for parameters and the prepared batch."""
        return self.model.held_bytes

    @property
    def peak_device_bytes(self) -> int | None:
        """
        What the driver says that this process holds of the GPU, the context included; None where it does not tell.

        On a CPU what the resident set grew by at most since before there was a model, BLAS's buffers included.
        """
        if self._meter is not None:
            peak = self._meter.peak()
            held = 0 if self._reference is None else self._reference.held_bytes
            return None if peak is None else max(0, peak - held)
        return self._monitor.process_bytes(os.getpid()) if self._monitor else None

    @property
    def launch(self) -> dict[str, Any] | None:
        """How the steps of the last batch size were launched, as `Model.launch`: also once it is released."""
        return self.model.launch or self._launch

    def prepare(self, batch_size: int) -> None:
        """Lay out memory for the batch and fill it with random data."""
        self.release()
        if self._meter is not None:
            self._meter.restart()
        self.model.prepare(batch_size)
        self.model.load_random()

    def hold_reference(self, repeats: int) -> bool:
        """Keep the prepared model as the reference; False on a GPU, and where it takes much of the free memory."""
        if self._make_model is None:
            return False
        free = None if isinstance(self.model, DataParallel) else host.available_memory_bytes()  # ranks decide alike
        if free is not None and self.model.held_bytes > REFERENCE_SHARE * free:
            return False
        self._reference, self.model = self.model, self._make_model()
        self.clock.hold_reference(self._reference.step, repeats)
        return True

    def step(self) -> None:
        """Run one step, or enqueue it on a GPU."""
        self.model.step()

    def release(self) -> None:
        """Free the memory of the batch, pools included; memory outside the pools on a GPU counts in the next limit."""
        self._launch = self.launch
        if self._learns and self._monitor and self.model.plan is not None and (held := self._monitor.process_bytes()):
            reserve.keep(self.model.device, held - self.model.held_bytes)
        self.model.release()

    def close(self) -> None:
        """Free all memory."""
        self.release()
        self.model.close()
        if self._reference is not None:
            self._reference.release()
            self._reference.close()


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
    exchange: Exchange | None = None,
) -> NetworkRunner:
    """
    Build the runner of a network from what JSON can hold: the factory that a worker is given.

    Args:
        spec: Network or layer as a mapping.
        device: "cpu", or "cuda:1" as this process numbers them.
        mode, dtype, optimizer, library, recompute, seed: As for `autotune`; the library is "cubatch" or "im2col".
        choice_seconds: How long timing kernel variants may take.
        winners: File of the variants that won before; None keeps them for this process only.
        exchange: Makes it one rank of a data parallel run; None: it runs alone.
    """
    found = probe.resolve(device)
    meter, context, monitor = ResidentMeter(), None, clocks.monitor_of(found.uuid)
    meter.start()
    # In a user's process arrays of others may lie there, and in a rank what sums: which of it is whose nobody tells.
    learns = monitor is not None and not monitor.process_bytes()
    if library == "cubatch":
        path = None if winners is None else Path(winners)
        overlaps = mode == "inference" or exchange is not None  # with others it launches one by one
        context = kernel_choice.kernel_context(found, dtype, overlaps=overlaps, seconds=choice_seconds, path=path)
    options: dict[str, Any] = {
        "device": found, "dtype": dtype, "optimizer": optimizer, "context": context, "recompute": recompute,
        "learning_rate": 0.0,  # every step does the same work on the same parameters; random data would drive them away
        "seed": seed,
    }  # fmt: skip
    resolved = models.resolve(spec)

    def make_model() -> Model:
        if exchange is None:
            return Model(resolved, mode=mode, **options)
        return DataParallel(resolved, exchange=exchange, **options)

    if found.kind == "cpu":
        return NetworkRunner(make_model(), clocks.HostClock(), meter=meter, make_model=make_model)
    return NetworkRunner(make_model(), clocks.cupy_clock(found.uuid), monitor, learns=learns)

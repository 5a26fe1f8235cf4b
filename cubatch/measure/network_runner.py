"""A network on our engine, as something that can be stepped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cubatch.engine.network import Model
from cubatch.hardware import probe
from cubatch.measure import clocks, kernel_choice
from cubatch.measure.runner import Clock
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
    """

    def __init__(self, model: Model, clock: Clock, monitor: Monitor | None = None) -> None:
        self.clock = clock
        self._model, self._monitor = model, monitor
        self._launch: dict[str, Any] | None = None

    @property
    def peak_bytes(self) -> int | None:
        """Bytes that the engine took for parameters and the prepared batch."""
        return self._model.held_bytes

    @property
    def peak_device_bytes(self) -> int | None:
        """What the driver says this process holds; None on a CPU or where it does not tell."""
        return self._monitor.process_bytes(os.getpid()) if self._monitor else None

    @property
    def launch(self) -> dict[str, Any] | None:
        """How the steps of the last batch size were launched, as `Model.launch`: also once it is released."""
        return self._model.launch or self._launch

    def prepare(self, batch_size: int) -> None:
        """Lay out memory for the batch and fill it with random data."""
        self._launch = self.launch
        self._model.prepare(batch_size)
        self._model.load_random()

    def step(self) -> None:
        """Run one step, or enqueue it on a GPU."""
        self._model.step()

    def release(self) -> None:
        """Give the batch's memory back, pools included."""
        self._launch = self.launch
        self._model.release()

    def close(self) -> None:
        """Give everything back."""
        self._launch = self.launch
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
        context = kernel_choice.kernel_context(found, dtype, seconds=choice_seconds, path=path)
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

"""A PyTorch module, as something that can be prepared for a batch size and stepped."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

from cubatch.errors import OutOfMemory
from cubatch.frameworks.torch_inputs import Inputs, random_like
from cubatch.frameworks.torch_step import StepKind
from cubatch.measure import clocks

_IMAGE_AXES = 4


class ModuleRunner:
    """
    Steps of a module on random inputs.

    Args:
        module: What is called, compiled or not.
        parameters: What is trained.
        inputs: An example of its inputs.
        kind: How it is stepped.
        device: PyTorch's device.
        memory_limit: Bytes that PyTorch may hold of a GPU.
        seed: Draws the inputs.
        channels_last: Lay four-dimensional inputs out as NHWC.
    """

    def __init__(
        self, module: Callable[..., Any], parameters: list[Any], inputs: Inputs, kind: StepKind, device: Any,
        memory_limit: int, seed: int, *, channels_last: bool,
    ) -> None:  # fmt: skip
        self._module, self._parameters, self._inputs, self._kind = module, parameters, inputs, kind
        self._device, self._memory_limit, self._seed = device, memory_limit, seed
        self._channels_last = channels_last
        self._step: Callable[[], None] | None = None
        self.clock = clocks.torch_clock(device.index or 0) if device.type == "cuda" else clocks.HostClock()

    @property
    def peak_bytes(self) -> int | None:
        """High water of what PyTorch took from the GPU since `prepare`; None on the CPU."""
        import torch

        return int(torch.cuda.max_memory_reserved(self._device)) if self._device.type == "cuda" else None

    @property
    def peak_device_bytes(self) -> int | None:
        """Not asked for."""
        return None

    def prepare(self, batch_size: int) -> None:
        """
        Draw a batch, and do a first step: what is compiled or chosen in it is not timed.

        Raises:
            OutOfMemory: If PyTorch holds more than the limit after it.
        """
        import torch

        self.release()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        draw = random_like(torch.Generator().manual_seed(self._seed), self._device)

        def make(tensor: Any, n: int) -> Any:
            drawn = draw(tensor, n)
            is_image = self._channels_last and drawn.ndim == _IMAGE_AXES
            return drawn.contiguous(memory_format=torch.channels_last) if is_image else drawn

        arguments = self._inputs.batch(batch_size, make)
        self._step = self._kind.step(self._module, self._parameters, self._device.type, arguments)
        self._step()
        held = self.peak_bytes
        if held is not None and held > self._memory_limit:
            raise OutOfMemory(f"a step of batch size {batch_size}", held, self._memory_limit)

    def step(self) -> None:
        """Do a step: on a GPU it is enqueued."""
        if self._step is not None:
            self._step()

    def release(self) -> None:
        """Let go of the batch, the gradients and the optimiser's state."""
        import torch

        self._step = None
        for parameter in self._parameters:
            parameter.grad = None
        gc.collect()
        if self._device.type == "cuda":
            with contextlib.suppress(Exception):  # after a failed GPU every call fails; whoever asked already knows
                torch.cuda.empty_cache()

    def close(self) -> None:
        """Let go of everything."""
        self.release()

"""Workloads of the benchmark of repeatability: how the tuner is called, and how a step is run without it."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

import cubatch as cb
from cubatch.hardware import host
from cubatch.measure.network_runner import network_runner

now = time.perf_counter


class Stepper(Protocol):
    """A workload that can run steps."""

    def prepare(self, batch_size: int) -> None: ...
    def step(self) -> object: ...


class ModuleStepper:
    """Steps of a PyTorch module on random images, in plain PyTorch."""

    def __init__(self, module: Any, shape: Sequence[int], mode: str) -> None:
        import torch

        self.torch, self.module, self.shape = torch, module.train(mode == "training"), shape
        self.step = self._train if mode == "training" else self._infer
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.0)

    def prepare(self, batch_size: int) -> None:
        self.batch = None  # free the old batch first
        self.batch = self.torch.randn(batch_size, *self.shape)

    def _infer(self) -> None:
        with self.torch.inference_mode():
            self.module(self.batch)

    def _train(self) -> None:
        loss = self.module(self.batch).square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


@attrs.frozen(kw_only=True)
class Workload:
    """
    A command of a user and the steps that it times.

    Attributes:
        mode: "training" or "inference".
        tune: Runs the tuner within a budget in seconds and returns its result.
        build: Returns a new stepper.
        max_batch_size: Maximum given to the tuner; None for none.
    """

    mode: str
    tune: Callable[[float], Any]
    build: Callable[[], Stepper]
    max_batch_size: int | None = None


def network(model: str, mode: str, **options: Any) -> Workload:
    """Return the workload of a network on the engine of cubatch."""

    def tune(budget: float) -> Any:
        spec = cb.models.build(model, **options) if options else model
        return cb.autotune(spec, device="cpu", mode=mode, budget=budget, store=False)

    def build() -> Stepper:
        return network_runner(
            spec=cb.models.build(model, **options).to_mapping(), device="cpu", mode=mode, dtype="float32",
            optimizer="sgd", library="im2col", recompute=False, seed=0,
        )  # fmt: skip

    return Workload(mode=mode, tune=tune, build=build)


def torchvision_module(model: str, mode: str, side: int) -> Workload:
    """Return the workload of a torchvision model without weights on square images."""
    shape, largest = (3, side, side), 512

    def module() -> Any:
        import torch

        from benchmarks.modules import zoo

        torch.manual_seed(0)
        return getattr(zoo.torchvision_package().models, model)(weights=None)

    def tune(budget: float) -> Any:
        return cb.autotune_module(
            module(), shape, device="cpu", mode=mode, max_batch_size=largest, budget=budget, store=False
        )

    return Workload(
        mode=mode, tune=tune, build=lambda: ModuleStepper(module(), shape, mode), max_batch_size=largest,
    )  # fmt: skip


WORKLOADS: dict[str, Workload] = {
    "mnist-cnn": network("mnist-cnn", "training"),
    "resnet18-32": network("resnet18", "training", input_shape=(32, 32, 3), classes=10),
    "mobilenet-v3-large": network("mobilenet-v3-large", "inference"),
    "torchvision-resnet18": torchvision_module("resnet18", "training", 64),
    "torchvision-mobilenet_v2": torchvision_module("mobilenet_v2", "inference", 96),
}


def block_seconds(stepper: Stepper, steps: int) -> float:
    """Return the mean seconds of a step over a block of steps."""
    began = now()
    for _ in range(steps):
        stepper.step()
    return (now() - began) / steps


def bound_memory() -> None:
    """Bound the address space of this process, so that a size without memory raises MemoryError."""
    available, (_, hard) = host.available_memory_bytes(), resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if available and statm.exists():
        held = int(statm.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + int(0.9 * available), hard))

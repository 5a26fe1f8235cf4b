"""A PyTorch module to be tuned: what it is, what its steps take, and a runner of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

from cubatch.errors import InvalidArgument, MissingDependency
from cubatch.frameworks import module_source, torch_memory
from cubatch.frameworks.module_runner import ModuleRunner
from cubatch.frameworks.torch_inputs import Inputs
from cubatch.frameworks.torch_memory import Peaks
from cubatch.frameworks.torch_state import SavedState
from cubatch.frameworks.torch_step import AUTOCAST, OPTIMIZERS, StepKind
from cubatch.hardware import probe
from cubatch.hardware.facts import Device
from cubatch.network.importers.torch_export import check_initialized

MODES = ("inference", "training")


class TorchModule:
    """
    A module, made ready to be stepped; used with `with`, after which the module is as it was.

    Args:
        module: A torch.nn.Module.
        example_inputs, mode, loss, optimizer, autocast, channels_last, compiled: As for `autotune_module`, where
            the last is `compile`.

    Raises:
        InvalidArgument: If one of them makes no sense.
        MissingDependency: If PyTorch is not installed.
    """

    def __init__(
        self, module: Any, example_inputs: Any, *, mode: str, loss: Callable[[Any], Any] | str | None,
        optimizer: str | Callable[[Iterable[Any]], Any], autocast: str | None, channels_last: bool, compiled: bool,
    ) -> None:  # fmt: skip
        torch = _torch()
        if not isinstance(module, torch.nn.Module):
            raise InvalidArgument(
                "module",
                module,
                "a torch.nn.Module, or 'package.module:build'",
                "Hand other steps to autotune_callable().",
            )
        check_kind(mode, loss, optimizer, autocast)
        check_initialized(module)
        self._module, self._channels_last, self._compiled = module, channels_last, compiled
        self._kind = StepKind(
            training=mode == "training",
            loss=_function(loss, "loss"),
            optimizer=_function(optimizer, "optimizer"),
            autocast=autocast,
        )
        first = next((p for p in [*module.parameters(), *module.buffers()] if p.is_floating_point()), None)
        self._place = torch.device("cpu") if first is None else first.device
        self._dtype = torch.float32 if first is None else first.dtype
        self._inputs = Inputs.of(example_inputs, self._dtype)
        self._saved = SavedState(module, training=self._kind.training)
        self._called: Callable[..., Any] = module
        is_wrapped = isinstance(module, torch.nn.parallel.DistributedDataParallel)
        self._bare = module.module if is_wrapped else module

    @property
    def name(self) -> str:
        """Its class, or that of what DistributedDataParallel has wrapped."""
        return type(self._bare).__name__

    @property
    def dtype(self) -> str:
        """What it computes with: that of autocast, else that of its parameters."""
        return self._kind.autocast or str(self._dtype).removeprefix("torch.")

    @property
    def device(self) -> Device:
        """
        Where its parameters are.

        Raises:
            InvalidArgument: If that is neither the CPU nor a GPU of NVIDIA's.
        """
        if self._place.type not in {"cpu", "cuda"}:
            raise InvalidArgument("module", f"on {self._place}", "on the CPU or an NVIDIA GPU: module.to('cuda')")
        return probe.resolve("cpu" if self._place.type == "cpu" else f"cuda:{self._place.index or 0}")

    def __enter__(self) -> Self:
        self._saved.__enter__()
        try:
            self.ready()
        except BaseException:
            self._saved.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._saved.__exit__()

    def ready(self) -> Self:
        """Make it ready to be stepped, for good."""
        torch = _torch()
        self._module.train(self._kind.training)
        if self._channels_last:
            self._module.to(memory_format=torch.channels_last)
        if self._compiled:  # once for all batch sizes
            self._called = torch.compile(self._module, dynamic=True)
        return self

    def peaks(self, num_bytes: int, top: int | None = None) -> Peaks:
        """
        Say what its steps take, by walking through them on fake tensors: see `torch_memory.peaks`.

        Raises:
            NotImplementedError: If parameters are sharded: a walk would wait for what other ranks send.
            Exception: Whatever a step raises on fake tensors.
        """
        if any(hasattr(parameter, "to_local") for parameter in self._module.parameters()):
            raise NotImplementedError("its parameters are sharded over ranks, as FSDP does")
        return torch_memory.peaks(self._bare, self._inputs, self._kind, num_bytes, top)

    def runner(self, memory_limit: int, seed: int) -> ModuleRunner:
        """Give a runner of its steps."""
        return ModuleRunner(
            self._called, list(self._module.parameters()), list(self._module.buffers()), self._inputs, self._kind,
            self._place, self.peaks, memory_limit, seed, channels_last=self._channels_last, dtype=self.dtype,
            bare=None if self._bare is self._module else self._bare,
        )  # fmt: skip


def check_kind(mode: str, loss: object, optimizer: object, autocast: str | None) -> None:
    """
    Refuse what makes no sense of how a module is to be stepped; functions may be named, "package.module:function".

    Raises:
        InvalidArgument: If one of them makes no sense.
    """
    if mode not in MODES:
        raise InvalidArgument("mode", mode, " or ".join(map(repr, MODES)))
    if loss is not None and not callable(loss) and not _is_name(loss):
        allowed = "a function from the module's output to a scalar, its name ('package.module:function'), or None"
        raise InvalidArgument("loss", loss, allowed)
    if loss is not None and mode == "inference":
        raise InvalidArgument("loss", loss, "left out in inference, which has none", "Or tune with mode='training'.")
    if not (callable(optimizer) or _is_name(optimizer) or (isinstance(optimizer, str) and optimizer in OPTIMIZERS)):
        raise InvalidArgument(
            "optimizer", optimizer, f"one of {', '.join(OPTIMIZERS)}, or a function of parameters or its name"
        )
    if autocast is not None and autocast not in AUTOCAST:
        raise InvalidArgument("autocast", autocast, f"one of {', '.join(AUTOCAST)}, or None")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and ":" in value


def _function(value: Any, field: str) -> Any:
    return module_source.load(value, field) if _is_name(value) else value


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependency("PyTorch", "autotune_module", "torch") from error
    return torch

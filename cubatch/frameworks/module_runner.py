"""The runner of a PyTorch module: random batches, steps, and a memory limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from cubatch.frameworks.bounded_runner import BoundedRunner
from cubatch.frameworks.lazy_torch import torch
from cubatch.frameworks.memory_meter import AllocatorMeter, HostMeter, Meter
from cubatch.frameworks.torch_compile import compiled_only, num_graphs
from cubatch.frameworks.torch_inputs import Call, Inputs, arrays_at, random_like, tensors_at
from cubatch.frameworks.torch_memory import Peaks, num_bytes
from cubatch.frameworks.torch_state import StartState
from cubatch.frameworks.torch_step import StepKind
from cubatch.measure import clocks
from cubatch.measure.runner import Remark
from cubatch.units import join_words

_MOST_COMPILATIONS = 2  # one for a batch of 1, one for all others


class ModuleRunner(BoundedRunner):
    """
    Steps of a module on random inputs.

    Args:
        module: The module, compiled or not.
        parameters, buffers: Tensors of the module.
        inputs: An example of its inputs.
        kind: The operations of a step.
        device: PyTorch's device.
        walk: Gets bytes, a maximum batch size or None, and seconds. Traces steps without data, up to the largest batch
            that fits into the bytes.
        put_aside: Backs up the parameters that a step modifies; all of them without a trace (None). Gets the trace and
            the memory limit in bytes; returns the bytes that are left.
        memory_limit: Bytes that the module, a batch and its step may take together.
        seed: Seed of the random inputs.
        channels_last: Whether images and volumes have PyTorch's channels_last memory format.
        dtype: Name of the type that steps compute in, such as "float32".
        bare: The module without DistributedDataParallel; None is the module itself.
        start: The state of the module from which each batch size starts; None restores nothing.
        meter: Measures the memory of a step; None is that of the device.
    """

    def __init__(
        self, module: Callable[..., Any], parameters: list[Any], buffers: list[Any], inputs: Inputs, kind: StepKind,
        *, device: Any, walk: Callable[[int, int | None, float], Peaks], put_aside: Callable[[Peaks | None, int], int],
        memory_limit: int, seed: int, channels_last: bool, dtype: str, bare: Callable[..., Any] | None = None,
        meter: Meter | None = None, start: StartState | None = None,
    ) -> None:  # fmt: skip
        is_cuda = device.type == "cuda"
        super().__init__(
            clocks.torch_clock(device.index or 0) if is_cuda else clocks.HostClock(),
            meter or (AllocatorMeter(torch.cuda, device) if is_cuda else HostMeter()),
            memory_limit, dtype, num_bytes([*parameters, *buffers]),
        )  # fmt: skip
        self._module, self._parameters, self._inputs, self._kind = module, parameters, inputs.on(device), kind
        self._device, self._seed, self._channels_last = device, seed, channels_last
        self.num_samples, self.sizes, self.multiple = inputs.num_samples, inputs.sizes, inputs.multiple
        self._scaler = kind.scaler(device.type)
        self._walk_of, self._put_aside, self._is_cuda, self._is_loaded = walk, put_aside, is_cuda, False
        self._time_first: tuple[str, ...] = ()
        self._guessed: frozenset[str] = frozenset()
        self._bare: Any = module if bare is None else bare
        self.is_compiled = hasattr(module, "_orig_mod")
        self.compile_seconds = 0.0
        self._compiled: dict[int, float] = {}
        self._start, self._scales = start, True
        self._rowless: tuple[int, ...] = ()
        self._traced_size = 0
        self._arguments: Any = None
        self._bind: Callable[[Callable[..., Any]], Callable[[], None]] | None = None

    @property
    def remarks(self) -> list[Remark]:
        """Return remarks on memory, compilation, parts in evaluation mode, state, inputs, and a batch read as time."""
        remarks = super().remarks
        remarks += getattr(self._bare, "cubatch_remarks", ())  # of the loop around the step, by an integration
        parts = self._bare.named_modules() if self._kind.training else ()
        if resting := [name for name, part in parts if not part.training]:
            remarks.append(Remark(code="evaluation_mode", values={"first": resting[0], "count": len(resting)}))
        if self._kind.training and self._kind.loss is None and self._inputs.call.targets:
            remarks.append(Remark(code="targets_unused", values={}))
        remarks += self._inputs.remarks(self._kind.written)
        if not self._scales:
            remarks.append(Remark(code="step_does_not_grow", values={}))
        elif len(self._rowless) > self._kind.training:  # in training a single axis may hold several losses
            values = {"shape": str(self._rowless), "count": self._traced_size}
            remarks.append(Remark(code="output_stays", values=values))
        if self._inputs.is_uneven:
            remarks.append(Remark(code="uneven_samples", values={}))
        if self._guessed:
            remarks.append(Remark(code="data_dependent", values={"operators": ", ".join(sorted(self._guessed))}))
        if self._start is not None and (names := self._start.unrestored()):
            remarks.append(Remark(code="state_remains", values={"attributes": join_words(names)}))
        if self._time_first:
            values = {"first": self._time_first[0], "count": len(self._time_first)}
            remarks.append(Remark(code="batch_as_time", values=values))
        if self._compiled:
            values = {"count": len(self._compiled), "compile_seconds": sum(self._compiled.values())}
            is_each = len(self._compiled) > _MOST_COMPILATIONS
            remarks.append(
                Remark(code="compiled_for_each_size", values=values)
                if is_each
                else Remark(code="compiled", values=values)
            )
        return remarks

    def prepare(self, batch_size: int) -> float | None:
        """
        Draw a batch and run a first step; return its seconds, never None; set `compile_seconds` to those of compiling.

        InvalidArgument is raised if PyTorch reached its recompile limit and would run the step uncompiled.
        """
        if not self.is_compiled:
            return super().prepare(batch_size)
        self.forget_compiling()
        with self.compiling():
            first = super().prepare(batch_size)
        if self.compile_seconds:
            began = time.monotonic()
            self.clock.time(self.step, 1)
            self.note_compiling(batch_size, self.compile_seconds - (time.monotonic() - began))
        return first

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """
        Add the seconds of the block to `compile_seconds` if a graph was compiled in it.

        Raises:
            InvalidArgument: If PyTorch reached its recompile limit and would run a step uncompiled.
        """
        if not self.is_compiled:
            yield
            return
        before, began = num_graphs(), time.monotonic()
        try:
            with compiled_only():
                yield
        finally:
            if num_graphs() > before:
                self.compile_seconds += time.monotonic() - began

    def forget_compiling(self) -> None:
        """Set `compile_seconds` to 0."""
        self.compile_seconds = 0.0

    def note_compiling(self, batch_size: int, seconds: float) -> None:
        """Record the seconds of compiling for a batch size, also as `compile_seconds`; negative ones count as 0."""
        self.compile_seconds = self._compiled[batch_size] = max(0.0, seconds)

    def walk(self, num_bytes: int, top: int | None, seconds: float) -> Peaks:
        """
        Return peak bytes of traced steps by batch size, up to the largest that fits into `num_bytes`, or `top`.

        `top` None: no maximum.
        """
        peaks = self._walk_of(num_bytes, top, seconds)
        self._time_first, self._guessed = peaks.time_first, peaks.guessed
        return peaks

    def put_aside(self, walked: Peaks | None) -> int:
        """Back up the parameters that a step modifies, or all without a trace (None); return the bytes left for it."""
        if walked is not None:
            self._inputs, self._scales = self._inputs.held(walked.constant), walked.scales is not False
            self._rowless, self._traced_size = walked.rowless, max(walked.known)
            self._kind = attrs.evolve(self._kind, written=walked.written_inputs)
        return self._put_aside(walked, self._memory_limit)

    def _reference_step(self, prepared: Callable[[], None]) -> Callable[[], object]:  # noqa: ARG002 - of the same batch
        """Return a function that runs the step on the prepared batch with plain SGD, which holds no optimizer state."""
        return attrs.evolve(self._kind, optimizer="sgd").step(
            self._module, self._parameters, self._device.type, self._arguments
        )

    def hold_reference(self, repeats: int) -> bool:
        """
        Keep the prepared step as the reference step; return whether that is possible.

        In addition to the cases of `BoundedRunner`, it is impossible if the module keeps the batch between steps.
        """
        kept_names = self._start.kept_batches(self._batch_size) if self._start is not None else ()
        return not kept_names and super().hold_reference(repeats)

    def loop_step(self, batch_size: int, loader: Any) -> Callable[[Any], object]:
        """
        Prepare a batch size; return a function that runs a step in a loop with a data loader, on a batch of the loader.

        If the loader does not make the module's batches, the step runs on the prepared batch, whose data may still be
        in the caches.
        """
        self.draw(batch_size)
        if not self._inputs.come_from(loader):
            return lambda _: self.step()
        optimizers: list[Any] = []

        def make_optimizer(parameters: Any) -> Any:
            optimizers[:] = optimizers or [self._kind.make_optimizer(list(parameters))]
            return optimizers[0]

        def step(batch: Any) -> None:
            arguments = self._inputs.moved(batch, self._placed)
            kind.step(self._module, self._parameters, self._device.type, arguments, self._scaler)()

        kind = attrs.evolve(self._kind, optimizer=make_optimizer)
        return step

    def _placed(self, tensor: Any) -> Any:
        moved = tensor.to(self._device)
        return channels_last(moved) if self._channels_last else moved

    def rehearse(self) -> None:
        """Run a step of this rank alone: a step that fails in a collective operation would keep other ranks waiting."""
        if self._bind is not None:
            self._bind(self._bare)()
            self._drop_gradients()

    def _make(self, batch_size: int) -> tuple[Callable[[], None], int]:
        if self._scaler is not None:  # another, since a step that failed leaves it half done
            self._scaler = self._kind.scaler(self._device.type, self._scaler.get_scale())
        if self._start is not None:
            self._start.restore()
        draw = random_like(torch.Generator().manual_seed(self._seed), self._device)
        batch: list[Any] = []

        def placed(tensor: Any) -> Any:
            batch.append(channels_last(tensor) if self._channels_last else tensor)
            return batch[-1]

        def drawn() -> Call:
            batch.clear()
            return self._inputs.drawn(
                batch_size,
                lambda tensor, shape: placed(draw(tensor, shape)),
                lambda tensor: placed(tensor.to(self._device)),
            )

        arguments = drawn()
        if not self._is_loaded:  # the very first step loads code and allocates workspaces that stay
            has_written = self._load(arguments)
            arguments = drawn() if has_written else arguments
            self._is_loaded = True

        def bound(module: Callable[..., Any]) -> Callable[[], None]:
            return self._kind.step(module, self._parameters, self._device.type, arguments, self._scaler)

        self.meter.start()
        self._bind, self._arguments = bound, arguments
        return bound(self._module), num_bytes(batch)

    def _load(self, arguments: Call) -> bool:
        """
        Run the very first step; return whether it wrote to inputs, of which later steps get copies.

        Most of these are known from the trace. Inputs that are the same in every batch may be the user's own tensors:
        they are copied for this step.
        """
        copies = self._inputs.with_copies(arguments)
        tensors = [(path, each, each._version) for path, each in tensors_at(copies) if not each.is_inference()]  # noqa: SLF001
        self.meter.start()
        self._kind.step(self._bare, self._parameters, self._device.type, copies, self._scaler)()
        self._drop_gradients()
        written = {path for path, tensor, version in tensors if tensor._version != version}  # noqa: SLF001
        before = {path: array.tobytes() for path, array in arrays_at(arguments).items()}
        written |= {path for path, array in arrays_at(copies).items() if array.tobytes() != before[path]}
        self._kind = attrs.evolve(self._kind, written=self._kind.written | written)
        return bool(written)

    def _drop(self) -> None:
        self._bind = self._arguments = None
        self._drop_gradients()
        if self._is_cuda:
            with contextlib.suppress(Exception):  # after a GPU error every call fails
                torch.cuda.empty_cache()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def channels_last(tensor: Any) -> Any:
    """
    Return a tensor of four or five axes in PyTorch's channels_last memory format, its shape unchanged.

    Any other tensor is returned as it is.
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.ndim not in formats or tensor.layout != torch.strided:
        return tensor
    return tensor.contiguous(memory_format=formats[tensor.ndim])

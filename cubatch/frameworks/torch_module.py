"""A PyTorch module to be tuned: its name and device, the memory of its steps, and their runner."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import attrs

from cubatch.checks import MAX_BATCH_SIZE, check_optimizer
from cubatch.choices import ModuleOptimizer
from cubatch.errors import CubatchError, InvalidArgument
from cubatch.estimate.operators import Operator
from cubatch.frameworks import garbage, module_footprint, module_source, optimizers, torch_memory
from cubatch.frameworks.attributes import kept_attributes
from cubatch.frameworks.batch_sources import INPUTS
from cubatch.frameworks.data_dependent import NUMBER
from cubatch.frameworks.lazy_torch import torch
from cubatch.frameworks.module_footprint import ModuleFootprint
from cubatch.frameworks.module_runner import ModuleRunner, channels_last
from cubatch.frameworks.torch_compile import check_graphs
from cubatch.frameworks.torch_inputs import DRAWN_SIZES, FURTHER_SIZES, Inputs
from cubatch.frameworks.torch_memory import Opaque, Peaks, Walk
from cubatch.frameworks.torch_state import SavedState, StartState, trained, with_loss
from cubatch.frameworks.torch_step import AUTOCAST, OPTIMIZERS, StepKind
from cubatch.hardware import memory_limit as hardware_memory, probe
from cubatch.hardware.facts import Device
from cubatch.network.importers.torch_export import check_initialized
from cubatch.units import first_line
from cubatch.user_code import takes
from cubatch.workload import common_divisor

MODES = ("inference", "training")
_FIRST_SIZES = 2, 16  # traced first for the largest batch that fits, where a line through them meets the limit
_MOST_REFUSED = 3  # sizes whose traces raise errors before one ends


class TorchModule:
    """
    A PyTorch module whose steps are timed and traced; as a context manager it restores the module at the end.

    Args:
        module: The torch.nn.Module.
        batches, mode, loss, optimizer, autocast, channels_last, accumulate, constant_inputs, compiled: As for
            `autotune_module`, where the last is `compile`.
        sizes: Batch sizes at which a function that makes batches is called.
        place: PyTorch's name of the device of a module without tensors; None is the device of the example.
        opaque: As for `cubatch.footprint`.
        records: Whether traces record the operators of a step, for a prediction of time.

    Attributes:
        on_trace: Called with the batch size before each trace that is not cached.

    Raises:
        InvalidArgument: If an argument is invalid.
        MissingDependency: If PyTorch is not installed.
    """

    def __init__(
        self, module: Any, batches: Any, *, mode: str, loss: Callable[..., Any] | str | None = None,
        optimizer: ModuleOptimizer = "sgd", autocast: str | None = None,
        channels_last: bool = False, compiled: bool = False, accumulate: int = 1,
        constant_inputs: Sequence[str | int] = (), sizes: Sequence[int] = DRAWN_SIZES, place: str | None = None,
        opaque: Mapping[str, Opaque] | None = None, records: bool = False,
    ) -> None:  # fmt: skip
        check_module(module)
        check_kind(mode, loss, optimizer, autocast)
        check_initialized(module)
        _check_open(module)
        self._module, self._channels_last, self._compiled = module, channels_last, compiled
        used_loss = _function(loss, "loss")
        self._kind = StepKind(
            training=mode == "training",
            loss=used_loss,
            optimizer=optimizers.maker(_function(optimizer, "optimizer"), trained(module, used_loss)),
            autocast=autocast,
            accumulate=accumulate,
        )
        tensors = [*module.parameters(), *module.buffers()]
        self._dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
        self._bare, self._exchange = _unwrapped(module)
        self._opaque = _checked_opaque(opaque or {}, self._bare)
        inputs = Inputs.of(
            batches, self._dtype, module=self._bare, loss=self._kind.loss, constant=constant_inputs, sizes=sizes
        )
        self._place = _place(tensors) or (inputs.device if place is None else torch.device(place))
        if self._place.type == "cuda":
            check_graphs(module)
        # On "meta" PyTorch has other operators of attention and LSTM, and no autocast.
        self._traced_place = torch.device("cpu") if self._place.type == "meta" else self._place
        self._inputs = inputs.on(self._traced_place)
        self._start: StartState | None = None
        self._stepped = with_loss(module, self._kind.loss)
        self._saved = SavedState(self._stepped, training=self._kind.training)
        self._called: Callable[..., Any] = module
        self._records, self._walks = records, dict[tuple[int, bool], Walk]()
        self._first_sizes: Sequence[int] = _FIRST_SIZES
        self.on_trace: Callable[[int], object] = lambda _: None

    @property
    def name(self) -> str:
        """Class name of the module without the wrappers of torch.compile and DistributedDataParallel."""
        return type(self._bare).__name__

    @property
    def dtype(self) -> str:
        """Type of autocast, else of the first floating-point parameter or buffer, as "float32"."""
        return self._kind.autocast or str(self._dtype).removeprefix("torch.")

    @property
    def device(self) -> Device:
        """
        The device of the module's parameters.

        Raises:
            InvalidArgument: If the parameters are neither on the CPU nor on an NVIDIA GPU.
        """
        if self._place.type not in {"cpu", "cuda"}:
            raise InvalidArgument("module", f"on {self._place}", "on the CPU or an NVIDIA GPU: module.to('cuda')")
        return probe.resolve("cpu" if self._place.type == "cpu" else f"cuda:{self._place.index or 0}")

    @property
    def held_bytes(self) -> int:
        """Bytes of the module's parameters and buffers, and on a GPU of unused blocks in PyTorch's allocator."""
        own = torch_memory.num_bytes([*self._module.parameters(), *self._module.buffers()])
        if self._place.type != "cuda":
            return own
        reserved, allocated = torch.cuda.memory_reserved(self._place), torch.cuda.memory_allocated(self._place)
        return own + max(0, int(reserved) - int(allocated))

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undone:
            if self._place.type == "cuda":
                undone.callback(torch.cuda.set_device, torch.cuda.current_device())
            undone.enter_context(self._saved)
            self.ready()
            undone.callback(garbage.freeze_objects())
            self._undone = undone.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undone.close()

    def ready(self) -> Self:
        """Prepare the module for steps, without a backup that restores it; return this object."""
        if self._place.type == "cuda":  # whose stream is timed, and where a kernel of a user's is launched
            torch.cuda.set_device(self._place)
        if not (self._kind.training and self._bare.training):  # parts that are kept from training stay so
            self._set_mode()
        if self._channels_last:
            for tensor in (*self._module.parameters(), *self._module.buffers()):
                tensor.data = channels_last(tensor.data)
        if self._compiled:  # once for all batch sizes
            self._called = torch.compile(self._module, dynamic=True)
        changes = self._kind.training and not isinstance(self._kind.optimizer, str)
        self._start = StartState(with_loss(self._bare, self._kind.loss), parameters=changes)
        return self

    def _set_mode(self) -> None:
        """Set the module's training or evaluation mode; reject training of an exported module, whose mode is fixed."""
        try:
            self._module.train(self._kind.training)
        except NotImplementedError as error:
            if self._kind.training:
                allowed = "inference for a module of torch.export, which has no training mode"
                remedy = "Tune the module that was exported."
                raise InvalidArgument("mode", "training", allowed, remedy) from error

    def peaks(self, num_bytes: int, top: int | None = None, seconds: float = math.inf) -> Peaks:
        """
        Return peak bytes of steps by batch size, up to the largest size within `num_bytes`.

        `top` is the largest size of interest (None: no maximum), `seconds` the limit of CPU time. See
        `torch_memory.peaks`.

        Raises:
            NotImplementedError: If parameters are sharded: a trace would wait for other ranks. If PyTorch is older
                than 2.6 and parts are compiled: they would run eagerly from then on.
            Exception: Raised by a step on fake tensors.
        """
        _check_walkable(self._bare)
        return torch_memory.peaks_of(
            self._bare, self._inputs, self._kind, self._traced_place, num_bytes, top=top, seconds=seconds
        )

    def walk(self, batch_size: int, *, on_gpu: bool = False) -> Walk:
        """
        Return the trace of a step of a batch size on fake tensors; it is cached, and the module is restored.

        `on_gpu` is whether optimizers step as PyTorch's do on a GPU.

        Raises:
            NotImplementedError: As `peaks`.
            InvalidArgument: If a step cannot be traced on tensors without data.
        """
        walked = self._walks.get((batch_size, on_gpu))
        if walked is None:
            _check_walkable(self._bare)
            self.on_trace(batch_size)
            kind = attrs.evolve(
                self._kind, foreach=on_gpu, consumes_inputs=not self._kind.training, exchange=self._exchange
            )
            trace = functools.partial(
                torch_memory.walked, self._bare, self._inputs, kind, self._traced_place, batch_size, deadline=math.inf,
                records=self._records, opaque=self._opaque,
            )  # fmt: skip
            try:
                with self._in_mode():
                    walked = trace()
                    is_sure = NUMBER not in walked.guessed or trace(number=2).elements == walked.elements
            except CubatchError:
                raise
            except Exception as error:
                raise self._untraceable(error) from error
            if not is_sure:
                given = f"{self.name}, in which numbers that depend on data decide how large tensors are"
                allowed = "one whose memory depends on the shapes of its inputs"
                remedy = "Replace the submodule that reads them with opaque={name: function}, or measure its steps."
                raise InvalidArgument("module", given, allowed, remedy)
            self._walks[batch_size, on_gpu] = walked
        return walked

    def _untraceable(self, error: Exception) -> InvalidArgument:
        """Return an error for the user in place of a trace's, with the submodule that `opaque` may replace."""
        allowed = f"one whose {MODES[self._kind.training]} step can be traced on tensors without data"
        if isinstance(error, torch_memory.TraceTooLong):
            given = f"{self.name}, in which data decide when a loop ends, as in generate()"
            page = '"Text generation" in docs/how-to/pytorch.md'
            remedy = f"Write the loop with a fixed number of rounds, in a module around the model: see {page}."
            return InvalidArgument("module", given, allowed, remedy)
        where = "in footprint(), max_batch_size() or predict()"
        if (operation := getattr(error, "func", None)) is not None:  # PyTorch's errors of tensors without data have it
            name = torch_memory.name_of(operation)
            given = f"{self.name}, which calls {name}: it has no kernel for tensors without data"
            remedy = f"Use torch.library.register_fake, or opaque={{{name!r}: function}} {where}."
            return InvalidArgument("module", given, allowed, remedy)
        names = {id(part): name for name, part in self._bare.named_modules() if name}
        owners = [id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__)]
        remedy = f"It raised {first_line(error)}." + f" {INPUTS}" * (self._inputs.source is None)
        if name := next((names[owner] for owner in reversed(owners) if owner in names), ""):
            remedy += f" If submodule {name} reads data, replace it with opaque={{{name!r}: function}} {where}."
        return InvalidArgument("module", self.name, allowed, remedy)

    def operators(self, largest: int) -> dict[int, Sequence[Operator]]:
        """
        Return the operators of traced steps by batch size: those of 2, 16 and `largest` that are at most `largest`.

        If the module does not take 2 or 16, others replace them, which the method `largest` traced. Without `records`
        the sequences of operators are empty.

        Raises:
            NotImplementedError, InvalidArgument: As `walk`.
        """
        sizes = sorted({min(size, largest) for size in (*self._first_sizes, largest)})
        return {size: self.walk(size).operators for size in sizes}

    def peak_bytes(self, batch_size: int) -> int:
        """Return the peak bytes of a step from at least two earlier traces; an upper bound between their sizes."""
        return Peaks({size: walk.peak_bytes for (size, _), walk in self._walks.items()}).at(batch_size)

    def footprint(self, batch_size: int, device: Device | None = None) -> ModuleFootprint:
        """
        Return the memory of a step of a batch size by part, from a trace.

        Args:
            batch_size: Samples of the batch.
            device: A GPU, whose allocator and context are then included; the CPU has neither. None: the module's
                device.

        Raises:
            NotImplementedError, InvalidArgument: As `walk`.
        """
        gpu = self._gpu(device)
        mode = MODES[self._kind.training]
        layers = self._module.named_modules()
        recurrent = tuple(name or self.name for name, layer in layers if isinstance(layer, torch.nn.RNNBase))
        walk = self.walk(batch_size, on_gpu=gpu is not None)
        return ModuleFootprint.of(self.name, mode, batch_size, walk, gpu, recurrent=recurrent)

    def _gpu(self, device: Device | None) -> Device | None:
        """Return the GPU on which steps are to run, by default that of the module; None for a CPU."""
        if device is None and self._place.type == "cuda":
            device = self.device
        return None if device is None or device.kind == "cpu" else device

    def largest(self, num_bytes: int, device: Device | None = None) -> int:
        """
        Return a batch size whose footprint on a device is at most `num_bytes`, while that of the next size is more.

        It is 0 if the smallest size takes more. If memory falls from one size to the next, several sizes qualify. Where
        the module takes multiples of a number only, that is learned from the sizes that raise errors.

        `device` is as for `footprint`, None included.

        Raises:
            NotImplementedError, InvalidArgument: As `walk`.
        """
        gpu = self._gpu(device)

        def traced(size: int) -> int:
            return self.footprint(size, device).total

        def linear(size: int) -> int:
            """Return the bytes of a step if all its storages grow linearly with the batch, as in most modules."""
            grown = (
                (few + (many - few) * (size - low) // (high - low), begin, end)
                for (few, begin, end), (many, *_) in zip(*lives, strict=True)
            )
            return module_footprint.total_bytes(grown, gpu)

        known = _first_known(traced)
        low, high = self._first_sizes = sorted(known)
        lives = [self.walk(size, on_gpu=gpu is not None).lives for size in (low, high)]
        times = [[life[1:] for life in each] for each in lives]
        guess = _largest(linear, num_bytes, known) if times[0] == times[1] else 0
        # The operations may be others at these sizes.
        return _largest(traced, num_bytes, known, [guess, guess + 1] if guess else [])

    @property
    def least_size(self) -> int:
        """The smallest batch size that was traced."""
        return min(size for size, _ in self._walks)

    @contextlib.contextmanager
    def _in_mode(self) -> Iterator[None]:
        with kept_attributes(self._module):
            if not (self._kind.training and self._bare.training):
                self._set_mode()
            yield

    def put_aside(self, walked: Peaks | None, limit: int) -> int:
        """
        Back up the parameters that a traced step modifies in place; all of them without a trace (`walked` None).

        Returns:
            int: Bytes that are left for a step next to the copy, at most `limit`. Ranks on a CPU share the free memory.
        """
        parameters = dict(self._bare.named_parameters())
        names: Iterable[str] = parameters if walked is None or walked.guessed else walked.written
        has_copied = self._saved.keep(parameters[name] for name in names)
        if not has_copied or self._place.type != "cpu":  # a GPU keeps its memory limit
            return limit
        from torch import distributed

        has_others = distributed.is_available() and distributed.is_initialized()
        ranks = distributed.get_world_size() if has_others else 1
        return min(limit, hardware_memory.memory_limit(self.device).bytes // ranks + self.held_bytes)

    def runner(self, memory_limit: int, seed: int) -> ModuleRunner:
        """Return a runner of the module's steps within `memory_limit` bytes; `seed` is that of the random inputs."""
        return ModuleRunner(
            self._called, trained(self._module, self._kind.loss), list(self._stepped.buffers()), self._inputs,
            self._kind,
            device=self._place, walk=self.peaks, put_aside=self.put_aside, memory_limit=memory_limit, seed=seed,
            channels_last=self._channels_last,
            dtype=self.dtype, bare=None if self._exchange is None else self._bare, start=self._start,
        )  # fmt: skip


def _first_known(total: Callable[[int], int]) -> dict[int, int]:
    """Return `total` at 2 and 16, or after an error there at other sizes, two altogether."""
    known, refused = dict[int, int](), list[InvalidArgument]()
    for size in (*_FIRST_SIZES, *reversed(FURTHER_SIZES)):
        try:
            known[size] = total(size)
        except InvalidArgument as error:
            refused.append(error)
        if len(known) == len(_FIRST_SIZES):
            return known
        if refused and (not _is_of_size(refused[-1]) or (len(refused) == _MOST_REFUSED and not known)):
            break
    raise refused[0]


def _is_of_size(error: InvalidArgument) -> bool:
    """Return whether the error of a trace may concern its batch size: others are raised at all sizes."""
    cause = error.__cause__
    return cause is not None and not isinstance(cause, torch_memory.TraceTooLong) and not hasattr(cause, "func")


def _largest(
    total: Callable[[int], int], num_bytes: int, known: Mapping[int, int], guesses: Sequence[int] = ()
) -> int:  # fmt: skip
    """
    Return a size with `total(size)` at most `num_bytes`, but not `total(size + 1)`; 0 if `total(1)` is more.

    `known` has some of the values of `total`, and `guesses` are tried first. Where `total` raises errors for all sizes
    but multiples of a number, the next multiple counts in place of the next size.
    """
    known, refused, multiple, waiting = dict(known), list[int](), 1, list(guesses)
    for trial in itertools.count(-len(waiting)):
        fits = max((size for size, taken in known.items() if taken <= num_bytes), default=0)
        beyond = min((size for size in known if size > fits), default=MAX_BATCH_SIZE + 1)
        least, most = fits // multiple + 1, (beyond - 1) // multiple
        if least > most:
            break
        # A line meets the limit at once where memory is linear. Segments of an allocator make steps: bisect those.
        guess = (fits + beyond) // 2 if trial % 2 and trial > 1 else Peaks(known).largest(num_bytes)
        guess = waiting.pop(0) if waiting else guess
        size = multiple * min(max(guess // multiple, least), most)
        try:
            known[size] = total(size)
        except InvalidArgument:
            refused.append(size)
            multiple, waiting = common_divisor(known, refused), []
            if multiple == 1:
                raise
    return fits


def check_module(module: Any) -> None:
    """Raise InvalidArgument unless the argument is a torch.nn.Module; MissingDependency without PyTorch."""
    if not isinstance(module, torch.nn.Module):
        is_class = isinstance(module, type) and issubclass(module, torch.nn.Module)
        other = "Hand other steps to autotune_callable()."
        remedy = f"Make an instance: {module.__name__}(...)." if is_class else other
        if type(module).__name__ == "ExportedProgram":
            remedy = "Pass the result of its module()."
        raise InvalidArgument("module", module, "a torch.nn.Module, or 'package.module:build'", remedy)


def check_kind(mode: str, loss: object, optimizer: object, autocast: str | None) -> None:
    """
    Raise an error unless mode, loss, optimizer and autocast are valid; "package.module:function" names a function.

    `autocast` None computes in the types of the parameters.

    Raises:
        InvalidArgument: If one of the arguments is invalid, or inference has a loss or an optimizer.
    """
    if mode not in MODES:
        raise InvalidArgument("mode", mode, " or ".join(map(repr, MODES)))
    if loss is not None and not callable(loss) and not _is_name(loss):
        allowed = "a function from the module's output to a scalar, its name ('package.module:function'), or None"
        remedy = "For example loss=torch.nn.functional.cross_entropy, with batches as (inputs, targets)."
        raise InvalidArgument("loss", loss, allowed, remedy)
    if loss is not None and mode == "inference":
        raise InvalidArgument("loss", loss, "left out in inference, which has none", "Or pass mode='training'.")
    is_own = callable(optimizer) and takes(optimizer, 1, follow_wrapped=False)  # a decorator may add arguments
    is_known = optimizer in OPTIMIZERS if isinstance(optimizer, str) else isinstance(optimizer, torch.optim.Optimizer)
    if not (is_own or is_known or _is_name(optimizer)):
        allowed = f"one of {', '.join(OPTIMIZERS)}, an optimizer of PyTorch, or a function of parameters or its name"
        remedy = f"Pass optimizer=lambda parameters: {type(optimizer).__name__}(...)." * hasattr(optimizer, "step")
        raise InvalidArgument("optimizer", optimizer, allowed, remedy)
    check_optimizer(mode, optimizer)
    if autocast is not None and autocast not in AUTOCAST:
        raise InvalidArgument("autocast", autocast, f"one of {', '.join(AUTOCAST)}, or None")


def _checked_opaque(opaque: Any, module: Any) -> Mapping[str, Opaque]:
    """Return `opaque`; raise InvalidArgument for a value that is no function or bytes, or a name that is unknown."""
    if not isinstance(opaque, Mapping):
        raise InvalidArgument("opaque", opaque, "a mapping from names of operators and submodules")
    parts = {name for name, _ in module.named_modules() if name}
    for name, given in opaque.items():
        if "::" not in str(name) and name not in parts:
            raise InvalidArgument("opaque", name, "'library::operator', or a name of module.named_modules()")
        if not callable(given) and (not isinstance(given, int) or isinstance(given, bool) or given < 0):
            raise InvalidArgument("opaque", given, f"a function or a whole number of bytes for {name}")
    return opaque


def _place(tensors: Sequence[Any]) -> Any:
    """
    Return the device of a module's tensors, where scalars may be on the CPU; None if there are no tensors.

    Raises:
        InvalidArgument: If the tensors are on several devices, since only one device would be measured.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        devices = {tensor.device for tensor in tensors if tensor.ndim or tensor.device.type != "cpu"}
    if len(devices) > 1:
        on = " and ".join(sorted(map(str, devices)))
        raise InvalidArgument("module", f"on {on}", "on one device", "Time its steps with autotune_callable().")
    return next(iter(devices), None)


def _check_walkable(module: Any) -> None:
    if any(hasattr(parameter, "to_local") for parameter in module.parameters()):
        raise NotImplementedError(
            "its parameters are sharded over ranks, as FSDP does, and a trace would wait for the other ranks"
        )
    if not hasattr(torch.compiler, "set_stance") and any(map(_is_compiled, module.modules())):
        raise NotImplementedError(
            "a trace of its compiled parts needs PyTorch 2.6 or newer: update PyTorch, or leave out torch.compile"
        )


def _is_compiled(part: Any) -> bool:
    return hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None


def _check_open(module: Any) -> None:
    """Raise InvalidArgument for a module of torch.export in which all extents are fixed, that of the batch too."""
    if not isinstance(module, torch.fx.GraphModule):
        return
    values = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
    if shapes and all(isinstance(extent, int) for shape in shapes for extent in shape):
        given = f"exported for inputs of shape {' and '.join(map(str, shapes))} alone"
        allowed = "a module that takes batches of any size"
        open_axes = ", ".join('{0: torch.export.Dim("batch")}' for _ in shapes)
        remedy = (
            f"Export it with an open batch axis: torch.export.export(module, inputs, dynamic_shapes=({open_axes},))."
        )
        raise InvalidArgument("module", given, allowed, remedy)


def _unwrapped(module: Any) -> tuple[Any, Any]:
    """Return the module without torch.compile and DistributedDataParallel, and the latter; None without it."""
    exchange = None
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module, exchange = module.module, module
        elif hasattr(module, "_orig_mod"):  # PyTorch's OptimizedModule, whose import takes a second
            module = module._orig_mod  # noqa: SLF001 - its only name
        else:
            return module, exchange


def _is_name(value: object) -> bool:
    return isinstance(value, str) and ":" in value


def _function(value: Any, field: str) -> Any:
    return module_source.load(value, field) if _is_name(value) else value

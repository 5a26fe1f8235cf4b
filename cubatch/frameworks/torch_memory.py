"""
The memory of a step of a PyTorch module, without running it.

A step is traced on fake tensors, which have shapes and no data (PyTorch's `FakeTensorMode`), and the live storages are
added up. This needs no GPU at any batch size. Workspaces inside an operation (cuDNN's) and the rounding of allocators
are not included.
"""

from __future__ import annotations

import bisect
import contextlib
import dis
import functools
import itertools
import math
import sys
import time
import traceback
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import attrs

from cubatch.checks import MAX_BATCH_SIZE
from cubatch.errors import CubatchError, InvalidArgument
from cubatch.estimate.operators import Operator
from cubatch.frameworks import data_dependent, recurrent_workspace, step_operators, submodules, torch_state
from cubatch.frameworks.attributes import kept_attributes
from cubatch.frameworks.input_growth import Path
from cubatch.frameworks.input_objects import tensors_in
from cubatch.frameworks.lazy_torch import torch
from cubatch.frameworks.submodules import Running
from cubatch.frameworks.torch_inputs import Inputs, arrays_at, tensors_at
from cubatch.frameworks.torch_step import CALL_FIRST, StepKind, tensors_of
from cubatch.network.importers import fake_logs
from cubatch.workload import divisors

_PROBES = (2, 16, 64)  # 1 is left out: PyTorch treats an extent of 1 apart
_FEWEST = 2  # traces, for a line
_MOST_RAISED = 3  # sizes whose traces raise errors before one ends: a module may take multiples of a number only
_MOST_OTHERS = 3  # sizes that are traced after an error, those with most divisors first
_MOST_RUN_BYTES = 1 << 26  # of inputs, with which an operation is run on zeros if PyTorch cannot trace it
_MOST_CORRECTIONS = 4
_NEAR = 0.01  # how near to what a step may take a size must lie that no other need be walked through
_MOST_GUESSES = 2_000  # at what depends on data, in a walk
_MOST_GUESSES_IN_WHILE = 64  # in `while` loops: one until something is true would never end
_MOST_NAMED = 16  # operators of a trace, in an error
_MOST_SUBSETS = 8  # of inputs that are tried as constants: each takes a trace

_MOST_MORE = 10_000  # operations, which take a walk seconds: a loop over samples would take it minutes or hours
_SPARSE = (
    "tensors without data lose the elements of sparse ones. Make dense ones, such as gradients by "
    "Embedding(sparse=False), or measure steps with autotune_module()"
)
_SCRATCH = {"aten::linalg_matrix_exp": 12}
"""
Tensors of the size of its input that an operator holds next to its result, by ATen/native/LinearAlgebra.cpp.

The norm of a matrix decides the degree of the polynomial. The highest takes 10 powers and sums of them, and 2 copies.
"""
_READING = frozenset({"aten::select", "aten::_local_scalar_dense"})  # operators that are computed if there are data

PARTS = ("weights", "inputs", "gradients", "optimizer")

Opaque = Callable[..., Any] | int
"""A function that stands for an operator or submodule in a trace, or the bytes that it takes while it runs."""


class TraceTooLong(Exception):
    """Raised if a trace does not end by its deadline, or a loop that depends on data seems never to end in it."""


@attrs.frozen
class Walk:
    """Result of the trace of one step on tensors without data: its memory by part, operations and parameters."""

    peak_bytes: int  # bytes of the tensor storages in use at its peak, inputs and parameters included
    operations: int  # number of operations
    # layers that read the batch as time, by `submodules.watch_time_axis`: a trace has operations for each sample
    time_first: tuple[str, ...]
    # operations whose results depend on data and are assumed: see `data_dependent`
    guessed: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()  # names of the parameters that the step modifies in place
    written_inputs: frozenset[Path] = frozenset()  # paths of the inputs that it modifies in place
    outputs: tuple[tuple[int, ...], ...] = ()  # shapes of the tensors in the module's output
    # the same shapes with another axis first: the one of the largest stride, or one along which an input grows
    turned: tuple[tuple[int, ...], ...] = ()
    elements: int = 0  # elements of the results of all its operations
    # bytes at the peak for each part in PARTS: weights, inputs, gradients, optimizer
    parts: Mapping[str, int] = attrs.field(factory=dict, hash=False)
    operators: tuple[Operator, ...] = ()  # the calls of the step that take time, in their order, if they are recorded
    # all other bytes at the peak, by the submodule that made them: see `submodules`
    activations: Mapping[str, int] = attrs.field(factory=dict, hash=False)
    # of each storage: its bytes, and when it begins and ends, counted in allocations and releases
    lives: Sequence[tuple[int, float, float]] = ()


@attrs.frozen
class Peaks:
    """
    Peak bytes of a step by batch size: linear between traced sizes.

    The peak is a maximum of linear functions of the batch size, hence convex, so that interpolation is an upper bound.
    Beyond the last traced size the last slope continues.
    """

    known: Mapping[int, int]  # bytes by batch size, of at least two sizes
    time_first: tuple[str, ...] = ()  # time_first, guessed, written, written_inputs: as in `Walk`
    guessed: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    written_inputs: frozenset[Path] = frozenset()
    # whether the output, or the number of elements that operations compute, grows with the batch; None if unknown
    scales: bool | None = None
    # shape of the module's output for the largest traced size if no tensor has a row for each sample; else ()
    rowless: tuple[int, ...] = ()
    constant: tuple[Any, ...] = ()  # inputs that a trace needs to be the same at all sizes, by path

    def at(self, batch_size: int) -> int:
        """
        Return the peak bytes of a step of a batch size, interpolated or extrapolated.

        Example:
            >>> Peaks({2: 120, 4: 140}).at(3), Peaks({2: 120, 4: 140}).at(10)
            (130, 200)
        """
        sizes = sorted(self.known)
        right = min(max(bisect.bisect_left(sizes, batch_size), 1), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        slope = (self.known[high] - self.known[low]) / (high - low)
        return round(self.known[low] + slope * (batch_size - low))

    def largest(self, num_bytes: int) -> int:
        """
        Return the largest batch size whose peak is at most `num_bytes`; 0 if one sample takes more.

        Example:
            >>> Peaks({2: 120, 4: 140}).largest(195)
            9
        """
        sizes = range(1, MAX_BATCH_SIZE + 1)
        return bisect.bisect_right(sizes, num_bytes, key=self.at)


def num_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the storages of tensors, each storage once; of a sharded tensor this rank's shard."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = [storage for tensor in local for part in _plain(tensor) for storage in _storages(part)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())  # noqa: SLF001 - its only identity


def _plain(tensor: Any) -> Iterator[Any]:
    """Yield the tensors behind a wrapper such as quantized weights; else the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))


def _storages(tensor: Any) -> list[Any]:
    """Return the storages of a tensor; of a sparse one, those of indices and values."""
    rows, columns = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
    names = {
        torch.sparse_coo: ("_indices", "_values"),  # as they are, also where places are named twice
        torch.sparse_csr: (*rows, "values"),
        torch.sparse_bsr: (*rows, "values"),
        torch.sparse_csc: (*columns, "values"),
        torch.sparse_bsc: (*columns, "values"),
    }.get(tensor.layout, ())
    return [getattr(tensor, name)().untyped_storage() for name in names] or [tensor.untyped_storage()]


def peaks(
    module: Any, inputs: Inputs, kind: StepKind, device: Any, num_bytes: int, *, top: int | None, seconds: float
) -> Peaks:  # fmt: skip
    """
    Return peak bytes of a module's traced steps, up to the largest batch size within `num_bytes`, or to `top`.

    `device` is a torch.device, and `top` None means no maximum. Tracing stops after `seconds` of CPU time; two traces
    that have ended suffice. If a size raises an error, the sizes of the inputs are tried too.

    Raises:
        InvalidArgument: If a training step creates parameters.
        TraceTooLong: If two traces do not end within `seconds`.
        Exception: Raised by a step on fake tensors, such as one that reads its data.
    """
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    top, began = max(_PROBES[0] + 1, top or MAX_BATCH_SIZE), time.process_time()
    walks: dict[int, Walk] = {}

    def trace(size: int) -> bool:
        try:
            walks[size] = walked(module, inputs, kind, device, size, deadline=began + seconds)
        except (TraceTooLong, UnsupportedOperatorException):
            if len(walks) < _FEWEST:
                raise
        return size in walks

    usual = sorted({min(size, top) for size in _PROBES})

    def others() -> list[int]:
        allowed = {size for size in inputs.sizes if 1 < size <= top}
        return sorted(allowed.difference(usual), key=lambda size: -len(divisors(size)))[:_MOST_OTHERS]

    is_in_time = _probe(trace, usual, others)
    walks = dict(sorted(walks.items()))
    known = {size: walk.peak_bytes for size, walk in walks.items()}
    *_, (fewer, second), (most, last) = walks.items()
    named = Counter(part for walk in walks.values() for part in walk.time_first)
    turned = tuple(part for part, times in named.items() if times > 1)  # in one walk a length may be the batch size
    common = math.gcd(*walks)  # a module may take multiples of it only
    for _ in range(_MOST_CORRECTIONS):
        largest = min(Peaks(known).largest(num_bytes), top) // common * common
        is_met = any(abs(taken - num_bytes) <= _NEAR * num_bytes for taken in known.values())
        more = (last.operations - second.operations) / (most - fewer) * (largest - most)
        is_useless = largest <= most or largest in known or is_met or turned
        if is_useless or more > _MOST_MORE or not is_in_time:
            break
        with contextlib.suppress(Exception):  # of a size that the module does not take
            trace(largest)
        if largest not in walks:
            break
        known[largest] = walks[largest].peak_bytes
    guessed = frozenset().union(*(walk.guessed for walk in walks.values()))
    ends = walks[min(walks)], walks[max(walks)]
    counts = [(sum(map(math.prod, walk.outputs)), walk.elements) for walk in ends]
    scales = any(few < many for few, many in zip(*counts, strict=True))
    written = frozenset().union(*(walk.written for walk in walks.values()))
    inputs_written = frozenset().union(*(walk.written_inputs for walk in walks.values()))
    return Peaks(known, turned, guessed, written, inputs_written, scales, _rowless(walks))


def _probe(trace: Callable[[int], bool], usual: Sequence[int], others: Callable[[], Sequence[int]]) -> bool:
    """
    Trace the usual sizes, and after an error `others` too; return whether there was time for all.

    A module may take only some sizes, so that two traces suffice.

    Raises:
        Exception: The first error, if fewer than two traces ended, or the first three failed.
    """
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    waiting, raised, count = list(usual), list[Exception](), 0
    while waiting and (count or len(raised) < _MOST_RAISED):
        try:
            if not trace(waiting.pop(0)):
                return False
            count += 1
        except (CubatchError, TraceTooLong, UnsupportedOperatorException):
            raise
        except Exception as error:  # noqa: BLE001 - the first is raised below, unless others suffice
            waiting = waiting if raised else [*others(), *waiting]
            raised.append(error)
    if count < _FEWEST and raised:
        raise raised[0]
    return True


def _rowless(walks: Mapping[int, Walk]) -> tuple[int, ...]:
    """
    Return the shape of the module's output for the largest batch if no tensor has a row for each sample; else ().

    There is a row for each sample if the first axis longer than 1 grows and reaches the batch size. Shapes in `turned`
    count too. There is one too if an axis equals the batch size. An output of one element is a loss. Shapes that depend
    on data do not count.
    """
    (few, first), *_, (many, last) = sorted(walks.items())
    has_loss = any(math.prod(shape) == 1 for shape in last.outputs)
    if has_loss or last.guessed or len(first.outputs) != len(last.outputs):
        return ()
    for before, after in zip(first.outputs + first.turned, last.outputs + last.turned, strict=True):
        axes = [(low, high) for low, high in zip(before, after, strict=False) if high > 1]
        if (few, many) in axes or (axes and axes[0][0] < axes[0][1] >= many):
            return ()
    return max(last.outputs, key=len, default=())


def peaks_of(
    module: Any, inputs: Inputs, kind: StepKind, device: Any, num_bytes: int, *, top: int | None, seconds: float
) -> Peaks:  # fmt: skip
    """
    Return the result of `peaks`; if it fails, treat inputs that may be as long as the batch by chance as constant.

    A mask of [L, L] looks like a batch of L samples if the example has L of them. Two examples leave no doubt. `top`
    None means no maximum.
    """
    _import_fakes()
    began = time.process_time()
    try:
        return peaks(module, inputs, kind, device, num_bytes, top=top, seconds=seconds)
    except (CubatchError, TraceTooLong):
        raise
    except Exception:
        doubtful = inputs.doubtful()
        subsets = itertools.chain.from_iterable(
            itertools.combinations(doubtful, count) for count in range(1, len(doubtful) + 1)
        )
        for constant in itertools.islice(subsets, _MOST_SUBSETS):
            try:
                left = began + seconds - time.process_time()
                traced = peaks(module, inputs.held(constant), kind, device, num_bytes, top=top, seconds=left)
            except Exception:  # noqa: BLE001, S112 - the first error is the one of the example as it is
                continue
            return attrs.evolve(traced, constant=constant)
        raise


def _import_fakes() -> None:
    """Import the modules that PyTorch imports at the first operation without data, which takes a second."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        torch.zeros(2, 2, requires_grad=True).sum().backward()


def walked(
    module: Any, inputs: Inputs, kind: StepKind, device: Any, batch_size: int, *, deadline: float,
    records: bool = False, opaque: Mapping[str, Opaque] = types.MappingProxyType({}), number: int = 1,
) -> Walk:  # fmt: skip
    """
    Return the trace of a step of a batch size on tensors without data; the module is restored.

    `records` is whether to record the operators, for a prediction of time; the trace then takes a third longer. The
    operators and submodules in `opaque` are replaced by functions, or take bytes while they run: see `footprint`.
    Checks of all elements are assumed to be false. If the step then raises an error, a second trace takes them as true.
    A number that depends on data is assumed to be `number`.

    Raises:
        NotImplementedError: If the inputs cannot be traced: see `Inputs.check_traceable`.
        InvalidArgument: If the step does not call an operator or submodule in `opaque`, or a training step creates
            parameters.
        TraceTooLong: If this process has used `deadline` seconds of CPU time, or a loop does not end without data.
        Exception: Raised by the step on fake tensors.
    """
    inputs.check_traceable(batch_size)
    trace = functools.partial(
        _walked, module, inputs, kind, device, batch_size, deadline=deadline, records=records, opaque=opaque,
        number=number, packed=_packed_bytes(module),
    )  # fmt: skip
    checks: list[Any] = []
    try:
        return trace(checks=checks)
    except (CubatchError, TraceTooLong):
        raise
    except Exception:
        if not checks:
            raise
        return trace(checks=None)


def _walked(
    module: Any, inputs: Inputs, kind: StepKind, device: Any, batch_size: int, *, deadline: float, records: bool,
    opaque: Mapping[str, Opaque], number: int, packed: int, checks: list[Any] | None,
) -> Walk:  # fmt: skip
    """
    Return a trace as `walked` does.

    Checks of all elements are false and are appended to `checks`; None: they are true. `packed` is the bytes of weights
    that are no parameters.
    """
    from torch.nn.utils.stateless import _reparametrize_module

    inputs = attrs.evolve(inputs, call=inputs.with_copies(inputs.call))  # operations on tensors with data alone are run
    # torch.compile skips code that it first sees under a dispatch mode: it would run eagerly from then on.
    stance = getattr(torch.compiler, "set_stance", None)  # since PyTorch 2.6: before, nothing compiled is walked
    stepped = torch_state.with_loss(module, kind.loss)
    # A table that a module makes when it is first needed would be one without data from then on.
    with (
        torch_state.kept_gradients(stepped),  # a loss may refer to a parameter by a variable of its own
        kept_attributes(stepped),
        stance("force_eager") if stance else contextlib.nullcontext(),
        fake_logs.silent(),
        submodules.watch_time_axis(module, batch_size) as time_parts,
        submodules.watched(module) as running,
        _fake_mode(module, device) as mode,
        _Watch(
            deadline,
            running,
            mode,
            batches=kind.accumulate if records else None,
            opaque=opaque,
            on_cpu=not kind.foreach,
            assumed=(checks, number),
        ) as watch,
        data_dependent.replaced_functions(watch.guessed),
    ):
        _replace_submodules(module, opaque, watch.called)
        fakes: dict[str, Any] = {}
        converted: list[Any] = []  # as long as it is there, it is what the module finds by a reference of its own, too
        for name, parameter in stepped.named_parameters():
            converted.append(mode.from_tensor(parameter))
            fakes[name] = torch.nn.Parameter(converted[-1], requires_grad=parameter.requires_grad)
        fakes |= {name: mode.from_tensor(buffer) for name, buffer in stepped.named_buffers()}

        def make(tensor: Any, shape: tuple[int, ...]) -> Any:
            made = torch.empty(shape, dtype=tensor.dtype, device=device)
            watch.mark("inputs", [made])  # at once, as a step may free what a cache holds
            return made

        outputs, turned, optimizers = list[tuple[int, ...]](), list[tuple[int, ...]](), list[Any]()

        def call(*positional: Any, **keyword: Any) -> Any:
            watch.batch += 1
            made = module(*positional, **keyword)
            dense = [tensor for tensor in tensors_of(made) if not tensor.is_nested]
            outputs[:] = [tuple(tensor.shape) for tensor in dense]
            turned[:] = [tuple(map(tensor.size, order)) for tensor in dense for order in _orders(tensor, inputs)]
            return made

        arguments = inputs.batch(batch_size, make)
        quantized = torch.empty(packed, dtype=torch.uint8)
        for tensor in fakes.values():
            watch.see(tensor)
        converted += watch.see_constants(arguments)
        watch.elements, known = 0, set(map(id, torch_state.trained(module, kind.loss)))
        parameters = [fakes[name] for name, each in stepped.named_parameters() if id(each) in known]
        converted += _add_buckets(watch, parameters, kind)

        def make_optimizer(trained: Iterable[Any]) -> Any:
            optimizers.append(kind.make_optimizer(list(trained)))
            watch.observe(optimizers[-1])
            return optimizers[-1]

        # More than two batches take no more memory, and the others take as long as the second.
        traced = attrs.evolve(
            kind, accumulate=min(2, kind.accumulate), written=kind.written.union(arrays_at(arguments))
        )
        watched = attrs.evolve(traced, optimizer=make_optimizer) if kind.training else traced
        step = watched.step(call, parameters, device.type, arguments)  # without a scaler, whose scale data choose
        watch.mark("weights", [*fakes.values(), quantized])
        for place in range(2):  # the second finds gradients, the optimizer's state and what the module keeps
            if place and not kind.training and not _keeps_tensors(module):
                break
            watch.begin_step()
            with _reparametrize_module(stepped, fakes, tie_weights=True):  # also where backward passes run it again
                step()
            watch.mark("gradients", (each.grad for each in parameters if each.grad is not None))
            watch.mark("optimizer", tensors_in(optimizers))
        made = [name for name, _ in stepped.named_parameters() if name not in fakes]
        if kind.training and made:  # which no optimizer knows of that was made before, as a user's loop has one
            given = f"one that makes {made[0]} in its first forward pass"
            raise InvalidArgument(
                "module", given, "one whose parameters all exist before its first forward pass", CALL_FIRST
            )
        written = frozenset(name for name, _ in module.named_parameters() if watch.has_written(fakes.get(name)))
    watch.check_opaque()
    parts, activations = watch.at_peak()
    return Walk(
        watch.peak, watch.operations, tuple(time_parts), frozenset(watch.guessed), written,
        frozenset(path for path, each in tensors_at(arguments) if watch.has_written(each)),
        tuple(outputs), tuple(turned), watch.elements, parts, tuple(step_operators.merged(watch.operators)),
        activations, watch.lives(),
    )  # fmt: skip


def _packed_bytes(module: Any) -> int:
    """Return the bytes of weights that a module's attributes hold in objects of PyTorch, as quantized layers do."""
    values = itertools.chain.from_iterable(vars(part).values() for part in module.modules())
    objects = {id(value): value for value in values if isinstance(value, torch.ScriptObject)}
    return num_bytes(tensors_of([each.__getstate__() for each in objects.values()]))


def _add_buckets(watch: _Watch, parameters: Iterable[Any], kind: StepKind) -> list[Any]:
    """
    Return new tensors in which DistributedDataParallel sums gradients over ranks, for the trained ones of parameters.

    They hold the gradients themselves if it was made so, and else copies; for `watch` they are gradients. There are
    none without DistributedDataParallel.
    """
    if kind.exchange is None or not kind.training:
        return []
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    buckets = list(map(torch.empty_like, trained))
    watch.mark("gradients", buckets)
    for parameter, bucket in zip(trained, buckets, strict=True):
        if kind.exchange.gradient_as_bucket_view:
            parameter.register_post_accumulate_grad_hook(lambda each, bucket=bucket: setattr(each, "grad", bucket))
    return buckets


def _keeps_tensors(module: Any) -> bool:
    """Return whether an attribute of a module is a tensor of a traced step, such as a result that it keeps."""
    from torch._subclasses.fake_tensor import FakeTensor

    return any(isinstance(value, FakeTensor) for part in module.modules() for value in vars(part).values())


def _orders(tensor: Any, inputs: Inputs) -> Iterator[list[int]]:
    """Yield the axes of a tensor in the order of memory, and with each axis first along which an input grows."""
    strides = tensor.stride() if tensor.layout == torch.strided else (0,) * tensor.ndim
    yield sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
    for leading in {axis for growth in inputs.growth.values() for axis in growth.lines}:
        if leading < tensor.ndim:
            yield sorted(range(tensor.ndim), key=lambda axis: axis != leading)


@contextlib.contextmanager
def _fake_mode(module: Any, device: Any) -> Iterator[Any]:
    """
    Yield PyTorch's mode of tensors without data, in which tensors on the "meta" device count as on `device`.

    Where a module on "meta" names that device, as in `x.to(self.device)`, it means `device`.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.overrides import TorchFunctionMode

    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    converter = mode.fake_tensor_converter
    convert = converter.from_real_tensor

    def from_tensor(_: Any, tensor: Any, *arguments: Any, **options: Any) -> Any:
        if tensor.is_meta and not hasattr(tensor, "__tensor_flatten__"):
            return converter.from_meta_and_device(mode, tensor, device)
        return convert(mode, tensor, *arguments, **options)

    def placed(value: Any) -> Any:
        is_meta = isinstance(value, str | torch.device) and getattr(value, "type", value) == "meta"
        return device if is_meta else value

    class Placed(TorchFunctionMode):  # type: ignore[misc]
        """Replaces the "meta" device in the arguments of every function by the device of the traced step."""

        def __torch_function__(
            self, function: Any, _: Any, arguments: Sequence[Any] = (), options: Mapping[str, Any] | None = None
        ) -> Any:
            return function(*map(placed, arguments), **{key: placed(value) for key, value in (options or {}).items()})

    converter.from_real_tensor = from_tensor
    is_absent = any(each.is_meta for each in itertools.chain(module.parameters(), module.buffers()))
    is_default = torch.get_default_device().type == "meta"
    with (
        device if is_default else contextlib.nullcontext(),
        Placed() if is_absent else contextlib.nullcontext(),
        mode,
    ):
        yield mode


@attrs.define(eq=False)
class _Life:
    """A storage of a traced step: its bytes, its first and last event, and the submodule that made it."""

    size: int  # bytes
    # begin, end: when it is allocated and released, counted in such events; infinity if it is never released
    begin: int
    submodule: str  # name of the submodule that made it
    end: float = math.inf
    part: str = ""  # its part in PARTS; "" for an activation
    reference: Any = None  # to the storage, with a callback at its end. Storages on "meta" outlive the trace


class _Watch:
    """
    Adds up the bytes of the tensor storages that are in use, within a limit of CPU time.

    `deadline` is the CPU time of the process, in seconds, at which an operation raises TraceTooLong. The operators of
    the step are recorded only if `batches` is given, the number of batches of an optimizer step. `on_cpu` is whether
    the steps are to run on a CPU: the memory that oneDNN takes inside operations then counts. `assumed` has `checks`
    and `number` of `_walked`.
    """

    def __init__(
        self, deadline: float, running: Running, fakes: Any, *, batches: int | None, opaque: Mapping[str, Opaque],
        on_cpu: bool, assumed: tuple[list[Any] | None, int],
    ) -> None:  # fmt: skip
        self.deadline, self.batch, self.opaque, self._on_cpu = deadline, 0, opaque, on_cpu
        self._fakes = fakes
        self._running, self._batches = running, batches
        self.alive = self.peak = self.operations = self.elements = 0
        self.guessed: set[str] = set()
        self.called: dict[str, bool] = {}  # operators and opaque submodules; whether it is one that makes new tensors
        self.operators: list[Operator] = []
        self._is_updating = False
        self._guesses = self._guesses_in_while = self._now = self._peak_at = 0
        self._seen: weakref.WeakKeyDictionary[Any, _Life] = weakref.WeakKeyDictionary()
        self._lives: list[_Life] = []
        self._written: weakref.WeakSet[Any] = weakref.WeakSet()
        self._checks, self._number = assumed
        self._checked = weakref.WeakSet[Any]()  # storages of the results of checks
        self._mode: Any = None
        self._terms: list[_Life] = []  # those of the last operation if it is a sum of two gradients

    def observe(self, optimizer: Any) -> None:
        """Record the operations of an optimizer's later steps under the phase "optimizer"."""

        def switch(*_: Any) -> None:
            self._is_updating = not self._is_updating

        if hasattr(optimizer, "register_step_pre_hook"):
            optimizer.register_step_pre_hook(switch)
            optimizer.register_step_post_hook(switch)

    def begin_step(self) -> None:
        """Discard the recorded operators of the previous step, and count batches from 0."""
        self.operators.clear()
        self.batch = 0

    def record(self, operation: Any, arguments: Sequence[Any], options: Mapping[str, Any], result: Any) -> None:
        """
        Record the operators of an operation, if requested; those of batch 2 count for all later batches too.

        Of an operation that a function replaces, the operators of the function count.
        """
        if self._batches is None or callable(self.opaque.get(name_of(operation))):
            return
        is_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001 - the only sign of it
        phase = "optimizer" if self._is_updating else "backward" if is_backward else "forward"
        repeats = self._batches - 1 if self.batch > 1 and not self._is_updating else 1
        self.operators.extend(
            step_operators.records(operation, arguments, options, result, phase=phase, repeats=repeats)
        )

    def see(self, tensor: Any) -> None:
        """Add the storage of a tensor to the storages in use until it is freed; each storage counts once."""
        self._see(tensor)
        self._check_peak()

    def _see(self, tensor: Any) -> None:
        if "sparse" in str(tensor.layout):
            raise NotImplementedError(_SPARSE)
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        size = storage.nbytes()
        self.alive += size
        self._now += 1
        self._lives.append(_Life(size, self._now, self._running.name()))
        self._hold(self._lives[-1], storage)

    def _hold(self, life: _Life, storage: Any) -> None:
        """Record the end of a storage as that of `life`."""
        self._seen[storage], life.end = life, math.inf
        life.reference = weakref.ref(storage, lambda _: self._gone(life))

    def _check_peak(self) -> None:
        if self.alive > self.peak:
            self.peak, self._peak_at = self.alive, self._now

    def is_sum(self, operation: Any) -> bool:
        """Return whether autograd itself calls an operation to add two gradients, and not a backward() in Python."""
        if operation is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():  # as while layers are computed again
            return False
        node = torch._C._current_autograd_node()  # noqa: SLF001 - its only name
        return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)

    def see_sum(self, terms: Iterable[Any], total: Any) -> None:
        """Add the storage of a sum of two gradients, which counts at the peak only after `settle`."""
        self._terms = [life for each in terms if (life := self._seen.get(each.untyped_storage())) is not None]
        self._see(total)

    def settle(self) -> None:
        """
        Merge the last sum of two gradients with one that was freed since, and update the peak.

        PyTorch's autograd adds in place to a gradient that nothing else refers to.  Under a mode that observes
        operations it makes a new tensor instead, and frees the old one before the next operation.
        """
        old = next((life for life in self._terms if life.end < math.inf and life.size == self._lives[-1].size), None)
        if old is not None and (storage := self._lives[-1].reference()) is not None:
            self._lives.pop().reference = None  # or its callback would count the end twice
            self._hold(old, storage)
        self._terms = []
        self._check_peak()

    def see_constants(self, arguments: Any) -> list[Any]:
        """Add the inputs that are the same at all batch sizes; return their fake tensors, which the trace must hold."""
        from torch._subclasses.fake_tensor import FakeTensor

        constant = [self._fakes.from_tensor(each) for each in tensors_in(arguments) if not isinstance(each, FakeTensor)]
        for each in constant:
            self.see(each)
        self.mark("inputs", constant)
        return constant

    def mark(self, part: str, tensors: Iterable[Any]) -> None:
        """Assign the recorded storages of tensors to `part`, one of PARTS, unless they belong to a part already."""
        for tensor in tensors:
            life = self._seen.get(tensor.untyped_storage())
            if life is not None and not life.part:
                life.part = part

    def at_peak(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the bytes at the peak by part in PARTS (weights, inputs, ...), and all other bytes by submodule."""
        parts, activations = dict.fromkeys(PARTS, 0), dict[str, int]()
        for life in self._lives:
            if life.begin <= self._peak_at < life.end:
                taken, name = (parts, life.part) if life.part else (activations, life.submodule)
                taken[name] = taken.get(name, 0) + life.size
        return parts, activations

    def lives(self) -> list[tuple[int, float, float]]:
        """
        Return (bytes, begin, end) of each storage.

        Begin and end are numbers of an event, an allocation or a release, counted from the start of the trace. The end
        is infinity for a storage that is still in use.
        """
        return [(life.size, life.begin, life.end) for life in self._lives]

    def write(self, operation: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Record the storages that an operation writes to by its schema, even if the tensor's version stays equal."""
        self._written.update(each.untyped_storage() for each in step_operators.changed(operation, arguments, options))

    def workspace(self, operation: Any, arguments: Sequence[Any]) -> Any:
        """Return a tensor of the bytes that an operator takes while it runs, by `opaque` or a library; else None."""
        name = name_of(operation)
        scratch = recurrent_workspace.scratch_bytes(name, arguments) if self._on_cpu else 0
        if name in _SCRATCH:
            self.guessed.add(str(operation))
            scratch = _SCRATCH[name] * arguments[0].numel() * arguments[0].itemsize
        given = self.opaque.get(name, scratch)
        with self._mode:
            return torch.empty(given, dtype=torch.uint8) if isinstance(given, int) and given else None

    def check_opaque(self) -> None:
        """Raise InvalidArgument if the step did not call an opaque operator or submodule."""
        for name in self.opaque.keys() - self.called:
            first = itertools.islice((each for each, computes in self.called.items() if computes), _MOST_NAMED)
            allowed = f"an operator or submodule that the trace of the step calls, such as {', '.join(first)}"
            remedy = "Operators that are composed of others, such as aten::linear, are traced as these."
            raise InvalidArgument("opaque", name, allowed, remedy)

    def has_written(self, tensor: Any) -> bool:
        """Return whether an operation wrote to a tensor's storage."""
        return tensor is not None and tensor.untyped_storage() in self._written

    def result(self, operation: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return the result of an operation without data; if it depends on data, assume a result and record that."""
        from torch._subclasses import fake_tensor

        is_recurrent = name_of(operation) == recurrent_workspace.OPERATOR
        if name_of(operation) in _READING and _has_data(arguments[0]):  # as the lengths of packed sequences
            with fake_tensor.unset_fake_temporarily():
                return operation(*arguments, **options)
        if callable(function := self.opaque.get(name_of(operation))):
            with self._mode:  # in which what the function makes counts
                return function(*arguments, **options)
        try:
            result = self._run(operation, arguments, options)
            if name_of(operation) in data_dependent.CHECKS:
                self._checked.add(result.untyped_storage())
            return recurrent_workspace.completed(arguments, result) if is_recurrent else result
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException):
            self._guesses += 1
            self._guesses_in_while += _is_in_while()
            if self._guesses > _MOST_GUESSES or self._guesses_in_while > _MOST_GUESSES_IN_WHILE:
                raise TraceTooLong from None
            assumed = data_dependent.result(operation, arguments, options, self._number)
            if assumed is False and arguments[0].untyped_storage() in self._checked:
                if self._checks is None:
                    assumed = True
                else:
                    self._checks.append(operation)
            if assumed is not NotImplemented:
                self.guessed.add(str(operation))
                return assumed
            with self._mode:  # one that is made of others, as they come without a record of gradients
                composed = operation.decompose(*arguments, **options)
            if composed is NotImplemented:
                raise
            return composed

    def _run(self, operation: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """
        Return the result of an operation without data.

        An operation that cannot be traced runs on zeros of up to 64 MiB.  PyTorch's rule for the results of an
        operation may reject float32, which its kernel takes: the rule is then applied to bfloat16.
        """
        from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException
        from torch.utils._pytree import tree_map_only

        def cast(tree: Any, old: Any, new: Any) -> Any:
            return tree_map_only(FakeTensor, lambda each: each.to(new) if each.dtype == old else each, tree)

        try:
            return operation(*arguments, **options)
        except UnsupportedOperatorException:
            size = sum(each.numel() * each.itemsize for each in tensors_of((arguments, options)))
            if size > _MOST_RUN_BYTES:
                raise
            self._fakes.allow_fallback_kernels = True
            try:
                return operation(*arguments, **options)
            finally:
                self._fakes.allow_fallback_kernels = False
        except RuntimeError as error:
            types = {each.dtype for each in tensors_of((arguments, options)) if each.is_floating_point()}
            if type(error) is not RuntimeError or types != {torch.float32} or not _computes(operation):
                raise
            try:
                made = operation(*cast(arguments, torch.float32, torch.bfloat16), **options)
            except RuntimeError:
                raise error from None
            return cast(made, torch.bfloat16, torch.float32)

    def _gone(self, life: _Life) -> None:
        self.alive -= life.size
        self._now += 1
        life.end = self._now

    def __enter__(self) -> Self:
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        watch, device_of = self, torch.ops.prim.device.default

        class Mode(TorchDispatchMode):  # type: ignore[misc]
            """Observes the results of every operation."""

            def __torch_dispatch__(
                self,
                func: Any,
                types: Any,
                args: Any = (),
                kwargs: Any = None,
            ) -> Any:
                if func is device_of:  # two of three calls
                    return func(*args)
                if time.process_time() > watch.deadline and _computes(func):
                    raise TraceTooLong
                if torch.is_inference_mode_enabled() and str(func).startswith("aten."):  # composed ones arrive whole
                    with self:
                        composed = _composed(func, args, kwargs or {})
                    if composed is not NotImplemented:
                        return composed
                watch.settle()
                is_sum = watch.is_sum(func)
                watch.operations += 1
                watch.called.setdefault(name_of(func), _computes(func))
                watch.write(func, args, kwargs or {})
                workspace = watch.workspace(func, args)
                result = watch.result(func, args, kwargs or {})
                watch.record(func, args, kwargs or {}, result)
                for leaf in tree_leaves(result):
                    if isinstance(leaf, torch.Tensor):
                        watch.see_sum(args[:2], leaf) if is_sum else watch.see(leaf)
                        watch.elements += leaf.numel()
                del workspace  # next to the results
                return result

        self._mode = Mode()
        self._mode.__enter__()
        return self

    def __exit__(self, *stop: object) -> None:
        self._mode.__exit__(*stop)


def _composed(operation: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return the result of an operation that is composed of others, as in eager mode; NotImplemented if it is not."""
    name = name_of(operation)
    data, weight, bias = (*arguments, None, None, None)[:3]
    if name == "aten::linear" and bias is not None and data.dim() > weight.dim() and not data.is_contiguous():
        return operation(data, weight).add_(bias)  # the composition adds it in place only to tensors with data
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd"):  # noqa: SLF001
        return NotImplemented
    # decompose() prefers compositions in Python, which have other results in memory.
    return operation._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *arguments, **options)  # noqa: SLF001


def _has_data(tensor: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def name_of(operation: Any) -> str:
    """Return the name of an operator without its overload, as "aten::add"."""
    return str(getattr(getattr(operation, "_schema", None), "name", operation))


def _replace_submodules(module: Any, opaque: Mapping[str, Opaque], called: dict[str, bool]) -> None:
    """
    Replace `forward` of each submodule in `opaque` by its function, or add its bytes to the memory of the call.

    A call adds the submodule's name to `called`, with False.
    """

    def replaced(name: str, forward: Callable[..., Any], given: Opaque) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            called[name] = False
            if callable(given):
                return given(*arguments, **options)
            workspace = torch.empty(given, dtype=torch.uint8)
            result = forward(*arguments, **options)
            del workspace  # next to the result
            return result

        return run

    for name, part in module.named_modules():
        if name in opaque:
            part.forward = replaced(name, part.forward, opaque[name])


def _is_in_while() -> bool:
    """Return whether a `while` loop of the traced module is running."""
    called = traceback.walk_stack(sys._getframe(1))  # noqa: SLF001 - not of this frame, which would refer to itself
    traced = itertools.takewhile(lambda each: each[0].f_code is not walked.__code__, called)
    places = ((frame.f_lasti, _while_loops(frame.f_code)) for frame, _ in traced)
    return any(begin <= place <= end for place, loops in places for begin, end in loops)


@functools.lru_cache(maxsize=1024)
def _while_loops(code: types.CodeType) -> list[tuple[int, int]]:
    """Return first and last bytecode offset of each `while` loop, which jumps back to no iterator, unlike `for`."""
    names = {each.offset: each.opname for each in dis.get_instructions(code)}
    jumps = [(each.argval, each.offset) for each in dis.get_instructions(code) if "JUMP_BACKWARD" in each.opname]
    return [(begin, end) for begin, end in jumps if names[begin] not in {"FOR_ITER", "SEND"}]


@functools.cache
def _computes(operation: Any) -> bool:
    """
    Return whether an operation makes new tensors.

    Other operations are queries and views, which PyTorch also calls where an error would end the process.
    """
    returned = operation._schema.returns if isinstance(operation, torch._ops.OpOverload) else ()  # noqa: SLF001
    return bool(returned) and all(isinstance(each.type, torch.TensorType) and not each.alias_info for each in returned)

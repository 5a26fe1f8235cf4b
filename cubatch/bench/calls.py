"""
Cases: calls of the engine's operations, recorded on arrays that have a shape and no memory.

A pass of a layer is recorded by the same functions that a network's step is bound with.  So a benchmark times the calls
that networks make.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import attrs
import numpy as np

from cubatch.engine import functional
from cubatch.engine.layers import TABLE, arguments
from cubatch.engine.place import Bound, Place
from cubatch.hardware.arithmetic import peak_flops_per_second
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.kernels.padding import stored_saved_elements
from cubatch.memory.schedule_records import Op
from cubatch.network.graph import Node
from cubatch.network.layer import Layer
from cubatch.network.passes import Pass

# float16 stands for the case's own type, which an operand leaves empty.
_STAND_INS = {"": np.float16, "uint8": np.uint8, "int32": np.int32, "float32": np.float32, "float64": np.float64}
_DTYPES = {np.dtype(stand_in): name for name, stand_in in _STAND_INS.items()}
_POSITIVE = {"gamma", "inv_std", "running_var", "variance", "square", "statistics"}
_EPILOGUE = {
    "b": "bias", "db": "bias gradient", "scale": "scale", "shift": "shift", "residual": "residual", "positive": "mask",
    "pooled": "gradient of a global pool", "statistics": "statistics",
}  # fmt: skip
_OF_TRAINING = {"workspace", "reduce", "momentum"}

_LISTS = {"biases": "b", "keep": ("qkv", "weights", "mixed"), "saved": ("qkv", "weights", "mixed")}
_SINGULAR = {"branches": "x", "outs": "dx"}


@attrs.frozen
class Operand:
    """An array of a case."""

    shape: tuple[int, ...]  # its extents
    # how it is filled. "signed" is uniform in [-reach, reach), and "rectified" the same through ReLU6. "positive" is in
    # [0.5, 1.5). "counts" are whole numbers from 0. "scaling" is the state of a loss scale
    kind: str = "signed"
    dtype: str = ""  # type of its elements; empty for the type of the case
    below: int = 0  # upper limit of whole numbers, exclusive
    is_batched: bool = True  # whether axis 0 is the batch
    reach: float = 1.0  # see `kind`
    padded: int = 0  # zero channels behind those that the operation reads


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """A call of an operation with operands in place of arrays, its FLOP, and the bytes that it moves."""

    operation: str  # name in `engine.functional`
    # names of operands by parameter; a tuple for a parameter that takes a list, in which `None` stays `None`
    arrays: Mapping[str, str | tuple[str | None, ...]]
    options: Mapping[str, Any]  # the other parameters
    operands: Mapping[str, Operand]  # arrays by name
    results: tuple[str, ...]  # names of the operands that are written
    name: str = ""  # unique among the cases of a run: "conv2d 56x56x64 to 64, 3x3, pad 1, n=32, fprop"
    pass_: Pass | None = None  # pass of the layer; `None` for an operation that is no pass
    layer: Layer | None = None  # the layer without its name; `None` for an operation of no layer
    batch_size: int = 1  # samples, or rows of a product
    dtype: str = "float32"  # storage of the elements; "tf32" is float32 whose products may be made on tensor cores
    flops: int = 0  # a multiply-add counts as two
    traffic_bytes: int = 0  # each array moved once; the roofline counts these
    moved_bytes: int = 0  # bytes that must really move if data is needed whole before it is needed again
    multiplicity: int = 1  # number of occurrences in a network
    layers: tuple[str, ...] = ()  # names of the layers that have it

    def call(self, operations: Any, arrays: Mapping[str, Any], **changes: Any) -> None:
        """Call the operation in `operations`, which writes into `arrays`; `changes` replace options of the case."""
        given = {
            parameter: arrays[names] if isinstance(names, str) else [name and arrays[name] for name in names]
            for parameter, names in self.arrays.items()
        }
        getattr(operations, self.operation)(**{**given, **self.options, **changes})

    @property
    def result(self) -> str:
        """Return the name of the operand that is the main result: "out" if it is written, else the first result."""
        return "out" if "out" in self.results else self.results[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays of all operands, with padding."""
        return sum(self.bytes_of(name) for name in self.operands)

    def bytes_of(self, name: str) -> int:
        """Return the bytes of the array of the operand `name`, with padding."""
        return math.prod(self.operands[name].shape) * self.itemsize(name)

    def dtype_of(self, name: str) -> str:
        """Return the storage type of the operand `name`: its own if it has one, such as "uint8", else the case's."""
        return self.operands[name].dtype or self.dtype

    def itemsize(self, name: str) -> int:
        """Return the bytes of an element of the operand `name`."""
        return {"uint8": 1, "int32": 4, **BYTES_PER_ELEMENT}[self.dtype_of(name)]

    def reads(self, name: str) -> bool:
        """Return whether the operand `name` is read; a result that is read must be restored before the next run."""
        is_state = name in {"parameters", "velocity", "mean", "square", "master", "state"} and not self.layer
        return name not in self.results or is_state or "parts" in self.arrays

    @property
    def kind(self) -> str:
        """Kind of the operation, by which the times of a step are grouped: "conv2d", "gelu backward"."""
        if self.operation.startswith("activation"):
            return f"{self.options['kind']}{' backward' if self.operation.endswith('backward') else ''}"
        # Depthwise convolutions are bound by bytes and have kernels of their own.
        shape = None if self.layer is None else self.layer.convolution
        is_depthwise = shape is not None and 1 < shape.groups == shape.c
        return ("depthwise " if is_depthwise else "") + self.operation.replace("_", " ")

    @property
    def epilogue(self) -> tuple[str, ...]:
        """Names of the terms that the operation applies to its result before it is stored, in their order."""
        names = {*self.operands} - ({"statistics"} - {*self.results})  # a backward pass reads statistics
        terms = tuple(term for name, term in _EPILOGUE.items() if name in names)
        relu, activation = self.options.get("relu"), self.options.get("activation")
        if activation and self.operation.endswith("backward"):
            return (*terms, f"slope of {activation}")
        return (*terms, *(["relu"] if relu else []), *([activation] if activation else []))

    def unpadded(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return `arrays` (by name of operand), the padded ones replaced by copies without their zero channels."""
        cut = {name: self.operands[name].padded for name in arrays if name in self.operands}
        return {name: array[..., : -cut[name]].copy() if cut.get(name) else array for name, array in arrays.items()}

    def roofline_seconds(self, device: Device) -> float | None:
        """
        Return the least seconds by the data sheet: the larger of arithmetic at the peak and all arrays moved once.

        Returns:
            float | None: `None` if a rate that counts is unknown.
        """
        peak, bandwidth = peak_flops_per_second(device, self.dtype), device.peak_bytes_per_second
        if bandwidth is None or (self.flops and peak is None):
            return None
        return max(self.flops / peak if peak else 0.0, self.traffic_bytes / bandwidth)

    def bound(self, device: Device) -> str | None:
        """Return the roofline's limit by the data sheet, "compute" or "memory"; `None` if a needed rate is unknown."""
        seconds = self.roofline_seconds(device)
        if seconds is None:
            return None
        return "memory" if seconds == self.traffic_bytes / (device.peak_bytes_per_second or 1) else "compute"

    def to_mapping(self) -> dict[str, Any]:
        """Return name, operation, options, FLOP, bytes and layers of the case as a dict for the JSON of `bench`."""
        options = dict(self.options)
        if "window" in options:
            options |= options.pop("window")._asdict()
        options = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
        return {
            "name": self.name,
            "operation": self.operation,
            "pass": self.pass_.value if self.pass_ else None,
            "layer": self.layer.to_mapping() if self.layer else None,
            "batch_size": self.batch_size,
            "dtype": self.dtype,
            "epilogue": list(self.epilogue),
            "options": options,
            "flops": self.flops,
            "traffic_bytes": self.traffic_bytes,
            "moved_bytes": self.moved_bytes,
            "multiplicity": self.multiplicity,
            "layers": list(self.layers),
        }


class Blanks:
    """Makes arrays without memory and records the operand that each array, or a view of it, stands for."""

    def __init__(self) -> None:
        self._operands: dict[int, tuple[np.ndarray[Any, Any], Operand, bool]] = {}

    def array(self, shape: Sequence[int], dtype: str = "", *, written: bool = False, **facts: Any) -> Any:
        """
        Return an array that stands for a new operand: it has the shape, but all its elements share one address.

        A storage type other than the case's is "uint8", "int32" or "float32". A `written` operand is a result. `facts`
        are further fields of `Operand`.
        """
        element = np.empty((), _STAND_INS[dtype])
        self._operands[element.ctypes.data] = element, Operand((), dtype=dtype, **facts), written
        return np.broadcast_to(element, tuple(shape))

    def operand(self, array: Any) -> tuple[Operand, bool]:
        """Return the operand that an array stands for, and whether the call writes it."""
        _, operand, written = self._operands[array.__array_interface__["data"][0]]
        return attrs.evolve(operand, shape=array.shape), written


def call_of(operation: str, arguments: Mapping[str, Any], blanks: Blanks) -> Case:
    """
    Return a call of an operation as a case: operands by argument name, options, and the operands that it writes.

    `arguments` are the arguments by name, of which `blanks` made the arrays.
    """
    arrays: dict[str, str | tuple[str | None, ...]] = {}
    options: dict[str, Any] = {}
    operands: dict[str, Operand] = {}
    results: list[str] = []

    def named(name: str, array: Any) -> str:
        operand, written = blanks.operand(array)
        if operation.startswith("linear") and operand.is_batched:
            operand = attrs.evolve(operand, shape=(math.prod(operand.shape[:-1]), operand.shape[-1]))
        operands[name] = operand
        if written:
            results.append(name)
        return name

    for parameter, value in arguments.items():
        if isinstance(value, np.ndarray):
            arrays[parameter] = "out" if parameter == "parts" else named(parameter, value)
        elif isinstance(value, list) and all(each is None or isinstance(each, np.ndarray) for each in value):
            stem = _LISTS.get(parameter, _SINGULAR.get(parameter, parameter.removesuffix("s")))
            names = [f"{stem}{at}" for at in range(len(value))] if isinstance(stem, str) else list(stem)
            arrays[parameter] = tuple(
                None if each is None else named(name, each) for name, each in zip(names, value, strict=True)
            )
        elif value is not None and not _is_unused(operation, parameter, value):
            options[parameter] = value
    kinds = {name: _filled(operation, name, operand, options) for name, operand in operands.items()}
    return Case(operation=operation, arrays=arrays, options=options, operands=kinds, results=tuple(results))


def _is_unused(operation: str, parameter: str, value: Any) -> bool:
    """Return whether a case leaves out an option with this value, since it changes no timing or belongs to training."""
    of_training = parameter in _OF_TRAINING or (parameter == "count" and operation.startswith("batch_norm"))
    return of_training or (parameter, value) == ("relu", False)


def _filled(operation: str, name: str, operand: Operand, options: Mapping[str, Any]) -> Operand:
    """Return the operand `name` with `kind`, `below` and `reach` set to values that occur in a network."""
    kind, stem = options.get("kind", ""), name.rstrip("0123456789")
    if stem in _POSITIVE:
        return attrs.evolve(operand, kind="positive")
    if name in {"argmax", "mask"}:
        below = options["window"].r * options["window"].s + 1 if name == "argmax" else 2
        return attrs.evolve(operand, kind="counts", below=below)
    if name == "positive" or (name, operation) == ("y", "relu_backward"):
        return attrs.evolve(operand, kind="rectified")
    if operation.startswith("attention") and name.startswith(("w_", "b_")):
        c = operand.shape[-1] if name == "w_in" else math.prod(operand.shape[:1]) // (3 if name == "b_in" else 1)
        return attrs.evolve(operand, reach=3 / math.sqrt(c))  # queries, keys and scores are then of order 1
    if kind and name in {"x", "saved"} and not (name == "saved" and "sigmoid" in kind):
        # All bends of activation functions lie within 8; a sigmoid saves its output, which lies in [0, 1].
        return attrs.evolve(operand, reach=8.0, kind="rectified" if (name, kind) == ("saved", "relu6") else "signed")
    return operand


class _Recorder:
    """Has the engine's operations as methods, which record their calls and compute nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, operation: str) -> Any:
        signature = inspect.signature(getattr(functional, operation))
        return lambda *args, **kwargs: self.calls.append((operation, signature.bind(*args, **kwargs).arguments))


def calls_of(
    layer: Layer, kind: str, samples: int, *, is_training: bool, ending: frozenset[str], relu: bool,
    activation: str | None, channels: int,
) -> list[Case]:  # fmt: skip
    """
    Return the calls that the engine makes for the forward or backward pass of a layer; nothing is computed.

    Args:
        kind: "forward" or "backward".
        samples: The batch size.
        is_training: Whether a forward pass saves the arrays that the backward pass reads.
        ending: Terms that the result ends with: "folded", "residual", "positive", "pooled", "parts"; see
            `memory.schedule_records.Op`.
        relu: Whether the result is clamped at zero.
        activation: Type of another activation that a batch norm computes or undoes, see `memory.schedule_records.Op`;
            None: none.
        channels: Channels that the input is stored with.
    """
    blanks, recorder, forward, name = Blanks(), _Recorder(), kind == "forward", layer.name or layer.type
    inputs = [f"x{at}" for at in range(len(layer.input_shapes))]
    saved = [*stored_saved_elements(layer), *(["statistics"] if layer.has_statistics else [])]
    if forward:
        reads, writes = inputs, ["y", *(saved if is_training else ())]
    else:
        reads = ["dy", *saved, *(inputs if "x" in layer.backward_reads else ()), *layer.backward_reads & {"y"}]
        writes = [f"d{role}" for role in inputs]
    arrays = {
        role: _of_role(
            blanks,
            layer,
            role,
            samples=samples,
            made="y" if forward else "x0",
            channels=channels,
            written=role in writes,
        )
        for role in (*reads, *writes, *sorted(ending - {"parts"}))
    }
    if "parts" in ending:  # the gradients of other channels, which stay where they are
        arrays["parts"] = arrays["dx0"]
    roles = {role: number for number, role in enumerate(arrays)}
    op = Op(
        kind, Node(name, layer, tuple(inputs)), {role: roles[role] for role in (*reads, *ending)},
        {role: roles[role] for role in writes}, relu=relu, activation=activation,
    )  # fmt: skip
    parameters, gradients = (
        {each: blanks.array(shape, written=written, is_batched=False) for each, shape in layer.parameter_shapes.items()}
        for written in (False, True)
    )
    states = {each: blanks.array(layer.input_shape[2:], "float32", is_batched=False) for each in ("mean", "var")}
    place: Any = Place(
        operations=recorder, arena=cast("Any", SimpleNamespace(samples=samples)), parameters={name: parameters},
        gradients={name: gradients}, states={name: states}, team=cast("Any", SimpleNamespace(sum=max)), rank=1,
        batch_size=samples, begin=0, first=0, clock=[0], numbers=None, seed=0,
    )  # fmt: skip
    bound = Bound(
        op, layer, {role: arrays[role] for role in op.reads}, {role: arrays[role] for role in op.writes}, None, place,
        is_training,
    )  # fmt: skip
    TABLE[type(layer)].run(bound, arguments(bound))
    return [call_of(operation, arguments, blanks) for operation, arguments in recorder.calls]


def _of_role(blanks: Blanks, layer: Layer, role: str, *, samples: int, made: str, channels: int, written: bool) -> Any:
    """
    Return an array without memory, made by `blanks`, for a role of an operation on `samples` samples, such as "dy".

    Args:
        made: Role of the operation's result.
        channels: Channels that the input is stored with.
        written: Whether the operation writes it.
    """
    role = made if role in {"residual", "positive"} else role
    h, w, c = layer.input_shape
    if role == "folded":
        return blanks.array((2, layer.output_shape[2]), "float32", is_batched=False)
    if role == "statistics":
        is_batched = not layer.has_statistics
        shape = (2, samples, h * w) if is_batched else (2, c)
        return blanks.array(shape, "float32", written=written, is_batched=is_batched)
    if role in {"y", "dy", "pooled"}:
        extents = (c,) if role == "pooled" else layer.output_shape
        return blanks.array((samples, *extents), written=written)
    if role.lstrip("d").startswith("x"):
        height, width, own = layer.input_shapes[int(role.lstrip("dx"))]
        padded = channels - own if role == "x0" and channels else 0
        return blanks.array((samples, height, width, own + padded), written=written, padded=padded)
    elements, itemsize = stored_saved_elements(layer)[role]
    if itemsize == 1:
        return blanks.array((samples, *layer.output_shape), "uint8", written=written)
    return blanks.array((samples, elements), written=written)

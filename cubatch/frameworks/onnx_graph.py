"""The graph of an ONNX file: inputs, batch axis, and memory of its tensors at any batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from cubatch.checks import check_whole
from cubatch.errors import InvalidArgument, InvalidSpec, MissingDependency
from cubatch.frameworks.torch_memory import Peaks
from cubatch.network.importers.onnx_file import evaluated

_BATCH = "batch"  # the name that a rewritten axis gets
_PROBE = 1031  # a batch size that no other extent is likely to have
_WALKED = (2, 64)
_LARGEST_SHAPE = 1024  # elements; what decides a shape has fewer
DTYPES = ("float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
_DECIDING: Mapping[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,), "Expand": (1,), "GRU": (4,), "If": (0,), "LSTM": (4,), "Loop": (0, 1), "OneHot": (1,),
    "Pad": (1,), "RNN": (4,), "Range": (0, 1, 2), "Reshape": (1,), "Resize": (3,), "Slice": (1, 2), "Tile": (1,),
    "TopK": (1,),
}  # fmt: skip
"""Operators of which some inputs, here by position, decide how much is computed: lengths, shapes, rounds."""
_RECURRENT = ("GRU", "LSTM", "RNN")
_DYNAMIC = (
    "Export it with a dynamic batch: torch.onnx.export(..., dynamic_shapes=({0: 'batch'},)), with dynamo=False "
    "input_names=['x'], dynamic_axes={'x': {0: 'batch'}}."
)


@attrs.frozen(kw_only=True)
class Input:
    """An input of a graph: `shape` lacks the batch axis; `values` is the number of rows that indices select from."""

    name: str  # name, dtype: as in the file; the type by its name in NumPy
    dtype: str
    shape: tuple[int, ...]  # its extents, without the batch axis
    batch_axis: int | None  # position of its batch axis; None if it has none
    values: int | None  # the number of rows of the table that it indexes, as token ids do; None if it is no index
    value: int | None = None  # what it holds everywhere, as the user gave it; None: it is drawn

    def extents(self, batch_size: int) -> tuple[int, ...]:
        """Return the shape of the input at a batch size."""
        if self.batch_axis is None:
            return self.shape
        return (*self.shape[: self.batch_axis], batch_size, *self.shape[self.batch_axis :])


class OnnxGraph:
    """
    The graph of a file, without external weights.

    The batch is the axis whose name begins with "batch", else axis 0 of the first input. If `dims` has that axis, it is
    the first one that is left open.

    Args:
        path: The file.
        dims: Extents of open axes other than the batch, and values of integer inputs, by name.

    Attributes:
        inputs: Inputs of the graph.
        outputs: Names of the graph's outputs.
        files: Paths of the file and of external weights.
        rewritten: The file's bytes with a symbolic batch axis, if its own is fixed; else None.

    Raises:
        InvalidSpec: If the file cannot be read, or an input has an unsupported type or another open axis than the
            batch. Also if an output is no tensor of numbers, a Reshape fixes the batch, or a recurrent layer reads the
            batch as time. Also if integers that `dims` does not give decide how much is computed.
        InvalidArgument: If `dims` names neither an open axis nor an integer input.
        MissingDependency: If onnx is not installed.
    """

    def __init__(self, path: Path, dims: Mapping[str, int] | None = None) -> None:
        try:
            import onnx
            import onnx.inliner
            import onnx.shape_inference
        except ImportError as error:
            raise MissingDependency("onnx", 'library="onnxruntime"', "onnxruntime") from error
        self._onnx, self._path = onnx, path
        if not path.is_file():
            raise self.refused("a file that exists")
        try:
            model = onnx.load(str(path), load_external_data=False)
        except Exception as error:  # its decoders raise what they like
            raise self.refused(f"a file that onnx can read ({error})") from error
        self.files = (path, *_beside(model.graph, path.parent))
        weights = {each.name for each in model.graph.initializer}
        values = [each for each in model.graph.input if each.name not in weights]
        if not values or not values[0].type.tensor_type.shape.dim:
            raise self.refused("one whose first input is a tensor of known rank, with the batch as axis 0")
        self._dims = dims or {}
        axis = self._batch_dim(values)
        self._set_dims(values, axis.dim_param)
        self._batch, self._batch_name = axis.dim_value or None, axis.dim_param
        self._weights = sum(self._bytes(each.dims, each.data_type) for each in model.graph.initializer)
        self.inputs = tuple(self._input(model.graph, each) for each in values)
        self.outputs = tuple(self._output(each) for each in model.graph.output)
        self.rewritten: bytes | None = None
        if self._batch is not None:
            self._set_batch(model.graph, _BATCH)
            self.rewritten = model.SerializeToString()
        self._graph_of = self._skeleton(model)
        if self._batch is not None and (node := self.fixing_node(self._batch)):
            raise self.fixed_by(node)
        self._check_values()
        self._check_time()

    @property
    def dtype(self) -> str:
        """Element type of the first floating-point input, else of most of the weights."""
        of_input = next((each.dtype for each in self.inputs if each.dtype.startswith("float")), None)
        return of_input or self._weights_dtype()

    def peaks(self) -> Peaks:
        """
        Return the peak bytes of steps by batch size, from the lifetimes of tensors in file order, weights included.

        Raises:
            NotImplementedError: If a shape is unknown: of a custom operator, or one that depends on data.
        """
        return Peaks({n: self._weights + self._peak(n) for n in _WALKED})

    def fixing_node(self, batch_size: int | None = None) -> str | None:
        """
        Return a description of the first Reshape whose target shape fixes the batch axis; None if there is none.

        With `batch_size`, only a shape with this extent counts.
        """
        shapes = {name: shape for name, (shape, _) in self._inferred(_PROBE).items()}
        constants = self._constants(self._graph_of.graph)
        for node in self._graph_of.graph.node:
            is_constant = node.op_type == "Reshape" and len(node.input) > 1 and node.input[1] in constants
            shape = constants[node.input[1]].reshape(-1).tolist() if is_constant else None
            holds_batch = shapes.get(node.input[0], ())[:1] == (_PROBE,) if node.input else False
            if shape and holds_batch and (shape[0] == batch_size if batch_size else shape[0] > 0):
                return f"{_described(node)} of shape {shape}"
        return None

    def fixed_by(self, node: str) -> InvalidSpec:
        """Return the error that a node of the file, given by its description, fixes the batch size."""
        return self.refused(f"one of any batch size, not with the batch fixed inside, by {node}", _DYNAMIC)

    def refused(self, allowed: str, remedy: str = "") -> InvalidSpec:
        """Return the error that the file cannot be used; `allowed` describes a usable file, `remedy` the next step."""
        return InvalidSpec("ONNX file", str(self._path), allowed, remedy)

    def _input(self, graph: Any, value: Any) -> Input:
        """
        Return an input of the graph; raise InvalidSpec for an open axis other than the batch or a bad type.

        Its batch axis has the name of the batch, or is axis 0 and open or as long as the batch.
        """
        tensor = value.type.tensor_type
        dims = list(tensor.shape.dim)
        batch_axis = next((axis for axis, dim in enumerate(dims) if self._is_batch(axis, dim)), None)
        for axis, dim in enumerate(dims):
            if not dim.dim_value and axis != batch_axis:
                raise self._open(value.name, dims, axis)
        dtype = self._dtype(tensor.elem_type) if tensor.elem_type else "no tensor"
        if dtype not in DTYPES:
            kind = "text" if dtype == "object" else dtype
            raise self.refused(f"one whose input {value.name} is of {', '.join(DTYPES)}, not {kind}")
        rows = None
        for node in graph.node:
            if node.op_type == "Gather" and node.input[1] == value.name:
                rows = next((each.dims[0] for each in graph.initializer if each.name == node.input[0]), rows)
        shape = tuple(dim.dim_value for axis, dim in enumerate(dims) if axis != batch_axis)
        given = self._dims.get(value.name) if self._is_whole(value) else None
        return Input(name=value.name, dtype=dtype, shape=shape, batch_axis=batch_axis, values=rows, value=given)

    def _output(self, value: Any) -> str:
        """Return the name of an output; raise InvalidSpec unless it is a tensor of numbers, which can be bound."""
        kind = value.type.WhichOneof("value") or "tensor_type"
        is_text = kind == "tensor_type" and value.type.tensor_type.elem_type == self._onnx.TensorProto.STRING
        if kind == "tensor_type" and not is_text:
            return str(value.name)
        words = "text" if is_text else f"a {kind.removesuffix('_type')}"
        remedy = "onnx.utils.extract_model omits it; scikit-learn's converter has options={'zipmap': False}."
        raise self.refused(f"one whose output {value.name} is a tensor of numbers, not {words}", remedy)

    def _set_dims(self, values: list[Any], batch: str) -> None:
        """Set the extents that the user gave; `batch` is the name of the batch axis, which has none."""
        every = [dim for value in values for dim in value.type.tensor_type.shape.dim]
        names = {dim.dim_param for dim in every} - {"", batch}
        known = names | {value.name for value in values if self._is_whole(value)}
        for name, given in self._dims.items():
            if name not in known:
                others = ", ".join(sorted(known)) or "it has none"
                allowed = (
                    f"names of integer inputs, or of open axes other than the batch, of {self._path.name}: {others}"
                )
                raise InvalidArgument("dims", name, allowed)
            check_whole(f"dims[{name!r}]", given, least=1 if name in names else 0)
        for dim in every:
            if dim.dim_param in self._dims:
                dim.dim_value = self._dims[dim.dim_param]

    def _is_whole(self, value: Any) -> bool:
        """Return whether an input holds integers or booleans."""
        elem_type = value.type.tensor_type.elem_type
        return bool(elem_type) and self._dtype(elem_type).startswith(("int", "uint", "bool"))

    def _batch_dim(self, values: list[Any]) -> Any:
        every = [dim for value in values for dim in value.type.tensor_type.shape.dim]
        first = values[0].type.tensor_type.shape.dim[0]
        named = next((dim for dim in every if dim.dim_param.lower().startswith("batch")), None)
        if named is None and first.dim_param in self._dims:  # as in recurrent networks, which take time first
            named = next((dim for dim in every if dim.dim_param and dim.dim_param not in self._dims), None)
        return first if named is None else named

    def _check_values(self) -> None:
        """
        Raise InvalidSpec if values of an input decide how much is computed, and the user has not given its value.

        Drawn ones would be 0 or 1: a sequence of one step, however long it is in use.
        """
        holds = {
            each.name: frozenset({each.name})
            for each in self.inputs
            if not each.dtype.startswith("float") and each.value is None
        }
        for name, node in self._deciding(self._graph_of.graph.node, holds):
            remedy = f"Pass its value: dims={{{name!r}: N}}, or on the command line --dim {name}=N."
            raise self.refused(f"one whose input {name} has a known value: it decides how much {node} computes", remedy)

    def _deciding(self, nodes: Iterable[Any], holds: dict[str, frozenset[str]]) -> Iterator[tuple[str, str]]:
        """
        Yield (input, node) for inputs whose values decide how much a node computes.

        `holds` has the inputs on whose values a tensor depends, by its name; tensors of the nodes are added.
        """
        for node in nodes:
            read = [holds.get(name, frozenset()) for name in node.input]
            for place in _DECIDING.get(node.op_type, ()):
                yield from ((name, _described(node)) for name in sorted(frozenset().union(*read[place : place + 1])))
            made = frozenset().union(*read) if node.op_type not in ("Shape", "Size") else frozenset[str]()
            for attribute in node.attribute:
                if attribute.type == self._onnx.AttributeProto.GRAPH:
                    holds |= {each.name: made for each in attribute.g.input}
                    yield from self._deciding(attribute.g.node, holds)
                    made |= frozenset().union(*(holds.get(each.name, frozenset()) for each in attribute.g.output))
            holds |= dict.fromkeys(node.output, made)

    def _check_time(self) -> None:
        """Raise InvalidSpec if a recurrent layer reads the batch axis as time."""
        recurrent = [node for node in self._graph_of.graph.node if node.op_type in _RECURRENT]
        shapes = self._inferred(_PROBE) if recurrent else {}
        for node in recurrent:
            axis = next((each.i for each in node.attribute if each.name == "layout"), 0)
            if shapes.get(node.input[0], ((), 0))[0][axis : axis + 1] == (_PROBE,):
                name = self._batch_name
                remedy = (
                    f"Pass its extent: dims={{{name!r}: N}}, or on the command line --dim {name}=N." if name else ""
                )
                raise self.refused(
                    f"one whose batch axis is not what {_described(node)} reads as time",
                    remedy or "Export it with the name 'batch' for its batch axis, which is then open.",
                )

    def _is_batch(self, axis: int, dim: Any) -> bool:
        if dim.dim_value:
            return axis == 0 and bool(dim.dim_value == self._batch)
        if dim.dim_param and dim.dim_param == self._batch_name:
            return True
        return axis == 0 and self._batch is None and "" in {dim.dim_param, self._batch_name}

    def _open(self, name: str, dims: list[Any], number: int) -> InvalidSpec:
        """Return the error that axis `number` of an input is open and not the batch, with a remedy."""
        axis = dims[number].dim_param
        if axis:
            remedy = f"pass dims={{{axis!r}: N}}, or on the command line --dim {axis}=N"
        else:  # ONNX Runtime's tool sets axes without a name
            shape = ",".join(str(dim.dim_value or ("1" if place == 0 else "N")) for place, dim in enumerate(dims))
            options = f"--input_name {name} --input_shape {shape} {self._path.name} fixed.onnx"
            remedy = f"fix it: python -m onnxruntime.tools.make_dynamic_shape_fixed {options}"
        also = f" If it is the batch, export it with the name {self._batch_name or _BATCH!r}."
        if number and axis and self._batch_name and not self._batch_name.lower().startswith(_BATCH):
            also = f" If it is the batch, pass the extent of axis {self._batch_name} instead."
        allowed = f"one whose input {name} is open in the batch only, not in axis {axis or number}"
        return self.refused(allowed, f"{remedy[0].upper()}{remedy[1:]}.{also}")

    def _set_batch(self, graph: Any, batch: int | str) -> None:
        """Set the batch axis of the inputs to a size or name, and clear other shapes, which may depend on it."""
        axes = {each.name: each.batch_axis for each in self.inputs if each.batch_axis is not None}
        for value in graph.input:
            if value.name in axes:
                dim = value.type.tensor_type.shape.dim[axes[value.name]]
                if isinstance(batch, int):
                    dim.dim_value = batch
                else:
                    dim.dim_param = batch
        for value in graph.output:
            value.type.tensor_type.ClearField("shape")
        del graph.value_info[:]

    def _skeleton(self, model: Any) -> Any:
        """Return the model without values of large weights, on which no shape depends, and with functions inlined."""
        for tensor in model.graph.initializer:
            if math.prod(tensor.dims) > _LARGEST_SHAPE:
                tensor.ClearField("raw_data")
                tensor.ClearField("float_data")
        return self._onnx.inliner.inline_local_functions(model) if model.functions else model

    def _inferred(self, batch_size: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """
        Return (shape, bytes) of all tensors with a known shape at a batch size, by name; weights are left out.

        Small tensors that onnx does not compute, but that others depend on for their shape, are computed here.
        """
        self._set_batch(self._graph_of.graph, batch_size)
        model: Any = self._graph_of
        while True:
            inferred = self._by_onnx(model)
            made = {name for node in model.graph.node for name in node.output if name}
            if made <= inferred.keys() or (folded := self._folded(model, inferred)) is None:
                return inferred
            model = folded

    def _by_onnx(self, model: Any) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return (shape, bytes) of all tensors of a model whose shape onnx infers, by name; weights are left out."""
        try:
            graph = self._onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        except self._onnx.shape_inference.InferenceError:  # running the file gives a better error
            graph = model.graph
        weights = {each.name for each in graph.initializer}
        inferred = {}
        for value in [*graph.input, *graph.value_info, *graph.output]:
            tensor = value.type.tensor_type
            dims = tensor.shape.dim
            is_known = tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in dims)  # 0 is an extent too
            if value.name not in weights and is_known:
                shape = tuple(dim.dim_value for dim in dims)
                inferred[value.name] = shape, self._bytes(shape, tensor.elem_type)
        return inferred

    def _folded(self, model: Any, inferred: Mapping[str, tuple[tuple[int, ...], int]]) -> Any:
        """
        Return a copy of a model in which small tensors that depend on shapes alone are constants; None without any.

        `inferred` has the known (shape, bytes) of tensors by name.
        """
        constants, nodes, is_folded = self._constants(model.graph), [], False
        opsets = {each.domain: each.version for each in model.opset_import}
        small = {name: shape for name, (shape, _) in inferred.items() if math.prod(shape) <= _LARGEST_SHAPE}
        for node in model.graph.node:
            names, inputs = [name for name in node.output if name], dict[str, np.ndarray[Any, Any]]()
            if node.op_type in ("Shape", "Size") and node.input[0] in inferred:
                inputs = {node.input[0]: np.broadcast_to(np.float32(0.0), inferred[node.input[0]][0])}
            elif constants.keys() >= {name for name in node.input if name}:
                inputs = {name: constants[name] for name in node.input if name}
            arrays = evaluated(node, inputs, opsets) if inputs and small.keys() >= set(names) else {}
            constants |= arrays
            tensors = [self._onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
            made = [self._onnx.helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in tensors]
            nodes += made or [node]
            is_folded |= bool(made)
        if not is_folded:
            return None
        copy = self._onnx.ModelProto()
        copy.CopyFrom(model)
        del copy.graph.node[:]
        copy.graph.node.extend(nodes)
        return copy

    def _peak(self, batch_size: int) -> int:
        sizes = {name: num_bytes for name, (_, num_bytes) in self._inferred(batch_size).items()}
        nodes = self._graph_of.graph.node
        last = {name: number for number, node in enumerate(nodes) for name in node.input}
        lasting = {each.name for each in self.inputs} | set(self.outputs)
        alive = peak = sum(sizes.get(each.name, 0) for each in self.inputs)
        for number, node in enumerate(nodes):
            if unknown := [name for name in node.output if name and name not in sizes]:
                raise NotImplementedError(f"onnx infers no shape of {unknown[0]}, an output of {node.op_type}")
            alive += sum(sizes.get(name, 0) for name in node.output)
            peak = max(peak, alive)
            done = {name for name in [*node.input, *node.output] if last.get(name, number) == number} - lasting
            alive -= sum(sizes.get(name, 0) for name in done)
        return peak

    def _constants(self, graph: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Return small constant tensors of a graph, such as shapes, by name."""
        tensors, arrays = {each.name: each for each in graph.initializer}, dict[str, np.ndarray[Any, Any]]()
        made = [(node.output[0], each) for node in graph.node if node.op_type == "Constant" for each in node.attribute]
        for name, each in made:
            if each.name == "value":
                tensors[name] = each.t
            elif dtype := {"value_int": "int64", "value_float": "float32"}.get(each.name.removesuffix("s")):
                arrays[name] = np.asarray(self._onnx.helper.get_attribute_value(each), dtype)
        small = {name: each for name, each in tensors.items() if math.prod(each.dims) <= _LARGEST_SHAPE}
        return arrays | {
            name: self._onnx.numpy_helper.to_array(each) for name, each in small.items() if not each.external_data
        }

    def _weights_dtype(self) -> str:
        sizes: dict[str, int] = {}
        for each in self._graph_of.graph.initializer:
            dtype = self._dtype(each.data_type)
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(each.dims)
        return max(sizes, key=lambda name: sizes[name], default="float32")

    def _dtype(self, elem_type: int) -> str:
        return str(self._onnx.helper.tensor_dtype_to_np_dtype(elem_type))

    def _bytes(self, dims: Any, elem_type: int) -> int:
        num_bytes: int = math.prod(dims) * self._onnx.helper.tensor_dtype_to_np_dtype(elem_type).itemsize
        return num_bytes


def _described(node: Any) -> str:
    return f"{node.op_type} {node.name or node.output[0]!r}"


def _beside(graph: Any, folder: Path) -> list[Path]:
    entries = [entry for each in graph.initializer for entry in each.external_data if entry.key == "location"]
    return [folder / name for name in sorted({entry.value for entry in entries})]

"""load_onnx(): import an ONNX file from its graph and the shapes that onnx infers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cubatch.errors import InvalidArgument, InvalidSpec, MissingDependency
from cubatch.network.extents import Extents
from cubatch.network.graph import Network
from cubatch.network.importers.building import Builder
from cubatch.network.importers.layer_rules import RULES, keep_opaque
from cubatch.network.importers.onnx_operators import OPERATORS, SYMMETRIC, Call, Shape, part
from cubatch.network.importers.onnx_patterns import Patterns
from cubatch.network.importers.refusal import as_a_file
from cubatch.network.importers.source import Meaning, Parameters, Source, Step, single_input, united, unlike

EXAMPLE_BATCH = 2  # where the file leaves the batch size open
_OWN_DOMAINS = ("", "ai.onnx")
_TO_CHANNELS_FIRST = [0, 3, 1, 2]  # permutation of a Transpose
# Random operators; each of them has a form that reads nothing, or the shape of a constant alone.
_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
)
_OF_FACTORS = frozenset({"Resize", "Upsample"})  # their floating-point inputs are the size of the result, not weights


def load_onnx(path: str | Path, *, input_shape: tuple[int, ...] | None = None, opaque: bool = False) -> Network:
    """
    Read an ONNX file as a network, with its weights.

    The batch is the first axis of its only input; its size in the file does not matter. A batch norm that was folded
    into the convolution before it stays a convolution with a bias.

    Transpositions and reshapes make no layers. Activations of cubatch are (h, w, c), filters (k, r, s, c), and weights
    after a flatten are reordered to match. An output that ends in a flatten has cubatch's order too.

    Args:
        path: The file.
        input_shape: Shape of one sample in the file, if the file leaves it open; None: that of the file. It is
            (channels, height, width), (tokens, channels) or (features,), or (height, width, channels) if the file
            transposes its input first.
        opaque: Import operators without a layer as layers of known extents, bytes and FLOP. Such a network can be
            planned and predicted, but not run.

    Returns:
        Network: Its `weights` are in float32; its name is that of the file.

    Raises:
        UnsupportedOperator: If an operator has no layer, and opaque is False; it names the operator and its node.
        InvalidArgument: If `path` is no path, or `input_shape` does not fit the file.
        InvalidSpec: If the file cannot be read, has several inputs or outputs, leaves its input's shape open, or has no
            layer between input and output.
        MissingDependency: If onnx is not installed.

    Example:
        >>> load_onnx("resnet50.onnx").parameters                                     # doctest: +SKIP
        25530472
    """
    return read(path, input_shape=input_shape, opaque=opaque)


def read(
    path: str | Path,
    *,
    input_shape: tuple[int, ...] | None = None,
    extents: Extents | None = None,
    opaque: bool = False,
) -> Network:
    """
    Return an ONNX file as a network; the errors are those of `load_onnx`.

    Args:
        path, input_shape, opaque: As for `load_onnx`.
        extents: (h, w, c) of one sample, for any order of the file's axes; None: `input_shape` or the file has them.
    """
    if not isinstance(path, str | Path):
        raise InvalidArgument("path", path, "the path of an ONNX file")
    path = Path(path)
    if not path.is_file():
        raise InvalidSpec("ONNX file", str(path), "a file that exists")
    try:
        import onnx
        import onnx.inliner
        import onnx.shape_inference
    except ImportError as error:
        raise MissingDependency("onnx", "load_onnx", "onnx") from error
    try:
        model = onnx.load(str(path))
    except Exception as error:  # the decoders of onnx raise many types
        raise InvalidSpec("ONNX file", str(path), f"a file that onnx can read ({error})") from error
    source = _Reader(onnx, model, path, input_shape, extents).source()
    return Builder(source, RULES, keep_opaque if opaque else None).network()


def evaluated(node: Any, inputs: Mapping[str, Any], opsets: Mapping[str, int]) -> dict[str, Any]:
    """Return the outputs of a node by name for inputs by name, as onnx computes them; empty if it cannot."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    outputs = [name for name in node.output if name]
    values = [[helper.make_empty_tensor_value_info(name) for name in names] for names in (inputs, outputs)]
    graph = helper.make_graph([node], "node", *values)  # a bare node is evaluated by the newest operator version
    try:
        results = ReferenceEvaluator(graph, opsets=dict(opsets)).run(None, dict(inputs))
    except Exception:  # noqa: BLE001 - it raises any error
        return {}
    return dict(zip(outputs, results, strict=True))


class _Reader:
    """Reads a model into steps: fixes the batch, infers shapes, and computes nodes that depend on constants alone."""

    def __init__(
        self, onnx: Any, model: Any, path: Path, input_shape: tuple[int, ...] | None, extents: Extents | None
    ) -> None:
        self._onnx, self._path = onnx, path
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        opsets = {each.domain: each.version for each in model.opset_import}
        self._opset = next((opsets[domain] for domain in _OWN_DOMAINS if domain in opsets), 1)
        self._opsets = opsets | dict.fromkeys(_OWN_DOMAINS, self._opset)
        self._constants: dict[str, np.ndarray[Any, Any]] = {
            each.name: onnx.numpy_helper.to_array(each, str(path.parent)) for each in model.graph.initializer
        }
        self._trained = {name: _parameters(name, array) for name, array in self._constants.items()}
        self._input, self._input_shape = self._fix_input(model, input_shape, extents)
        outputs = [each.name for each in model.graph.output]
        if len(outputs) != 1:
            raise self._refused(f"one with a single output, not {', '.join(outputs)}")
        self._output = outputs[0]
        self._shapes = {self._input: self._input_shape}
        self._nodes = list(model.graph.node)
        while True:  # constants decide shapes, and shapes are constants
            self._shapes.update(self._infer_shapes(model))
            left = [node for node in self._nodes if not self._fold(node)]
            if len(left) == len(self._nodes):
                break
            self._store_constants(model, left)
        self._patterns = Patterns(self._nodes, self._constants, self._shapes, self._opset)
        self._live = {self._output}  # names on which the output depends
        for node in reversed(self._nodes):
            if self._live.intersection(node.output):
                self._live.update(node.input)

    def _refused(self, allowed: str) -> InvalidSpec:
        return InvalidSpec("ONNX file", str(self._path), allowed, f"To {as_a_file(self._path)}")

    def _fix_input(self, model: Any, input_shape: tuple[int, ...] | None, extents: Extents | None) -> tuple[str, Shape]:
        """
        Return name and shape of the model's only input, and write the shape into the model.

        Raises InvalidSpec for several inputs or an open shape, InvalidArgument for a shape that does not fit the file.

        `input_shape` and `extents` are as for `read`; if both are None, the file must have a known shape.
        """
        inputs = [each for each in model.graph.input if each.name not in self._constants]
        if len(inputs) != 1:
            names = ", ".join(each.name for each in inputs) or "none"
            raise self._refused(f"one with a single input, not {names}")
        dims = inputs[0].type.tensor_type.shape.dim
        sizes = [max(dim.dim_value, 0) for dim in dims]  # some files write -1 for an open size
        is_right = isinstance(input_shape, tuple | list) and all(type(each) is int and each > 0 for each in input_shape)
        if input_shape is not None and not (input_shape and is_right):
            allowed = "whole numbers of at least 1, one for each axis behind the batch"
            raise InvalidArgument("input_shape", input_shape, allowed)
        if not sizes:  # the file leaves even the number of axes open
            rank = len(input_shape) if input_shape else _rank(extents) if extents else -1
            sizes = [0] * (1 + rank)
        if extents is not None:
            readers = [node for node in model.graph.node if inputs[0].name in node.input]
            input_shape = self._ordered(extents, sizes[1:], readers)
        if input_shape is not None:
            if len(input_shape) != len(sizes) - 1:
                allowed = f"{len(sizes) - 1} whole numbers of at least 1, as {self._path.name} has {len(sizes)} axes"
                raise InvalidArgument("input_shape", input_shape, allowed)
            sizes[1:] = input_shape
        if not sizes or not all(sizes[1:]):
            axes = [dim.dim_param or size or "?" for dim, size in zip(dims, sizes, strict=True)]
            raise InvalidSpec("ONNX file", f"input {axes}", "one whose input has a known shape", "Give input_shape.")
        sizes[0] = sizes[0] or EXAMPLE_BATCH
        dims.extend(self._onnx.TensorShapeProto.Dimension() for _ in sizes[len(dims) :])
        for dim, extent in zip(dims, sizes, strict=True):
            dim.dim_value = extent
        return inputs[0].name, tuple(sizes)

    def _ordered(self, extents: Extents, sizes: list[int], readers: list[Any]) -> tuple[int, ...]:
        """
        Return (h, w, c) in the file's order of axes; `sizes` are those that the file fixes, 0 where it leaves one open.

        Raises InvalidArgument if no order agrees with them. If channels first and last both agree, channels are last
        only where every reader of the input transposes it.
        """
        h, w, c = extents
        orders: dict[int, list[tuple[int, ...]]] = {
            3: [(c, h, w), (h, w, c)], 2: [(h, c)] * (w == 1), 1: [(c,)] * (h == w == 1),
        }  # fmt: skip
        agreeing = [
            order
            for order in orders.get(len(sizes), [])
            if all(size in {0, extent} for size, extent in zip(sizes, order, strict=True))
        ]
        if not agreeing:
            shape = ", ".join(str(size or "?") for size in sizes)
            allowed = f"(h, w, c) of one sample that agrees with the input of {self._path.name}, ({shape})"
            raise InvalidArgument("input_shape", extents, allowed, "Features are 1,1,c, tokens h,1,c.")
        turns = [[list(each.ints) for each in node.attribute] for node in readers if node.op_type != "Shape"]
        return agreeing[-1 if all(turn == [_TO_CHANNELS_FIRST] for turn in turns) else 0]

    def _store_constants(self, model: Any, left: list[Any]) -> None:
        """Replace the model's nodes by those in `left`, and add the results of the other nodes as constants."""
        results = {name for node in left for name in node.output}
        made = [name for node in self._nodes for name in node.output if name in self._constants and name not in results]
        del model.graph.node[:]
        model.graph.node.extend(left)
        model.graph.initializer.extend(self._onnx.numpy_helper.from_array(self._constants[name], name) for name in made)
        self._nodes = left

    def _infer_shapes(self, model: Any) -> dict[str, Shape]:
        """
        Return the shapes that onnx infers, by name; raise InvalidSpec if it cannot.

        Shapes in the file may be of another batch and are discarded.
        """
        graph = model.graph
        del graph.value_info[:]
        for output in graph.output:
            output.type.tensor_type.ClearField("shape")
        for tensor in graph.initializer:
            if math.prod(tensor.dims) > 1024:  # noqa: PLR2004 - no shape depends on these, and messages are limited
                tensor.ClearField("raw_data")
                tensor.ClearField("float_data")
        try:
            inferred = self._onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        except self._onnx.shape_inference.InferenceError as error:
            raise self._refused(f"one whose shapes onnx can infer ({error})") from error
        shapes = {}
        for each in [*inferred.value_info, *inferred.output]:
            extents = [dim.dim_value for dim in each.type.tensor_type.shape.dim]
            if each.type.tensor_type.HasField("shape") and all(extents):
                shapes[each.name] = tuple(extents)
        return shapes

    def source(self) -> Source:
        steps = [step for node in self._nodes for step in self._steps(node)]
        return Source(
            name=self._path.stem, input=self._input, input_shape=self._input_shape, steps=tuple(steps),
            output=self._output, as_it_is=as_a_file(self._path),
        )  # fmt: skip

    def _fold(self, node: Any) -> bool:
        """Compute a node if it depends on constants or shapes alone; return whether it was computed."""
        if node.op_type == "Shape" and node.input[0] in self._shapes:
            where = {each.name: each.i for each in node.attribute}
            shape = self._shapes[node.input[0]]
            self._constants[node.output[0]] = np.array(shape[where.get("start", 0) : where.get("end", len(shape))])
            return True
        if node.op_type in _RANDOM or not all(not name or name in self._constants for name in node.input):
            return False
        if node.op_type == "Identity":
            self._constants[node.output[0]] = self._constants[node.input[0]]
            self._trained[node.output[0]] = united(self._trained, node.input)
            return True
        results = evaluated(node, {name: self._constants[name] for name in node.input if name}, self._opsets)
        self._constants.update(results)
        for name, array in results.items():
            own = _parameters(name, array)
            self._trained[name] = united(self._trained, node.input) if own and node.input else own
        return bool(results)

    def _steps(self, node: Any) -> list[Step]:
        """Return the import steps of an ONNX node, one for each of its outputs in their order."""
        name = node.op_type if node.domain in _OWN_DOMAINS else f"{node.domain}.{node.op_type}"
        attributes = {each.name: self._attribute(each) for each in node.attribute}
        pattern = self._patterns.match(node)
        # The first live result carries the FLOP and parameters of all.
        counted = next((result for result in node.output if result in self._live), "")
        steps = []
        for number, result in enumerate(node.output):
            if not result:
                continue
            shape = self._shapes.get(result)
            call = Call(
                name, list(node.input), attributes, self._constants, self._shapes, shape or (), self._opset,
                list(node.output),
            )  # fmt: skip
            kind, constants, options = self._meaning(call, number, shape)
            reads = tuple(call.values)
            if pattern is not None:
                (kind, reads), constants, options = pattern, {}, {}
            is_trained = result == counted and node.op_type not in _OF_FACTORS
            steps.append(
                Step(
                    kind=kind,
                    operator=f"{name}[{number}]" if number else name,
                    place=(node.name or node.output[0]).strip("/"),
                    reads=reads,
                    result=result,
                    shape=call.result_shape,
                    constants={key: array for key, array in constants.items() if array is not None},
                    options=options,
                    flop=call.flop if result == counted else 0,
                    weights=sum(size for _, size in united(self._trained, node.input)) if is_trained else 0,
                )
            )
        return steps

    def _meaning(self, call: Call, number: int, shape: Shape | None) -> Meaning:
        reason = None
        if call.name in _RANDOM:
            reason = "it draws random numbers"
        elif not call.values:
            reason = "it reads nothing that depends on the network's input, and could not be computed in advance"
        elif shape is None or not all(name in call.shapes for name in call.values):
            reason = "onnx cannot infer the shape of its result"
        elif not shape:
            reason = "its result is a single number for the whole batch"
        elif call.name not in SYMMETRIC and call.inputs[0] in call.constants:
            reason = "its first input does not depend on the network's"
        if reason is not None:
            return unlike(reason)
        if call.name == "Split":
            return single_input(part(call, number), len(call.values))
        if call.name not in OPERATORS or number:
            return "", {}, {}
        return single_input(OPERATORS[call.name](call), len(call.values))

    def _attribute(self, attribute: Any) -> Any:
        value = self._onnx.helper.get_attribute_value(attribute)
        return value.decode() if isinstance(value, bytes) else value


def _rank(extents: Extents) -> int:
    """Return the number of axes of one sample: 3 for an image, 2 for tokens (w = 1), 1 for features (h = w = 1)."""
    h, w, _ = extents
    return 3 if w > 1 else 2 if h > 1 else 1


def _parameters(name: str, array: Any) -> Parameters:
    """Return {(name, elements)} for an array of several floating-point numbers, a trained parameter; else empty."""
    is_trained = isinstance(array, np.ndarray) and array.size > 1 and array.dtype.name.startswith(("float", "bfloat"))
    return frozenset({(name, array.size)}) if is_trained else frozenset()

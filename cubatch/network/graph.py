"""
Networks: lists of layers in which each layer reads layers above it.

Extents are inferred from the input shape down, and every error names the place: `layers[3] (conv2d).stride`.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import attrs
from attrs import field

from cubatch.errors import InvalidSpec, UnknownName
from cubatch.network.extents import A_NAME, MAX_EXTENT, Extents, check_integer, is_name, whole
from cubatch.network.layer import Layer, check_mode
from cubatch.network.layers import LAYERS, Linear
from cubatch.network.passes import Pass

_P = ParamSpec("_P")
_R = TypeVar("_R")
INPUT = "input"


class SuspiciousSpec(UserWarning):
    """A warning about a spec that is valid, but probably a mistake."""


@attrs.frozen
class Node:
    """A layer in a network, with its extents inferred, its name, and the names of the layers that it reads."""

    name: str  # its name, or "layer1" by position
    layer: Layer  # the layer with inferred extents
    inputs: tuple[str, ...]  # names of the layers that it reads; "input" is the network's input


def check_input_shape(value: object) -> Extents:
    """Return (h, w, c) as a tuple of whole numbers of at least 1; raise InvalidSpec for anything else."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 3:  # noqa: PLR2004
        raise InvalidSpec("input_shape", value, "three whole numbers (h, w, c)")
    h, w, c = (check_integer(whole(extent), "input_shape", 1) for extent in value)
    return h, w, c


def _layers(value: object) -> tuple[Layer, ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise InvalidSpec("layers", value, "a list of layers")
    return tuple(item if isinstance(item, Layer) else layer_of(item, f"layers[{i}]") for i, item in enumerate(value))


def _check_name(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not is_name(value):
        raise InvalidSpec(attribute.name, value, A_NAME)


@attrs.frozen(kw_only=True, cache_hash=True)
class Network:
    """
    Layers as a graph without cycles, from one input to the output of the last layer.

    Attributes:
        input_shape: (h, w, c) of one sample.
        layers: The layers in order, or mappings in the form of a spec file. `inputs` of a layer names layers above it;
            without `inputs` a layer reads the one before.
        name: Name of the network in tables and results.
        weights: Parameters and running statistics by layer and name, float32 arrays. Missing arrays are drawn at
            random. Networks are compared without weights, and a spec file has none.

    Raises:
        InvalidSpec: If a layer, a connection, the input shape, the name or an array of weights is invalid.
        UnknownName: If a layer type, key, input, or a name in `weights` is not known.

    Example:
        >>> from cubatch.network.layers import Conv2d, Flatten, Linear
        >>> net = Network(input_shape=(8, 8, 1), layers=[Conv2d(k=4, r=3, s=3), Flatten(), Linear(k=10)])
        >>> net.output_shape, net.parameters
        ((1, 1, 10), 1490)
    """

    input_shape: Extents = field(converter=check_input_shape)
    layers: tuple[Layer, ...] = field(converter=_layers)
    name: str = field(default="network", validator=_check_name)
    weights: Mapping[str, Mapping[str, Any]] = field(factory=dict, eq=False, repr=False)
    nodes: tuple[Node, ...] = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        h, w, c = self.input_shape
        named = bool(self.layers) and self.layers[0].resolved  # h, w and c were given by name
        if not named and h in {1, 3} and c > 4 and w > 4 and c == w:  # noqa: PLR2004
            warnings.warn(
                f"input_shape {self.input_shape} is read as h={h}, w={w}, c={c}; "
                f"for a {w}x{c} image with {h} channels write ({w}, {c}, {h})",
                SuspiciousSpec,
                stacklevel=3,
            )
        nodes = _connect(self.input_shape, self.layers)
        last, (height, width, channels) = nodes[-1], nodes[-1].layer.output_shape
        # A convolution acts on places by design, and rows of tokens are one wide.
        if len(nodes) > 1 and isinstance(last.layer, Linear) and min(height, width) > 1:
            warnings.warn(
                f"{last.name} (linear) gives {channels} numbers for each of {height}x{width} places; "
                f"for {channels} in all put a flatten or a global_avg_pool before it",
                SuspiciousSpec,
                stacklevel=3,
            )
        _check_weights(nodes, self.weights)
        object.__setattr__(self, "nodes", nodes)

    @functools.cached_property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(node.layer.parameters for node in self.nodes)

    @functools.cached_property
    def _trained(self) -> frozenset[str]:
        """Names of the layers whose output depends on a parameter."""
        trained: set[str] = set()
        for node in self.nodes:
            if node.layer.parameter_shapes or trained.intersection(node.inputs):
                trained.add(node.name)
        return frozenset(trained)

    @property
    def output_shape(self) -> Extents:
        """(h, w, c) of one sample of the network's output, which is that of the last layer."""
        return self.nodes[-1].layer.output_shape

    def flops(self, mode: str = "inference") -> int:
        """Return the FLOP of one sample: of the forward pass, and in "training" also of all gradients that it needs."""
        total = sum(node.layer.flops(mode) for node in self.nodes)
        if check_mode(mode) == "training":
            total -= sum(
                node.layer.pass_flops(Pass.DGRAD) for node in self.nodes if not self.wants_input_gradient(node)
            )
        return total

    def wants_input_gradient(self, node: Node) -> bool:
        """Return whether training needs the gradient of a layer's inputs: one of them depends on parameters."""
        return any(name in self._trained for name in node.inputs)

    def to_mapping(self) -> dict[str, Any]:
        """Return "name", "input_shape" and "layers" of the network as a plain mapping, in the form of a spec file."""
        layers = [layer.to_mapping() for layer in self.layers]
        return {"name": self.name, "input_shape": list(self.input_shape), "layers": layers}

    def __str__(self) -> str:
        return self.name


Spec = Layer | Network


def cached(function: Callable[Concatenate[Spec, _P], _R]) -> Callable[Concatenate[Spec, _P], _R]:
    """
    Return the function with a cache of its last 64 results; its first argument is a layer or network.

    The function gets networks without weights, which the cache would keep in memory; so it must not read them.
    """
    lookup = cast("Callable[Concatenate[Spec, _P], _R]", functools.lru_cache(maxsize=64)(function))

    @functools.wraps(function)
    def answer(spec: Spec, /, *args: _P.args, **named: _P.kwargs) -> _R:
        if isinstance(spec, Network) and spec.weights:
            spec = copy.copy(spec)  # a new Network would be checked, and warned about, again
            object.__setattr__(spec, "weights", {})
        return lookup(spec, *args, **named)

    return answer


def _check_weights(nodes: Sequence[Node], weights: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise InvalidSpec or UnknownName for weights that are no arrays, belong to no layer, or have another shape."""
    known = {node.name: {**node.layer.parameter_shapes, **node.layer.state_shapes} for node in nodes}
    if not isinstance(weights, Mapping):
        raise InvalidSpec("weights", weights, "a mapping of arrays by layer and name")
    for layer, arrays in weights.items():
        if layer not in known:
            raise UnknownName("layer in weights", layer, known)
        if not isinstance(arrays, Mapping):
            raise InvalidSpec(f"weights[{layer!r}]", arrays, "a mapping of arrays by name")
        for name, array in arrays.items():
            if name not in known[layer]:
                raise UnknownName(f"array in weights of {layer}", name, known[layer])
            if not hasattr(array, "shape"):
                raise InvalidSpec(f"weights[{layer!r}][{name!r}]", array, "an array", "numpy.array() makes one.")
            if tuple(array.shape) != known[layer][name]:
                raise InvalidSpec(f"weights[{layer!r}][{name!r}]", array.shape, f"of shape {known[layer][name]}")


def _connect(input_shape: Extents, layers: Sequence[Layer]) -> tuple[Node, ...]:
    """
    Return a node for each layer in order, with names, inputs and extents filled in.

    Raises InvalidSpec for invalid connections, UnknownName for an input that is no layer.
    """
    paths = [f"layers[{i}] ({layer.type})" for i, layer in enumerate(layers)]
    names = [layer.name or f"layer{i + 1}" for i, layer in enumerate(layers)]
    place = _places(names, paths)
    shapes: dict[str, Extents] = {INPUT: input_shape}
    nodes: list[Node] = []
    for i, layer in enumerate(layers):
        inputs = layer.inputs if layer.inputs is not None else ((names[i - 1] if i else INPUT),)
        for name in inputs:
            if name in shapes:
                continue
            if name in place:
                allowed = f"layers above it, and {name!r} is at {place[name]}"
                raise InvalidSpec(f"{paths[i]}.inputs", list(inputs), allowed, "List layers in order of execution.")
            raise UnknownName(f"layer in {paths[i]}.inputs", name, list(shapes))
        try:
            placed = layer.with_inputs([shapes[name] for name in inputs])
        except InvalidSpec as error:
            raise InvalidSpec(f"{paths[i]}.{error.field}", error.value, error.allowed, error.remedy) from None
        if math.prod(placed.output_shape) > MAX_EXTENT:
            raise InvalidSpec(paths[i], placed.output_shape, f"of a shape with at most {MAX_EXTENT} outputs per sample")
        shapes[names[i]] = placed.output_shape
        nodes.append(Node(names[i], placed, inputs))
    _check_all_read(nodes, paths)
    return tuple(nodes)


def _places(names: Sequence[str], paths: Sequence[str]) -> dict[str, str]:
    """
    Return the path in the spec of each layer by its name, as errors show it; "input" is the network's input.

    Raises InvalidSpec if there are no layers or two share a name.
    """
    if not names:
        raise InvalidSpec("layers", [], "at least one layer")
    place = {INPUT: "the network's input"}
    for name, path in zip(names, paths, strict=True):
        if name in place:
            raise InvalidSpec(f"{path}.name", name, f"a name of its own; {place[name]} has it")
        place[name] = path
    return place


def _check_all_read(nodes: Sequence[Node], paths: Sequence[str]) -> None:
    read = {name for node in nodes for name in node.inputs}
    for node, path in zip(nodes[:-1], paths, strict=False):
        if node.name not in read:
            remedy = "Name it in another layer's inputs, or remove it; the output is the last layer's."
            raise InvalidSpec(path, node.name, "read by some layer", remedy)


def layer_of(mapping: object, path: str) -> Layer:
    """
    Return the layer that a mapping in the form of a spec file describes.

    Raises UnknownName for an unknown type or key, else InvalidSpec; the fields in errors begin with `path`.
    """
    if not isinstance(mapping, Mapping):
        raise InvalidSpec(path, mapping, 'a mapping with a "type"')
    if "type" not in mapping:
        raise InvalidSpec(f"{path}.type", None, f"given: one of {', '.join(LAYERS)}")
    kind = mapping["type"]
    if not isinstance(kind, str) or kind not in LAYERS:
        raise UnknownName(f"layer type in {path}", kind, LAYERS)
    place = f"{path} ({kind})"
    fields = attrs.fields_dict(LAYERS[kind])
    values = {key: value for key, value in mapping.items() if key != "type"}
    for key in values:
        if key not in fields:
            raise UnknownName(f"key in {place}", key, fields)
    for key, attribute in fields.items():
        if attribute.default is attrs.NOTHING and key not in values:
            raise InvalidSpec(f"{place}.{key}", None, "given")
    try:
        return LAYERS[kind](**values)
    except InvalidSpec as error:
        raise InvalidSpec(f"{place}.{error.field}", error.value, error.allowed, error.remedy) from None


def as_network(spec: Spec) -> Network:
    """Return a layer as a network of one layer, a network unchanged; raise InvalidSpec for layers of several inputs."""
    if isinstance(spec, Network):
        return spec
    shapes = spec.input_shapes
    if len(shapes) > 1:
        raise InvalidSpec("spec", spec.type, "a network: this type of layer has several inputs")
    alone = attrs.evolve(spec, inputs=None, name=spec.name or spec.type)
    return Network(input_shape=shapes[0], layers=[alone], name=str(spec))


def layer_passes(spec: Spec, mode: str) -> list[tuple[Node, Pass]]:
    """
    Return (node, pass) of one step, layer by layer: the forward pass, and in training the gradients after it.

    In training a layer without parameters has no wgrad. A layer that reads nothing trained has no dgrad, since the
    gradient of the network's input is not needed. A single layer does all its passes. In inference, layers that do
    nothing then, such as dropout, have no pass.
    """
    network, alone = as_network(spec), isinstance(spec, Layer)
    if check_mode(mode) == "inference":
        return [(node, Pass.FPROP) for node in network.nodes if not node.layer.idle_in_inference]
    passes = []
    for node in network.nodes:
        passes.append((node, Pass.FPROP))
        if alone or network.wants_input_gradient(node):
            passes.append((node, Pass.DGRAD))
        if node.layer.parameter_shapes:
            passes.append((node, Pass.WGRAD))
    return passes

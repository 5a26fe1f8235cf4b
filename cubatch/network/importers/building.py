"""
The builder: makes layers, weights and a `Network` from the steps of a foreign network.

The rules (`layer_rules`) make the layers of a step. The builder knows which value is the output of which layer, and how
its axes lie. Layers that nothing reads are left out in the end, such as a sigmoid whose product became a SiLU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from cubatch.errors import InvalidSpec
from cubatch.network.extents import Extents, printable
from cubatch.network.graph import INPUT, Network
from cubatch.network.importers.axes import Atom, Dims, is_whole, joined, laid_out, places
from cubatch.network.importers.refusal import KEEP, UnsupportedOperator
from cubatch.network.importers.source import Source, Step
from cubatch.network.layer import Layer
from cubatch.network.layers import Flatten, Slice

Pad = tuple[int, int, int, int]
NO_PAD = (0, 0, 0, 0)
_TO_NCHW = "permute", (0, 3, 1, 2)  # the first step of a network whose input has its channels last


@attrs.frozen
class Value:
    """A tensor of the imported network: the output of a layer, or a range of its channels."""

    layer: str  # the layer whose output it is, or "input"
    dims: Dims  # its axes, each as pieces of the axes n, h, w and c of cubatch
    pad: Pad = NO_PAD  # zeros around it (top, bottom, left, right) that the layer which reads it must add
    offset: int = 0  # its first channel in the layer's output, where it has only a range of the channels


Rule = Callable[["Builder", Step], Value]


class Builder:
    """
    Builds a network of cubatch from the operators (steps) of a network of another framework.

    Args:
        source: The network to import.
        rules: The rule for each kind of step.
        fallback: The rule for steps of other kinds, and for steps whose rule fails; None raises.

    Raises:
        UnsupportedOperator: If a step has no layer and there is no fallback.
        InvalidSpec: If the input is neither an image nor tokens nor features, or the output does not depend on it.
    """

    def __init__(self, source: Source, rules: Mapping[str, Rule], fallback: Rule | None) -> None:
        self.batch_size, *extents = source.input_shape
        steps = _live_steps(source)
        layout = {3: "nchw", 2: "nhc", 1: "nc"}.get(len(extents))
        first = [(step.kind, step.options.get("order")) for step in steps if source.input in step.reads]
        if first and all(each == _TO_NCHW for each in first):
            layout = "nhwc"
        if layout is None:
            raise InvalidSpec(
                "input_shape", tuple(extents), "(channels, height, width), (tokens, channels) or (features,)"
            )
        sizes = dict(zip(layout[1:], extents, strict=True))
        self.input_shape: Extents = (sizes.get("h", 1), sizes.get("w", 1), sizes["c"])
        self.name = source.name
        self.shapes: dict[str, Extents] = {INPUT: self.input_shape}
        self.layers: dict[str, Layer] = {}
        self.arrays: dict[str, dict[str, Any]] = {}
        self.opaque: set[str] = set()  # layers without an implementation, whose axes are the foreign ones
        self.pending: dict[str, Any] = {}  # incomplete layers, by the name that stands for their output
        self.values = {source.input: Value(INPUT, laid_out(layout, self.batch_size, self.input_shape))}
        self._rules, self._fallback, self._as_it_is = rules, fallback, source.as_it_is
        self._flat: list[tuple[Atom, ...]] = []  # orders of flattened features that a Flatten layer reproduces
        self._slices: dict[tuple[str, int, int], str] = {}  # by layer, first channel and number of channels
        if source.output != source.input and not any(step.result == source.output for step in steps):
            raise InvalidSpec("network", self.name, "one whose output depends on its input")
        self.readers = Counter(name for step in steps for name in step.reads) + Counter([source.output])
        self._makers = {step.result: step for step in steps}
        for step in steps:
            self.values[step.result] = self._make(step)
        self._output = self._make_output(source.output)

    def _make(self, step: Step) -> Value:
        if missing := [name for name in step.reads if name not in self.values]:
            unknown = f"it reads {missing[0]!r}, which no operator before it computes"
            raise self.refusal(step, f"{unknown}, and which is no constant (store a sparse constant as a dense one)")
        try:
            return self._apply_rule(step)
        except UnsupportedOperator:
            if self._fallback is None:
                raise
            # The rule may fail only because an input is a part of a layer's output.
            if not [name for name in step.reads if self._complete(name)]:
                return self._fallback(self, step)
        try:
            return self._apply_rule(step)
        except UnsupportedOperator:
            return self._fallback(self, step)

    def _apply_rule(self, step: Step) -> Value:
        rule = self._rules.get(step.kind)
        if rule is None:
            raise self.refusal(step, step.options.get("reason", "it has no layer"))
        try:
            value = rule(self, step)
        except InvalidSpec as error:
            raise self.refusal(step, str(error)) from None
        shape = tuple(math.prod(atom.size for atom in dim) for dim in value.dims)
        if shape != step.shape and value.pad == NO_PAD:
            raise self.refusal(step, f"its result has shape {step.shape}, that of cubatch's layer would have {shape}")
        return value

    def _complete(self, name: str) -> bool:
        """
        Make the value `name` the whole output of a layer, by adding a Slice or an opaque layer if needed.

        Return whether a layer was added.
        """
        value = self.values[name]
        if self._is_part(value) and (sliced := self._slice(self._makers[name], value)) is not None:
            self.values[name] = sliced
            return True
        if self._fallback is None or not self._is_incomplete(value):
            return False
        for read in self._makers[name].reads:
            self._complete(read)
        self.values[name] = self._fallback(self, self._makers[name])
        return True

    def _make_output(self, name: str) -> str:
        self._complete(name)
        output = self.values[name]
        if self._is_incomplete(output) or output.pad != NO_PAD:
            raise self.refusal(
                self._makers[name], "its result is the network's output, but not the whole output of a layer"
            )
        if self._is_shuffled(output) and not self.opaque:  # a network with opaque layers is not run
            if self._fallback is None:
                reason = "its result, which is the network's, has its channels or pixels in another order than a layer"
                raise self.refusal(self._makers[name], reason)
            output = self._fallback(self, self._makers[name])
        return output.layer

    def _is_incomplete(self, value: Value) -> bool:
        return self._is_part(value) or value.layer in self.pending

    def _is_part(self, value: Value) -> bool:
        return _size(value.dims) != self.batch_size * math.prod(self.shapes[value.layer])

    def _is_shuffled(self, value: Value) -> bool:
        """Return whether a value's elements are in an order that no layer has: neither pixels nor channels first."""
        if value.layer == INPUT or value.layer in self.opaque:
            return False
        orders = [_in_a_row(self.axes(layout, self.shapes[value.layer])) for layout in ("nchw", "nhwc")]
        return _in_a_row(value.dims) not in [*orders, *self._flat]

    # --- for rules: what a step reads ----------------------------------------------------------

    def refusal(self, step: Step, reason: str) -> UnsupportedOperator:
        """Return the error that a step cannot be imported, with the reason and what the user can do instead."""
        remedy = f"{KEEP}; to {self._as_it_is}" if self._fallback is None else f"To {self._as_it_is}"
        return UnsupportedOperator(step.operator, step.place, reason, remedy)

    def part(self, step: Step, index: int = 0) -> Value:
        """
        Return the step's input at `index`, which may be a range of a layer's channels.

        UnsupportedOperator is raised for an input that does not depend on the network's, or that is padded.
        """
        if index >= len(step.reads):
            raise self.refusal(step, "one of its inputs does not depend on the network's input")
        value = self.values[step.reads[index]]
        if value.pad != NO_PAD:
            raise self.refusal(step, "it reads an input that was padded for a convolution")
        return value

    def value(self, step: Step, index: int = 0) -> Value:
        """Return the step's input at `index` as the whole output of a layer; a range of channels gets a Slice."""
        return self._whole(step, self.part(step, index))

    def pixels(self, step: Step, *, padded: bool = False) -> Value:
        """
        Return the first input of a step; raise UnsupportedOperator unless it is images (n, c, h, w).

        `padded` accepts pending padding.
        """
        value = self._whole(step, self.values[step.reads[0]] if padded else self.part(step))
        if value.dims == self.axes("nchw", self.shapes[value.layer]):
            return value
        labels = [{atom.label for atom in dim} for dim in value.dims]
        if len(labels) == 4 and all(of <= {label} for of, label in zip(labels, "nchw", strict=True)):  # noqa: PLR2004
            raise self.refusal(step, "its channels or pixels were put into another order before, as by a shuffle")
        raise self.refusal(step, "its input is not (batch, channels, height, width)")

    def features(self, step: Step, axis: int = -1) -> tuple[Value, list[int] | None]:
        """
        Return the input of a step, and the order of its features along an axis; None if it is the layer's order.

        Flattened features get a Flatten layer: their order of h, w and c differs from cubatch's. An axis that is not
        that of the features raises UnsupportedOperator.
        """
        value = self.value(step)
        extents, atoms = self.shapes[value.layer], value.dims[axis]
        if is_whole(atoms, "c", extents):
            order = places(atoms, extents)
        elif is_whole(atoms, "hwc", extents):
            order = places(atoms, extents)
            value = self._flatten(step, value)
        else:
            raise self.refusal(step, f"it works along axis {axis}, which is not the channel axis of its input")
        return value, None if order == list(range(len(order))) else order

    def is_read_once(self, value: Value) -> bool:
        """Return whether only one step reads the output of a value's layer, whose reshapes count as the output too."""
        names = [name for name, other in self.values.items() if other.layer == value.layer]
        return all(self.readers[name] == 1 for name in names)

    def axes(self, layout: str, extents: Extents) -> Dims:
        """Return the axes of a batch of samples in the order of the letters of `layout`, such as "nchw"."""
        return laid_out(layout, self.batch_size, extents)

    def channel_axis(self, value: Value) -> int | None:
        """Return the axis of a value, 1 or -1, that holds all channels and nothing else; None if neither does."""
        plain = laid_out("c", 1, self.shapes[value.layer])[0]
        return next((axis for axis in (1, -1) if value.dims[axis] == plain), None)

    def _whole(self, step: Step, value: Value) -> Value:
        whole = self._slice(step, value) if self._is_part(value) else value
        if whole is None:
            raise self.refusal(step, "it reads channels of its input that are not a contiguous range")
        return whole

    def _slice(self, step: Step, value: Value) -> Value | None:
        """Return a range of channels of a layer's output as the output of a new Slice layer; None for other parts."""
        h, w, _ = self.shapes[value.layer]
        of_channels = [atom for dim in value.dims for atom in dim if atom.label == "c"]
        of_channels.sort(key=lambda atom: atom.stride, reverse=True)
        channels = math.prod(atom.size for atom in of_channels)
        is_range = joined(of_channels) == joined([Atom("c", channels)])
        if not is_range or _size(value.dims) != self.batch_size * h * w * channels or value.layer in self.pending:
            return None
        key = value.layer, value.offset, channels
        if key not in self._slices:
            layer = Slice(start=value.offset, end=value.offset + channels)
            self._slices[key] = self.add(step, layer, value, suffix="slice").layer
        return attrs.evolve(value, layer=self._slices[key], offset=0)

    def _flatten(self, step: Step, value: Value) -> Value:
        h, w, c = self.shapes[value.layer]
        strides = {"h": w * c, "w": c, "c": 1}
        dims = tuple(
            joined(
                atom if atom.label == "n" else Atom("c", atom.size, atom.stride * strides[atom.label]) for atom in dim
            )
            for dim in value.dims
        )
        if h * w == 1:
            return value
        if not self._is_shuffled(value):
            self._flat.append(_in_a_row(dims))
        return self.add(step, Flatten(), value, dims=dims, suffix="flatten")

    # --- for rules: new layers -----------------------------------------------------------------

    def add(
        self,
        step: Step,  # the step, which names the layer
        layer: Layer,  # the layer, without name, inputs and extents
        *reads: Value,
        # axes of its output, or a layout such as "nchw"; None are those of the first input
        dims: Dims | str | None = None,
        arrays: Mapping[str, Any] | None = None,  # its parameters and statistics, in the engine's layout
        suffix: str = "",  # suffix of its name, where it is not the step's only layer
    ) -> Value:
        """
        Add a layer to the network and return its output; raise UnsupportedOperator for an incomplete input.

        `reads` are its inputs, and `arrays` its weights and statistics by name. `dims` are the axes of the output, or
        letters such as "nchw"; None: as of the first input. `suffix` is appended to the layer's name.
        """
        names = tuple(value.layer for value in reads)
        if incomplete := self.pending.keys() & set(names):
            raise self.refusal(step, f"it reads {min(incomplete)}, a part of a layer that is not complete")
        name = self._free_name(f"{step.place}.{suffix}" if suffix else step.place)
        placed = attrs.evolve(layer, name=name, inputs=names).with_inputs([self.shapes[each] for each in names])
        self.layers[name], self.shapes[name] = placed, placed.output_shape
        if arrays:
            self.arrays[name] = {key: _float32(array) for key, array in arrays.items()}
        if isinstance(dims, str):
            dims = self.axes(dims, placed.output_shape)
        return Value(name, reads[0].dims if dims is None else dims)

    def hold(self, step: Step, pending: Any, extents: Extents) -> str:
        """
        Store an incomplete layer; return a name for its output, valid until a later step completes the layer.

        `pending` is an object of the rules, which the rule of the later step gets from `self.pending` by that name.
        `extents` are (h, w, c) of the output.
        """
        name = self._free_name(f"{step.place}.pending")
        self.shapes[name], self.pending[name] = extents, pending
        return name

    def replace(self, name: str, layer: Layer, arrays: Mapping[str, Any]) -> None:
        """Replace the layer of this name, and merge arrays into its parameters and statistics."""
        self.layers[name] = attrs.evolve(layer, name=name)
        self.arrays[name] = {**self.arrays.get(name, {}), **{key: _float32(array) for key, array in arrays.items()}}

    def _free_name(self, start: str) -> str:
        start = printable(start)
        name, number = start, 2
        while name in self.shapes:
            name, number = f"{start}.{number}", number + 1
        return name

    # --- the end -------------------------------------------------------------------------------

    def network(self) -> Network:
        """Return the network of the layers that the output depends on; raise InvalidSpec if that is the input."""
        if self._output == INPUT:
            raise InvalidSpec("network", self.name, "one with a layer of cubatch: its output is its input")
        live = {self._output}
        for name in reversed(self.layers):
            if name in live:
                live.update(self.layers[name].inputs or ())
        layers = [layer for name, layer in self.layers.items() if name in live]
        last = next(i for i, layer in enumerate(layers) if layer.name == self._output)
        layers = layers[: last + 1]
        weights = {str(layer.name): self.arrays[str(layer.name)] for layer in layers if layer.name in self.arrays}
        plain = [_without_extents(layer) for layer in layers]
        return Network(input_shape=self.input_shape, layers=plain, name=printable(self.name), weights=weights)


def with_channels(value: Value, axis: int, channels: int) -> Dims:
    """Return the axes of a value, with one axis replaced by an axis of this number of channels."""
    dims = list(value.dims)
    dims[axis] = joined([Atom("c", channels)])
    return tuple(dims)


def permuted(array: Any, order: Sequence[int] | None) -> Any:
    """
    Return an array whose last axis is in the layer's order of features; unchanged if `order` is None.

    `order` has for each position the index of that feature in the layer.
    """
    if order is None:
        return array
    result = np.empty_like(array)
    result[..., np.asarray(order)] = array
    return result


def _size(dims: Dims) -> int:
    return math.prod(atom.size for dim in dims for atom in dim)


def _in_a_row(dims: Dims) -> tuple[Atom, ...]:
    return joined(atom for dim in dims for atom in dim)


def _live_steps(source: Source) -> list[Step]:
    live, steps = {source.output}, []
    for step in reversed(source.steps):
        if step.result in live:
            live.update(step.reads)
            steps.append(step)
    return steps[::-1]


def _without_extents(layer: Layer) -> Layer:
    """Return a layer without the fields that a network infers, so that its spec file does not repeat them."""
    inferred = {"h": None, "w": None, "c": None}
    return attrs.evolve(layer, **{**inferred, **({"channels": None} if hasattr(layer, "channels") else {})})


def _float32(array: Any) -> np.ndarray[Any, Any]:
    return np.array(array, dtype=np.float32, order="C")

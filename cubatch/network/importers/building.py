"""
A foreign network, made ours: steps in, layers, weights and a `Network` out.

The rules (`rules`) make the layers of a step; here is what they share: which value is which layer's output, and
how its axes lie.  What nobody reads in the end is left out, such as a sigmoid whose product became a SiLU.
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
_TO_NCHW = "permute", (0, 3, 1, 2)  # what a network does to its input that has its channels last


@attrs.frozen
class Value:
    """
    A foreign tensor: the output of one of our layers, or of none yet.

    Attributes:
        layer: The layer whose output it is, or "input".
        dims: Which of our axes each of its axes is.
        pad: Zeros around it (top, bottom, left, right) that the layer which reads it is to add.
        offset: Its first channel, where it has only some of them.
    """

    layer: str
    dims: Dims
    pad: Pad = NO_PAD
    offset: int = 0


Rule = Callable[["Builder", Step], Value]


class Builder:
    """
    Makes layers of steps.

    Args:
        source: The foreign network.
        rules: How a step of each kind becomes layers.
        fallback: What becomes of a step without a rule; None raises.

    Raises:
        UnsupportedOperator: If a step has no layer and there is no fallback.
        InvalidSpec: If the input has no shape that we know.
    """

    def __init__(self, source: Source, rules: Mapping[str, Rule], fallback: Rule | None) -> None:
        self.batch_size, *extents = source.input_shape
        steps = _wanted(source)
        layout = {3: "nchw", 2: "nhc", 1: "nc"}.get(len(extents))
        reading = [(step.kind, step.options.get("order")) for step in steps if source.input in step.reads]
        if reading and all(each == _TO_NCHW for each in reading):
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
        self.kept: set[str] = set()  # layers of what has none, whose axes are as they were: they are not run
        self.pending: dict[str, Any] = {}  # layers that are not whole yet, by the name that stands for their output
        self.values = {source.input: Value(INPUT, laid_out(layout, self.batch_size, self.input_shape))}
        self._rules, self._fallback, self._as_it_is = rules, fallback, source.as_it_is
        self._flat: list[tuple[Atom, ...]] = []  # orders in which flattened features are theirs, and ours by a layer
        self._slices: dict[tuple[str, int, int], str] = {}  # by what they read, their first channel and their channels
        if source.output != source.input and not any(step.result == source.output for step in steps):
            raise InvalidSpec("network", self.name, "one whose output depends on its input")
        self.readers = Counter(name for step in steps for name in step.reads) + Counter([source.output])
        self._makers = {step.result: step for step in steps}
        for step in steps:
            self.values[step.result] = self._made(step)
        self._made_whole(source.output)
        output = self.values[source.output]
        if self._is_unfinished(output) or output.pad != NO_PAD:
            raise self.refusal(
                self._makers[source.output], "its result, which is the network's, is no output of a layer"
            )
        if self._is_shuffled(output) and not self.kept:  # with layers that are kept it is not run
            if self._fallback is None:
                reason = "its result, which is the network's, has its channels or pixels in another order than a layer"
                raise self.refusal(self._makers[source.output], reason)
            output = self._fallback(self, self._makers[source.output])
        self._output = output.layer

    def _made(self, step: Step) -> Value:
        if unmade := [name for name in step.reads if name not in self.values]:
            raise self.refusal(step, f"it reads {unmade[0]!r}, which nothing before it makes")
        try:
            return self._by_rule(step)
        except UnsupportedOperator:
            if self._fallback is None:
                raise
            if not [name for name in step.reads if self._made_whole(name)]:
                return self._fallback(self, step)
        try:
            return self._by_rule(step)
        except UnsupportedOperator:
            return self._fallback(self, step)

    def _by_rule(self, step: Step) -> Value:
        rule = self._rules.get(step.kind)
        if rule is None:
            raise self.refusal(step, step.options.get("reason", "it has no layer"))
        try:
            return self._checked(step, rule(self, step))
        except InvalidSpec as error:
            raise self.refusal(step, str(error)) from None

    def _made_whole(self, name: str) -> bool:
        """Make a layer of a part of another's output, or keep what made it or a pending layer; say if there was any."""
        value = self.values[name]
        if self._is_part(value) and (sliced := self._sliced(self._makers[name], value)) is not None:
            self.values[name] = sliced
            return True
        if self._fallback is None or not self._is_unfinished(value):
            return False
        for read in self._makers[name].reads:
            self._made_whole(read)
        self.values[name] = self._fallback(self, self._makers[name])
        return True

    def _is_unfinished(self, value: Value) -> bool:
        """Whether a value is only a part of a layer's output, or that of a pending layer."""
        return self._is_part(value) or value.layer in self.pending

    def _is_part(self, value: Value) -> bool:
        return _size(value.dims) != self.batch_size * math.prod(self.shapes[value.layer])

    def _is_shuffled(self, value: Value) -> bool:
        """Whether a value that nobody reads has its numbers in another order than what runs gives or flattens."""
        if value.layer == INPUT or value.layer in self.kept:
            return False
        orders = [_in_a_row(self.axes(layout, self.shapes[value.layer])) for layout in ("nchw", "nhwc")]
        return _in_a_row(value.dims) not in [*orders, *self._flat]

    def _checked(self, step: Step, value: Value) -> Value:
        """Hold what a rule made against the shape that the source says."""
        found = tuple(math.prod(atom.size for atom in dim) for dim in value.dims)
        if found != step.shape and value.pad == NO_PAD:
            raise self.refusal(step, f"its result is {step.shape}, which as a layer of ours would be {found}")
        return value

    # --- what rules ask ------------------------------------------------------------------------

    def refusal(self, step: Step, reason: str) -> UnsupportedOperator:
        """Make the error of a step that cannot be ours."""
        remedy = f"{KEEP}; to {self._as_it_is}" if self._fallback is None else f"To {self._as_it_is}"
        return UnsupportedOperator(step.operator, step.place, reason, remedy)

    def value(self, step: Step, index: int = 0) -> Value:
        """Return what a step reads as a whole; zeros around it are for those that ask for `pixels`."""
        return self._whole(step, self.part(step, index))

    def _whole(self, step: Step, value: Value) -> Value:
        found = self._sliced(step, value) if self._is_part(value) else value
        if found is None:
            raise self.refusal(step, "it reads some of the channels of its input, and not a range of them")
        return found

    def _sliced(self, step: Step, value: Value) -> Value | None:
        """Give a part of a layer's output as that of a layer of its own; None where it is no range of the channels."""
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

    def part(self, step: Step, index: int = 0) -> Value:
        """Return what a step reads, which may be some of the channels of what a layer makes."""
        value = self.values[step.reads[index]]
        if value.pad != NO_PAD:
            raise self.refusal(step, "it reads an input that was padded for a convolution")
        return value

    def is_read_once(self, value: Value) -> bool:
        """Whether nobody else reads the layer of a value, under whichever name: views of it have names of their own."""
        names = [name for name, other in self.values.items() if other.layer == value.layer]
        return all(self.readers[name] == 1 for name in names)

    def hold(self, step: Step, pending: Any, extents: Extents) -> str:
        """Keep what a later step makes a layer of, and give the name that stands for its output until then."""
        name = self._free(f"{step.place}.pending")
        self.shapes[name], self.pending[name] = extents, pending
        return name

    def pixels(self, step: Step, *, padded: bool = False) -> Value:
        """Return what a step reads as images, (n, c, h, w)."""
        value = self._whole(step, self.values[step.reads[0]] if padded else self.part(step))
        if value.dims == self.axes("nchw", self.shapes[value.layer]):
            return value
        labels = [{atom.label for atom in dim} for dim in value.dims]
        is_shuffled = len(labels) == 4 and all(of <= {label} for of, label in zip(labels, "nchw", strict=True))  # noqa: PLR2004
        if is_shuffled:
            raise self.refusal(step, "its channels or pixels were put into another order before, as by a shuffle")
        raise self.refusal(step, "its input is not (batch, channels, height, width)")

    def axes(self, layout: str, extents: Extents) -> Dims:
        """Return the axes of a foreign tensor with one of ours on each: those of images are "nchw"."""
        return laid_out(layout, self.batch_size, extents)

    def features(self, step: Step, axis: int = -1) -> tuple[Value, list[int] | None]:
        """
        Return what a step reads as features along one axis, and at which of ours each lies where that differs.

        What was flattened is flattened by a layer: our order of h, w and c is another than theirs.
        """
        value = self.value(step)
        extents, atoms = self.shapes[value.layer], value.dims[axis]
        if is_whole(atoms, "c", extents):
            order = places(atoms, extents)
        elif is_whole(atoms, "hwc", extents):
            order = places(atoms, extents)
            value = self._flattened(step, value)
        else:
            raise self.refusal(step, f"its axis {axis} is not all channels of its input")
        return value, None if order == list(range(len(order))) else order

    def _flattened(self, step: Step, value: Value) -> Value:
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

    def channel_axis(self, value: Value) -> int | None:
        """Return the foreign axis that is our channels and nothing else; None if none is."""
        plain = laid_out("c", 1, self.shapes[value.layer])[0]
        return next((axis for axis in (1, -1) if value.dims[axis] == plain), None)

    # --- what rules do -------------------------------------------------------------------------

    def add(
        self,
        step: Step,
        layer: Layer,
        *reads: Value,
        dims: Dims | str | None = None,
        arrays: Mapping[str, Any] | None = None,
        suffix: str = "",
    ) -> Value:
        """
        Add a layer.

        Args:
            step: Whose it is, which names it.
            layer: The layer, without name, inputs and extents.
            reads: What it reads.
            dims: Axes of its output: a layout such as "nchw", or as they are; None are those of the first input.
            arrays: Its parameters and statistics, as the engine has them.
            suffix: Of its name, where it is not the step's only layer.
        """
        names = tuple(value.layer for value in reads)
        if held := self.pending.keys() & set(names):
            raise self.refusal(step, f"it reads {min(held)}, which is not whole")
        name = self._free(f"{step.place}.{suffix}" if suffix else step.place)
        placed = attrs.evolve(layer, name=name, inputs=names).with_inputs([self.shapes[each] for each in names])
        self.layers[name], self.shapes[name] = placed, placed.output_shape
        if arrays:
            self.arrays[name] = {key: _float32(array) for key, array in arrays.items()}
        if isinstance(dims, str):
            dims = self.axes(dims, placed.output_shape)
        return Value(name, reads[0].dims if dims is None else dims)

    @staticmethod
    def with_channels(value: Value, axis: int, channels: int) -> Dims:
        """Return the axes of a layer's output that has other channels, along one of the axes of its input."""
        dims = list(value.dims)
        dims[axis] = joined([Atom("c", channels)])
        return tuple(dims)

    def replace(self, name: str, layer: Layer, arrays: Mapping[str, Any]) -> None:
        """Put another layer in the place of one, and more arrays beside its own."""
        self.layers[name] = attrs.evolve(layer, name=name)
        self.arrays[name] = {**self.arrays.get(name, {}), **{key: _float32(array) for key, array in arrays.items()}}

    def _free(self, wanted: str) -> str:
        """Return a name that no layer has yet, of one that somebody else chose."""
        wanted = printable(wanted)
        name, again = wanted, 2
        while name in self.shapes:
            name, again = f"{wanted}.{again}", again + 1
        return name

    # --- the end -------------------------------------------------------------------------------

    def network(self) -> Network:
        """Return the network of the layers that the output depends on."""
        if self._output == INPUT:
            raise InvalidSpec("network", self.name, "one with a layer that is ours: its output is its input")
        wanted: set[str] = {self._output}
        for name in reversed(self.layers):
            if name in wanted:
                wanted.update(self.layers[name].inputs or ())
        kept = [layer for name, layer in self.layers.items() if name in wanted]
        last = next(i for i, layer in enumerate(kept) if layer.name == self._output)
        layers = kept[: last + 1]
        weights = {str(layer.name): self.arrays[str(layer.name)] for layer in layers if str(layer.name) in self.arrays}
        plain = [_unplaced(layer) for layer in layers]
        return Network(input_shape=self.input_shape, layers=plain, name=printable(self.name), weights=weights)


def _size(dims: Dims) -> int:
    """Count the elements of a tensor."""
    return math.prod(atom.size for dim in dims for atom in dim)


def _in_a_row(dims: Dims) -> tuple[Atom, ...]:
    """Return the atoms of all axes in order."""
    return joined(atom for dim in dims for atom in dim)


def _wanted(source: Source) -> list[Step]:
    """Return the steps that the output depends on, in order."""
    wanted, found = {source.output}, []
    for step in reversed(source.steps):
        if step.result in wanted:
            wanted.update(step.reads)
            found.append(step)
    return found[::-1]


def _unplaced(layer: Layer) -> Layer:
    """Leave to the network what it infers, so that a spec file of it has nothing twice."""
    inferred = {"h": None, "w": None, "c": None}
    return attrs.evolve(layer, **{**inferred, **({"channels": None} if hasattr(layer, "channels") else {})})


def _float32(array: Any) -> np.ndarray[Any, Any]:
    return np.array(array, dtype=np.float32, order="C")


def permuted(array: Any, order: Sequence[int] | None) -> Any:
    """Put features, the last axis of an array, where ours are."""
    if order is None:
        return array
    found = np.empty_like(array)
    found[..., np.asarray(order)] = array
    return found

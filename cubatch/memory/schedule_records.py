"""Records of a step's operations and of the buffers that they read and write; `schedule` makes them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from cubatch.network.graph import Network, Node
from cubatch.network.layer import Layer, extents
from cubatch.network.passes import Pass
from cubatch.network.windows import Axis

PARTS = ("activations", "activation_gradients", "workspace")
FLOAT32_BYTES = 4
LABEL_BYTES = 4
PASSES_OF = {"forward": (Pass.FPROP,), "backward": (Pass.WGRAD, Pass.DGRAD)}  # by `Op.kind`
ENDINGS = frozenset({"folded", "residual", "positive", "pooled", "curved"})
LOSS_SCALE_BYTES = {"float16": 16}
"""State of loss scaling, four float32 words, for the dtypes whose gradients need it in training."""


@attrs.frozen
class Buffer:
    """A piece of memory that holds one value during a part of the step."""

    name: str  # layer and value: "conv1.y", "conv1.y gradient"
    part: str  # one of PARTS
    node: str  # the layer it belongs to
    shape: tuple[int, ...]  # extents per sample, or total extents if it does not grow with the batch
    itemsize: int = 0  # bytes per element; 0 is the dtype's size, 4 is at least that
    batched: bool = True  # whether it holds `shape` for every sample

    @property
    def elements(self) -> int:
        """Elements of `shape`."""
        return math.prod(self.shape)


@attrs.frozen
class Op:
    """An operation of a step."""

    # "fold" (scale and shift of fused batch norms), "forward", "loss", "backward", "accumulate" (the first read is
    # added to the write) or "update"
    kind: str
    node: Node | None  # the layer, or None for fold, loss and update
    # reads, writes: buffer numbers by role: "x0", "y", "dy", "dx0", "argmax", ...; the same number in both means in
    # place. Roles of a product's epilogue: "folded" is the scale and shift of a batch norm, "residual" is added. The
    # result is zero where "positive", the output of a ReLU, is not positive, or multiplied by an activation's slope at
    # "curved". "parts" are the gradients of other channels, which an operation on a range of channels leaves
    # unchanged. A norm's backward operation adds "pooled" to "dy": the gradient of a global pool, which it divides
    # among the pixels of each sample
    reads: dict[str, int]
    writes: dict[str, int]
    workspace: int | None = None  # number of the scratch buffer, alive during this operation only; None: none
    replay: bool = False  # a forward operation repeated in the backward pass, to save memory
    relu: bool = False  # the result is clamped at zero by the operation itself: a fused ReLU
    # type of another activation that a batch norm applies to its result. In a backward operation, type of the
    # activation behind the norm, whose slope is applied to "dy", or before the product; None for none
    activation: str | None = None
    # fused layers in their order: a batch norm by running statistics, a sum, activations. In a backward operation, the
    # activation whose slope is applied
    then: tuple[Node, ...] = ()
    # a batch norm whose sums over the batch the operation also computes; None for none. A forward operation writes
    # "statistics", the norm's mean and inverse deviation. A backward one reads the norm's input "normed" and its
    # statistics. It writes "means" and the gradients of the norm's parameters. With "curved" it is the product before
    # the activation, and the operation computes the gradient of its bias
    summed: Node | None = None
    has_bias_gradient: bool = False  # the operation that computed "dy" has computed the gradient of the layer's bias
    norms: tuple[tuple[Node, Node], ...] = ()  # for "fold": each product and its fused batch norm
    # the convolution over patches that computes the layer's results, see `over_patches`; None: the layer itself is run
    computed: Layer | None = None

    @property
    def layer(self) -> Layer | None:
        """The layer that kernels compute: the node's, or its equivalent over patches; None without a node."""
        return self.computed or (self.node.layer if self.node else None)

    @property
    def norm(self) -> Node | None:
        """The batch norm that is fused into the operation, or None."""
        return next((node for node in self.then if node.layer.has_statistics), None)

    @property
    def undoes_relu(self) -> bool:
        """Whether the operation applies the slope of a ReLU behind the batch norm `summed`, computed from "normed"."""
        return self.summed is not None and [node.inputs[0] for node in self.then] == [self.summed.name]

    @property
    def ending(self) -> frozenset[str]:
        """Roles of the further arrays that a product's epilogue or a norm combines with what it reads."""
        return ENDINGS.intersection(self.reads)


@attrs.frozen
class Schedule:
    """The operations of one step in order."""

    network: Network  # the network
    mode: str  # "inference" or "training"
    ops: tuple[Op, ...]  # the operations
    buffers: tuple[Buffer, ...]  # buffers by number
    given: frozenset[int]  # buffers that are filled before the step and unchanged by it: the batch, its labels
    results: frozenset[int]  # buffers that live to the end of the step: the output
    outputs: dict[str, int]  # buffer number of each layer's output after the forward pass
    # whether it is a step of one layer, given the gradient of its output, which computes that of its input
    single: bool
    # vertical and horizontal axis along which samples of the batch are stored in patches: see `padding.input_patches`
    patches: tuple[Axis, Axis]

    @functools.cached_property
    def moved(self) -> int:
        """Elements per sample that the operations read and write, without buffers that do not grow with the batch."""
        used = (number for op in self.ops for number in [*op.reads.values(), *op.writes.values()])
        return sum(self.buffers[number].elements for number in used if self.buffers[number].batched)

    @functools.cached_property
    def flops(self) -> int:
        """FLOP of a step for each sample."""
        return self.network.flops(self.mode)

    @functools.cached_property
    def state_elements(self) -> int:
        """Number of elements of all running statistics."""
        return sum(math.prod(shape) for node in self.network.nodes for shape in node.layer.state_shapes.values())

    @functools.cached_property
    def size_groups(self) -> tuple[Sequence[Buffer | Op], NDArray[np.intp]]:
        """
        Groups of buffers of equal size: a representative of each group, and the index of each buffer's group.

        A group of scratch buffers is represented by an operation that uses one of them.
        """
        scratch = {op.workspace: op for op in self.ops}
        numbers: dict[object, int] = {}
        representatives: list[Buffer | Op] = []
        groups = []
        for number, buffer in enumerate(self.buffers):
            op = scratch.get(number)
            if op is None:
                key: object = buffer.elements, buffer.itemsize, buffer.batched
            else:
                key = op.kind, op.layer and extents(op.layer), op.ending, op.summed is not None, op.computed is not None
            if key not in numbers:
                numbers[key] = len(representatives)
                representatives.append(op or buffer)
            groups.append(numbers[key])
        return representatives, np.array(groups, dtype=np.intp)

    @functools.cached_property
    def lifetimes(self) -> NDArray[np.intp]:
        """Indices of the first and last operation during which each buffer must exist, as (buffers, 2)."""
        spans = [[len(self.ops), -1] for _ in self.buffers]
        for time, op in enumerate(self.ops):
            used = [*op.reads.values(), *op.writes.values(), *([] if op.workspace is None else [op.workspace])]
            for number in used:
                spans[number] = [min(spans[number][0], time), max(spans[number][1], time)]
        end = max(len(self.ops) - 1, 0)
        for number in self.given | self.results:
            spans[number] = [0 if number in self.given else min(spans[number][0], end), end]
        return np.array(spans, dtype=np.intp).reshape(-1, 2)

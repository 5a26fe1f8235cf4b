"""The operations of a step and the buffers they read and write, as records; `schedule` makes them."""

from __future__ import annotations

import functools
import math

import attrs

from cubatch.network.graph import Network, Node

PARTS = ("activations", "activation_gradients", "workspace")
FLOAT32_BYTES = 4
LABEL_BYTES = 4
ENDINGS = frozenset({"folded", "residual", "positive"})
LOSS_SCALE_BYTES = {"float16": 16}
"""State of the loss's scale, four float32 words, for the dtypes whose gradients need one in training."""


@attrs.frozen
class Buffer:
    """
    A piece of memory that holds one value during a part of the step.

    Attributes:
        name: Layer and value: "conv1.y", "conv1.y gradient".
        part: One of PARTS.
        node: The layer it belongs to.
        shape: Extents per sample, or in whole for one that does not grow with the batch.
        itemsize: Bytes per element; 0 is the dtype's, 4 grows with it beyond float32.
        batched: Whether it holds `shape` for every sample.
    """

    name: str
    part: str
    node: str
    shape: tuple[int, ...]
    itemsize: int = 0
    batched: bool = True

    @property
    def elements(self) -> int:
        """Elements per sample, or in whole for one that does not grow with the batch."""
        return math.prod(self.shape)


@attrs.frozen
class Op:
    """
    One operation of a step.

    Attributes:
        kind: "fold" (scale and shift of batch norms that products do), "forward", "loss", "backward", "accumulate" (the
            first read is added to the write) or "update".
        node: The layer, or None for fold, loss and update.
        reads, writes: Buffer numbers by role: "x0", "y", "dy", "dx0", "argmax", ...; the same number in
            both means in place.  Of what a product ends with: "folded", the scale and shift of a batch norm, then
            "residual", which is added; the result is zero where "positive", the output of a ReLU, is not.  "parts"
            are the gradients of other channels, which a range of the channels leaves as they are.
        workspace: Number of the scratch buffer, alive during this operation only.
        replay: A forward operation done again in the backward pass, to save memory.
        relu: The result is clamped at zero while it is at hand: a ReLU layer that needs no operation of its own.
        then: Layers done to the result while it is at hand, in their order, that need no operation of their own: a
            batch norm by running statistics, a sum, ReLUs; backward the ReLU whose slope is applied.
        norms: Of "fold": each product and the batch norm that it does.
    """

    kind: str
    node: Node | None
    reads: dict[str, int]
    writes: dict[str, int]
    workspace: int | None = None
    replay: bool = False
    relu: bool = False
    then: tuple[Node, ...] = ()
    norms: tuple[tuple[Node, Node], ...] = ()

    @property
    def norm(self) -> Node | None:
        """The batch norm that it does to its result."""
        return next((node for node in self.then if node.layer.has_statistics), None)

    @property
    def ending(self) -> frozenset[str]:
        """Which roles are of what its product ends with."""
        return ENDINGS.intersection(self.reads)


@attrs.frozen
class Schedule:
    """
    The operations of one step in order.

    Attributes:
        network: What is run.
        mode: "inference" or "training".
        ops: The operations.
        buffers: What they read and write, by number.
        given: Buffers filled before the step and kept through it: the batch, its labels.
        results: Buffers kept to the end of the step: the output.
        outputs: Buffer number of each layer's output after the forward pass.
        single: A layer on its own: its output gradient is given and the gradient of its input computed.
    """

    network: Network
    mode: str
    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    given: frozenset[int]
    results: frozenset[int]
    outputs: dict[str, int]
    single: bool

    @functools.cached_property
    def moved(self) -> int:
        """Elements per sample that the operations read and write."""
        used = (number for op in self.ops for number in [*op.reads.values(), *op.writes.values()])
        return sum(self.buffers[number].elements for number in used if self.buffers[number].batched)

    @functools.cached_property
    def lifetimes(self) -> list[tuple[int, int]]:
        """First and last operation of every buffer, both included."""
        spans = [[len(self.ops), -1] for _ in self.buffers]
        for time, op in enumerate(self.ops):
            used = [*op.reads.values(), *op.writes.values(), *([] if op.workspace is None else [op.workspace])]
            for number in used:
                spans[number] = [min(spans[number][0], time), max(spans[number][1], time)]
        end = max(len(self.ops) - 1, 0)
        for number in self.given | self.results:
            spans[number] = [0 if number in self.given else min(spans[number][0], end), end]
        return [(first, last) for first, last in spans]

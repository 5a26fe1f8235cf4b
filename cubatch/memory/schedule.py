"""
Write one step of a network as a list of operations and the buffers that they read and write.

The engine executes this schedule and the memory plan lays it out, so the plan cannot differ from what runs.  It does
not depend on the batch size.

The readers of each value decide where memory is reused:

- An elementwise layer overwrites its input if no other layer reads it.
- Flatten, and dropout in inference, are other names for the same buffer.
- The gradient of a sum is one buffer under several names, copied only if one of its readers would write into it.

A ReLU is fused into a neighbor where possible: into the convolution, linear layer, batch norm or sum before it.  A max
pool that is its only reader also takes it and masks the gradient, so that the ReLU's input need not be saved.  In the
backward pass its slope is applied by the convolution or linear layer that computes the gradient of its output.  That
operation also adds the gradients of other readers, as does that of a global pool.

On cubatch kernels a batch norm also computes another activation that alone reads it.  The norm's backward pass computes
the slope from the norm's input, which it reads anyway.  The value between the two is not stored.  A ReLU whose slope no
product applies is undone in the same way.  The gradient of a global pool has one value per sample and channel.  A norm
whose result the pool reads first adds it to the gradient of the other readers.

With "norm_sums" in `experimental`, products also compute the sums over the batch of the norms next to them.  A forward
product whose result a norm reads computes that norm's statistics.  A product that makes the gradient of a norm's result
computes the gradients of the norm's parameters.  Each such norm has one pass over its arrays then, instead of two.

With "gelu_products" a product that makes the gradient of a GELU's output applies the slope, if a product made the
GELU's input.  It also sums the gradient of that product's bias.

With "flash_attention" attention saves the logarithm of the sum of each query's exponentials instead of its weights.
Its backward operation computes them again.

With "space_to_depth" the batch is stored in patches of the first convolution's stride: see `kernels.padding`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

import attrs

from cubatch.kernels.padding import input_patches, over_patches, stored_input_shape, stored_saved_elements
from cubatch.memory.dataflow import Dataflow, is_relu
from cubatch.memory.schedule_records import FLOAT32_BYTES, LABEL_BYTES, Buffer, Op, Schedule
from cubatch.network.graph import INPUT, Network, Node, Spec, as_network
from cubatch.network.layer import Layer, check_mode

_TWO = 2  # branches of a sum that an epilogue can add: its own result and another


def schedule(
    spec: Spec, mode: str = "inference", *, recompute: bool = False, library: str = "im2col",
    experimental: Collection[str] = (),
) -> Schedule:  # fmt: skip
    """
    Return the operations of one step and the buffers that they read and write.

    Args:
        spec: A network, or a layer on its own, which in training runs all three passes.
        mode: "inference" or "training".
        recompute: Discard the activations of all but a few layers and compute them again in the backward pass. Segments
            have equal size, their number is about the square root of the layers (Chen et al., 2016, arXiv:1604.06174).
        library: For "cubatch" the batch has the shape `stored_input_shape` and saved values `stored_saved_elements`,
            and batch norms compute activations.
        experimental: For "cubatch", names of `experimental` of `Model` that are `runnable` on the device.

    Returns:
        Schedule: Operations and buffers, valid for every batch size.
    """
    network = as_network(spec)
    check_mode(mode)
    pads = library == "cubatch"
    writer = _Writer(network, mode, single=isinstance(spec, Layer), pads=pads, activates=norms_activate(library))
    # The gradient of the batch, which a layer on its own has, is stored as it is.
    is_cut = "space_to_depth" in experimental and pads and not (writer.single and writer.training)
    writer.patches = input_patches(network, space_to_depth=is_cut)
    writer.sums = "norm_sums" in experimental and pads and writer.training
    writer.by_sums = "flash_attention" in experimental
    writer.curves = "gelu_products" in experimental and pads and writer.training
    cuts = writer.cuts() if recompute and mode == "training" else [len(network.nodes)]
    values = writer.inputs(stored_input_shape(network, writer.patches) if pads else network.input_shape)
    for node in network.nodes:
        writer.forward(node, values)
    if mode == "training":
        writer.loss(values)
        start_of = dict(zip(cuts, [0, *cuts[:-1]], strict=True))
        for cut in reversed(cuts):
            segment = network.nodes[start_of[cut] : cut]
            seen = values if cut == cuts[-1] else writer.replay(segment, values)
            for node in reversed(segment):
                writer.backward(node, seen)
        writer.ops.append(Op("update", None, {}, {}, writer.scratch("update", network.nodes[-1])))
    return writer.finish(values)


def norms_activate(library: str) -> bool:
    """Return whether a library's batch norms compute the activation behind them, and its slope."""
    return library == "cubatch"


class _Writer:
    """Writes operations in order and tracks the readers of each buffer."""

    def __init__(
        self, network: Network, mode: str, *, single: bool, pads: bool = False, activates: bool = False
    ) -> None:
        self.network, self.training, self.single = network, mode == "training", single
        self.mode, self.pads, self.activates = mode, pads, activates
        self.ops: list[Op] = []
        self.buffers: list[Buffer] = []
        self.given: set[int] = set()
        self.results: set[int] = set()
        self.gradients: dict[str, int] = {}
        self.saved: dict[str, dict[str, int]] = {}
        # By buffer: layers whose gradient it holds and that have not used it yet; several share it.
        self.holders: dict[int, set[str]] = {}
        self.segment_ends: set[str] = set()
        self.produced: dict[int, int] = {}
        self.flow = Dataflow(network, training=self.training)
        # By layer: buffer of its gradient by ranges of channels, zero elsewhere, and the ranges so far.
        self.parts: dict[str, tuple[int, list[tuple[int, int]]]] = {}
        # ReLUs whose slope is applied by the operation that computes the gradient of their output.
        self.sloped: set[str] = set()
        # By batch norm: the activation behind it, whose slope its backward operation applies.
        self.undone: dict[str, Node] = {}
        # By batch norm: buffer of the gradient of a global pool of its result, which its backward operation adds.
        self.spread: dict[str, int] = {}
        self.sums = self.by_sums = self.curves = False
        self.patches = input_patches(network)

    def buffer(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def scratch(self, kind: str, node: Node) -> int:
        """Add a buffer for an operation's scratch memory, whose size the plan sets, and return its number."""
        return self.buffer(Buffer(f"{node.name} {kind} workspace", "workspace", node.name, (), 1))

    def inputs(self, shape: tuple[int, int, int]) -> dict[str, int]:
        number = self.buffer(Buffer(INPUT, "activations", INPUT, shape))
        self.given.add(number)
        return {INPUT: number}

    def emit(
        self, kind: str, node: Node, reads: dict[str, int], writes: dict[str, int], *, replay: bool = False
    ) -> None:
        workspace = self.scratch(kind, node)
        relu = node.inputs[0] in self.flow.pooled
        is_cut = INPUT in node.inputs and max(axis.taps for axis in self.patches) > 1
        computed = over_patches(node.layer) if is_cut else None
        self.ops.append(Op(kind, node, reads, writes, workspace, replay, relu, computed=computed))

    # --- forward -----------------------------------------------------------------------------

    def overwritten(self, node: Node) -> str | None:
        """Return the name of an input whose memory the node's output may overwrite; None if there is none."""
        layer = node.layer
        if not layer.in_place or (self.training and "x" in layer.backward_reads):
            return None
        return next((name for name in node.inputs if self.is_free(name, node)), None)

    def is_free(self, name: str, node: Node) -> bool:
        """Return whether nothing needs the output of layer `name` once a node has read it, recomputing included."""
        return self.flow.origin[name] not in self.segment_ends and self.flow.is_done_with(name, node)

    def forward(self, node: Node, values: dict[str, int], *, replay: bool = False) -> None:
        """
        Append a layer's forward operation, unless it is fused or a view; store its output's buffer in `values`.

        `replay` is whether the operation repeats one of the forward pass, to save memory.
        """
        layer = node.layer
        if self.flow.is_alias(node):
            values[node.name] = values[node.inputs[0]]
            return
        joined = self.joined(node, values)
        if joined is not None:
            values[node.name] = joined
            return
        reads = {f"x{i}": values[name] for i, name in enumerate(node.inputs)}
        target = self.overwritten(node)
        name = f"{node.name}.y" + (" again" if replay else "")
        new = Buffer(name, "activations", node.name, layer.output_shape)
        writes = {"y": self.buffer(new) if target is None else values[target]}
        if self.training:
            elements = layer.saved_elements()
            if self.pads:
                elements = stored_saved_elements(layer, by_sums=self.by_sums)
            saved = {
                role: self.buffer(Buffer(f"{node.name}.{role}", "activations", node.name, (count,), itemsize))
                for role, (count, itemsize) in elements.items()
            }
            if layer.has_statistics:
                name, shape = f"{node.name}.statistics", (2, layer.input_shape[2])
                fixed = Buffer(name, "activations", node.name, shape, FLOAT32_BYTES, batched=False)
                saved["statistics"] = self.buffer(fixed)
            self.saved[node.name] = saved
            before = self.sum_behind(node, values, saved)
            reads |= before
            writes |= {role: number for role, number in saved.items() if role not in before}
        self.produced[writes["y"]] = len(self.ops)
        self.emit("forward", node, reads, writes, replay=replay)
        values[node.name] = writes["y"]

    def sum_behind(self, node: Node, values: dict[str, int], saved: dict[str, int]) -> dict[str, int]:
        """
        Fuse a batch norm's statistics into the product that computes its input.

        `values` has the output's buffer number of each layer so far, and `saved` the norm's saved buffers by role.

        Returns:
            dict: The buffer number of "statistics", which the norm reads then; empty if they are not fused.
        """
        time = self.produced.get(values[node.inputs[0]], -1)
        if not (self.sums and node.layer.has_statistics) or time < 0:
            return {}
        op, channels = self.ops[time], node.layer.input_shape[2]
        product = op.node.layer if op.node else node.layer
        is_plain = not (op.then or op.summed or op.relu)
        if not (product.has_epilogue and is_plain and product.output_shape[2] == channels):
            return {}
        fused = {"statistics": saved["statistics"]}
        self.ops[time] = attrs.evolve(op, writes=op.writes | fused, summed=node)
        return fused

    def sum_before(self, node: Node, dy: int, reads: dict[str, int]) -> dict[str, int]:
        """
        Fuse the sums of a batch norm's gradient into the product that computes dy, the gradient of its result.

        `reads` has the buffer numbers of the norm's input "x0" and its "statistics".

        Returns:
            dict: The buffer number of "means", which the norm's operation reads then; empty if they are not fused.
        """
        if not (self.sums and node.layer.has_statistics) or node.name in self.undone:
            return {}
        time = self.written(dy)
        if time <= max(map(self.written, (reads["x0"], reads["statistics"]))):  # computed again after the product
            return {}
        op = self.ops[time]
        product, channels = op.node.layer if op.node else node.layer, node.layer.input_shape[2]
        is_of_product = op.kind == "backward" and product.has_epilogue and op.writes.get("dx0") == dy
        if not is_of_product or op.summed or product.input_shape[2] != channels:
            return {}
        means = Buffer(
            f"{node.name}.means", "activation_gradients", node.name, (2, channels), FLOAT32_BYTES, batched=False
        )
        fused = {"means": self.buffer(means)}
        more = {"normed": reads["x0"], "statistics": reads["statistics"]}
        self.ops[time] = attrs.evolve(op, reads=op.reads | more, writes=op.writes | fused, summed=node)
        return fused

    def sum_of_bias(self, node: Node, dy: int) -> bool:
        """Fuse a bias's gradient into the matrix product whose result times a slope is `dy`; return whether it did."""
        time = self.written(dy)
        op = self.ops[time]
        if time < 0 or op.node is None or "curved" not in op.reads or "b" not in node.layer.parameter_shapes:
            return False
        if node.layer.output_shape[2] != op.node.layer.input_shape[2]:  # flattened between the two
            return False
        self.ops[time] = attrs.evolve(op, summed=node)
        return True

    def written(self, number: int) -> int:
        """Return the index of the last operation so far that writes a buffer; -1 if none does."""
        return max((time for time, op in enumerate(self.ops) if number in op.writes.values()), default=-1)

    def joined(self, node: Node, values: dict[str, int]) -> int | None:
        """
        Fuse a layer into the operation that computed its latest input.

        `values` has the output's buffer number of each layer so far.

        Returns:
            The number of the output's buffer; None if the layer cannot be fused.
        """
        made = {name: self.produced.get(values[name], -1) for name in node.inputs if self.is_free(name, node)}
        name = max(made, key=made.__getitem__, default=None)
        if name is None or made[name] < 0:
            return None
        time, number = made[name], values[name]
        op, layer = self.ops[time], node.layer
        before = op.node.layer if op.node else layer
        # The order within an epilogue is fixed.
        is_open = not op.relu and op.activation is None and "residual" not in op.reads
        if is_relu(layer) and before.can_clamp and op.activation is None:
            op = attrs.evolve(op, relu=True)
        elif self.activates and before.can_activate and layer.slope_of_input and is_open:
            op = attrs.evolve(op, activation=layer.type)
        elif (
            layer.has_statistics and not self.training and before.has_epilogue and is_open and op.norm is None
            and before.output_shape[2] == layer.input_shape[2]  # not flattened between the two
        ):  # fmt: skip
            name, shape = f"{node.name}.scale and shift", (2, layer.input_shape[2])
            fixed = Buffer(name, "activations", node.name, shape, FLOAT32_BYTES, batched=False)
            op = attrs.evolve(op, reads=op.reads | {"folded": self.buffer(fixed)})
        elif layer.passes_gradient and before.can_add and is_open and len(node.inputs) == _TWO:
            other = next(each for each in node.inputs if each != name)
            if self.produced.get(values[other], -1) >= time:
                return None
            number = values[other] if other in made else number
            op = attrs.evolve(op, reads=op.reads | {"residual": values[other]}, writes=op.writes | {"y": number})
            self.produced[number] = time
        else:
            return None
        self.ops[time] = attrs.evolve(op, then=(*op.then, node))
        return number

    def cuts(self) -> list[int]:
        """
        Choose segments to recompute, of nearly equal size, and return the end index of each.

        After a segment, only the output of its last layer is read.
        """
        nodes = self.network.nodes
        place = {node.name: i for i, node in enumerate(nodes)}
        # Number of layer outputs alive at each place: computed before it and read there or later.
        change, last_read = [0] * (len(nodes) + 1), {}
        for origin, readers in self.flow.readers.items():
            last_read[origin] = max(place[node.name] for node in readers)
            if origin in place:
                change[place[origin] + 1] += 1
                change[last_read[origin] + 1] -= 1
        possible = set()
        for i, alive in enumerate(itertools.accumulate(change[: len(nodes)])):
            output = self.flow.origin[nodes[i - 1].name]
            is_alone = i and alive == 1 and output != INPUT and last_read.get(output, 0) >= i
            if is_alone and self.overwritten(nodes[i]) is None:
                possible.add(i)
        sizes = [math.prod(node.layer.output_shape) for node in nodes]
        share = sum(sizes) / max(1, math.isqrt(len(possible)))
        cuts, held = [], 0
        for i, size in enumerate(sizes, start=1):
            held += size
            if held >= share and i in possible:
                cuts.append(i)
                held = 0
        self.segment_ends = {self.flow.origin[nodes[i - 1].name] for i in cuts}
        return [*cuts, len(nodes)]

    def replay(self, segment: Sequence[Node], values: dict[str, int]) -> dict[str, int]:
        """
        Append operations that compute a segment's activations again; return their buffers' numbers by layer.

        `values` has the number of the output's buffer of each layer in the forward pass.
        """
        again = {name: values[name] for node in segment for name in node.inputs if name in values}
        for node in segment:
            again.pop(node.name, None)
        for node in segment:
            self.forward(node, again, replay=True)
        again[segment[-1].name] = values[segment[-1].name]
        return again

    # --- backward ----------------------------------------------------------------------------

    def loss(self, values: dict[str, int]) -> None:
        """
        Append the loss and the gradient of the output; a layer on its own receives that gradient as an input.

        `values` has the number of the output's buffer of each layer.
        """
        last = self.network.nodes[-1]
        h, w, _ = last.layer.output_shape
        gradient = self.buffer(self.gradient_of(last))
        if self.single:
            self.given.add(gradient)
        else:
            labels = self.buffer(Buffer("labels", "activations", last.name, (h, w), LABEL_BYTES))
            self.given.add(labels)
            reads = {"x0": values[last.name], "labels": labels}
            self.ops.append(Op("loss", None, reads, {"dy": gradient}, self.scratch("loss", last)))
        self.receive(last.name, gradient)

    def receive(self, name: str, number: int) -> None:
        """Add buffer `number` to the gradient of a layer's output; the first one becomes that gradient."""
        if name not in self.gradients:
            self.gradients[name] = number
            self.holders.setdefault(number, set()).add(name)
            return
        held = self.gradients[name]
        node = self.flow.nodes[name]
        # Add into the one of the two buffers that has no other reader.
        free = [n for n in (number, held) if not self.holders.get(n, set()) - {name} and n not in self.given]
        target = free[0] if free else self.buffer(self.gradient_of(node))
        self.ops.append(Op("accumulate", node, {"x0": held, "x1": number}, {"y": target}))
        self.holders[held].discard(name)
        self.gradients[name] = target
        self.holders.setdefault(target, set()).add(name)

    def ending(self, node: Node, values: dict[str, int], writes: dict[str, int]) -> dict[str, int]:
        """
        Fuse earlier contributions and a ReLU's slope into the product that computes an input's gradient.

        `values` has the number of the output's buffer of each layer, and `writes` the buffers of the product by role.

        Returns:
            dict: Further buffers that the product reads. "residual" has the contributions; the product overwrites it if
                it has no other reader. "positive" is the output of the ReLU, "curved" the input of another activation.
        """
        name, reads = node.inputs[0], {}
        held = self.gradients.pop(name, None)
        if held is not None:
            reads["residual"] = held
            self.holders[held].discard(name)
            if not self.holders[held] and held not in self.given:
                writes["dx0"] = held
        slope = self.flow.slope(node, curves=self.curves)
        if slope is not None and is_relu(slope.layer):
            reads["positive"] = values[name]
        elif slope is not None:
            reads["curved"] = values[slope.inputs[0]]
        return reads

    def join_ranges(self, name: str, own: tuple[int, int], writes: dict[str, int]) -> dict[str, int]:
        """
        Write a slice's gradient into the buffer of other slices' gradients, unless their channels overlap.

        `name` is the layer that is sliced, `own` the range of channels, and `writes` the slice's buffers by role.

        Returns:
            dict: "parts", the number of that buffer, whose own channels the slice overwrites; empty if there is none.
        """
        held, ranges = self.parts.pop(name, (None, []))
        if held is not None and any(own[0] < end and start < own[1] for start, end in ranges):
            self.receive(name, held)
            held, ranges = None, []
        if held is not None:
            writes["dx0"] = held
        self.parts[name] = writes["dx0"], [*ranges, own]
        return {} if held is None else {"parts": held}

    def gradient_of(self, node: Node) -> Buffer:
        return Buffer(f"{node.name}.y gradient", "activation_gradients", node.name, node.layer.output_shape)

    def wanted(self, node: Node) -> list[tuple[int, str]]:
        return [(i, name) for i, name in enumerate(node.inputs) if self.single or name in self.flow.trained]

    def saved_for(self, node: Node, values: dict[str, int]) -> dict[str, int]:
        needed = node.layer.backward_reads
        inputs = {f"x{i}": values[name] for i, name in enumerate(node.inputs)} if "x" in needed else {}
        return inputs | ({"y": values[node.name]} if "y" in needed else {})

    def has_no_backward(self, node: Node) -> bool:
        """Return whether a node's gradient is passed on as it is; record the norm that applies its slope, if any."""
        if self.flow.is_alias(node) or node.layer.passes_gradient or node.name in self.sloped:
            return True
        norm = self.flow.undoing(node) if self.activates else None
        if norm is not None:
            self.undone[norm.name] = node
        return norm is not None

    def is_added_by_norm(self, node: Node, dy: int) -> bool:
        """Return whether a batch norm adds a global pool's gradient itself; if so, record dy of the pool's output."""
        norm = self.flow.pooled_norm(node) if self.activates else None
        if norm is None or node.inputs[0] not in self.gradients:
            return False
        self.spread[norm.name] = dy  # the pool stays a holder: nothing may overwrite it before the norm has read it
        return True

    def apply_slope(self, node: Node, *, by_product: bool) -> None:
        """Fuse the slope of a neighboring activation into the last operation, which is the node's."""
        before = self.flow.slope(node, curves=self.curves) if by_product else None
        undone = self.undone.get(node.name)
        if before is not None:
            curve = None if is_relu(before.layer) else before.layer.type
            self.ops[-1] = attrs.evolve(self.ops[-1], then=(before,), activation=curve)
            self.sloped.add(before.name)
        elif undone is not None:
            self.ops[-1] = attrs.evolve(self.ops[-1], then=(undone,), activation=undone.layer.type)

    def pass_on(self, node: Node, dy: int, names: Sequence[str]) -> None:
        for position, name in enumerate(names, start=1):
            if position == len(names):  # held until then: an earlier reader must not add into it
                self.holders[dy].discard(node.name)
            if name == INPUT:  # a view on its own: the given gradient is the result
                self.results.add(dy)
            else:
                self.receive(name, dy)

    def backward(self, node: Node, values: dict[str, int]) -> None:
        """
        Append the operations that compute the gradients of a layer's inputs and parameters.

        Nothing is appended if the loss does not depend on the layer's output, or if no gradient is wanted. `values` has
        the number of the output's buffer of each layer.
        """
        dy = self.gradients.pop(node.name, None)
        wanted = self.wanted(node)
        if dy is None or not (wanted or node.layer.parameters):
            return
        layer = node.layer
        if self.has_no_backward(node):
            self.pass_on(node, dy, [name for _, name in wanted])
            return
        if self.is_added_by_norm(node, dy):
            return
        reads = {"dy": dy} | self.saved.get(node.name, {}) | self.saved_for(node, values)
        spread = self.spread.pop(node.name, None)
        reads |= self.sum_before(node, dy, reads) if spread is None else {"pooled": spread}
        in_place = layer.elementwise and self.holders[dy] == {node.name} and dy not in self.given
        writes = {}
        for i, _ in wanted:
            shape = layer.input_shapes[i]
            fresh = Buffer(f"{node.name}.x{i} gradient", "activation_gradients", node.name, shape)
            writes[f"dx{i}"] = dy if in_place else self.buffer(fresh)
        if (layer.has_epilogue or layer.adds_gradients) and wanted:
            reads |= self.ending(node, values, writes)
        if layer.channel_range is not None:
            reads |= self.join_ranges(node.inputs[0], layer.channel_range, writes)
        has_bias_gradient = self.sum_of_bias(node, dy)
        self.emit("backward", node, reads, writes)
        self.ops[-1] = attrs.evolve(self.ops[-1], has_bias_gradient=has_bias_gradient)
        self.apply_slope(node, by_product=not reads.keys().isdisjoint({"positive", "curved"}))
        self.holders[dy].discard(node.name)
        for i, name in wanted:
            if name == INPUT:
                self.results.add(writes[f"dx{i}"])
            elif not self.flow.awaits_range(node):
                self.receive(name, writes[f"dx{i}"])

    # --- the end -----------------------------------------------------------------------------

    def finish(self, values: dict[str, int]) -> Schedule:
        """
        Return the schedule, without recomputations that nothing reads, and with its buffers numbered again.

        `values` has the number of the output's buffer of each layer; in inference that of the last is the result.
        """
        read: set[int] = set()
        ops: list[Op] = []
        for op in reversed(self.ops):
            if op.replay and not read.intersection(op.writes.values()):
                continue
            read.update(op.reads.values())
            ops.append(op)
        ops.reverse()
        folds = [op for op in ops if op.norm is not None]
        if folds:  # in every step, so that changed parameters and statistics are always used
            written = {op.norm.name: op.reads["folded"] for op in folds if op.norm}
            ops.insert(
                0, Op("fold", None, {}, written, norms=tuple((op.node, op.norm) for op in folds if op.node and op.norm))
            )
        if not self.training:
            self.results.add(values[self.network.nodes[-1].name])
        used = self.given | self.results
        for op in ops:
            used.update([*op.reads.values(), *op.writes.values()], [] if op.workspace is None else [op.workspace])
        number = {old: new for new, old in enumerate(sorted(used))}
        return Schedule(
            network=self.network,
            mode=self.mode,
            ops=tuple(
                attrs.evolve(
                    op,
                    reads={role: number[n] for role, n in op.reads.items()},
                    writes={role: number[n] for role, n in op.writes.items()},
                    workspace=None if op.workspace is None else number[op.workspace],
                )
                for op in ops
            ),
            buffers=tuple(self.buffers[old] for old in sorted(used)),
            given=frozenset(number[n] for n in self.given),
            results=frozenset(number[n] for n in self.results),
            outputs={name: number[n] for name, n in values.items() if n in number},
            single=self.single,
            patches=self.patches,
        )

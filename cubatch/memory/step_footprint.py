"""The memory of a step, part by part."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np

from cubatch.hardware.facts import BYTES_PER_ELEMENT
from cubatch.memory.plan import bytes_alive, plan
from cubatch.network.graph import INPUT, Spec, as_network
from cubatch.shown import Shown
from cubatch.workload import Workload


@attrs.frozen(kw_only=True)
class Footprint(Shown):
    """
    The memory of the arrays of a step in bytes, part by part; libraries and the context of a GPU are not included.

    Attributes:
        weights: Parameters and running statistics.
        gradients: Gradients of the parameters, and their sum if those of several batches are added up; 0 in inference.
        optimizer: The optimizer state; with 16-bit weights also the float32 master weights and the loss scale.
        activations: The batch and each layer's output and saved values, each buffer once.
        activation_gradients: Gradients of outputs, each buffer once.
        workspace: Scratch memory of the kernels, each buffer once.
        total: The plan's peak: at most the sum of the parts, since buffers share memory if their lifetimes allow.
        elements_per_sample: The textbook count: input and layer outputs, in training also the gradients of the outputs.
            Flatten and in-place layers add nothing.
        peak_layer: The layer during whose pass the most memory is alive.
        batch_size: Samples per step.
        layers: A mapping for the input and for each layer: "name", "type", "output_shape", number of "parameters", and
            bytes of "weights", "activations", "activation_gradients" and "workspace".
        members: CPU threads with samples and gradients of their own; 1 on a GPU.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    activation_gradients: int
    workspace: int
    total: int
    elements_per_sample: int
    peak_layer: str
    batch_size: int
    layers: tuple[dict[str, Any], ...] = attrs.field(hash=False)
    members: int = 1

    def to_mapping(self) -> dict[str, Any]:
        """Return the footprint as a plain mapping, for JSON."""
        return attrs.asdict(self) | {"layers": [dict(layer) for layer in self.layers]}


def footprint_of(work: Workload, batch_size: int) -> Footprint:
    """
    Return the bytes of a step by part and by layer, from the plan that the engine follows.

    The process overhead is not included: libraries, and on a GPU the context.
    """
    whole = plan(work, batch_size)
    program = whole.schedule
    parts = dict.fromkeys(("activations", "activation_gradients", "workspace"), 0)
    by_node = {name: dict(parts) for name in [INPUT, *(node.name for node in program.network.nodes)]}
    for buffer, shard_bytes in zip(program.buffers, whole.sizes, strict=True):
        num_bytes = whole.members * whole.copies * shard_bytes
        parts[buffer.part] += num_bytes
        by_node[buffer.node][buffer.part] += num_bytes
    peak = int(np.argmax(bytes_alive(whole.buffer_bytes, program)))
    node = program.ops[peak].node if program.ops else None
    itemsize = BYTES_PER_ELEMENT[work.dtype]
    shape = program.network.input_shape
    layers = [{"name": INPUT, "type": INPUT, "output_shape": shape, "parameters": 0, "weights": 0}]
    layers += [
        {
            "name": node.name,
            "type": node.layer.type,
            "output_shape": node.layer.output_shape,
            "parameters": node.layer.parameters,
            "weights": node.layer.parameters * itemsize,
        }
        for node in program.network.nodes
    ]
    return Footprint(
        weights=whole.weight_bytes,
        gradients=whole.gradient_bytes,
        optimizer=whole.optimizer_bytes,
        **parts,
        total=whole.total,
        elements_per_sample=textbook_elements(work.spec, work.mode),
        peak_layer=node.name if node else program.network.nodes[-1].name,
        batch_size=batch_size,
        layers=tuple(layer | by_node[str(layer["name"])] for layer in layers),
        members=whole.members,
    )


def textbook_elements(spec: Spec, mode: str) -> int:
    """
    Return the elements per sample as textbooks count them: input, layer outputs, in training their gradients.

    Layers that are a view of their input or commonly work in place (flatten, dropout, activations) add nothing.
    For `mlp` the count is 1410, with gradients 1820.
    """
    network = as_network(spec)
    outputs = sum(
        math.prod(node.layer.output_shape)
        for node in network.nodes
        if not (node.layer.elementwise or node.layer.aliases_input)
    )
    return math.prod(network.input_shape) + outputs * (2 if mode == "training" else 1)

"""
The passes of a step as the schedule runs them.

What a neighbour's operation does is no pass of its own: it costs what it makes the neighbour read, and no launch.  Sums
of gradients cost what they move also where the pass before which they are made is none, as that of a residual branch's
sum.  The fold of batch norms at the head of a step is left out, as the loss and the optimiser are.
"""

from __future__ import annotations

import math

import attrs

from cubatch.memory.plan import schedule_of
from cubatch.memory.schedule_records import Op
from cubatch.network.graph import Node, Spec, cached, layer_passes
from cubatch.network.passes import Pass


@attrs.frozen
class Scheduled:
    """
    One pass of one layer in a step.

    Attributes:
        node: The layer.
        pass_: Which of its passes.
        runs: Whether it is an operation; otherwise a neighbour does it, or there is nothing to do.
        more: Elements of a sample that it moves beside its own: what its epilogue reads, sums of gradients before it,
            which are all that is moved where it does not run.
    """

    node: Node
    pass_: Pass
    runs: bool
    more: int


@cached
def scheduled_passes(spec: Spec, mode: str) -> tuple[Scheduled, ...]:
    """
    List the passes of one step in the order of `layer_passes`, each with what the schedule makes of it.

    Example:
        >>> from cubatch.network import models
        >>> found = scheduled_passes(models.build("resnet50"), "inference")
        >>> sum(item.runs for item in found), len(found)
        (56, 174)
    """
    program = schedule_of(spec, mode, recompute=False, library="im2col")  # which runs is the same on any
    ops: dict[tuple[str, str], Op] = {}
    summed: dict[str, int] = {}
    for op in program.ops:
        if op.node is not None and op.kind == "accumulate":
            summed[op.node.name] = summed.get(op.node.name, 0) + 3 * math.prod(op.node.layer.output_shape)
        elif op.node is not None:
            ops[op.node.name, op.kind] = op
    found = []
    for node, pass_ in layer_passes(spec, mode):
        runs = ops.get((node.name, "forward" if pass_ is Pass.FPROP else "backward"))
        ending = runs.ending - {"folded"} if runs and pass_ is not Pass.WGRAD else ()
        more = sum(program.buffers[runs.reads[role]].elements for role in ending) if runs else 0
        if pass_ is not Pass.FPROP:  # before the first of its gradients
            more += summed.pop(node.name, 0)
        found.append(Scheduled(node, pass_, runs is not None, more))
    return tuple(found)

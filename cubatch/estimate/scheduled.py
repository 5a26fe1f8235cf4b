"""
The passes of a step as the schedule runs them.

A fused layer is no pass of its own: it costs what its neighbor additionally reads, and no launch.  The kernels of
cubatch fuse more than an array library.  Of a layer norm with up to 6140 channels one kernel computes all gradients, in
the input's pass.  A sum of gradients costs what it moves, even if the pass after it is fused.  The fold of batch norms,
the loss and the optimizer are left out.
"""

from __future__ import annotations

import math

import attrs

from cubatch.kernels.workspace.misc import gradients_at_once
from cubatch.memory.plan import schedule_of
from cubatch.memory.schedule_records import Op
from cubatch.network.graph import Node, Spec, cached, layer_passes
from cubatch.network.layer import Layer, without_bias
from cubatch.network.passes import Pass


@attrs.frozen
class Scheduled:
    """A pass of a layer in a step: whether it is a separate operation, and the elements it moves for other layers."""

    node: Node  # the layer
    pass_: Pass  # one of its passes
    runs: bool  # whether it is an operation; otherwise it is fused, or does nothing
    # further elements per sample that it moves: reads of its epilogue, and sums of gradients before it. If the pass
    # does not run, it moves only these
    more: int
    computed: Layer | None = None  # the layer that kernels compute instead of the node's, see `Op`; None: the node's
    # whether a product's pass also computes the sums of a batch norm, or a norm's pass does not, or attention's passes
    # share logarithms of sums instead of weights. With `curved`, whether a product sums the gradient of a bias
    summed: bool = False
    curved: bool = False  # whether a product applies the slope of an activation other than a ReLU

    @property
    def layer(self) -> Layer:
        """The layer that kernels compute: `computed`, else the layer of the node."""
        return self.computed or self.node.layer


@cached
def scheduled_passes(
    spec: Spec,
    mode: str,
    library: str,
    experimental: frozenset[str] = frozenset(),
) -> tuple[Scheduled, ...]:
    """
    Return the passes of one step in the order of `layer_passes`; each records whether it runs or is fused.

    Any `library` but "cubatch" runs the schedule of the array library, "im2col". `experimental` is that of `schedule`.
    """
    library = "cubatch" if library == "cubatch" else "im2col"
    program = schedule_of(spec, mode, recompute=False, library=library, experimental=experimental)
    ops: dict[tuple[str, str], Op] = {}
    added: dict[str, int] = {}
    for op in program.ops:
        if op.node is not None and op.kind == "accumulate":
            added[op.node.name] = added.get(op.node.name, 0) + 3 * math.prod(op.node.layer.output_shape)
        elif op.node is not None:
            ops[op.node.name, op.kind] = op
    passes: list[Scheduled] = []
    for node, pass_ in layer_passes(spec, mode):
        runs = ops.get((node.name, "forward" if pass_ is Pass.FPROP else "backward"))
        ending = runs.ending - {"folded"} if runs and pass_ is not Pass.WGRAD else frozenset()
        summed = runs is not None and _shares_sums(runs, pass_)
        if summed and runs and "normed" in runs.reads:  # the norm's input, instead of a mask that it implies
            ending = ending - ({"positive"} if runs.undoes_relu else set()) | {"normed"}
        more = sum(program.buffers[runs.reads[role]].elements for role in ending) if runs else 0
        if pass_ is not Pass.FPROP:  # before the first of its gradients
            more += added.pop(node.name, 0)
        computed = runs.computed if runs else None
        if runs and runs.has_bias_gradient and pass_ is Pass.WGRAD:
            computed = without_bias(computed or node.layer)
        before = passes[-1].pass_ if passes else None
        is_one = library == "cubatch" and gradients_at_once(node.layer) and before is Pass.DGRAD
        is_done = runs is None or (pass_ is Pass.WGRAD and (summed or is_one))
        passes.append(Scheduled(node, pass_, not is_done, more, computed, summed, "curved" in ending))
    return tuple(passes)


def _shares_sums(op: Op, pass_: Pass) -> bool:
    """Return the value of `Scheduled.summed` for a pass of an operation."""
    if op.summed is not None or "log_sums" in op.reads | op.writes:
        return pass_ is not Pass.WGRAD
    return "means" in op.reads or (op.kind == "forward" and "statistics" in op.reads)

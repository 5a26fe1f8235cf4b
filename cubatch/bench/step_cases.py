"""
The cases of a whole step: every operation that the schedule of a network launches, with how often it occurs.

They are what `engine.layers` binds of the same schedule, operation by operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs

from cubatch.bench import training_calls
from cubatch.bench.cases import Case, has_case, of_layer
from cubatch.bench.fused import with_epilogue
from cubatch.memory.plan import schedule_of
from cubatch.memory.schedule_records import Op, Schedule
from cubatch.network.graph import Network, Spec, as_network
from cubatch.network.layers import Add
from cubatch.network.passes import Pass

_EXTENTS = 3  # of a sample: height, width, channels


def of_step(
    spec: Spec, mode: str, batch_size: int, dtype: str = "float32", *, optimizer: str = "momentum"
) -> list[Case]:
    """
    List the distinct operations of one step on cubatch kernels, in the order of their first launch.

    Args:
        spec: A network or layer.
        mode: "training" or "inference".
        batch_size: Samples.
        dtype: Storage of the elements.
        optimizer: "sgd", "momentum" or "adam", for training.

    Returns:
        list: `multiplicity` is the number of occurrences in a step; `layers` names where they are.

    Raises:
        InvalidArgument: If a layer has no kernel.
        UnknownName: If there is no such dtype or optimizer.

    Example:
        >>> from cubatch.network import models
        >>> found = of_step(models.build("go-net"), "inference", 32)
        >>> [(case.name, case.multiplicity) for case in found if case.flops]
        [('conv2d 19x19x128 to 128, 3x3, bias, pad 1, n=32, fprop, then relu', 80)]
    """
    network = as_network(spec)
    program = schedule_of(network, mode, recompute=False, library="cubatch")
    cases: dict[str, Case] = {}
    for op in program.ops:
        place = op.node.name if op.node else op.kind
        for case in _of_op(op, program, network, batch_size, dtype, optimizer):
            before = cases.get(case.name)
            layers = (*(before.layers if before else ()), place)
            cases[case.name] = attrs.evolve(case, multiplicity=len(layers), layers=layers)
    return list(cases.values())


def _of_op(op: Op, program: Schedule, network: Network, batch_size: int, dtype: str, optimizer: str) -> Iterator[Case]:
    if op.node is None:
        yield from _of_network(op, network, batch_size, dtype, optimizer)
        return
    layer = op.node.layer
    residual, positive = "residual" in op.reads, "positive" in op.reads
    if op.kind == "accumulate":
        h, w, c = layer.output_shape
        yield of_layer(Add(h=h, w=w, c=c), Pass.FPROP, batch_size, dtype)
    elif op.kind == "forward":
        # The bias of a product with a folded norm is part of the norm's shift.
        case = of_layer(layer, Pass.FPROP, batch_size, dtype, with_bias=op.norm is None, mode=program.mode)
        case = with_epilogue(case, folded=op.norm is not None, residual=residual, relu=op.relu)
        yield _as_stored(case, op, program)
    elif has_case(layer, Pass.WGRAD):
        yield _as_stored(of_layer(layer, Pass.WGRAD, batch_size, dtype, with_bias=True), op, program)
        if "dx0" in op.writes:
            case = of_layer(layer, Pass.DGRAD, batch_size, dtype)
            yield with_epilogue(case, residual=residual, positive=positive)
    else:
        case = of_layer(layer, Pass.DGRAD, batch_size, dtype, with_bias=True)
        yield _next_to_others(case) if "parts" in op.reads else case


def _next_to_others(case: Case) -> Case:
    """Write the gradient of a range of channels next to that of other ranges, which stays."""
    moved = 2 * math.prod(case.operands["dy"].shape) * case.itemsize("dy")
    return attrs.evolve(
        case,
        name=f"{case.name}, next to others",
        aliases={"parts": "out"},
        updates=("out",),
        traffic_bytes=moved,
        moved_bytes=moved,
    )


def stored_with(case: Case, channels: int) -> Case:
    """Return a convolution whose input is stored with zero channels behind its own."""
    x = case.operands["x"]
    padded = channels - x.shape[3]
    if not padded:
        return case
    more = math.prod(x.shape[:3]) * padded * case.itemsize("x")
    return attrs.evolve(
        case,
        name=f"{case.name}, stored with {channels} channels",
        operands={**case.operands, "x": attrs.evolve(x, shape=(*x.shape[:3], channels), padded=padded)},
        traffic_bytes=case.traffic_bytes + more,
        moved_bytes=case.moved_bytes + more,
    )


def _as_stored(case: Case, op: Op, program: Schedule) -> Case:
    stored = program.buffers[op.reads["x0"]].shape
    # Only convolutions read an image whose channels are padded.
    is_image = case.layer is not None and case.layer.convolution is not None and len(stored) == _EXTENTS
    return stored_with(case, stored[2]) if is_image else case


def _of_network(op: Op, network: Network, batch_size: int, dtype: str, optimizer: str) -> Iterator[Case]:
    """Build the cases of an operation that belongs to no layer."""
    if op.kind == "fold":
        norms = [norm for _, norm in op.norms]
        has_bias = ["b" in product.layer.parameter_shapes for product, _ in op.norms]
        yield training_calls.fold([norm.layer.input_shape[2] for norm in norms], has_bias, dtype)
    elif op.kind == "loss":
        h, w, classes = network.output_shape
        yield training_calls.cross_entropy(batch_size * h * w, classes, dtype)
    else:
        if dtype == "float16":
            yield training_calls.loss_scale(network.parameters)
        yield training_calls.optimizer_step(optimizer, network.parameters, dtype)

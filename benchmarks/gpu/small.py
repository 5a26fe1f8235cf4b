"""Cases cut down to what a simulated GPU computes in a moment: a rehearsal of the pass goes the same ways with them."""

from __future__ import annotations

import attrs

from cubatch.bench import cases, training_calls
from cubatch.bench.cases import Case
from cubatch.bench.fused import with_epilogue
from cubatch.bench.step_cases import stored_with
from cubatch.network.layer import Layer
from cubatch.network.layers import Attention, Linear

NETWORK, BATCH_SIZE = "mnist-cnn", 4
"""In the place of every network and its batch."""

EXTENTS = {"h": 8, "w": 8, "c": 16, "k": 16}
ROWS = 48
"""Of a matrix product: one tile of some variants, several of others."""

PARAMETERS = 5000


def cut(case: Case) -> Case:
    """
    Return a case of the same operation, pass, type and epilogue on small arrays.

    Example:
        >>> cut(cases.gemm(8192, 8192, 8192, layout="tn", dtype="float16")).name
        'linear 1x1x48 to 48, n=48, wgrad, float16'
    """
    if case.layer is None or case.pass_ is None:
        return _of_network(case)
    layer = _cut_layer(case.layer)
    batch_size = min(case.batch_size, ROWS if isinstance(layer, Linear) else 2)
    with_bias = any("bias" in term for term in case.epilogue) or "b_in" in case.operands or "db_in" in case.operands
    modes = ("", *(mode for mode in ("training", "inference") if cases.has_case(layer, case.pass_, mode)))
    found = [
        cases.of_layer(layer, case.pass_, batch_size, case.dtype, with_bias=with_bias, mode=mode) for mode in modes
    ]
    # Of the forms of a forward pass the one that has the same arrays.
    plain = next(each for each in found if (each.operation, each.results) == (case.operation, case.results))
    ended = with_epilogue(
        plain,
        folded="shift" in case.operands,
        residual="residual" in case.operands,
        positive="positive" in case.operands,
        relu=bool(case.options.get("relu")),
    )
    padded = case.operands["x"].padded if "x" in case.operands else 0
    ended = stored_with(ended, ended.operands["x"].shape[3] + padded) if padded else ended
    return attrs.evolve(ended, aliases=case.aliases, updates=case.updates)


def _cut_layer(layer: Layer) -> Layer:
    given = layer.to_mapping()
    if isinstance(layer, Linear):
        return Linear(c=min(given["c"], ROWS), k=min(given["k"], ROWS), bias=layer.bias)
    few = {name: min(given[name], most) for name, most in EXTENTS.items() if isinstance(given.get(name), int)}
    few |= {extent: max(few[extent], given[taps]) for extent, taps in (("h", "r"), ("w", "s")) if taps in given}
    if given.get("groups", 1) == given["c"]:
        few["groups"] = few["c"]
    if isinstance(layer, Attention):
        few["heads"] = 2
    return attrs.evolve(layer, **few)


def _of_network(case: Case) -> Case:
    """Cut what is of no layer."""
    if case.operation == "fold_batch_norms":
        return training_calls.fold([16, 8], [False, True], case.dtype)
    if case.operation == "softmax_cross_entropy":
        return training_calls.cross_entropy(4, 10, case.dtype)
    if case.operation == "update_loss_scale":
        return training_calls.loss_scale(PARAMETERS, case.dtype)
    return training_calls.optimizer_step(case.operation, PARAMETERS, case.dtype)

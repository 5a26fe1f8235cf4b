"""Cases cut down to what a simulated GPU computes in a moment: a rehearsal of the pass goes the same ways with them."""

from __future__ import annotations

import attrs

from cubatch.bench import cases, fused
from cubatch.bench.cases import Case
from cubatch.network.layers import Conv2d, Linear

NETWORK, BATCH_SIZE = "mnist-cnn", 4
"""In the place of every network and its batch."""

EXTENTS = {"h": 8, "w": 8, "c": 16, "k": 16}
ROWS = 48
"""Of a matrix product: one tile of some variants, several of others."""


def cut(case: Case) -> Case:
    """
    Give a case of the same operation, pass and type on small arrays; what is of no layer stays as it is.

    Example:
        >>> cut(cases.gemm(8192, 8192, 8192, layout="tn", dtype="float16")).name
        'linear 1x1x48 to 48, n=48, wgrad, float16'
    """
    if case.layer is None or case.pass_ is None:
        return case
    layer, given = case.layer, case.layer.to_mapping()
    if isinstance(layer, Linear):
        few = Linear(c=min(given["c"], ROWS), k=min(given["k"], ROWS), bias=False)
        return cases.of_layer(few, case.pass_, min(case.batch_size, ROWS), case.dtype)
    few = {name: min(given[name], most) for name, most in EXTENTS.items() if isinstance(given.get(name), int)}
    if given.get("groups", 1) == given["c"]:
        few["groups"] = few["c"]
    small, batch_size = attrs.evolve(layer, **few), min(case.batch_size, 2)
    if isinstance(small, Conv2d) and case.options.get("relu", case.operation == fused.WITH_RESIDUAL):
        is_sum = case.operation == fused.WITH_RESIDUAL
        return fused.conv_relu(small, batch_size, case.dtype, residual=is_sum)
    return cases.of_layer(small, case.pass_, batch_size, case.dtype)

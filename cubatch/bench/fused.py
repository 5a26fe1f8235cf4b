"""
Epilogues: what a product or a norm does to its result before it is stored.

Our kernels do it in one launch; the vendor's library in its own kernel and one for each term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from cubatch.bench.calls import Operand
from cubatch.bench.cases import Case


def with_epilogue(
    case: Case, *, folded: bool = False, residual: bool = False, positive: bool = False, relu: bool = False
) -> Case:
    """
    Return a case whose operation applies further terms to `out`, in the order of the arguments.

    Args:
        case: A product, norm, sum or pooling that stores `out`.
        folded: Multiply each channel by a factor and add a term: a batch norm by running statistics.
        residual: Add an array of the shape of `out`.
        positive: Write zero where an array of that shape, the output of a ReLU, is not positive.
        relu: Write zero where the result is negative.

    Example:
        >>> from cubatch.bench.cases import of_layer
        >>> from cubatch.network.layers import Conv2d
        >>> from cubatch.network.passes import Pass
        >>> plain = of_layer(Conv2d(h=7, w=7, c=64, k=32, r=1, s=1), Pass.FPROP, 4)
        >>> with_epilogue(plain, residual=True, relu=True).name
        'conv2d 7x7x64 to 32, 1x1, n=4, fprop, then residual, relu'
    """
    if not (folded or residual or positive or relu):
        return case
    out = case.operands["out"]
    channel, image = Operand(out.shape[-1:], dtype="float32", is_batched=False), Operand(out.shape)
    added = ({"scale": channel, "shift": channel} if folded else {}) | ({"residual": image} if residual else {})
    added |= {"positive": attrs.evolve(image, kind="rectified")} if positive else {}

    def cut(axes: Mapping[str, int]) -> Mapping[str, int]:
        """Cut what is added where `out` is cut."""
        axis = axes.get("out")
        ways = {"scale": 0, "shift": 0} if axis == len(out.shape) - 1 else {}
        ways |= {} if axis is None else {"residual": axis, "positive": axis}
        return {**axes, **{name: at for name, at in ways.items() if name in added}}

    ended = attrs.evolve(
        case,
        operands={**case.operands, **added},
        options={**case.options, "relu": True} if relu else case.options,
        cuts={name: cut(axes) for name, axes in case.cuts.items()},
    )
    more = sum(math.prod(operand.shape) * ended.itemsize(name) for name, operand in added.items())
    terms = [term for term in ended.epilogue if term not in case.epilogue]
    return attrs.evolve(
        ended,
        name=f"{case.name}, then {', '.join(terms)}",
        traffic_bytes=case.traffic_bytes + more,
        moved_bytes=case.moved_bytes + more,
    )

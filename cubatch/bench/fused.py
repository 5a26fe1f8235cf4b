"""
Forward passes with everything behind them fused: convolution, bias, a residual block's shortcut, ReLU.

Our kernels do it in one launch; the vendor's library in a convolution and one kernel for each of the others.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np

from cubatch.bench.calls import Operand
from cubatch.bench.cases import Case, of_layer
from cubatch.engine import functional
from cubatch.engine.native import conv
from cubatch.engine.native.context import Context
from cubatch.engine.native.product import Fused
from cubatch.network.layers import Conv2d
from cubatch.network.passes import Pass

WITH_RESIDUAL = "conv2d_residual_relu"
"""The operation that `engine.functional` has no name for."""


def conv_relu(layer: Conv2d, batch_size: int, dtype: str = "float32", *, residual: bool = False) -> Case:
    """
    Give relu(convolution + bias), or relu(convolution + bias + residual).

    Args:
        layer: With its extents known.
        batch_size: Samples.
        dtype: Storage of the elements.
        residual: Whether an array of the output's shape is added.

    Example:
        >>> conv_relu(Conv2d(h=7, w=7, c=64, k=32, r=1, s=1), 4, residual=True).name
        'conv2d 7x7x64 to 32, 1x1, bias, n=4, fprop, then residual, relu'
    """
    plain = of_layer(attrs.evolve(layer, bias=True), Pass.FPROP, batch_size, dtype, with_bias=True)
    if not residual:
        return attrs.evolve(plain, name=f"{plain.name}, then relu", options={**plain.options, "relu": True})
    out = plain.operands["out"]
    more = math.prod(out.shape) * plain.itemsize("out")
    return attrs.evolve(
        plain,
        name=f"{plain.name}, then residual, relu",
        operation=WITH_RESIDUAL,
        operands={**plain.operands, "residual": Operand(out.shape)},
        traffic_bytes=plain.traffic_bytes + more,
        moved_bytes=plain.moved_bytes + more,
        cuts={name: {**axes, "residual": axes["out"]} for name, axes in plain.cuts.items()},
    )


def on_kernels(context: Context) -> dict[str, Any]:
    """Give the operations that cases have beyond those of `engine.functional`, on our kernels."""
    return {WITH_RESIDUAL: functools.partial(_conv2d, context)}


def _conv2d(context: Context, x: Any, w: Any, b: Any, *, residual: Any, **options: Any) -> None:
    conv.conv2d(context, x, w, b, fused=Fused(residual=residual, activation="relu"), **options)


@functools.cache
def reference() -> SimpleNamespace:
    """Give every operation that a case may call, by NumPy."""
    named = {name: getattr(functional, name) for name in functional.__all__}
    return SimpleNamespace(**named, **{WITH_RESIDUAL: _reference})


def _reference(x: Any, w: Any, b: Any, *, residual: Any, out: Any, **options: Any) -> None:
    functional.conv2d(x, w, b, out=out, **options)
    np.maximum(out + residual, 0, out=out)

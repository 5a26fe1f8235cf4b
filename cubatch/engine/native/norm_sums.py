"""
Products that compute the sums over the batch of a batch norm next to them, or an activation's slope.

Kernels of hopper/ compute them while they store a result, in both passes; those of simt/ and mma/ compute sums in
forward passes. A variant that does not, such as a split product or Winograd's algorithm, is followed by kernels of the
norm or activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from cubatch.engine.native import activation_functions, batch_norm, product
from cubatch.engine.native.arrays import check, floats, take_workspace
from cubatch.engine.native.context import Context, dtype_of
from cubatch.engine.native.operands import Operands, RowSums
from cubatch.engine.native.reductions import add_up_tiles, column_sums, finish_gradients, finish_sums
from cubatch.kernels.workspace import misc


def launch(context: Context, operands: Operands, norm: Mapping[str, Any] | None) -> None:
    """
    Launch a product and, with `norm`, compute the sums of a batch norm behind it or, for a gradient, before it.

    Args:
        operands: The product, without `Fused.sums`. Its workspace, if it is given, has `norm_sums_workspace` bytes
            more at its end.
        norm: None for no norm. For a forward product the arguments of `batch_norm_statistics` for the norm that reads
            the output. For the gradient of an input, which is the gradient of a norm's result, those of
            `gradient_sums` for that norm, and its gamma and beta. Both are None unless the mask is a ReLU of that
            result. For a gradient that is multiplied by the slope of an activation: "kind", its type, "x", its input,
            and "db". "db" receives the sums of the output over its rows; with None there are no sums.
    """
    if norm is None:
        product.launch(context, operands)
        return
    if "kind" in norm and norm["db"] is None:
        _apply_slope(context, operands, norm, None)
        return
    out, channels = operands.out, operands.out.shape[-1]
    rows = out.size // channels
    size = misc.norm_sums_workspace(rows, channels, dtype_of(out), context.device)
    if operands.workspace is None:
        rest = take_workspace(None, out, size)
    else:
        rest = take_workspace(operands.workspace, out, size)[-size:]
        operands = attrs.evolve(operands, workspace=operands.workspace[:-size])
    if "kind" in norm:
        _apply_slope(context, operands, norm, rest)
        return
    check(np.float32, (channels,), mean=norm["mean"], inv_std=norm["inv_std"])
    behind = "x" not in norm
    quantities = 3 if behind else 2
    most = misc.product_tiles(rows) * quantities * channels
    partials, more = floats(rest, most), rest[4 * most :]
    read = {} if behind else {name: norm[name] for name in ("x", "mean", "inv_std", "gamma", "beta")}
    sums = RowSums(partials=partials, **read)
    tiles = _launch_with(context, operands, sums)
    partials = partials[: tiles * quantities * channels]
    if behind and tiles:
        batch_norm.batch_norm_finish(context, partials, tiles, dtype=dtype_of(out), **norm, workspace=more)
    elif behind:
        batch_norm.batch_norm_statistics(context, out, **norm, workspace=rest)
    elif tiles:
        partials = add_up_tiles(context, partials, 2 * channels, workspace=more)
        finish_gradients(context, out, partials, means=norm["means"], dgamma=norm["dgamma"], dbeta=norm["dbeta"])
    else:
        given = {name: value for name, value in norm.items() if name not in {"gamma", "beta"}}
        batch_norm.gradient_sums(context, out, **given, workspace=rest)


def _apply_slope(context: Context, operands: Operands, curve: Mapping[str, Any], workspace: Any) -> None:
    """
    Launch a product times the slope of an activation, and sum it over its rows.

    `curve` is `norm` of `launch`. `workspace` has `norm_sums_workspace` bytes; None if nothing is summed.
    """
    out, kind, db, channels = operands.out, curve["kind"], curve["db"], operands.out.shape[-1]
    x = curve["x"].reshape(out.shape)
    check(out.dtype, x=x)
    check(out.dtype, (channels,), db=db)
    most = misc.product_tiles(out.size // channels) * channels
    partials = None if db is None else floats(workspace, most)
    tiles = _launch_with(context, operands, RowSums(partials=partials, x=x, curve=kind))
    if not tiles:
        activation_functions.activation_backward(context, out, x, kind=kind, out=out)
    if partials is not None and tiles:
        partials = add_up_tiles(context, partials[: tiles * channels], channels, workspace=workspace[4 * most :])
        finish_sums(context, partials, out=db)
    elif db is not None:
        column_sums(context, out, out=db, workspace=workspace)


def _launch_with(context: Context, operands: Operands, sums: RowSums) -> int:
    """Launch a product with sums or a slope; return its number of row tiles, 0 if the variant computes neither."""
    return product.launch(context, attrs.evolve(operands, fused=attrs.evolve(operands.fused, sums=sums)))

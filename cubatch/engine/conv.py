"""
Convolution as a matrix product: forward, gradient of the input, gradient of the filter.

    product     forward y          gradient dx, per phase      gradient dw
    gemm_m      output pixels      input pixels of the phase   output channels k
    gemm_n      k                  c                           filter taps r,s,c
    gemm_k      r,s,c              taps of the phase, k        output pixels
    gathered    x                  dy                          x

One operand is gathered ("im2col") block by block into scratch memory. A block stays in the cache until BLAS has used
it; the operand is never stored whole. The gradient of the input is a convolution of dy with the filter turned around.
A stride of sh x sw cuts the input into sh * sw phases. Each phase uses its own subset of the taps at stride 1, so that
nothing is scattered. Taps that read nothing but padding are left out: eight of nine over a single pixel.

Activations are (n, h, w, c), filters (k, r, s, c / groups).
"""

from __future__ import annotations

from typing import Any

from cubatch.engine import depthwise
from cubatch.engine.backend import gate, of, take_workspace, view
from cubatch.engine.columns import Columns
from cubatch.errors import InvalidArgument
from cubatch.memory import blocks, conv_blocks
from cubatch.network.windows import Pad, Pair, conv_shape, phases, seen_taps

_NO_PAD = (0, 0, 0, 0)


def conv2d(
    x: Any, w: Any, b: Any = None, *, stride: Pair = (1, 1), pad: Pad = _NO_PAD, dilation: Pair = (1, 1),
    groups: int = 1, scale: Any = None, shift: Any = None, residual: Any = None, relu: bool = False, out: Any = None,
    workspace: Any = None,
) -> Any:  # fmt: skip
    """
    Return the convolution of activations with a filter.

        y[n,p,q,k] = b[k] + sum over r,s,c of x[n, p*sh - top + r*dh, q*sw - left + s*dw, c] * w[k,r,s,c]

    Args:
        x: Activations (n, h, w, c).
        w: Filter (k, r, s, c / groups).
        b: Bias (k,), or None.
        stride: Vertical and horizontal stride.
        pad: Zeros at the top, bottom, left and right.
        dilation: Vertical and horizontal dilation.
        groups: Groups of channels; an output channel reads the input channels of its own group only.
        scale, shift: Factor and term of each filter's sums (k,), instead of a bias: a folded batch norm. Both or none.
        residual: Added to y, of its shape: another branch. May be `out`.
        relu: Clamp y at zero, as the last step.
        out: Where y goes: (n, p, q, k).
        workspace: Scratch memory, see `functional`; None allocates it.

    Raises:
        InvalidArgument: If filter and groups do not fit x, or a depthwise convolution gets a scale or residual.

    Example:
        >>> import numpy as np
        >>> conv2d(np.ones((1, 3, 3, 1)), np.ones((1, 3, 3, 1)), pad=(1, 1, 1, 1))[0, :, :, 0]
        array([[4., 6., 4.],
               [6., 9., 6.],
               [4., 6., 4.]])
    """
    shape = conv_shape(x.shape[1:], w.shape, stride, pad, dilation, groups=groups)
    xp, q, k = of(x), shape.horizontal.out, shape.k
    y = xp.empty((x.shape[0], shape.vertical.out, q, k), dtype=x.dtype) if out is None else out
    ending = blocks.ending(folded=scale, residual=residual)
    if shape.is_depthwise:
        if ending:
            raise InvalidArgument(
                "groups", groups, "fewer than the channels: a depthwise convolution takes no scale, shift or residual"
            )
        return depthwise.forward(shape, x, w, b, relu=relu, out=y, workspace=workspace)
    shape, rows, cols = seen_taps(shape)
    w = w[:, rows, cols]
    columns = Columns(x, conv_blocks.forward_tiles(shape, x.itemsize, ending), workspace)
    bias = factors = zeros = None
    if scale is not None:
        b, factors = shift, columns.fixed(2, (q * k,))
        xp.copyto(factors.reshape(q, k), scale)
    filters = w.reshape(groups, k // groups, -1).transpose(0, 2, 1) if groups > 1 else w.reshape(k, -1).T
    if b is not None:
        bias = columns.fixed(0, (q * k,))
        xp.copyto(bias.reshape(q, k), b)
    if relu:
        zeros = columns.fixed(1, (q * k,))
        xp.copyto(zeros, 0)
    for block in columns.blocks:
        target = y[block]
        added = None if residual is None else residual[block]
        columns.multiply(block, filters, target, scale=None if added is None else scale, residual=added)
        flat = target.reshape(-1, q * k)  # whole rows of pixels: long inner loops
        if added is None and factors is not None:
            xp.multiply(flat, factors, out=flat)
        if b is not None:
            xp.add(flat, bias, out=flat)
        if relu:
            xp.maximum(flat, zeros, out=flat)
    return y


def conv2d_dgrad(
    dy: Any, w: Any, *, x_shape: tuple[int, int, int, int], stride: Pair = (1, 1), pad: Pad = _NO_PAD,
    dilation: Pair = (1, 1), groups: int = 1, residual: Any = None, positive: Any = None, out: Any = None,
    workspace: Any = None,
) -> Any:  # fmt: skip
    """
    Return the gradient of a convolution's input, or of the input of a ReLU before it.

    Args:
        dy: Gradient of the output (n, p, q, k).
        w: Filter (k, r, s, c / groups).
        x_shape: Shape of the input (n, h, w, c).
        stride, pad, dilation, groups: As in the forward pass.
        residual: Added to dx, of its shape: the gradient from other branches. May be `out`.
        positive: The output of a ReLU before, of dx's shape. Where that output is 0, dx is 0, residual included.
        out: Where dx goes: (n, h, w, c).
        workspace: Scratch memory, see `functional`; None allocates it.

    Raises:
        InvalidArgument: If filter and groups do not fit, or a depthwise gradient gets `residual` or `positive`.
    """
    shape = conv_shape(x_shape[1:], w.shape, stride, pad, dilation, groups=groups)
    xp = of(dy)
    dx = xp.empty(x_shape, dtype=dy.dtype) if out is None else out
    ending = blocks.ending(residual=residual, positive=positive)
    if shape.is_depthwise:
        if ending:
            raise InvalidArgument(
                "groups", groups, "fewer than the channels: a depthwise gradient takes no residual or positive"
            )
        return depthwise.dgrad(shape, dy, w, out=dx, workspace=workspace)
    shape, rows, cols = seen_taps(shape)
    w = w[:, rows, cols]
    by_group = w.reshape(groups, shape.k // groups, *w.shape[1:])  # (g, k, r, s, c)
    needs = iter(conv_blocks.dgrad_tiles(shape, dy.itemsize, ending))
    for phase in phases(shape):
        at = (slice(None), slice(phase.top, None, stride[0]), slice(phase.left, None, stride[1]))
        part: Any = dx[at]
        added: Any = None if residual is None else residual[at]
        passing: Any = None if positive is None else positive[at]
        if not phase.works:
            _end_idle(conv_blocks.idle_phase(shape, dy.itemsize, phase), part, added, passing, workspace)
            continue
        columns = Columns(dy, next(needs), workspace)
        turned = by_group[:, :, phase.rows, phase.columns].transpose(0, 2, 3, 1, 4)  # (g, r, s, k, c)
        filters = columns.fixed(0, turned.shape)
        xp.copyto(filters, turned)
        filters = filters.reshape(groups, -1, turned.shape[-1]) if groups > 1 else filters.reshape(-1, shape.c)
        for block in columns.blocks:
            columns.multiply(
                block, filters, part[block], residual=None if added is None else added[block],
                positive=None if passing is None else passing[block],
            )  # fmt: skip
    return dx


def _end_idle(need: blocks.Ends, part: Any, residual: Any, positive: Any, workspace: Any) -> None:
    """
    Write `part`, the input gradient of a stride's phase that no tap reaches: `residual`, or 0 without one.

    Where `positive` is 0, `part` is 0 too. `workspace` is scratch memory of `need`.
    """
    of(part).copyto(part, 0 if residual is None else residual)
    if residual is None or positive is None or not part.size:
        return
    workspace = take_workspace(workspace, part, need, len(part))
    for block in need.cut(len(part), workspace.nbytes):
        flags = view(workspace, part[block].shape, of(part).bool_)
        of(part).not_equal(positive[block], 0, out=flags)
        gate(part[block], flags, part[block])


def conv2d_wgrad(
    x: Any, dy: Any, *, dw: Any, db: Any = None, stride: Pair = (1, 1), pad: Pad = _NO_PAD, dilation: Pair = (1, 1),
    groups: int = 1, workspace: Any = None,
) -> Any:  # fmt: skip
    """
    Compute the gradients of a convolution's filter and bias, summed over all samples; return the filter's.

    Args:
        x: The forward pass's input (n, h, w, c).
        dy: Gradient of the output (n, p, q, k).
        dw: Receives the filter's gradient (k, r, s, c / groups).
        db: Receives the bias's gradient (k,); None leaves it out.
        stride, pad, dilation, groups: As in the forward pass.
        workspace: Scratch memory, see `functional`; None allocates it.
    """
    shape = conv_shape(x.shape[1:], dw.shape, stride, pad, dilation, groups=groups)
    if shape.is_depthwise:
        return depthwise.wgrad(shape, x, dy, dw=dw, db=db, workspace=workspace)
    xp, k, all_taps = of(x), shape.k, shape.taps
    shape, rows, cols = seen_taps(shape)
    if shape.taps < all_taps:
        xp.copyto(dw, 0)
    seen = dw[:, rows, cols]
    columns = Columns(x, conv_blocks.wgrad_tiles(shape, x.itemsize), workspace)
    whole = seen.reshape(groups, k // groups, -1) if groups > 1 else seen.reshape(k, -1)
    partial = columns.fixed(0, whole.shape)
    partial_bias = columns.fixed(1, (k,))
    if not columns.blocks:
        xp.copyto(whole, 0)
        if db is not None:
            xp.copyto(db, 0)
    for index, block in enumerate(columns.blocks):
        operand, errors = columns.load(block), dy[block].reshape(-1, k)
        if groups > 1:
            errors_by_group = errors.reshape(-1, groups, k // groups).transpose(1, 2, 0)
            xp.matmul(errors_by_group, operand, out=partial if index else whole)
        else:
            xp.matmul(errors.T, operand, out=partial if index else whole)
        if index:
            xp.add(whole, partial, out=whole)
        if db is not None:
            ones = columns.staged((errors.shape[0],))  # a product with ones sums faster than a reduction over rows
            xp.copyto(ones, 1)
            xp.matmul(ones, errors, out=partial_bias if index else db)
            if index:
                xp.add(db, partial_bias, out=db)
    return dw

"""
The truth in float64, slow and obvious, against which every faster form is checked.

Nothing here shares a line with the code it checks. Of windows indices are written out and padding is an `if`; the rest
are formulas of whole arrays, where the engine goes block by block and in place.
Layouts are the engine's: activations (n, h, w, c), filters (k, r, s, c / groups), pads (top,
bottom, left, right).
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Array = np.ndarray[Any, Any]
Pair = tuple[int, int]
Pad = tuple[int, int, int, int]
WIDE = np.longdouble
"""Sums of the norms and of attention are rounded once: bounds of float64 leave no place for the reference's error."""


def _products(
    x_shape: tuple[int, ...], w_shape: tuple[int, ...], stride: Pair, pad: Pad, dilation: Pair, groups: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Every multiply-add of a convolution: the indices into x, w and y."""
    n_extent, h_extent, w_extent, _ = x_shape
    k_extent, r_extent, s_extent, group_c = w_shape
    p_extent = (h_extent + pad[0] + pad[1] - dilation[0] * (r_extent - 1) - 1) // stride[0] + 1
    q_extent = (w_extent + pad[2] + pad[3] - dilation[1] * (s_extent - 1) - 1) // stride[1] + 1
    extents = (n_extent, p_extent, q_extent, k_extent, r_extent, s_extent, group_c)
    for n, p, q, k, r, s, c in itertools.product(*map(range, extents)):
        h = p * stride[0] - pad[0] + r * dilation[0]
        w = q * stride[1] - pad[2] + s * dilation[1]
        if 0 <= h < h_extent and 0 <= w < w_extent:
            group = k // (k_extent // groups)
            yield (n, h, w, group * group_c + c), (k, r, s, c), (n, p, q, k)


def conv2d(
    x: Array, w: Array, b: Array | None = None, *, stride: Pair = (1, 1), pad: Pad = (0, 0, 0, 0),
    dilation: Pair = (1, 1), groups: int = 1,
) -> Array:  # fmt: skip
    """
    Convolve, one multiply-add at a time.

    Example:
        >>> conv2d(np.ones((1, 2, 2, 1)), np.ones((1, 2, 2, 1)), np.ones(1)).item()
        5.0
    """
    k, r, s, _ = w.shape
    p = (x.shape[1] + pad[0] + pad[1] - dilation[0] * (r - 1) - 1) // stride[0] + 1
    q = (x.shape[2] + pad[2] + pad[3] - dilation[1] * (s - 1) - 1) // stride[1] + 1
    y = np.zeros((x.shape[0], p, q, k))
    if b is not None:
        y += b.astype(np.float64)
    x, w = x.astype(np.float64), w.astype(np.float64)
    for in_x, in_w, in_y in _products(x.shape, w.shape, stride, pad, dilation, groups):
        y[in_y] += x[in_x] * w[in_w]
    return y


def conv2d_dgrad(
    dy: Array, w: Array, *, x_shape: tuple[int, ...], stride: Pair = (1, 1), pad: Pad = (0, 0, 0, 0),
    dilation: Pair = (1, 1), groups: int = 1,
) -> Array:  # fmt: skip
    """Give the gradient by the input: each product's share of dy goes back to the x it came from."""
    dx = np.zeros(x_shape)
    dy, w = dy.astype(np.float64), w.astype(np.float64)
    for in_x, in_w, in_y in _products(x_shape, w.shape, stride, pad, dilation, groups):
        dx[in_x] += dy[in_y] * w[in_w]
    return dx


def conv2d_wgrad(
    x: Array, dy: Array, *, w_shape: tuple[int, ...], stride: Pair = (1, 1), pad: Pad = (0, 0, 0, 0),
    dilation: Pair = (1, 1), groups: int = 1,
) -> tuple[Array, Array]:  # fmt: skip
    """Give the gradients by the filter and the bias: each product's share of dy goes to the w it came from."""
    dw, db = np.zeros(w_shape), np.zeros(w_shape[0])
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    for in_x, in_w, in_y in _products(x.shape, w_shape, stride, pad, dilation, groups):
        dw[in_w] += dy[in_y] * x[in_x]
    for n, p, q, k in np.ndindex(dy.shape):
        db[k] += dy[n, p, q, k]
    return dw, db


def _window(
    shape: tuple[int, ...], p: int, q: int, extent: Pair, stride: Pair, pad: Pad
) -> Iterator[tuple[int, int, int]]:
    """The taps of a pooling window that lie in the input: number of the tap, row, column."""
    for r, s in itertools.product(range(extent[0]), range(extent[1])):
        h, w = p * stride[0] - pad[0] + r, q * stride[1] - pad[2] + s
        if 0 <= h < shape[1] and 0 <= w < shape[2]:
            yield r * extent[1] + s, h, w


def _pooled(extent: int, taps: int, stride: int, before: int, after: int, *, ceil_mode: bool) -> int:
    room = extent + before + after - taps
    if not ceil_mode:
        return room // stride + 1
    count = math.ceil(room / stride) + 1
    return count - 1 if (count - 1) * stride >= extent + before else count


def max_pool2d(
    x: Array, *, r: int, s: int, stride: Pair, pad: Pad = (0, 0, 0, 0), ceil_mode: bool = False
) -> tuple[Array, Array]:
    """
    Take each window's largest value, and 1 + the number of the first tap that has it.

    Example:
        >>> y, winner = max_pool2d(np.array([1.0, 3.0, 3.0, 2.0]).reshape(1, 2, 2, 1), r=2, s=2, stride=(2, 2))
        >>> y.item(), winner.item()
        (3.0, 2)
    """
    p_extent = _pooled(x.shape[1], r, stride[0], pad[0], pad[1], ceil_mode=ceil_mode)
    q_extent = _pooled(x.shape[2], s, stride[1], pad[2], pad[3], ceil_mode=ceil_mode)
    y = np.full((x.shape[0], p_extent, q_extent, x.shape[3]), -np.inf)
    winner = np.zeros(y.shape, dtype=np.int64)
    for n, p, q, c in np.ndindex(y.shape):
        for tap, h, w in _window(x.shape, p, q, (r, s), stride, pad):
            if x[n, h, w, c] > y[n, p, q, c]:
                y[n, p, q, c], winner[n, p, q, c] = x[n, h, w, c], tap + 1
    return y, winner


def avg_pool2d(
    x: Array, *, r: int, s: int, stride: Pair, pad: Pad = (0, 0, 0, 0), ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Array:  # fmt: skip
    """
    Take each window's mean, over what lies in the input or in the padded input.

    Example:
        >>> avg_pool2d(np.ones((1, 2, 2, 1)), r=2, s=2, stride=(2, 2), pad=(1, 1, 1, 1))[0, 0, 0, 0].item()
        0.25
    """
    p_extent = _pooled(x.shape[1], r, stride[0], pad[0], pad[1], ceil_mode=ceil_mode)
    q_extent = _pooled(x.shape[2], s, stride[1], pad[2], pad[3], ceil_mode=ceil_mode)
    y = np.zeros((x.shape[0], p_extent, q_extent, x.shape[3]))
    for n, p, q, c in np.ndindex(y.shape):
        taps = [x[n, h, w, c] for _, h, w in _window(x.shape, p, q, (r, s), stride, pad)]
        count = len(taps)
        if count_include_pad:
            top, left = p * stride[0] - pad[0], q * stride[1] - pad[2]
            rows = min(top + r, x.shape[1] + pad[1]) - top
            count = rows * (min(left + s, x.shape[2] + pad[3]) - left)
        y[n, p, q, c] = math.fsum(taps) / count
    return y


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _normal(x: Array) -> Array:
    return np.vectorize(math.erfc)(-x / math.sqrt(2)) / 2


CURVES: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "none": (lambda x: x, np.ones_like),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0) * 1.0),
    "relu6": (lambda x: np.clip(x, 0, 6), lambda x: ((x > 0) & (x < 6)) * 1.0),
    "silu": (lambda x: x * _logistic(x), lambda x: _logistic(x) * (1 + x * (1 - _logistic(x)))),
    "sigmoid": (_logistic, lambda x: _logistic(x) * (1 - _logistic(x))),
    "hard_sigmoid": (lambda x: np.clip(x + 3, 0, 6) / 6, lambda x: (abs(x) < 3) / 6),
    "hard_swish": (
        lambda x: x * np.clip(x + 3, 0, 6) / 6,
        lambda x: np.where(x <= -3, 0, np.where(x < 3, x / 3 + 0.5, 1)),
    ),
    "gelu": (lambda x: x * _normal(x), lambda x: _normal(x) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)),
}
"""Each activation function and its slope, as the layer's docstring has it; a kink has PyTorch's slope."""


def activation(x: Array, *, kind: str) -> Array:
    """
    Apply an activation function.

    Example:
        >>> activation(np.array([-4.0, 1.5, 9.0]), kind="hard_swish").tolist()
        [-0.0, 1.125, 9.0]
    """
    return CURVES[kind][0](x.astype(np.float64))


def activation_backward(dy: Array, x: Array, *, kind: str) -> Array:
    """Return the gradient by the input x, independent of what the engine saves."""
    return dy.astype(np.float64) * CURVES[kind][1](x.astype(np.float64))


def batch_norm(x: Array, gamma: Array, beta: Array, *, eps: float = 1e-5) -> tuple[Array, Array, Array]:
    """
    Normalise each channel over all other axes: y, the mean and the biased variance.

    Example:
        >>> batch_norm(np.array([[1.0], [3.0]]), np.ones(1), np.zeros(1), eps=0.0)[0].tolist()
        [[-1.0], [1.0]]
    """
    rows = x.reshape(-1, x.shape[-1]).astype(WIDE)
    mean, var = rows.mean(axis=0), rows.var(axis=0)
    y = (gamma * (rows - mean) / np.sqrt(var + eps) + beta).reshape(x.shape)
    return y.astype(np.float64), mean.astype(np.float64), var.astype(np.float64)


def softmax_cross_entropy(logits: Array, labels: Array) -> float:
    """
    Give the mean of -log(softmax(logits)[label]).

    Example:
        >>> round(softmax_cross_entropy(np.zeros((1, 2)), np.array([1])), 6)
        0.693147
    """
    scores, labels = logits.reshape(-1, logits.shape[-1]).astype(np.float64), labels.reshape(-1)
    top = scores.max(axis=1)
    losses = np.log(np.exp(scores - top[:, None]).sum(axis=1)) + top - scores[np.arange(len(labels)), labels]
    return math.fsum(losses) / len(losses)


def layer_norm(x: Array, gamma: Array, beta: Array, *, eps: float) -> tuple[Array, Array, Array]:
    """
    Normalise each position over its channels; give the mean and the biased variance too.

    Example:
        >>> layer_norm(np.array([[1.0, 3.0]]), np.full(2, 10.0), np.full(2, 5.0), eps=0.0)[0].tolist()
        [[-5.0, 15.0]]
    """
    x = x.astype(WIDE)
    mean, var = x.mean(axis=-1), x.var(axis=-1)
    y = gamma * (x - mean[..., None]) / np.sqrt(var + eps)[..., None] + beta
    return y.astype(np.float64), mean.astype(np.float64), var.astype(np.float64)


def attention(
    x: Array, w_in: Array, w_out: Array, b_in: Array | None = None, b_out: Array | None = None, *, heads: int
) -> tuple[Array, Array, Array, Array]:
    """
    Attend to all positions, (n, t, c): the output, queries, keys and values, the weights, and the mixed values.

    Example:
        >>> one = np.ones((1, 1))
        >>> attention(np.array([[[1.0], [3.0]]]), np.array([[0.0], [0.0], [1.0]]), 2 * one, heads=1)[0].ravel().tolist()
        [4.0, 4.0]
    """
    n, t, c = x.shape
    qkv = x.astype(WIDE) @ w_in.T + (0 if b_in is None else b_in)
    queries, keys, values = (part.reshape(n, t, heads, c // heads) for part in np.split(qkv, 3, axis=-1))
    scores = np.einsum("nihd,njhd->nhij", queries, keys) / math.sqrt(c // heads)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = powers / powers.sum(axis=-1, keepdims=True)
    mixed = np.einsum("nhij,njhd->nihd", weights, values).reshape(n, t, c)
    y = mixed @ w_out.T + (0 if b_out is None else b_out)
    return y.astype(np.float64), qkv.astype(np.float64), weights.astype(np.float64), mixed.astype(np.float64)

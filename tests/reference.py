"""
The truth: float64 loop nests, slow and obvious, against which every faster form is checked.

Nothing here shares a line with the code it checks: indices are written out, padding is an `if`.
Layouts are the engine's: activations (n, h, w, c), filters (k, r, s, c / groups), pads (top,
bottom, left, right).
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = np.ndarray[Any, Any]
Pair = tuple[int, int]
Pad = tuple[int, int, int, int]


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


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _curve_and_slope(x: float, kind: str) -> tuple[float, float]:
    reach, top = 3.0, 6.0
    s, hard = _logistic(x), min(max(x + reach, 0.0), top) / top
    inside, density = -reach < x < reach, math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return {
        "relu6": (min(max(x, 0.0), top), float(0 < x < top)),
        "sigmoid": (s, s * (1 - s)),
        "silu": (x * s, s + x * s * (1 - s)),
        "hard_sigmoid": (hard, 1 / 6 if inside else 0.0),
        "hard_swish": (x * hard, x / 3 + 0.5 if inside else float(x > 0)),
        "gelu": (x * math.erfc(-x / math.sqrt(2)) / 2, math.erfc(-x / math.sqrt(2)) / 2 + x * density),
    }[kind]


def activation(x: Array, *, kind: str) -> Array:
    """
    Apply an activation function, one number at a time.

    Example:
        >>> activation(np.array([-4.0, 1.5, 9.0]), kind="hard_swish").tolist()
        [-0.0, 1.125, 9.0]
    """
    y = np.empty(x.shape)
    for index in np.ndindex(x.shape):
        y[index], _ = _curve_and_slope(float(x[index]), kind)
    return y


def activation_backward(dy: Array, x: Array, *, kind: str) -> Array:
    """Give the gradient by the input x, whatever the engine saves; a kink has PyTorch's slope."""
    dx = np.empty(x.shape)
    for index in np.ndindex(x.shape):
        dx[index] = float(dy[index]) * _curve_and_slope(float(x[index]), kind)[1]
    return dx


def scale(x: Array, s: Array) -> Array:
    """
    Multiply every channel of a sample by its factor.

    Example:
        >>> scale(np.ones((1, 1, 2, 1)), np.full((1, 1, 1, 1), 3.0)).ravel().tolist()
        [3.0, 3.0]
    """
    y = np.empty(x.shape)
    for n, h, w, c in np.ndindex(x.shape):
        y[n, h, w, c] = float(x[n, h, w, c]) * float(s[n, 0, 0, c])
    return y


def scale_backward(dy: Array, x: Array, s: Array) -> tuple[Array, Array]:
    """Give the gradients by x and by the factors: each product's share of dy goes to both."""
    dx, ds = np.empty(x.shape), np.zeros(s.shape)
    for n, h, w, c in np.ndindex(x.shape):
        dx[n, h, w, c] = float(dy[n, h, w, c]) * float(s[n, 0, 0, c])
        ds[n, 0, 0, c] += float(dy[n, h, w, c]) * float(x[n, h, w, c])
    return dx, ds


def batch_norm(x: Array, gamma: Array, beta: Array, *, eps: float = 1e-5) -> tuple[Array, Array, Array]:
    """
    Normalise each channel over all other axes: y, the mean and the biased variance.

    Example:
        >>> batch_norm(np.array([[1.0], [3.0]]), np.ones(1), np.zeros(1), eps=0.0)[0].tolist()
        [[-1.0], [1.0]]
    """
    rows = x.reshape(-1, x.shape[-1]).astype(np.float64)
    y, mean, var = np.empty_like(rows), np.empty(rows.shape[1]), np.empty(rows.shape[1])
    for c in range(rows.shape[1]):
        mean[c] = math.fsum(rows[:, c]) / len(rows)
        var[c] = math.fsum((value - mean[c]) ** 2 for value in rows[:, c]) / len(rows)
        for row in range(len(rows)):
            y[row, c] = gamma[c] * (rows[row, c] - mean[c]) / math.sqrt(var[c] + eps) + beta[c]
    return y.reshape(x.shape), mean, var


def softmax_cross_entropy(logits: Array, labels: Array) -> float:
    """
    Give the mean of -log(softmax(logits)[label]).

    Example:
        >>> round(softmax_cross_entropy(np.zeros((1, 2)), np.array([1])), 6)
        0.693147
    """
    losses = []
    for scores, label in zip(logits.reshape(-1, logits.shape[-1]).astype(np.float64), labels.reshape(-1), strict=True):
        top = max(scores)
        losses.append(math.log(math.fsum(math.exp(score - top) for score in scores)) + top - scores[label])
    return math.fsum(losses) / len(losses)


def layer_norm(x: Array, gamma: Array, beta: Array, *, eps: float) -> tuple[Array, Array, Array]:
    """
    Normalise each position over its channels; give the mean and the biased variance too.

    Example:
        >>> layer_norm(np.array([[1.0, 3.0]]), np.full(2, 10.0), np.full(2, 5.0), eps=0.0)[0].tolist()
        [[-5.0, 15.0]]
    """
    y, means, variances = np.empty(x.shape), np.empty(x.shape[:-1]), np.empty(x.shape[:-1])
    for place in np.ndindex(x.shape[:-1]):
        values = [float(value) for value in x[place]]
        mean = math.fsum(values) / len(values)
        variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
        means[place], variances[place] = mean, variance
        for c, value in enumerate(values):
            y[(*place, c)] = float(gamma[c]) * (value - mean) / math.sqrt(variance + eps) + float(beta[c])
    return y, means, variances


def tokens(x: Array, token: Array, position: Array) -> Array:
    """
    Put a class token before the pixels (n, t, c), and add a position to each.

    Example:
        >>> tokens(np.array([[[5.0]]]), np.array([1.0]), np.array([[0.25], [0.5]])).ravel().tolist()
        [1.25, 5.5]
    """
    n_extent, t_extent, c_extent = x.shape
    y = np.empty((n_extent, t_extent + 1, c_extent))
    for n, t, c in np.ndindex(y.shape):
        y[n, t, c] = float(token[c] if t == 0 else x[n, t - 1, c]) + float(position[t, c])
    return y


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
    n_extent, t_extent, c_extent = x.shape
    width = c_extent // heads
    qkv, mixed, y = np.empty((n_extent, t_extent, 3 * c_extent)), np.empty(x.shape), np.empty(x.shape)
    weights = np.empty((n_extent, heads, t_extent, t_extent))
    for n, t, k in np.ndindex(qkv.shape):
        terms = [float(x[n, t, c]) * float(w_in[k, c]) for c in range(c_extent)]
        qkv[n, t, k] = math.fsum(terms) + (0.0 if b_in is None else float(b_in[k]))
    for n, head, i in np.ndindex(weights.shape[:3]):
        query = qkv[n, i, head * width : (head + 1) * width]
        start = c_extent + head * width
        scores = [math.fsum(query * qkv[n, j, start : start + width]) / math.sqrt(width) for j in range(t_extent)]
        powers = [math.exp(score - max(scores)) for score in scores]
        for j, power in enumerate(powers):
            weights[n, head, i, j] = power / math.fsum(powers)
    for n, t, c in np.ndindex(x.shape):
        values = qkv[n, :, 2 * c_extent + c]
        mixed[n, t, c] = math.fsum(weights[n, c // width, t] * values)
    for n, t, k in np.ndindex(x.shape):
        terms = [mixed[n, t, c] * float(w_out[k, c]) for c in range(c_extent)]
        y[n, t, k] = math.fsum(terms) + (0.0 if b_out is None else float(b_out[k]))
    return y, qkv, weights, mixed

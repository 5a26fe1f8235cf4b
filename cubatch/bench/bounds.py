"""
How far a kernel's results may be off: derived from the roundings of its arithmetic, on terms of the size that there is.

A sum of products on CUDA cores is rounded to float32 after every term.  Tensor cores multiply exactly what they are
given and add the products of an instruction at once, cut off behind the last bit of the largest (Fasi, Higham,
Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ Comput. Sci. 7:e330, 2021): an error of up to
2^-23 of it for each term, and for the sum so far once in an instruction of at least 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cubatch.bench import attention_bounds
from cubatch.bench.cases import Case
from cubatch.kernels import winograd_plan

Arrays = Mapping[str, np.ndarray[Any, Any]]
Again = Callable[[Arrays], Arrays]
"""Calls the case in float64 on operands of the same shapes."""

_ROUNDED = 2.0**-24
"""Unit roundoff of float32, which every kernel computes in."""

_CUT_OFF = 2.0**-23
"""The same of tensor cores, which do not round to nearest."""

_TF32 = 2.0**-11
"""Unit roundoff of tf32, to which float32 operands are rounded before they are multiplied."""

_STORED = {"float16": (2.0**-11, 2.0**-24), "bfloat16": (2.0**-8, 2.0**-133)}
"""Unit roundoff and smallest number of what is stored in 16 bits, and rounded once more."""

_FUSED_ROUNDINGS = 4
"""Of what happens to a sum before it is stored: a scale and shift, a bias, a residual; and of the sum to be."""

_TENSOR_DTYPES = {"tf32", *_STORED}

_SPREAD = 6.0
"""
Rounding errors of random data cancel: after k of them the sum of the terms is off by at most lambda * sqrt(k) * u
with a probability of 1 - 2 exp(-lambda^2 / 2) per result (Higham and Mary, A new approach to probabilistic rounding
error analysis, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4); 6 leaves 3e-8.  The certain bound is lower for few.
"""


def bounds(case: Case, operands: Arrays, want: Arrays, again: Again) -> dict[str, Any]:
    """
    Bound the errors of all results.

    Args:
        case: The call.
        operands: In float64; whole numbers as they are.
        want: The right results.
        again: Calls the case on other operands.
    """
    found = RULES[case.operation](case, operands, want, again)
    given = {}
    for name in want:
        unit, smallest = _STORED.get(case.dtype_of(name), (0.0, 0.0))
        given[name] = found[name] + unit * (np.abs(want[name]) + found[name]) + smallest / 2
    return given


def stored_unit(dtype: str) -> float:
    """Return the unit roundoff of a stored element."""
    return _STORED.get(dtype, (_ROUNDED, 0.0))[0]


def winograd_bounds(case: Case, operands: Arrays, want: Arrays, again: Again, outputs: int) -> dict[str, Any]:
    """
    Bound the errors of a convolution in float32 that Winograd's algorithm computes.

    Its terms are larger than those of the direct sum and cancel; each is rounded in three transforms besides, see
    kernels/winograd/cook_toom.cuh.  What is fused to it is rounded a few times more.

    Args:
        case: The call.
        operands, want, again: As for `bounds`.
        outputs: Results along an axis that are computed at a time: 2 or 4.
    """
    source, turned = ("dy", True) if "dy" in operands else ("x", False)
    top, _, left, _ = case.options["pad"]
    before = (winograd_plan.TAPS - 1 - top, winograd_plan.TAPS - 1 - left) if turned else (top, left)
    filters = operands["w"][:, ::-1, ::-1].transpose(3, 1, 2, 0) if turned else operands["w"]
    size = _winograd_size(operands[source], filters, before, want["out"].shape[1:3], outputs)
    relative = _rounding(winograd_plan.roundings(outputs, filters.shape[-1]) + _FUSED_ROUNDINGS)
    direct = again(_each(np.abs, operands))
    size = size * np.abs(operands.get("scale", 1.0))
    return {"out": relative * size + _rounding(_FUSED_ROUNDINGS) * direct["out"]}


def _winograd_size(
    x: Any, w: Any, before: tuple[int, int], image: tuple[int, ...], outputs: int
) -> np.ndarray[Any, Any]:
    """Return |A^T| [sum over c of (|G| |w| |G^T|) * (|B^T| |d| |B|)] |A| for each result, from its whole tile."""
    result, filter_, source = (np.abs(np.array(matrix, dtype=np.float64)) for matrix in winograd_plan.matrices(outputs))
    extent = outputs + winograd_plan.TAPS - 1
    tiles = [-(-size // outputs) for size in image]
    spans = [count * outputs + winograd_plan.TAPS - 1 for count in tiles]
    padded = np.zeros((len(x), *spans, x.shape[-1]))
    rows, columns = (
        min(size, span - first) for size, span, first in zip(x.shape[1:3], spans, before, strict=True)
    )  # fmt: skip
    cut = [max(0, -first) for first in before]
    top, left = (max(0, first) for first in before)
    padded[:, top : top + rows - cut[0], left : left + columns - cut[1]] = np.abs(x[:, cut[0] : rows, cut[1] : columns])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (extent, extent), axis=(1, 2))
    windows = windows[:, ::outputs, ::outputs]  # n, rows, columns, c, i, j
    v = np.einsum("ai,nrqcij,bj->nrqabc", source, windows, source, optimize=True)
    u = np.einsum("ai,kijc,bj->kabc", filter_, np.abs(w), filter_, optimize=True)
    m = np.einsum("nrqabc,kabc->nrqabk", v, u, optimize=True)
    y = np.einsum("ia,nrqabk,jb->nriqjk", result, m, result, optimize=True)
    n, _, _, _, _, k = y.shape
    whole: np.ndarray[Any, Any] = y.reshape(n, tiles[0] * outputs, tiles[1] * outputs, k)
    return whole[:, : image[0], : image[1]]


def _rounding(operations: float, unit: float = _ROUNDED) -> float:
    """Bound the relative error of so many roundings: what is certain, or what random data practically never exceed."""
    lost = operations * unit
    certain = lost / (1 - lost) if lost < 1 else math.inf
    return min(certain, _SPREAD * math.sqrt(operations) * unit)


def _linear_bounds(case: Case, operands: Arrays, _: Arrays, again: Again) -> dict[str, Any]:
    """Sums of products: as many roundings as terms, on the sum of their sizes; and one for a mean."""
    sizes = again(_each(np.abs, operands))
    return {name: _rounding(case.terms + 1 + len(case.epilogue)) * size for name, size in sizes.items()}


def _product_bounds(case: Case, operands: Arrays, want: Arrays, again: Again) -> dict[str, Any]:
    """
    Sums of products that tensor cores may have made, and what is added to them.

    In tf32 every term a * b becomes a (1 + d) b (1 + e) with d and e of at most 2^-11: together (2 + 2^-11) 2^-11 of
    it for certain, and of random data the root of the sum of the squares of all 2 k errors, `_SPREAD` times.
    """
    if case.dtype not in _TENSOR_DTYPES:
        return _linear_bounds(case, operands, want, again)
    sizes = again(_each(np.abs, operands))
    roundings = 1.5 * case.terms + 2 + len(case.epilogue)
    found = {name: _rounding(roundings, _CUT_OFF) * size for name, size in sizes.items()}
    if case.dtype == "tf32":
        squares = again(_each(np.square, operands))  # what is added, unrounded, is among them and widens it a little
        for name in set(found) - {"db"}:  # a plain sum
            likely = _SPREAD * math.sqrt(2) * (1 + _TF32) * _TF32 * np.sqrt(squares[name])
            found[name] = found[name] + np.minimum((2 + _TF32) * _TF32 * sizes[name], likely)
    return found


def _each(function: Callable[[Any], Any], operands: Arrays) -> dict[str, Any]:
    return {name: function(array) for name, array in operands.items()}


def _exact(_: Case, __: Arrays, want: Arrays, ___: Again) -> dict[str, Any]:
    return dict.fromkeys(want, 0.0)


def _curve_bounds(_: Case, operands: Arrays, want: Arrays, __: Again) -> dict[str, Any]:
    """An exponential of two units in the last place, a quotient, and the products around them: under 16 roundings."""
    x = np.abs(operands.get("x", operands.get("saved", np.zeros(1))))
    size = 1 + x if "x" in operands else np.abs(operands["dy"]) * (1 + x)
    return {name: _rounding(16) * size for name in want}


def _batch_norm_bounds(case: Case, operands: Arrays, want: Arrays, _: Again) -> dict[str, Any]:
    """
    Mean and variance are sums over all positions; (x - mean) * inv_std inherits their errors.

    The variance loses as many digits as it is smaller than the mean square: the factor `condition`.
    """
    x, gamma, beta = operands["x"], np.abs(operands["gamma"]), np.abs(operands["beta"])
    axes, relative = tuple(range(x.ndim - 1)), _rounding(case.terms + 8)
    size = np.abs(x).mean(axis=axes)
    condition = 1 + (x**2).mean(axis=axes) * want["inv_std"] ** 2
    return {
        "mean": relative * size,
        "inv_std": relative * condition * want["inv_std"],
        "out": relative * condition * (gamma * want["inv_std"] * (np.abs(x) + size) + beta + _residual(operands)),
    }


def _residual(operands: Arrays) -> Any:
    return np.abs(operands.get("residual", 0.0))


def _batch_norm_inference_bounds(_: Case, operands: Arrays, want: Arrays, __: Again) -> dict[str, Any]:
    """(x - mean) / sqrt(variance + eps) * gamma + beta + residual: under 16 roundings."""
    x, mean, gamma, beta = (np.abs(operands[name]) for name in ("x", "running_mean", "gamma", "beta"))
    size = (x + mean) / np.sqrt(operands["running_var"]) * gamma + beta + _residual(operands)
    return {name: _rounding(16) * size for name in want}


def _fold_bounds(_: Case, operands: Arrays, want: Arrays, __: Again) -> dict[str, Any]:
    """Under 16 roundings of gamma / sqrt(variance + eps), and of beta + that * (bias - mean)."""
    found = {}
    for name in want:
        number = name.removeprefix("scale").removeprefix("shift")
        factor = np.abs(operands[f"gamma{number}"]) / np.sqrt(operands[f"variance{number}"])
        size = np.abs(operands[f"mean{number}"]) + np.abs(operands.get(f"b{number}", 0.0))
        is_shift = name.startswith("shift")
        found[name] = _rounding(16) * (np.abs(operands[f"beta{number}"]) + factor * size if is_shift else factor)
    return found


def _dropout_bounds(case: Case, operands: Arrays, want: Arrays, _: Again) -> dict[str, Any]:
    """Two masks of the same chance: an element is 0 or x / (1 - p), and no error is larger than between the two."""
    found = {"out": (1 + _rounding(4)) * np.abs(operands["x"]) / (1 - case.options["p"]), "mask": 1.0}
    return {name: found[name] * np.ones(want[name].shape) for name in want}


def _batch_norm_backward_bounds(case: Case, operands: Arrays, _: Arrays, __: Again) -> dict[str, Any]:
    """Sums over all positions of dy and of dy times the normalised x, and what is made of both."""
    dy, inv_std = np.abs(operands["dy"]), operands["inv_std"]
    normal = (np.abs(operands["x"]) + np.abs(operands["mean"])) * inv_std
    axes, relative = tuple(range(dy.ndim - 1)), _rounding(case.terms + 8)
    inner = dy + dy.mean(axis=axes) + normal * (dy * normal).mean(axis=axes)
    return {
        "dbeta": relative * dy.sum(axis=axes),
        "dgamma": relative * (dy * normal).sum(axis=axes),
        "out": relative * np.abs(operands["gamma"]) * inv_std * inner,
    }


def _layer_norm_bounds(case: Case, operands: Arrays, want: Arrays, _: Again) -> dict[str, Any]:
    """Forward as batch norm, but over the channels of each position."""
    x, gamma, beta = operands["x"], np.abs(operands["gamma"]), np.abs(operands["beta"])
    inv_std = 1 / np.sqrt(x.var(axis=-1, keepdims=True) + case.options["eps"])
    condition = 1 + (x**2).mean(axis=-1, keepdims=True) * inv_std**2
    size = np.abs(x) + np.abs(x).mean(axis=-1, keepdims=True)
    relative = _rounding(case.terms + 8) * condition
    found = {"out": relative * (gamma * inv_std * size + beta)}
    if "statistics" in want:
        kept = np.stack([np.abs(x).mean(axis=-1), inv_std[..., 0]]).reshape(want["statistics"].shape)
        found["statistics"] = relative.reshape(want["statistics"].shape[1:]) * kept
    return found


def _layer_norm_backward_bounds(case: Case, operands: Arrays, _: Arrays, __: Again) -> dict[str, Any]:
    """Sums over the channels for dx, over all positions for the parameters: at most `terms` of either."""
    dy, relative = np.abs(operands["dy"]), _rounding(case.terms + 8)
    mean, inv_std = (kept.reshape(*dy.shape[:-1], 1) for kept in operands["statistics"])
    normal, axes = (np.abs(operands["x"]) + np.abs(mean)) * inv_std, tuple(range(dy.ndim - 1))
    error = dy * np.abs(operands["gamma"])
    inner = error + error.mean(axis=-1, keepdims=True) + normal * (error * normal).mean(axis=-1, keepdims=True)
    return {
        "out": relative * inv_std * inner,
        "dgamma": relative * (dy * normal).sum(axis=axes),
        "dbeta": relative * dy.sum(axis=axes),
    }


def _softmax_bounds(case: Case, operands: Arrays, want: Arrays, _: Again) -> dict[str, Any]:
    """Forward as a curve with a sum over the classes; backward y * (dy - sum of dy * y)."""
    if "x" in operands:
        return {"out": _rounding(case.terms + 16) * want["out"]}
    dy, y = np.abs(operands["dy"]), np.abs(operands["y"])
    return {"out": _rounding(case.terms + 4) * y * (dy + (dy * y).sum(axis=-1, keepdims=True))}


def _attention_bounds(case: Case, operands: Arrays, want: Arrays, _: Again) -> dict[str, Any]:
    """Of stages in turn, each on what the one before has stored: see `attention_bounds`."""
    units = attention_bounds.Units(
        summed=1.5 * _CUT_OFF if case.dtype in _TENSOR_DTYPES else _ROUNDED,
        read=_TF32 if case.dtype == "tf32" else 0.0,
        stored=_STORED.get(case.dtype, (0.0, 0.0))[0],
    )
    carry = attention_bounds.forward if case.operation == "attention" else attention_bounds.backward
    found = carry(operands, case.options["heads"], units)
    return {name: _SPREAD * np.sqrt(found[name].variance) for name in want}


def _cross_entropy_bounds(case: Case, operands: Arrays, want: Arrays, _: Again) -> dict[str, Any]:
    """Exponentials, their sum over the classes and a quotient; the loss sums over rows besides."""
    logits, count = operands["logits"], case.options["count"]
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    logarithms = np.log(np.exp(logits).sum(axis=-1)) + np.abs(logits).max(axis=-1)
    found = {
        "dlogits": _rounding(case.terms + 16) * (shares + 1) / count,
        "loss": _rounding(case.terms + len(logits) + 16) * np.abs(logarithms).sum() / count,
    }
    return {name: found[name] for name in want}


def _optimizer_bounds(_: Case, operands: Arrays, want: Arrays, __: Again) -> dict[str, Any]:
    """Under 16 roundings, each on no more than the sum of the sizes that go in; a scaled gradient is made smaller."""
    size = sum((np.abs(operands[name]) for name in operands if name != "scaling"), np.zeros(1))
    return {name: _rounding(16) * size for name in want}


RULES: Mapping[str, Callable[[Case, Arrays, Arrays, Again], dict[str, Any]]] = {
    **dict.fromkeys(("linear", "linear_dgrad", "linear_wgrad"), _product_bounds),
    **dict.fromkeys(("conv2d", "conv2d_dgrad", "conv2d_wgrad"), _product_bounds),
    "relu": _exact,
    "relu_backward": _exact,
    "max_pool2d": _exact,
    "activation": _curve_bounds,
    "activation_backward": _curve_bounds,
    "batch_norm_inference": _batch_norm_inference_bounds,
    "fold_batch_norms": _fold_bounds,
    "dropout": _dropout_bounds,
    "batch_norm_train": _batch_norm_bounds,
    "batch_norm_backward": _batch_norm_backward_bounds,
    "layer_norm": _layer_norm_bounds,
    "layer_norm_backward": _layer_norm_backward_bounds,
    **dict.fromkeys(("layer_scale", "layer_scale_backward"), _linear_bounds),
    **dict.fromkeys(("max_pool2d_backward", "avg_pool2d", "avg_pool2d_backward"), _linear_bounds),
    **dict.fromkeys(("global_avg_pool", "global_avg_pool_backward"), _linear_bounds),
    **dict.fromkeys(("add", "scale", "scale_backward", "dropout_backward"), _linear_bounds),
    **dict.fromkeys(("concat", "concat_backward", "slice_channels", "slice_channels_backward"), _exact),
    **dict.fromkeys(("tokens", "tokens_backward"), _linear_bounds),
    **dict.fromkeys(("class_token", "class_token_backward"), _exact),
    "softmax": _softmax_bounds,
    "softmax_backward": _softmax_bounds,
    **dict.fromkeys(("attention", "attention_backward"), _attention_bounds),
    "softmax_cross_entropy": _cross_entropy_bounds,
    "sgd": _optimizer_bounds,
    "momentum": _optimizer_bounds,
    "adam": _optimizer_bounds,
    "update_loss_scale": _exact,
}
"""By operation; one without a rule has no case, since nothing would say how far off it may be."""

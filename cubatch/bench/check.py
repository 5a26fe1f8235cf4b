"""
Whether a kernel's results are right: a sample of them against the same call in float64.

A case is cut down to a few images or channels, whose results are those of the whole at these places.  The cut
call is repeated by the engine's NumPy path in float64, which shares nothing with the kernels.  How far a
result may be off is derived from the arithmetic: so many roundings on terms of such a size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from cubatch.bench.cases import Case
from cubatch.engine import functional
from cubatch.engine.backend import of, to_host

_ARITHMETIC = 2.0**-24
"""Unit roundoff of float32, which every kernel computes in."""

_STORED = {"float16": (2.0**-11, 2.0**-24), "bfloat16": (2.0**-8, 2.0**-133)}
"""Unit roundoff and smallest number of what is stored in 16 bits, and rounded once more."""

_SPREAD = 6.0
"""
Rounding errors of random data cancel: after k of them the sum of the terms is off by at most lambda * sqrt(k) * u
with a probability of 1 - 2 exp(-lambda^2 / 2) per result (Higham and Mary, A new approach to probabilistic rounding
error analysis, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4); 6 leaves 3e-8.  The certain bound is lower for few.
"""

_LONG_SUM = 1 << 20

Arrays = Mapping[str, np.ndarray[Any, Any]]


@attrs.frozen
class Check:
    """
    What a comparison found.

    Attributes:
        worst: Largest error in units of its bound: right is at most 1.  Infinite for NaN and for what must be exact.
        compared: Results that were compared.
        where: Array and place of the worst, with what was found and what is right.
    """

    worst: float
    compared: int
    where: str

    @property
    def passed(self) -> bool:
        """Whether every result was within its bound."""
        return self.worst <= 1


class Expected:
    """
    The right results of a case at a sample of places; made before the kernels run, which may write over operands.

    Args:
        case: The call.
        arrays: Its operands, filled.
        rng: Draws the places.
        images, channels: Places along an axis that is cut; None: all of it, uncut.
    """

    def __init__(
        self,
        case: Case,
        arrays: Mapping[str, Any],
        rng: np.random.Generator,
        *,
        images: int | None = 1,
        channels: int | None = 3,
    ) -> None:
        self._case = case
        self._places = _places(case, rng, images, channels)
        operands = {name: self._cut(name, arrays[name]) for name in case.operands}
        operands = {
            name: array if case.operands[name].kind == "counts" else _values(array) for name, array in operands.items()
        }
        changes = self._changes(operands)
        self._want = _call(case, operands, changes)
        self._bounds = _bounds(case, operands, self._want, changes)

    def check(self, arrays: Mapping[str, Any]) -> Check:
        """Compare what a kernel wrote with what is right."""
        worst, where, compared = -1.0, "", 0
        for name, want in self._want.items():
            got = _values(self._cut(name, arrays[name]))
            error, bound = np.abs(got - want), np.broadcast_to(self._bounds[name], want.shape)
            with np.errstate(divide="ignore", invalid="ignore"):
                units = np.where(error == 0, 0.0, error / bound)
            units = np.where(np.isnan(units), np.inf, units)
            compared += units.size
            place = np.unravel_index(int(np.argmax(units)), units.shape)
            if units[place] > worst:
                worst = float(units[place])
                index = ", ".join(str(int(i)) for i in place)
                where = f"{name}[{index}] of the sample: {got[place]:.7g}, right is {want[place]:.7g}"
        return Check(worst, compared, where)

    def _cut(self, name: str, array: Any) -> np.ndarray[Any, Any]:
        """Bring the sample of an array to the host."""
        for axes in self._case.cuts:
            places, axis = self._places.get(axes), self._case.cuts[axes].get(name)
            if places is not None and axis is not None:
                xp = of(array)
                array = xp.take(array, xp.asarray(places), axis=axis)
        return to_host(array)

    def _changes(self, operands: Arrays) -> dict[str, Any]:
        """Give the options that speak of extents which the cut has changed."""
        options, changes = self._case.options, {}
        if "x_shape" in options:
            changes["x_shape"] = operands["out"].shape
        if options.get("groups", 1) > 1 and "c" in self._places:
            changes["groups"] = len(self._places["c"])
        return changes


def poison(case: Case, arrays: Mapping[str, Any]) -> None:
    """Fill what is only written with NaN, or the largest integer, so that an element that nobody wrote shows."""
    given = {part for name in case.arguments for part in ([name] if isinstance(name, str) else name)}
    for name in case.results:
        if name not in given:
            arrays[name].fill(math.nan if arrays[name].dtype.kind == "f" else np.iinfo(arrays[name].dtype).max)


def _values(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Give the numbers of an array in float64; 16-bit integers are the bits of bfloat16."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def _places(case: Case, rng: np.random.Generator, images: int | None, channels: int | None) -> dict[str, list[int]]:
    """Draw places along each cut; the last is always among them, where the residue of a tile lies."""
    drawn: dict[str, list[int]] = {}
    for name, axes in case.cuts.items():
        operand, axis = next(iter(axes.items()))
        size = case.operands[operand].shape[axis]
        wanted = images if name == "n" else channels
        if name in {"rows", "parameters"} and wanted is not None:
            wanted = 64 * wanted  # a row is as little as a channel of one pixel
        elif wanted is not None and case.terms > _LONG_SUM:
            wanted = min(wanted, 2)  # each result costs the host millions of products
        if wanted is not None and wanted < size:
            others = rng.choice(size - 1, size=wanted - 1, replace=False)
            drawn[name] = [*sorted(int(i) for i in others), size - 1]
    return drawn


def _call(case: Case, operands: Arrays, changes: Mapping[str, Any], *, absolute: bool = False) -> dict[str, Any]:
    """Call the engine in float64; give the results that the cut leaves whole."""
    arrays = {name: np.abs(array) if absolute else array.copy() for name, array in operands.items()}
    for name in case.results:
        if case.dtype_of(name) != "uint8" and not _is_given(case, name):
            arrays[name] = np.empty(arrays[name].shape)
    case.call(functional, arrays, **changes)
    # A result that no cut mentions, such as the loss of the whole batch, is right only where nothing was cut.
    is_cut = any(arrays[name].shape != case.operands[name].shape for name in arrays)
    partial = {name for name in case.results if not any(name in axes for axes in case.cuts.values())}
    return {name: arrays[name].astype(np.float64) for name in case.results if not (is_cut and name in partial)}


def _is_given(case: Case, name: str) -> bool:
    return any(name == given or (not isinstance(given, str) and name in given) for given in case.arguments)


# --- how far a result may be off -------------------------------------------------------------------------------------


def _rounding(operations: float) -> float:
    """Bound the relative error of so many roundings: what is certain, or what random data practically never exceed."""
    lost = operations * _ARITHMETIC
    certain = lost / (1 - lost) if lost < 1 else math.inf
    return min(certain, _SPREAD * math.sqrt(operations) * _ARITHMETIC)


def _bounds(case: Case, operands: Arrays, want: Arrays, changes: Mapping[str, Any]) -> dict[str, Any]:
    found = _RULES.get(case.operation, _linear_bounds)(case, operands, want, changes)
    bounds = {}
    for name in want:
        unit, smallest = _STORED.get(case.dtype_of(name), (0.0, 0.0))
        bounds[name] = found[name] + unit * (np.abs(want[name]) + found[name]) + smallest / 2
    return bounds


def _linear_bounds(case: Case, operands: Arrays, _: Arrays, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Sums of products: as many roundings as terms, on the sum of their sizes; and one for a mean."""
    sizes = _call(case, operands, changes, absolute=True)
    return {name: _rounding(case.terms + 1) * size for name, size in sizes.items()}


def _exact(_: Case, __: Arrays, want: Arrays, ___: Mapping[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(want, 0.0)


def _curve_bounds(_: Case, operands: Arrays, want: Arrays, __: Mapping[str, Any]) -> dict[str, Any]:
    """An exponential of two units in the last place, a quotient, and the products around them: under 16 roundings."""
    x = np.abs(operands.get("x", operands.get("saved", np.zeros(1))))
    size = 1 + x if "x" in operands else np.abs(operands["dy"]) * (1 + x)
    return {name: _rounding(16) * size for name in want}


def _batch_norm_bounds(case: Case, operands: Arrays, want: Arrays, _: Mapping[str, Any]) -> dict[str, Any]:
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
        "out": relative * condition * (gamma * want["inv_std"] * (np.abs(x) + size) + beta),
    }


def _batch_norm_backward_bounds(case: Case, operands: Arrays, _: Arrays, __: Mapping[str, Any]) -> dict[str, Any]:
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


def _softmax_bounds(case: Case, operands: Arrays, want: Arrays, _: Mapping[str, Any]) -> dict[str, Any]:
    """Forward as a curve with a sum over the classes; backward y * (dy - sum of dy * y)."""
    if "x" in operands:
        return {"out": _rounding(case.terms + 16) * want["out"]}
    dy, y = np.abs(operands["dy"]), np.abs(operands["y"])
    return {"out": _rounding(case.terms + 4) * y * (dy + (dy * y).sum(axis=-1, keepdims=True))}


def _cross_entropy_bounds(case: Case, operands: Arrays, want: Arrays, _: Mapping[str, Any]) -> dict[str, Any]:
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


def _optimizer_bounds(_: Case, operands: Arrays, want: Arrays, __: Mapping[str, Any]) -> dict[str, Any]:
    """Under 16 roundings, each on no more than the sum of the sizes that go in."""
    size = sum((np.abs(operands[name]) for name in operands), np.zeros(1))
    return {name: _rounding(16) * size for name in want}


_RULES: Mapping[str, Callable[[Case, Arrays, Arrays, Mapping[str, Any]], dict[str, Any]]] = {
    "relu": _exact,
    "relu_backward": _exact,
    "max_pool2d": _exact,
    "activation": _curve_bounds,
    "activation_backward": _curve_bounds,
    "batch_norm_train": _batch_norm_bounds,
    "batch_norm_backward": _batch_norm_backward_bounds,
    "concat": _exact,
    "softmax": _softmax_bounds,
    "softmax_backward": _softmax_bounds,
    "softmax_cross_entropy": _cross_entropy_bounds,
    "sgd": _optimizer_bounds,
    "momentum": _optimizer_bounds,
    "adam": _optimizer_bounds,
}

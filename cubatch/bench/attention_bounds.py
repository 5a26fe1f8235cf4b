"""
How far attention's results may be off: the deviation of each stage's errors, carried to the next.

A bound for certain grows with every sum that it goes through, and says nothing after three.  Of random data errors are
as good as independent: of a sum of products their variances add up, weighed by the squares of the other factors.
Each rounding is taken to have its largest size as its deviation, which is at least sqrt(3) times what it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import attrs
import numpy as np

Array = np.ndarray[Any, Any]


@attrs.frozen
class Units:
    """
    Unit roundoffs.

    Attributes:
        summed: Of a term of a sum.
        read: Of what a product reads; 0 where it reads what is stored.
        stored: Of what is stored.
    """

    summed: float
    read: float
    stored: float


@attrs.frozen(eq=False)
class Uncertain:
    """
    Right values, and the variance of the errors of those that were computed.

    Attributes:
        values, variance: Of one shape.
    """

    values: Array
    variance: Array

    @classmethod
    def exact(cls, values: Array) -> Self:
        """Take what is given."""
        return cls(values, np.zeros_like(values))

    def turned(self) -> Uncertain:
        """Transpose the last two axes."""
        return Uncertain(self.values.swapaxes(-1, -2), self.variance.swapaxes(-1, -2))

    def times(self, other: Uncertain, units: Units) -> Uncertain:
        """Multiply matrices, each term rounded, and each factor as it is read."""
        a, b = self.values, other.values
        squares = a**2 @ b**2
        rounded = a.shape[-1] * units.summed**2 * (np.abs(a) @ np.abs(b)) ** 2 + 2 * units.read**2 * squares
        return Uncertain(a @ b, self.variance @ b**2 + a**2 @ other.variance + rounded)

    def scaled(self, factor: float) -> Uncertain:
        """Multiply by a number."""
        return Uncertain(self.values * factor, self.variance * factor**2)

    def stored(self, unit: float) -> Uncertain:
        """Round to what is stored."""
        return Uncertain(self.values, self.variance + (unit * self.values) ** 2)

    def shifted(self, bias: Array | None) -> Uncertain:
        """Add what is given."""
        return self if bias is None else Uncertain(self.values + bias, self.variance)


def softmax(scores: Uncertain, units: Units) -> Uncertain:
    """Return the weights, whose relative error is that of their score less the mean of those errors under them."""
    powers = np.exp(scores.values - scores.values.max(axis=-1, keepdims=True))
    weights = powers / powers.sum(axis=-1, keepdims=True)
    together = (weights**2 * scores.variance).sum(axis=-1, keepdims=True)
    sums = (scores.values.shape[-1] + 16) * units.summed**2
    return Uncertain(weights, weights**2 * (scores.variance + together + sums)).stored(units.stored)


def softmax_backward(gradient: Uncertain, weights: Uncertain, units: Units) -> Uncertain:
    """Return the gradient of the scores: weights * (gradient - its mean under the weights)."""
    p, dp = weights.values, gradient.values
    mean = (p * dp).sum(axis=-1, keepdims=True)
    terms = p**2 * gradient.variance + dp**2 * weights.variance
    rounded = (p.shape[-1] + 4) * units.summed**2 * (np.abs(p * dp).sum(axis=-1, keepdims=True) + np.abs(dp)) ** 2
    off = gradient.variance + terms.sum(axis=-1, keepdims=True) + rounded
    return Uncertain(p * (dp - mean), p**2 * off + (dp - mean) ** 2 * weights.variance).stored(units.stored)


def forward(operands: Mapping[str, Array], heads: int, units: Units) -> dict[str, Uncertain]:
    """Carry the errors of a forward pass: what it keeps, by name, and `out`. Padding of weights' rows has none."""
    x = operands["x"]
    n, _, c = x.shape
    between = attrs.evolve(units, read=0.0)
    qkv = _projected(Uncertain.exact(x), operands["w_in"].T, operands.get("b_in"), units)
    queries, keys, values = split(qkv, 3, heads)
    scores = queries.times(keys.turned(), between).scaled(1 / math.sqrt(c // heads)).stored(units.stored)
    weights = softmax(scores, units)
    mixed = joined(weights.times(values, between)).stored(units.stored)
    out = _projected(mixed, operands["w_out"].T, operands.get("b_out"), units)
    if "weights" in operands:
        padding = operands["weights"].size // weights.values[..., 0].size - weights.values.shape[-1]
        widths = [(0, 0), (0, 0), (0, 0), (0, padding)]
        weights = Uncertain(*(np.pad(array, widths) for array in (weights.values, weights.variance)))
    flat = {"qkv": qkv, "weights": weights, "mixed": mixed}
    kept = {name: Uncertain(each.values.reshape(n, -1), each.variance.reshape(n, -1)) for name, each in flat.items()}
    return {"out": out, **kept}


def backward(operands: Mapping[str, Array], heads: int, units: Units) -> dict[str, Uncertain]:
    """Carry the errors of a backward pass: `out`, which is dx, and the gradients of the projections."""
    dy, x, w_in, w_out = (operands[name] for name in ("dy", "x", "w_in", "w_out"))
    n, t, c = x.shape
    between, factor = attrs.evolve(units, read=0.0), 1 / math.sqrt(c // heads)
    saved = {
        "qkv": Uncertain.exact(operands["qkv"].reshape(n, t, 3 * c)),
        "weights": Uncertain.exact(operands["weights"].reshape(n, heads, t, -1)[..., :t]),
        "mixed": Uncertain.exact(operands["mixed"].reshape(n, t, c)),
    }
    queries, keys, values = split(saved["qkv"], 3, heads)
    # The mean under the weights is that of weights which were rounded where they were saved, or of what they mixed.
    weights = saved["weights"].stored(math.hypot(units.stored, math.sqrt(t + 16) * units.summed))
    owed_rows = _projected(Uncertain.exact(dy), w_out, None, units)
    (owed,) = split(owed_rows, 1, heads)
    dscores = softmax_backward(owed.times(values.turned(), between).stored(units.stored), weights, units)
    dqueries = dscores.times(keys, between).scaled(factor)
    dkeys = dscores.turned().times(queries, between).scaled(factor)
    dvalues = saved["weights"].turned().times(owed, between)
    dqkv = Uncertain(
        *(
            np.concatenate([getattr(joined(part), field) for part in (dqueries, dkeys, dvalues)], axis=-1)
            for field in ("values", "variance")
        )
    ).stored(units.stored)
    rows = {name: _rows(each) for name, each in (("dqkv", dqkv), ("mixed", saved["mixed"]))}
    inputs, errors = (Uncertain.exact(array.reshape(-1, c)) for array in (x, dy))
    return {
        "out": _projected(dqkv, w_in, None, units),
        "dw_in": rows["dqkv"].turned().times(inputs, units),
        "dw_out": errors.turned().times(rows["mixed"], units),
        **{f"db_{name}": _summed(each, units) for name, each in (("in", rows["dqkv"]), ("out", errors))},
    }


def split(rows: Uncertain, parts: int, heads: int) -> list[Uncertain]:
    """View rows (n, t, parts x heads x width) as (n, heads, t, width) each."""
    n, t, columns = rows.values.shape
    shape = n, t, parts, heads, columns // parts // heads
    values, variance = (array.reshape(shape).transpose(2, 0, 3, 1, 4) for array in (rows.values, rows.variance))
    return [Uncertain(*each) for each in zip(values, variance, strict=True)]


def joined(each: Uncertain) -> Uncertain:
    """Lay heads (n, heads, t, width) side by side: (n, t, heads x width)."""
    n, heads, t, width = each.values.shape
    arrays = (array.transpose(0, 2, 1, 3).reshape(n, t, heads * width) for array in (each.values, each.variance))
    return Uncertain(*arrays)


def _projected(rows: Uncertain, weights: Array, bias: Array | None, units: Units) -> Uncertain:
    return rows.times(Uncertain.exact(weights), units).shifted(bias).stored(units.stored)


def _rows(each: Uncertain) -> Uncertain:
    columns = each.values.shape[-1]
    return Uncertain(each.values.reshape(-1, columns), each.variance.reshape(-1, columns))


def _summed(rows: Uncertain, units: Units) -> Uncertain:
    """Add rows up."""
    ones = Uncertain.exact(np.ones((1, len(rows.values))))
    total = ones.times(rows, attrs.evolve(units, read=0.0))
    return Uncertain(total.values[0], total.variance[0])

"""
Whether a kernel's results are right: a sample of them against the same call in float64.

A case is cut down to a few images or channels, whose results are those of the whole at these places.  The cut
call is repeated by the engine's NumPy path in float64, which shares nothing with the kernels.  How far a
result may be off is what `bounds` derives from the arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

import attrs
import numpy as np

from cubatch.bench.bounds import bounds, stored_unit, winograd_bounds
from cubatch.bench.cases import Case
from cubatch.engine import functional
from cubatch.engine.backend import of, to_host

_LONG_SUM = 1 << 20

Arrays = Mapping[str, np.ndarray[Any, Any]]


@attrs.frozen
class Check:
    """
    The result of a comparison.

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
        whole = case.unpadded({name: arrays[name] for name in case.operands})
        operands = {name: self._cut(name, array) for name, array in whole.items()}
        operands = {
            name: array if case.operands[name].kind == "counts" else _values(array) for name, array in operands.items()
        }
        changes = self._changes(operands)
        self._operands, self._option_changes = operands, changes
        self._want = _call(case, operands, changes)
        again = functools.partial(_call, case, changes=changes)
        self._bounds: dict[int | None, dict[str, Any]] = {None: bounds(case, operands, self._want, again)}
        self._bounds_of = functools.partial(winograd_bounds, case, operands, self._want, again)

    def check(
        self,
        arrays: Mapping[str, Any],
        *,
        outputs: int | None = None,
        names: Collection[str] | None = None,
        stored_between: int = 0,
    ) -> Check:
        """
        Compare what a kernel wrote with what is right.

        Args:
            arrays: All of the case.
            outputs: Results along an axis that it computed at a time by Winograd's algorithm; None: by the direct sum.
            names: Results that are compared; None: all.
            stored_between: Times that a result is stored before it is done, by one kernel for the next: each rounds it.
        """
        if outputs is not None and outputs not in self._bounds:
            self._bounds[outputs] = self._bounds_of(outputs)
        found = self._bounds[outputs]
        worst, where, compared = -1.0, "", 0
        for name, want in self._want.items():
            if names is not None and name not in names:
                continue
            got = _values(self._cut(name, arrays[name]))
            error, bound = np.abs(got - want), np.broadcast_to(found[name], want.shape)
            if stored_between:
                bound = bound + stored_between * stored_unit(self._case.dtype_of(name)) * self._sizes[name]
            # Attention pads the rows of its weights, where neither the reference nor the kernel writes.
            pads = self._case.layer is not None and self._case.layer.products_in_turn
            padding = np.isnan(want) & np.isnan(got) & pads
            with np.errstate(divide="ignore", invalid="ignore"):
                units = np.where((error == 0) | padding, 0.0, error / bound)
            units = np.where(np.isnan(units), np.inf, units)
            compared += units.size - int(padding.sum())
            place = np.unravel_index(int(np.argmax(units)), units.shape)
            if units[place] > worst:
                worst = float(units[place])
                index = ", ".join(str(int(i)) for i in place)
                where = f"{name}[{index}] of the sample: {got[place]:.7g}, right is {want[place]:.7g}"
        return Check(worst, compared, where)

    @functools.cached_property
    def _sizes(self) -> dict[str, Any]:
        """The results of the sizes of all terms, which no result on the way exceeds."""
        return _call(self._case, {name: np.abs(array) for name, array in self._operands.items()}, self._option_changes)

    def _cut(self, name: str, array: Any) -> np.ndarray[Any, Any]:
        """Bring the sample of an array to the host."""
        for axes in self._case.cuts:
            places, axis = self._places.get(axes), self._case.cuts[axes].get(name)
            if places is not None and axis is not None:
                xp = of(array)
                array = xp.take(array, xp.asarray(places), axis=axis)
        return to_host(array)

    def _changes(self, operands: Arrays) -> dict[str, Any]:
        """Return the options that speak of extents which the cut has changed."""
        options, changes = self._case.options, {}
        if "x_shape" in options:
            changes["x_shape"] = operands["out"].shape
        if options.get("groups", 1) > 1 and "c" in self._places:
            changes["groups"] = len(self._places["c"])
        return changes


def poison(case: Case, arrays: Mapping[str, Any]) -> None:
    """Fill what is only written with NaN, or the largest integer, so that an element that was not written shows."""
    for name in case.results:
        if not case.reads(name):
            arrays[name].fill(math.nan if arrays[name].dtype.kind == "f" else np.iinfo(arrays[name].dtype).max)


def _values(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the numbers of an array in float64; 16-bit integers are the bits of bfloat16."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def _places(case: Case, rng: np.random.Generator, images: int | None, channels: int | None) -> dict[str, list[int]]:
    """Draw places along each cut; the last is always among them, where the residue of a tile lies."""
    drawn: dict[str, list[int]] = {}
    for name, axes in case.cuts.items():
        operand, axis = next(iter(axes.items()))
        given = case.operands[operand]
        size = given.shape[axis] - (given.padded if axis == len(given.shape) - 1 else 0)
        wanted = images if name == "n" else channels
        if name in {"rows", "parameters"} and wanted is not None:
            wanted = 64 * wanted  # a row is as little as a channel of one pixel
        elif wanted is not None and case.terms > _LONG_SUM:
            wanted = min(wanted, 2)  # each result costs the host millions of products
        if wanted is not None and wanted < size:
            others = rng.choice(size - 1, size=wanted - 1, replace=False)
            drawn[name] = [*sorted(int(i) for i in others), size - 1]
    return drawn


def _call(case: Case, operands: Arrays, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Call the engine in float64; give the results that the cut leaves whole."""
    arrays = {name: array.copy() for name, array in operands.items()}
    for name in case.results:
        if case.dtype_of(name) != "uint8" and not case.reads(name):
            arrays[name] = np.full(arrays[name].shape, np.nan)
    case.call(functional, arrays, **changes)
    # A result that no cut mentions, such as the loss of the whole batch, is right only where nothing was cut.
    is_cut = any(arrays[name].shape != case.operands[name].shape for name in arrays)
    partial = {name for name in case.results if not any(name in axes for axes in case.cuts.values())}
    return {name: arrays[name].astype(np.float64) for name in case.results if not (is_cut and name in partial)}

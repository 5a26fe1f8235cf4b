"""
Check of a kernel's results: a sample of them against the same call in float64.

A case is cut down to a few images or channels, whose results are those of the whole at these places.  NumPy repeats the
cut call in float64 and shares nothing with the kernels.

One rule bounds the error of every operation.  Its size is the result of the call on absolute values of its operands,
which bounds the intermediate sums.  Each element of a product has its own size; elsewhere the largest counts for all.
After k roundings of unit u, the errors of random
data come to at most 6 sqrt(k) u size.  The probability of more is 3e-8 per result (Higham and Mary, A new approach to
probabilistic rounding error analysis, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4).  k is the number of terms of the
longest sum, and 16 for functions such as exp.  Results of 16 bits are rounded once more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import attrs
import numpy as np

from cubatch.bench.calls import Case
from cubatch.engine import functional
from cubatch.engine.backend import of, to_host

_ROUNDED = 2.0**-24  # unit roundoff of float32, in which every kernel computes
_CUT_OFF = 1.5 * 2.0**-23
"""
The same of tensor cores, which cut off the products of an instruction behind the last bit of the largest.

Each term errs by up to 2^-23 of the sum, and so does each instruction of at least 4 terms. The source is Fasi, Higham,
Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ Comput. Sci. 7:e330, 2021.
"""

_TF32 = 2.0**-11  # unit roundoff of tf32, to which float32 operands are rounded before they are multiplied
_STORED = {"float16": (2.0**-11, 2.0**-24), "bfloat16": (2.0**-8, 2.0**-133)}
"""Unit roundoff and smallest number of the types of 16 bits."""

_SPREAD, _FUNCTIONS = 6.0, 16
WINOGRAD = 32.0
"""
Factor on the bound for Winograd's algorithm.

F(4 x 4, 3 x 3) computes A' ((G w) * (B' x)). For random data, its worst output along an axis has a variance
of sum A^2 (sum G^2) (sum B^2). That is 31 times the 3 of a direct sum, and along both axes the square of it.
"""

_ATTENTION_STAGES = 6
"""
Roundings to the type of the case between the first read and the last write of attention.

Its absolute operands give sums far above its results. Its size is the largest result: signs are random in each stage.
"""

_BENDS = {"relu": (0.0,), "relu6": (0.0, 6.0), "hard_swish": (-3.0, 3.0)}
"""Inputs at which the slope of an activation jumps, by at most 1."""

_NEAR = 2.0**-21  # eight roundings
_LONG_SUM = 1 << 20
_ROWS = 64  # of a product, each of which is little work
_LETTERS = {"x": "nhwc", "dy": "nhwk", "w": "krsc", "dw": "krsc", **dict.fromkeys(("b", "db", "scale", "shift"), "k")}
_BY_CHANNEL = {"batch_norm_train", "batch_norm_inference", "batch_norm_backward", "layer_scale_backward"}
_UNCUT = {
    "layer_norm_backward", "tokens_backward", "dropout", "fold_batch_norms", "update_loss_scale"
}  # fmt: skip
_BY_ROW = {"softmax", "softmax_backward", "softmax_cross_entropy", "layer_norm", "attention"}
_BOTH_WAYS = {"attention_backward", "layer_norm_backward"}  # sums over channels and over rows
_EXACT = {
    "relu", "relu_backward", "max_pool2d", "concat", "concat_backward", "slice_channels", "slice_channels_backward",
    "class_token", "class_token_backward", "update_loss_scale",
}  # fmt: skip

Arrays = Mapping[str, np.ndarray[Any, Any]]


def axes_of(case: Case) -> dict[str, str]:
    """
    Return by operand a letter for each axis; empty for operations whose channels cannot be cut.

    "n" samples, "h" and "w" pixels, "c" and "k" channels in and out, "r" and "s" taps of a filter.
    """
    if case.operation in _BY_CHANNEL:
        batched = {"pooled": "nc"}
        return {name: batched.get(name, "nhwc") if of.is_batched else "c" for name, of in case.operands.items()}
    if not case.operation.startswith(("conv2d", "linear")):
        return {}
    image = "nhwk" if case.operation in {"conv2d", "linear"} else "nhwc"
    letters = {name: _LETTERS.get(name, image) for name in case.operands}
    if case.operation.startswith("linear"):
        return {name: "".join(letter for letter in text if letter in "nck") for name, text in letters.items()}
    if 1 < case.options["groups"] == case.operands["w" if "w" in case.operands else "dw"].shape[0]:  # depthwise
        return {name: "crs-" if text == "krsc" else text.replace("k", "c") for name, text in letters.items()}
    return letters


def terms_of(case: Case) -> int:
    """Return the number of terms of the longest sum behind a result, at least 1; 0 if the results are exact."""
    if case.operation in _EXACT:
        return 0
    shapes = {name: operand.shape for name, operand in case.operands.items()}
    if letters := axes_of(case):
        by_size = sorted((letters[name] for name in case.results), key=len)
        left = by_size[0] if case.operation in _BY_CHANNEL else letters[case.result]
        extents = {
            letter: extent for name in shapes for letter, extent in zip(letters[name], shapes[name], strict=True)
        }
        summed = set(letters["w"]) if "w" in letters else set(extents)
        return math.prod(extents[letter] for letter in summed - set(left))
    if case.operation in _BY_ROW:
        return int(next(shapes[name] for name in ("x", "logits", "dy") if name in shapes)[-1])
    if case.layer is None:
        return 1
    read = max(math.prod(shape) for name, shape in shapes.items() if case.reads(name))
    written = min(math.prod(shapes[name]) for name in case.results)
    rows = math.prod(shapes["dy"][:-1]) if case.operation in _BOTH_WAYS else 1
    width = 3 * shapes["dy"][-1] if case.operation in _BOTH_WAYS else 1
    taps = case.options["window"].r * case.options["window"].s if "window" in case.options else 1
    return int(max(taps, rows, width, len(case.arrays.get("branches", ())), read // max(1, written)))


def cuts_of(case: Case) -> dict[str, dict[str, int]]:
    """
    Return the axes along which a case can be cut into smaller calls: by letter, {operand: axis}.

    The letters are "n" (samples), "c" and "k" (channels); empty if the case cannot be cut. A result without such an
    axis is right only for the whole call.
    """
    if case.operation in _UNCUT:
        return {}
    letters = axes_of(case)
    if not letters:
        batched = [name for name, operand in case.operands.items() if operand.is_batched]
        return {"n": {name: 1 if name == "statistics" else 0 for name in batched}}
    is_grouped = case.options.get("groups", 1) > 1 and not any("-" in text for text in letters.values())
    possible = "c" if case.operation in _BY_CHANNEL else "n" if is_grouped else "nck"
    return {
        letter: {name: text.index(letter) for name, text in letters.items() if letter in text}
        for letter in letters[case.result]
        if letter in possible
    }


@attrs.frozen
class Check:
    """The largest difference between the results of a kernel and the right results."""

    worst: float  # largest error in units of its bound; at most 1 is right. Infinite for NaN and for an inexact copy
    compared: int  # results that were compared
    where: str  # array and place of the worst error, with the value there and the right one

    @property
    def passed(self) -> bool:
        """Whether every result was within its bound."""
        return self.worst <= 1


class Expected:
    """
    The right results of a case at a random sample of indices.

    They are computed before the kernels run, since kernels may overwrite operands.

    Args:
        case: The call of an operation.
        arrays: The operands of the case by name, filled.
        rng: Draws the indices.
        images, channels: Number of indices along an axis of samples, or of channels, that is cut; `None` for all.
    """

    def __init__(
        self, case: Case, arrays: Mapping[str, Any], rng: np.random.Generator, *,
        images: int | None = 1, channels: int | None = 3,
    ) -> None:  # fmt: skip
        self._case, self._cuts = case, cuts_of(case)
        self._places = _places(case, self._cuts, rng, images, channels)
        whole = case.unpadded({name: arrays[name] for name in case.operands})
        operands = {name: self._cut(name, array) for name, array in whole.items()}
        operands = {
            name: array if case.operands[name].kind == "counts" else _values(array) for name, array in operands.items()
        }
        self._want, self._operands = self._call(operands), operands
        # Each result of a product has sums of its own; elsewhere results share means, maxima and totals.
        size_of = np.abs if axes_of(case) and case.operation not in _BY_CHANNEL else _largest
        self._sizes: dict[str, Any] = {name: size_of(array) for name, array in self._want.items()}
        self._squares = {}
        absolute = {name: np.abs(array) for name, array in operands.items()}
        if not case.operation.startswith("attention"):
            for name, array in self._call(absolute).items():
                self._sizes[name] = np.fmax(self._sizes[name], size_of(array))
        if case.dtype == "tf32" and axes_of(case):
            squares = self._call({name: array**2 for name, array in absolute.items()})
            self._squares = {name: np.sqrt(size_of(each)) for name, each in squares.items()}

    def check(
        self, arrays: Mapping[str, Any], *, names: Collection[str] | None = None, stored_between: int = 0,
        factor: float = 1.0,
    ) -> Check:  # fmt: skip
        """
        Compare the results of a kernel with the right results; return the worst error / its bound.

        Args:
            arrays: All arrays of the case.
            names: Results that are compared; `None` for all.
            stored_between: Number of times that a result is stored, and so rounded, before a later kernel completes it.
            factor: Factor on the bound, such as `WINOGRAD`.
        """
        worst, where, compared = -1.0, "", 0
        for name, want in self._want.items():
            if names is not None and name not in names:
                continue
            got = _values(self._cut(name, arrays[name]))
            error, bound = np.abs(got - want), self._bound(name, want, stored_between, factor)
            # Attention pads the rows of its weights, where neither the reference nor the kernel writes.
            padding = np.isnan(want) & np.isnan(got) & self._case.operation.startswith("attention")
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

    def _bound(self, name: str, want: np.ndarray[Any, Any], stored_between: int, factor: float) -> Any:
        case, terms, size = self._case, terms_of(self._case), self._sizes[name]
        squares = self._squares.get(name)
        if factor != 1.0:  # a transform mixes the results of a tile
            size, squares = _largest(size), None if squares is None else _largest(squares)
        unit, smallest = _STORED.get(case.dtype_of(name), (0.0, 0.0))
        is_product = bool(axes_of(case)) and case.operation not in _BY_CHANNEL
        is_attention = case.operation.startswith("attention")
        on_tensor_cores = case.dtype in {"tf32", *_STORED} and (is_product or is_attention)
        roundings = terms + _FUNCTIONS if terms else 0
        bound = factor * _SPREAD * math.sqrt(roundings) * (_CUT_OFF if on_tensor_cores else _ROUNDED) * size
        if squares is not None and name != "db":  # a plain sum
            certain, likely = 2 * size, _SPREAD * math.sqrt(2) * squares
            bound = bound + factor * _TF32 * (1 + _TF32) * np.fmin(certain, likely)
        bound = bound + stored_between * _STORED.get(case.dtype, (_ROUNDED, 0.0))[0] * size
        if is_attention:
            bound += _ATTENTION_STAGES * (_TF32 if case.dtype == "tf32" else _STORED.get(case.dtype, (0.0,))[0]) * size
        if case.operation == "batch_norm_backward":
            bound = bound + self._at_bends(name)
        if case.operation == "dropout":  # two masks of the same probability: an element is 0 or x / (1 - p)
            bound += 1.0 if name == "mask" else np.abs(self._operands["x"]) / (1 - case.options["p"])
        return unit * (np.abs(want) + bound) + bound + smallest / 2

    def _at_bends(self, name: str) -> Any:
        """
        Return an allowance for the gradient `name`, an array or sums: its largest change by elements near a bend.

        Near a bend of the activation, rounding decides on which side an element is, and so its slope.
        """
        of, bends = self._operands, _BENDS.get(self._case.options.get("activation", ""), ())
        apart, factor = of["x"] - of["mean"], of["gamma"] * of["inv_std"]
        near = _NEAR * (np.abs(apart * factor) + np.abs(of["mean"] * factor) + np.abs(of["beta"]) + 1)
        is_near = np.any([np.abs(apart * factor + of["beta"] - bend) <= near for bend in bends], axis=0)
        errors, axes = np.where(is_near, np.abs(of["dy"]), 0.0), tuple(range(of["x"].ndim - 1))
        distance = np.abs(apart * of["inv_std"])
        sums = {"dbeta": errors.sum(axes), "dgamma": (errors * distance).sum(axes)}
        share = of["x"].shape[-1] / of["x"].size
        return sums.get(name, np.abs(factor) * (errors + share * (sums["dbeta"] + distance * sums["dgamma"])))

    def _call(self, operands: Arrays) -> dict[str, Any]:
        """Return the engine's results in float64, without results that are wrong if operands are cut, such as sums."""
        case = self._case
        arrays = {name: array.copy() for name, array in operands.items()}
        for name in case.results:
            if case.dtype_of(name) != "uint8" and not case.reads(name):
                arrays[name] = np.full(arrays[name].shape, np.nan)
        changes: dict[str, Any] = {}  # options about extents that the cut has changed
        if "x_shape" in case.options:
            changes["x_shape"] = arrays["out"].shape
        if case.options.get("groups", 1) > 1 and "c" in self._places:
            changes["groups"] = len(self._places["c"])
        with np.errstate(all="ignore"):
            case.call(functional, arrays, **changes)
        # A result that no cut mentions, such as the loss of the whole batch, is right only if nothing was cut.
        is_cut = any(arrays[name].shape != case.operands[name].shape for name in arrays)
        partial = {name for name in case.results if not any(name in axes for axes in self._cuts.values())}
        return {name: arrays[name].astype(np.float64) for name in case.results if not (is_cut and name in partial)}

    def _cut(self, name: str, array: Any) -> np.ndarray[Any, Any]:
        """Return a NumPy copy of an array of the operand `name`, with the sampled indices only."""
        for letter, axes in self._cuts.items():
            places, axis = self._places.get(letter), axes.get(name)
            if places is not None and axis is not None:
                xp = of(array)
                array = xp.take(array, xp.asarray(places), axis=axis)
        return to_host(array)


def poison(case: Case, arrays: Mapping[str, Any]) -> None:
    """Fill the results that a case only writes with NaN or the largest integer, to reveal elements left unwritten."""
    for name in case.results:
        if not case.reads(name):
            arrays[name].fill(math.nan if arrays[name].dtype.kind == "f" else np.iinfo(arrays[name].dtype).max)


def _largest(array: np.ndarray[Any, Any]) -> float:
    return float(np.nanmax(np.abs(array), initial=0.0, where=np.isfinite(array)))


def _values(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the numbers of an array in float64; 16-bit integers are the bits of bfloat16."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def _places(
    case: Case, cuts: Mapping[str, Mapping[str, int]], rng: np.random.Generator, images: int | None,
    channels: int | None,
) -> dict[str, list[int]]:  # fmt: skip
    """
    Return random indices along each axis to cut, by its letter, always with the last; an uncut axis has no entry.

    `images` and `channels` are the numbers of indices along an axis of samples and along any other; None: all.
    """
    drawn: dict[str, list[int]] = {}
    for letter, axes in cuts.items():
        name, axis = next(iter(axes.items()))
        operand = case.operands[name]
        size = operand.shape[axis] - (operand.padded if axis == len(operand.shape) - 1 else 0)
        wanted = images if letter == "n" else channels
        if wanted is not None and letter == "n" and (case.layer is None or case.operation.startswith("linear")):
            wanted = _ROWS
        elif wanted is not None and terms_of(case) > _LONG_SUM:
            wanted = min(wanted, 2)  # each result costs the host millions of products
        if wanted is not None and wanted < size:
            others = rng.choice(size - 1, size=wanted - 1, replace=False)
            drawn[letter] = [*sorted(int(i) for i in others), size - 1]
    return drawn

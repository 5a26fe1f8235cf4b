"""Products and convolutions on drawn arrays, by any family of kernels, against float64 within derived bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from cubatch.engine.native import conv, gemm
from cubatch.engine.native.operands import Fused, RowSums
from tests import reference
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma
from tests.kernels import cases, epilogues, placing


def fused(activation: str) -> dict[str, Any]:
    """Return the argument by which an activation is fused, so that depthwise shapes stay with the tiled kernels."""
    return {"fused": Fused(activation=activation)}


def clamped(activation: str) -> dict[str, Any]:
    """Return the argument of operations that know ReLU only."""
    return {"relu": activation == "relu"}


@attrs.frozen
class Passes:
    """
    Runs operations and checks what they write; each method returns its first result as stored.

    Attributes:
        launcher: Where kernels run.
        where: The context, which chooses kernels.
        dtype: How elements are stored.
        seed: Of the drawn elements.
        multiplied: Values of stored operands as kernels multiply them.
        bound: Largest error of sums, with the arguments of `cases.bound`.
        ends: Arguments of a forward pass that say its activation.
        shift: Elements that the first operand and the result lie past the start of an allocation.
        stored: What the first operand is in memory.
        more: Roundings beyond those of the sum, such as one for each slice.
        options: Further arguments, such as the workspace.
    """

    launcher: Any
    where: Any
    dtype: str = "float32"
    seed: int = 0
    multiplied: Callable[[Any], Any] = cases.decoded
    bound: Callable[..., Any] = cases.bound
    ends: Callable[[str], dict[str, Any]] = fused
    shift: int = 0
    stored: Callable[[Any], Any] = np.asarray
    more: int = 0
    options: dict[str, Any] = attrs.field(factory=dict)

    def product(
        self, layout: str, extents: tuple[int, int, int], *,
        activation: str = "none", parts: tuple[str, ...] | None = None, run: Any = gemm.gemm,
    ) -> Any:  # fmt: skip
        """Multiply (m, k) by (k, n) in a layout, with its epilogue of these parts; None: without any."""
        (m, n, k), random = extents, np.random.default_rng(self.seed)
        a = cases.drawn(random, (k, m) if layout[0] == "t" else (m, k), self.dtype)
        b = cases.drawn(random, (n, k) if layout[1] == "t" else (k, n), self.dtype)
        end = epilogues.Epilogue()
        if parts is not None:
            end = epilogues.drawn(random, layout, m, n, self.dtype, activation=activation, parts=parts)
        bias, ending = end.put(self.launcher)
        options = {"fused": ending} if self.ends is fused else self.ends(end.activation)
        out = self._room((m, n))
        run(self.where, self._first(a), self.launcher.put(b), bias, layout=layout, out=out, **options, **self.options)
        left, right = self.multiplied(a), self.multiplied(b)
        left, right = left.T if layout[0] == "t" else left, right.T if layout[1] == "t" else right
        plain = end.masked(left @ right + end.added())
        want = reference.activation(plain, kind=end.activation)
        stored = want if end.activation in {"none", "relu"} else plain
        error = self.bound(k + 1 + self.more, abs(left) @ abs(right) + abs(end.added()), stored, self.dtype)
        if stored is plain and end.activation != "none":  # slopes are at most 1.1; and the roundings of the function
            error = 1.1 * (error + cases.bound(8, abs(want), want, self.dtype))
        return self._compare(out, want, end.masked(error), "mn", layout)

    def columns(self, extents: tuple[int, int, int], activation: str = "none") -> Any:
        """Multiply by a transposed matrix, fold a batch norm, add bias and residual, activate; write no row beyond."""
        (m, n, k), random = extents, np.random.default_rng(self.seed)
        shapes = ((m, k), (n, k), (m, n), (n,))
        a, b, residual, bias = (cases.drawn(random, shape, self.dtype) for shape in shapes)
        scale, shift = (4 * cases.drawn(random, (n,)) for _ in range(2))
        out = self.launcher.unwritten((m + 1, n), a.dtype)
        terms = {"scale": scale, "shift": shift, "residual": residual}
        held = {name: self.launcher.put(array) for name, array in terms.items()}
        left, right, added = (self.launcher.put(array) for array in (a, b, bias))
        gemm.gemm(self.where, left, right, added, out=out[:m], fused=Fused(**held, activation=activation))
        left, right = self.multiplied(a), self.multiplied(b).T
        bias, residual = cases.decoded(bias), cases.decoded(residual)
        plain = scale * (left @ right) + shift + bias + residual
        magnitude = abs(scale) * (abs(left) @ abs(right)) + abs(shift) + abs(bias) + abs(residual)
        want = reference.activation(plain, kind=activation)
        slope = 1.1 + (abs(plain) if activation == "hard_swish" else 0)
        error = slope * self._error(k + 4, magnitude, plain) + gamma(12, UNIT_ROUNDOFF["float32"]) * (1 + abs(want))
        assert (np.ascontiguousarray(self.launcher.get(out)[m]).view(np.uint8) == 0xFF).all()
        return self._compare(out[:m], want, error, "mn", activation)

    def fprop(self, drawn: cases.Conv, *, bias: bool = True, activation: str = "none", run: Any = conv.conv2d) -> Any:
        """Convolve, add a bias, and clamp at zero if the activation is "relu"."""
        random = np.random.default_rng(self.seed)
        x, w, b = (cases.drawn(random, shape, self.dtype) for shape in (drawn.x_shape, drawn.w_shape, (drawn.k,)))
        y, held = self._room(drawn.y_shape), (self._first(x), self.launcher.put(w), self.launcher.put(b))
        run(
            self.where, *held[: 3 if bias else 2], out=y, **self.ends(activation), **drawn.options, **self.options
        )  # fmt: skip
        x, w, b = self.multiplied(x), self.multiplied(w), cases.decoded(b) * bias
        want, magnitude = cases.conv2d(drawn, x, w, b), cases.conv2d(drawn, abs(x), abs(w), abs(b))
        want = np.maximum(want, 0) if activation == "relu" else want
        return self._compare(y, want, self._error(w[0].size + 1, magnitude, want), "npqk", drawn)

    def dgrad(
        self, drawn: cases.Conv, *, parts: tuple[str, ...] = (), in_place: str = "", run: Any = conv.conv2d_dgrad
    ) -> Any:
        """
        Give the gradient of an input, with a "residual" and what must be "positive"; one of them may be written.

        Where nothing passes, half of the residual is infinite, which must not be seen.
        """
        random = np.random.default_rng(self.seed)
        dy, w = cases.drawn(random, drawn.y_shape, self.dtype), cases.drawn(random, drawn.w_shape, self.dtype)
        terms = {part: cases.drawn(random, drawn.x_shape, self.dtype) for part in ("residual", "positive")}
        terms["positive"] = cases.encoded(np.maximum(cases.decoded(terms["positive"]), 0), self.dtype)  # a ReLU's
        passes = (cases.decoded(terms["positive"]) > 0) | ("positive" not in parts)
        terms["residual"][~passes & (np.arange(drawn.c) % 2 == 0)] = cases.encoded(np.inf, self.dtype)
        held = {part: self.launcher.put(terms[part]) for part in parts}
        dx = held[in_place] if in_place else self._room(drawn.x_shape)
        operands = self._first(dy), self.launcher.put(w)
        run(self.where, *operands, x_shape=drawn.x_shape, out=dx, **held, **drawn.options, **self.options)
        dy, w = self.multiplied(dy), self.multiplied(w)
        residual = np.where(passes, cases.decoded(terms["residual"]), 0) * ("residual" in parts)
        want = np.where(passes, cases.conv2d_dgrad(drawn, dy, w) + residual, 0)
        magnitude = cases.conv2d_dgrad(drawn, abs(dy), abs(w)) + abs(residual)
        terms = drawn.k // drawn.groups * drawn.r * drawn.s + 1
        return self._compare(dx, want, np.where(passes, self._error(terms, magnitude, want), 0), "nhwc", drawn)

    def wgrad(self, drawn: cases.Conv, *, bias: bool = False, adds: bool = False, run: Any = conv.conv2d_wgrad) -> Any:
        """Give the gradient of a filter, added to what is there if asked for, and of a bias."""
        random = np.random.default_rng(self.seed)
        shapes = (drawn.x_shape, drawn.y_shape, drawn.w_shape)
        x, dy, before = (cases.drawn(random, shape, self.dtype) for shape in shapes)
        dw = self.launcher.put(before) if adds else self.launcher.unwritten(drawn.w_shape, x.dtype)
        db = self.launcher.unwritten((drawn.k,), x.dtype) if bias else None
        options = {**drawn.options, **self.options, **({"fused": Fused(residual=dw)} if adds else {})}
        run(self.where, self._first(x), self.launcher.put(dy), dw=dw, db=db, **options)
        x, dy, before = self.multiplied(x), self.multiplied(dy), cases.decoded(before) * adds
        want, of_bias = cases.conv2d_wgrad(drawn, x, dy)
        magnitude, most = cases.conv2d_wgrad(drawn, abs(x), abs(dy))
        pixels = dy[..., 0].size + 1
        if bias:
            self._compare(db, of_bias, self._error(pixels, most, of_bias), "k", drawn)
        error = self._error(pixels, magnitude + abs(before), want + before)
        return self._compare(dw, want + before, error, "krsc", drawn)

    def _first(self, array: Any) -> Any:
        return placing.place(self.launcher, self.stored(array), self.shift)

    def _room(self, shape: Any) -> Any:
        return placing.room(self.launcher, shape, cases.encoded(0, self.dtype).dtype, self.shift)

    def _error(self, terms: int, magnitude: Any, want: Any) -> Any:
        return self.bound(terms + self.more, magnitude, want, self.dtype)

    def _compare(self, got: Any, want: Any, error: Any, axes: str, label: Any) -> Any:
        found = self.launcher.get(got)
        assert_within(cases.decoded(found), want, error, axes=axes, label=f"{self.dtype} {label}")
        return found


def moments(launcher: Any, rows: int, columns: int, run: Callable[[Fused], Any]) -> tuple[Any, Any]:
    """
    Run a forward product that also computes the moments of its tiles.

    Returns:
        The product, and count, mean and sum of squared deviations (tiles, 3, columns) in float64.
    """
    partials = launcher.unwritten((-(-rows // 32) * 3 * columns,), np.float32)  # no tile has fewer rows
    product = run(Fused(sums=RowSums(partials=partials)))
    written = launcher.get(partials).reshape(-1, 3, columns).astype(np.float64)
    return product, written[~np.isnan(written[:, 0, 0])]


def repeats(check: Passes, direction: str, drawn: cases.Conv) -> Passes:
    """Check a pass twice, which must give the same bits; return the checks."""
    first, again = (getattr(check, direction)(drawn).tobytes() for _ in range(2))
    assert first == again
    return check


def watched(choose: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """Return a chooser, and the list of the slices that it chooses."""
    seen: list[int] = []

    def watch(problem: Any, device: Any, prepare: Any = None) -> Any:
        chosen = choose(problem, device)
        seen.append(chosen.slices)
        return chosen

    return watch, seen


def check_last_images(where: Any, big: cases.Conv, dtype: str, bound: Callable[..., Any] = cases.bound) -> None:
    """
    Check the last tile of a forward pass and of a gradient whose arrays have more than 2^31 elements.

    Args:
        where: A context whose launcher runs the last block of each launch alone.
        big: A convolution whose last image fits one tile of pixels.
        dtype: How elements are stored; not bfloat16.
        bound: Largest error of sums.
    """
    x, y = cases.reserved(big.x_shape, dtype), cases.reserved(big.y_shape, dtype)
    few, random = attrs.evolve(big, n=1), np.random.default_rng(0)
    w, tail, dy = (cases.drawn(random, shape, dtype) for shape in (few.w_shape, few.x_shape, few.y_shape))
    x[-1:] = tail
    conv.conv2d(where, x, w, out=y, **big.options)
    wide = [np.float64(array) for array in (w, tail, dy)]
    want, magnitude = (cases.conv2d(few, f(wide[1]), f(wide[0])) for f in (np.asarray, abs))
    assert_within(y[-1:], want, bound(w[0].size, magnitude, want, dtype), axes="npqk")
    assert not y[:-1].any()
    y[-1:], x[-1:] = dy, 0
    conv.conv2d_dgrad(where, y, w, x_shape=big.x_shape, out=x, **big.options)
    want, magnitude = (cases.conv2d_dgrad(few, f(wide[2]), f(wide[0])) for f in (np.asarray, abs))
    got, limit = x[-1:, ..., -64:], bound(72, magnitude, want, dtype)
    assert_within(got, want[..., -64:], limit[..., -64:], axes="nhwc")

"""Attention that stores logarithms of sums instead of weights, and its gradients, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cubatch.engine.native import self_attention
from cubatch.engine.native.context import Context
from cubatch.kernels import attention_launches as planned
from cubatch.kernels.padding import stored_row
from cubatch.kernels.workspace import attention_scratch as scratch
from cubatch.network import layers
from cubatch.network.passes import Pass
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma
from tests.kernels.cases import bound, decoded, drawn, encoded
from tests.kernels.conftest import CUDA, target
from tests.kernels.placing import place, room

U = UNIT_ROUNDOFF["float32"]
CASES = [  # samples, tokens, heads, channels of a head, factor on the queries
    (1, 1, 1, 8, 1.0),
    (2, 5, 3, 24, 1.0),
    (1, 64, 2, 64, 1.0),
    (2, 65, 2, 32, 3.0),
    (1, 130, 1, 20, 1.0),  # rows of 60 elements are no whole vectors
    (1, 197, 2, 64, 2.0),
    (1, 70, 1, 8, -200.0),  # sums whose reciprocal is no float32: padding must not be exponentiated
]


@pytest.fixture(scope="session", params=["cpusim-80", CUDA])
def launcher(request):
    """Give each target that has these kernels."""
    return target(request.param)


class Reference:
    """Attention in float64 from stored queries, keys and values, with bounds of what float32 makes of it."""

    def __init__(self, qkv, heads):
        n, t, c = qkv.shape
        self.heads, self.width = heads, c // 3 // heads
        self.q, self.k, self.v = qkv.reshape(n, t, 3, heads, self.width).transpose(2, 0, 3, 1, 4)
        self.factor = 1 / math.sqrt(self.width)
        scores = self.factor * (self.q @ self.k.swapaxes(-1, -2))
        terms = self.factor * (abs(self.q) @ abs(self.k).swapaxes(-1, -2))
        top = scores.max(-1, keepdims=True)
        sums = np.exp(scores - top).sum(-1, keepdims=True)
        self.log_sums = (top + np.log(sums)) / math.log(2)
        self.weights = np.exp(scores - top) / sums
        # Logarithms are off by what their scores are, and by roundings of numbers of their size.
        apart = gamma(self.width + 6, U) * terms + 8 * U * abs(scores)
        self.log_within = (apart.max(-1, keepdims=True) + gamma(t + 16, U)) / math.log(2) + 4 * U * abs(self.log_sums)
        self.relative = np.expm1(apart + (self.log_within + 2 * U * abs(self.log_sums)) * math.log(2)) + 8 * U

    def by_head(self, mixed):
        """(n, t, c) to (n, heads, t, width)."""
        n, t, _ = mixed.shape
        return mixed.reshape(n, t, self.heads, self.width).transpose(0, 2, 1, 3)

    def gradients(self, mixed, dmixed, dtype):
        """Name, gradient and bound of queries, keys and values; means and gradients of scores are of stored values."""
        mixed, owed = self.by_head(mixed), self.by_head(dmixed)
        means, of_means = ((a * b).sum(-1, keepdims=True) for a, b in ((owed, mixed), (abs(owed), abs(mixed))))
        dweights, terms = owed @ self.v.swapaxes(-1, -2), abs(owed) @ abs(self.v).swapaxes(-1, -2)
        dscores = self.weights * (dweights - means)
        apart = gamma(self.width + 6, U) * (terms + of_means)
        off = self.weights * ((1 + self.relative) * apart + self.relative * abs(dweights - means))
        off = off + bound(1, off, dscores, dtype)
        of_weights = self.weights * self.relative
        of_weights = of_weights + bound(1, of_weights, self.weights, dtype)
        tokens = dscores.shape[-1]
        for name, a, within, b, factor in (
            ("queries", dscores, off, self.k, self.factor),
            ("keys", dscores.swapaxes(-1, -2), off.swapaxes(-1, -2), self.q, self.factor),
            ("values", self.weights.swapaxes(-1, -2), of_weights.swapaxes(-1, -2), owed, 1.0),
        ):
            want, more = factor * (a @ b), factor * (within @ abs(b))
            yield name, want, more + bound(tokens + 3, factor * (abs(a) @ abs(b)) + more, want, dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_without_stored_weights_are_right(launcher, dtype, case):
    """Logarithms, mixed values and the three gradients, of whole tiles and parts; each of them written."""
    n, t, heads, width, factor = case
    random, c, context = np.random.default_rng(t), heads * width, launcher.context()
    values = random.uniform(-1, 1, (n, t, 3 * c))
    if factor < 0:  # all scores are far below zero
        values[..., : 2 * c] = random.uniform(0.5, 1, (n, t, 2 * c))
    values[..., :c] *= factor
    qkv = encoded(values, dtype)
    dmixed = drawn(random, (n, t, c), dtype)
    mixed, plain, out = (room(launcher, (n, t, parts * c), qkv.dtype) for parts in (1, 1, 3))
    log_sums, means = (launcher.unwritten((n, heads, t), np.float32) for _ in range(2))
    on = place(launcher, qkv)
    self_attention.attend(context, on, heads=heads, out=mixed, log_sums=log_sums)
    self_attention.attend(context, on, heads=heads, out=plain)
    np.testing.assert_array_equal(launcher.get(mixed), launcher.get(plain))
    self_attention.attend_backward(
        context, on, mixed, place(launcher, dmixed), log_sums, heads=heads, means=means, out=out
    )
    reference, label = Reference(decoded(qkv), heads), f"{dtype} {case}"
    assert_within(launcher.get(log_sums)[..., None], reference.log_sums, reference.log_within, label=f"{label} sums")
    stored = decoded(launcher.get(mixed)), decoded(dmixed)
    found = decoded(launcher.get(out)).reshape(n, t, 3, heads, width).transpose(2, 0, 3, 1, 4)
    for part, (name, want, within) in zip(found, reference.gradients(*stored, dtype), strict=True):
        assert_within(part, want, within, label=f"{label} {name}")


@pytest.mark.parametrize("heads", [2, 5])
def test_passes_on_sums_launch_what_is_predicted_and_agree_with_weights(launcher, monkeypatch, heads):
    """Names, order and blocks; gradients of all parameters and the input are near those from stored weights."""
    seen, launch = [], Context.launch

    def noted(context, kernel, grid, arguments):
        seen.append((kernel.name, math.prod(grid)))
        launch(context, kernel, grid, arguments)

    monkeypatch.setattr(Context, "launch", noted)
    n, t, c, dtype = 2, 70, 40, "float16"
    random, context, kind = np.random.default_rng(0), launcher.context(), np.float16
    x, dy = (random.uniform(-1, 1, (n, t, c)).astype(kind) for _ in range(2))
    p = {
        name: random.uniform(-0.3, 0.3, shape).astype(kind)
        for name, shape in {"w_in": (3 * c, c), "w_out": (c, c), "b_in": (3 * c,), "b_out": (c,)}.items()
    }
    layer, on = layers.Attention(h=t, w=1, c=c, heads=heads), place(launcher, x)
    device = {name: place(launcher, array) for name, array in p.items()}
    results = []
    for by_sums in (True, False):
        second = (n, heads * t) if by_sums else (n, heads * t * stored_row(t))
        shapes = {"qkv": (n, 3 * t * c), "second": second, "mixed": (n, t * c)}
        saved = [
            launcher.unwritten(shape, np.float32 if by_sums and name == "second" else kind)
            for name, shape in shapes.items()
        ]
        gradients = {f"d{name}": launcher.unwritten(array.shape, kind) for name, array in p.items()}
        dx, seen[:] = room(launcher, x.shape, kind), []
        need = scratch.attention_workspace((n, t, c), heads, dtype, launcher.device, saves=True)
        self_attention.attention(
            context, on, **device, heads=heads, keep=saved, out=room(launcher, x.shape, kind),
            workspace=launcher.unwritten((need,), np.uint8),
        )  # fmt: skip
        need = scratch.attention_backward_workspace((n, t, c), heads, dtype, launcher.device, by_sums=by_sums)
        self_attention.attention_backward(
            context, place(launcher, dy), on, device["w_in"], device["w_out"], heads=heads, saved=saved, out=dx,
            workspace=launcher.unwritten((need,), np.uint8), **gradients,
        )  # fmt: skip
        expected = [
            each
            for pass_ in (Pass.FPROP, Pass.DGRAD)
            for each in planned.launches(layer, pass_, n, dtype, launcher.device, saves=True, by_sums=by_sums)
        ]
        between = [one for one in seen if one[0].startswith(("attend", "heads", "softmax"))]
        assert between == [(one.name, one.blocks) for one in expected]
        results.append([launcher.get(array).astype(float) for array in (dx, *gradients.values())])
    for got, want in zip(*results, strict=True):
        assert np.linalg.norm(got - want) < 2.0**-8 * np.linalg.norm(want)

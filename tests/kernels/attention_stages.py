"""
Attention on kernels, stage by stage: each from what the stage before it stored, so that a bound is of one stage alone.

What lies between the projections is kept by a forward pass in training; else it is read from the scratch memory, where
`cubatch/engine/native/self_attention.py` has it one behind the other.
"""

from __future__ import annotations

import math

import numpy as np

from cubatch.kernels.attention_launches import find, on_tensor_cores
from cubatch.kernels.padding import stored_row
from cubatch.kernels.workspace.attention_scratch import saved_bytes, stores_weights
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma
from tests.kernels.cases import bound, decoded

U = UNIT_ROUNDOFF["float32"]


class Stages:
    """
    The extents of an attention and how its elements are stored and multiplied.

    Args:
        shape: (n, t, c).
        heads: Number of heads.
        dtype: Storage; "tf32" is float32 whose projections round their factors.
        label: What is compared, for messages.
        device: By whose kernels; None: by none of a GPU.
    """

    def __init__(self, shape, heads, dtype, label="", *, device=None):
        (self.n, self.t, self.c), self.heads, self.width = shape, heads, shape[2] // heads
        self.stored, self.rounds, self.label = "float32" if dtype == "tf32" else dtype, dtype == "tf32", label
        kernel = None if device is None else find("attend", self.stored, device)
        self.on_tensor_cores = kernel is not None and on_tensor_cores(kernel)
        rows = self.n, heads, self.t, stored_row(self.t)
        self.shapes = (self.n, self.t, 3 * self.c), rows, (self.n, self.t, self.c)

    def between(self, workspace, kind, *, forward=False):
        """
        Queries, keys and values, weights and mixed values, or their gradients, of the scratch memory's bytes.

        Weights are None where a forward pass does without.
        """
        begin, found = 0, []
        sizes = list(saved_bytes((self.n, self.t, self.c), self.heads, self.stored))
        sizes[1] *= not forward or stores_weights(self.c, self.heads, saves=False)
        for size, shape in zip(sizes, self.shapes, strict=True):
            found.append(workspace[begin : begin + size].view(kind)[: math.prod(shape)] if size else None)
            begin += size
        return found

    def wide(self, arrays):
        """
        The same in float64, under their shapes, weights without the padding of their rows.

        Weights may be handed over without it, as the NumPy engine stores them.
        """
        pairs = zip(arrays, self.shapes, strict=True)
        wide = [None if array is None else decoded(array).reshape((*shape[:-1], -1)) for array, shape in pairs]
        return [array if array is None or number != 1 else array[..., : self.t] for number, array in enumerate(wide)]

    def parts(self, qkv):
        """Queries, keys and values, (n, heads, t, width) each."""
        return qkv.reshape(self.n, self.t, 3, self.heads, self.width).transpose(2, 0, 3, 1, 4)

    def by_head(self, mixed):
        """(n, t, c) to (n, heads, t, width)."""
        return mixed.reshape(self.n, self.t, self.heads, self.width).transpose(0, 2, 1, 3)

    def product(self, name, got, a, b, more=0.0, *, factor=1.0, projected=False):
        """A product of two factors, and what is added to it, stored once."""
        want, terms = factor * (a @ b) + more, factor * (abs(a) @ abs(b)) + abs(more)
        within = bound(a.shape[-1] + 3, terms, want, self.stored)
        if projected and self.rounds:  # both factors lose all but 10 bits after the point
            within = within + 2.1 * 2.0**-11 * terms
        assert_within(got.reshape(want.shape), want, within, label=f"{self.label} {name}")

    def forward(self, x, p, kept, y):
        """Check all that a forward pass wrote; arrays as they are stored, biases may be missing from `p`."""
        p = {name: decoded(array) for name, array in p.items()}
        qkv, weights, mixed = self.wide(kept)
        q, k, v = self.parts(qkv)
        x, y = (decoded(array).reshape(self.shapes[2]) for array in (x, y))
        self.product("queries, keys and values", qkv, x, p["w_in"].T, p.get("b_in", 0.0), projected=True)
        # A score is off by its sum, and by being stored where it is; then an exponential by a factor of 1 + 2 d, and a
        # weight by that, its sum's, and the roundings of both and of the quotient.
        scores, terms = (of @ to.swapaxes(-1, -2) / math.sqrt(self.width) for of, to in ((q, k), (abs(q), abs(k))))
        stored = self.stored if weights is not None else "float32"
        apart = bound(self.width + 3, terms, scores, stored).max(-1, keepdims=True)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        want = powers / powers.sum(-1, keepdims=True)
        # The argument of the exponential is rounded once more, with the largest difference of scores in a row.
        spread = (scores.max(-1) - scores.min(-1))[..., None]
        relative = np.expm1(4 * (apart + U * (spread + 2 * apart))) + gamma(self.t + 12, U)
        if weights is not None:
            stored = bound(1, 0.0, want, self.stored)
            assert_within(weights, want, (relative * want + stored) * (1 + 2.0**-7), label=f"{self.label} weights")
            self.product("mixed values", self.by_head(mixed), weights, v)
        else:  # what is scaled down by an exponential in every step of 32 keys loses a few roundings each time
            relative = relative + gamma(2 * self.t + 8 * -(-self.t // 32), U)
            off = relative * want
            # On tensor cores powers are rounded to what these take, before they are divided by their sum.
            if self.on_tensor_cores:
                off = off + (1 + relative) * bound(1, 0.0, powers, self.stored) / powers.sum(-1, keepdims=True)
            within = bound(1, off @ abs(v), want @ v, self.stored) + off @ abs(v)
            assert_within(self.by_head(mixed), want @ v, within, label=f"{self.label} mixed values")
        self.product("output", y, mixed, p["w_out"].T, p.get("b_out", 0.0), projected=True)

    def backward(self, dy, x, p, saved, gradients, between, dx=None):
        """Check all that a backward pass wrote; `gradients` by the names of the parameters."""
        p, grads = ({name: decoded(array) for name, array in of.items()} for of in (p, gradients))
        (qkv, weights, mixed), (dqkv, dscores, dmixed) = self.wide(saved), self.wide(between)
        (q, k, v), (dq, dk, dv), owed = self.parts(qkv), self.parts(dqkv), self.by_head(dmixed)
        dy, x = (decoded(array).reshape(-1, self.c) for array in (dy, x))
        self.product("dmixed", dmixed.reshape(-1, self.c), dy, p["w_out"], projected=True)
        self.product("dvalues", dv, weights.swapaxes(-1, -2), owed)
        # The gradient of the weights is stored before softmax's is written over it.
        dweights, terms = owed @ v.swapaxes(-1, -2), abs(owed) @ abs(v).swapaxes(-1, -2)
        apart, size = bound(self.width + 1, terms, dweights, self.stored), abs(dweights)
        want = weights * (dweights - (dweights * weights).sum(-1, keepdims=True))
        sums = (apart * weights).sum(-1, keepdims=True)
        rounded = gamma(self.t + 4, U) * ((size + apart) * weights).sum(-1, keepdims=True)
        within = weights * (apart + sums + rounded + gamma(4, U) * (size + apart))
        stored = bound(1, within + U * abs(want), want, self.stored)
        assert_within(dscores, want, within + stored, label=f"{self.label} dscores")
        factor = 1 / math.sqrt(self.width)
        self.product("dqueries", dq, dscores, k, factor=factor)
        self.product("dkeys", dk, dscores.swapaxes(-1, -2), q, factor=factor)
        dqkv = dqkv.reshape(-1, 3 * self.c)
        if dx is not None:
            self.product("dx", decoded(dx).reshape(x.shape), dqkv, p["w_in"], projected=True)
        for name, errors, of in (("in", dqkv, x), ("out", dy, mixed.reshape(-1, self.c))):
            self.product(f"dw_{name}", grads[f"w_{name}"], errors.T, of, projected=True)
            if f"b_{name}" in grads:
                ones = np.ones((1, len(errors)))
                self.product(f"db_{name}", grads[f"b_{name}"].reshape(1, -1), ones, errors)

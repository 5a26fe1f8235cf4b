"""Products of kernels/simt that are split into slices of their sums."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from cubatch.engine.native import conv, gemm
from cubatch.engine.native.operands import Fused
from tests.checks import assert_within
from tests.kernels import cases, epilogues
from tests.kernels.tiles import chooser, context

SPLIT = [
    ("conv2d_wgrad", cases.Conv(n=4, h=16, w=17, c=4, k=8, r=2, s=2)),
    ("conv2d_fprop", cases.Conv(n=1, h=3, w=3, c=252, k=8, r=3, s=3, pad=(1, 1, 1, 1))),
    ("conv2d_dgrad", cases.Conv(n=1, h=5, w=4, c=6, k=601, r=3, s=3, stride=(2, 1), pad=(1, 1, 1, 1))),
]


@pytest.mark.parametrize(("operation", "drawn"), SPLIT, ids=lambda value: str(value)[:14])
def test_a_split_product_repeats_itself_to_the_bit(launcher, operation, drawn):
    """Few tiles and a long gemm_k are split into slices, which are added up in one order; the bound stays."""
    seen, random = [], np.random.default_rng(1)

    def watch(problem, device, prepare):
        chosen = chooser(problem, device)
        seen.append(chosen.slices)
        return chosen

    where = launcher.context(chooser=watch)
    x, w, dy = (cases.drawn(random, shape) for shape in (drawn.x_shape, drawn.w_shape, drawn.y_shape))
    results = []
    for _ in range(2):
        if operation == "conv2d_fprop":
            out = conv.conv2d(where, launcher.put(x), launcher.put(w), **drawn.options)
            want, magnitude = (cases.conv2d(drawn, f(x), f(w)) for f in (np.float64, lambda v: abs(np.float64(v))))
            terms = w[0].size
        elif operation == "conv2d_dgrad":
            out = conv.conv2d_dgrad(where, launcher.put(dy), launcher.put(w), x_shape=x.shape, **drawn.options)
            want, magnitude = (
                cases.conv2d_dgrad(drawn, f(dy), f(w)) for f in (np.float64, lambda v: abs(np.float64(v)))
            )
            terms = drawn.k * 9
        else:
            out = launcher.unwritten(w.shape, np.float32)
            conv.conv2d_wgrad(where, launcher.put(x), launcher.put(dy), dw=out, **drawn.options)
            want, magnitude = (
                cases.conv2d_wgrad(drawn, f(x), f(dy))[0] for f in (np.float64, lambda v: abs(np.float64(v)))
            )
            terms = dy[..., 0].size
        results.append(launcher.get(out))
    assert min(seen) > 1
    assert results[0].tobytes() == results[1].tobytes()
    assert_within(results[0], want, cases.bound(terms + seen[0], magnitude, want), label=operation)


@pytest.mark.parametrize("slices", [31, 32, 40, 60])
@pytest.mark.parametrize(("c", "k"), [(5, 9), (8, 20)])
def test_many_slices_are_shared_out_to_warps_and_none_is_lost(launcher, c, k, slices):
    """From 32 on each warp adds up its share: of single elements and of four at once, the last block part empty."""
    drawn = cases.Conv(n=4, h=16, w=17, c=c, k=k, r=2, s=2)
    random = np.random.default_rng(slices)
    x, dy = (cases.drawn(random, shape) for shape in (drawn.x_shape, drawn.y_shape))
    where = launcher.context(chooser=lambda *about: attrs.evolve(chooser(*about), slices=slices))
    results = []
    for _ in range(2):
        out = launcher.unwritten(drawn.w_shape, np.float32)
        conv.conv2d_wgrad(where, launcher.put(x), launcher.put(dy), dw=out, **drawn.options)
        results.append(launcher.get(out))
    want, magnitude = (cases.conv2d_wgrad(drawn, f(x), f(dy))[0] for f in (np.float64, lambda v: abs(np.float64(v))))
    assert results[0].tobytes() == results[1].tobytes()
    assert_within(results[0], want, cases.bound(dy[..., 0].size + slices, magnitude, want), label="conv2d_wgrad")


def test_a_split_product_goes_through_the_whole_epilogue(launcher):
    """The reduction finishes elements as an unsplit product would: bias, residual in place, activation."""
    random = np.random.default_rng(5)
    for columns, kind in ((8, "relu"), (8, "silu"), (7, "relu6")):
        a, b, y = (cases.drawn(random, shape) for shape in ((5, 2400), (columns, 2400), (5, columns)))
        bias = cases.drawn(random, (columns,))
        out = launcher.put(y)
        where = context(launcher)
        left, right = launcher.put(a), launcher.put(b)
        problem = gemm.gemm_problem(where, left, right)
        assert where.choose(problem).slices > 1
        gemm.gemm(where, left, right, launcher.put(bias), out=out, fused=Fused(residual=out, activation=kind))
        plain = a.astype(np.float64) @ b.astype(np.float64).T + bias + y
        magnitude = abs(a).astype(np.float64) @ abs(b).astype(np.float64).T + abs(bias) + abs(y)
        tolerance = 1.1 * cases.bound(2410, magnitude, plain) + 1e-6
        assert_within(launcher.get(out), epilogues.true_activation(kind, plain), tolerance, axes="mn", label=kind)

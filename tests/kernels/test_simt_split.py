"""Products of kernels/simt that are split into slices of their sums."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from cubatch.engine.native import gemm
from cubatch.engine.native.operands import Fused
from tests import reference
from tests.checks import assert_within
from tests.kernels import cases
from tests.kernels.passes import Passes, repeats, watched
from tests.kernels.tiles import chooser, context

SPLIT = {
    "wgrad": cases.Conv(n=4, h=16, w=17, c=4, k=8, r=2, s=2),
    "fprop": cases.Conv(n=1, h=3, w=3, c=252, k=8, r=3, s=3, pad=(1, 1, 1, 1)),
    "dgrad": cases.Conv(n=1, h=5, w=4, c=6, k=601, r=3, s=3, stride=(2, 1), pad=(1, 1, 1, 1)),
}


@pytest.mark.parametrize("direction", SPLIT)
def test_a_split_product_repeats_itself_to_the_bit(launcher, direction):
    """Few tiles and a long gemm_k are split into slices, which are added up in one order; the bound stays."""
    choose, slices = watched(chooser)
    check = repeats(Passes(launcher, launcher.context(chooser=choose), more=64), direction, SPLIT[direction])
    assert 1 < min(slices) <= max(slices) <= check.more


@pytest.mark.parametrize("slices", [31, 32, 40, 60])
@pytest.mark.parametrize(("c", "k"), [(5, 9), (8, 20)])
def test_many_slices_are_shared_out_to_warps_and_none_is_lost(launcher, c, k, slices):
    """From 32 on each warp adds up its share: of single elements and of four at once, the last block part empty."""
    where = launcher.context(chooser=lambda *about: attrs.evolve(chooser(*about), slices=slices))
    repeats(Passes(launcher, where, more=slices), "wgrad", cases.Conv(n=4, h=16, w=17, c=c, k=k, r=2, s=2))


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
        assert_within(launcher.get(out), reference.activation(plain, kind=kind), tolerance, axes="mn", label=kind)

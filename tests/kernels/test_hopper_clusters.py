"""kernels/hopper in clusters of two blocks: each of its variants, blocks and clusters without a tile, slices."""

from __future__ import annotations

import functools
import itertools

import attrs
import numpy as np
import pytest

from cubatch.engine.native import gemm
from cubatch.engine.native.operands import Fused
from tests.checks import assert_within
from tests.cpusim import building
from tests.cpusim.simulator import SCHEDULES, Simulator
from tests.kernels import cases, hopper_cases
from tests.kernels.conftest import BUILD, Target
from tests.kernels.hopper_cases import H200, bound, chooser
from tests.kernels.passes import Passes

launcher = hopper_cases.launcher

LAYOUTS = {"float32": ("nn", "nt")}  # others have all three
EVERY = [(dtype, layout) for dtype in cases.DTYPES for layout in LAYOUTS.get(dtype, ("nn", "nt", "tn"))]

# (m, n, k) of 128 x 256 tiles: three rows of tiles, the last a part of one, so that the last cluster's second block has
# none; one; and two.  k goes around the ring and on.
ODD, SINGLE, EVEN = (264, 256, 392), (72, 520, 136), (256, 264, 72)


def rng(seed):
    return np.random.default_rng(seed)


def clustered(launcher, dtype, *, sms=2, slices=None):
    """Give the context in which clusters compute a type, on so many SMs."""
    tile = "128x256x32_c2" if dtype == "float32" else "128x256x64_c2"
    where = launcher.context(chooser=functools.partial(chooser, tile=tile, slices=slices), tf32=True)
    return attrs.evolve(where, device=attrs.evolve(launcher.device, num_sms=sms))


def passes(launcher, dtype, **changes):
    return Passes(launcher, clustered(launcher, dtype, **changes), dtype, bound=bound, more=changes.get("slices", 0))


@pytest.mark.parametrize("extents", [ODD, SINGLE, EVEN], ids=["odd", "single", "even"])
@pytest.mark.parametrize(("dtype", "layout"), EVERY)
def test_products_stay_within_the_rounding_of_their_sums(launcher, dtype, layout, extents):
    """Rows of tiles that are odd leave the second block of a cluster without any: it still loads half for both."""
    passes(launcher, dtype).product(layout, extents)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_each_block_loads_what_its_own_tile_is_added_to(launcher, dtype):
    """Of rows of tiles that are odd; the ring goes on behind it, since two SMs have several tiles each."""
    m, n, k = ODD[0], 2 * ODD[1] + 8, 136
    a, b = (cases.drawn(rng(seed), shape, dtype) for seed, shape in ((1, (m, k)), (2, (n, k))))
    residual = cases.encoded(np.arange(m * n).reshape(m, n) % 251 - 125.0, dtype)
    out = launcher.put(residual)
    where, fused = clustered(launcher, dtype), Fused(residual=out)
    gemm.gemm(where, launcher.put(a), launcher.put(b), layout="nt", out=out, fused=fused)
    a, b, residual = map(cases.decoded, (a, b, residual))
    want, magnitude = a @ b.T + residual, abs(a) @ abs(b).T + abs(residual)
    assert_within(cases.decoded(launcher.get(out)), want, bound(k + 2, magnitude, want, dtype), axes="mn")


@pytest.mark.parametrize(("dtype", "layout"), EVERY)
def test_slices_are_of_whole_clusters(launcher, dtype, layout):
    """Three slices of 13 steps or fewer on two clusters: the last one is shorter, and shared by both blocks."""
    passes(launcher, dtype, sms=4, slices=3).product(layout, (136, 72, 392))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_convolutions_passes_stay_within_the_rounding_of_their_sums(launcher, dtype):
    """Three rows of tiles forward and of a gradient; of a filter's one, so that every second block is idle."""
    drawn = cases.Conv(n=3, h=13, w=18, c=136, k=72, r=3, s=2, stride=(2, 1), dilation=(1, 2), pad=(2, 1, 0, 3))
    check = passes(launcher, dtype)
    check.fprop(drawn, bias=False)
    check.dgrad(drawn)
    if dtype != "float32":
        check.wgrad(drawn)


class Widened:
    """A launcher of grids that are four blocks wider than the host asks for."""

    def __init__(self, launcher):
        self.launcher, self.module = launcher, launcher.module

    def bind(self, kernel, grid, arguments):
        """Prepare a launch with two clusters more."""
        return self.launcher.bind(kernel, (grid[0] + 4, *grid[1:]), arguments)

    def launch(self, kernel, grid, arguments):
        """Launch it."""
        self.bind(kernel, grid, arguments)()


def test_clusters_without_a_tile_end_with_the_others(launcher):
    """Two clusters more than there are tiles: they have nothing to load, to compute or to wait for."""
    check = passes(launcher, "float16")
    attrs.evolve(check, where=attrs.evolve(check.where, launcher=Widened(launcher.launcher))).product("nt", SINGLE)


@pytest.mark.skipif(BUILD == "thread", reason="the same lines as above, in more orders")
@pytest.mark.parametrize("mode", list(itertools.product(SCHEDULES, ("late", "early"))), ids="-".join)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_results_are_exact_in_every_schedule(dtype, mode):
    """Two tiles a cluster, an odd one too, three times around the ring, in every order of threads and copies."""
    if reason := building.reason_to_skip():
        pytest.skip(reason)
    simulator = Simulator(90, BUILD, schedule=mode[0], copies=mode[1], seed=7)
    where = clustered(Target(H200, simulator), dtype)
    shapes = (392, 392), (264, 392)
    a, b = (cases.encoded(rng(seed).integers(-1, 2, shape), dtype) for seed, shape in enumerate(shapes))
    want = cases.decoded(a) @ cases.decoded(b).T
    assert abs(want).max() < 2**8
    assert np.array_equal(gemm.gemm(where, a, b), cases.encoded(want, dtype))

"""Products of rows that are no whole vectors, which the code of 1x1 convolutions computes."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from cubatch.engine.native import gemm, product
from cubatch.engine.native.operands import Fused
from cubatch.errors import InvalidArgument
from cubatch.hardware.facts import Device
from cubatch.kernels import variant
from cubatch.kernels.problem import Problem
from cubatch.kernels.ranking import SplitKernel, can_run, ranked
from tests.checks import assert_within
from tests.cpusim.simulator import Simulator
from tests.kernels import cases
from tests.kernels.tiles import context, operand


@pytest.mark.parametrize("widest", [1, 7, 22])
def test_a_sum_over_more_rows_than_an_image_has_pixels_goes_on_in_the_next(launcher, monkeypatch, widest):
    """Whole images and a residue; with 2^30 pixels in an image, a sum over any number of rows."""
    monkeypatch.setattr(product, "_WIDEST", widest)
    random = np.random.default_rng(widest)
    a, b = (operand(random, 23, extent, "float32", turned=False) for extent in (5, 3))
    out = launcher.unwritten((5, 3), np.float32)
    gemm.gemm(context(launcher), launcher.put(a), launcher.put(b), layout="tn", out=out)
    a, b = np.float64(a), np.float64(b)
    assert_within(launcher.get(out), a.T @ b, cases.bound(23, abs(a).T @ abs(b), a.T @ b))


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_a_sum_over_nothing_is_what_is_added_to_it(launcher, layout):
    """In every layout, though an image of no pixels or channels is none."""

    def choose(problem, *_):
        return SplitKernel(variant.find(problem.operation, "float32", family="simt", vector=1))

    a, b = (np.zeros(shape, np.float32) for shape in {"nn": ((5, 0), (0, 3)), "nt": ((5, 0), (3, 0))}.get(
        layout, ((0, 5), (0, 3))
    ))  # fmt: skip
    out = launcher.unwritten((5, 3), np.float32)
    bias = launcher.put(np.float32([1, 2, 3])) if layout == "nt" else None
    fused = Fused() if layout == "nt" else Fused(residual=launcher.put(np.float32([[1, 2, 3]] * 5)))
    where = launcher.context(chooser=choose)
    gemm.gemm(where, launcher.put(a), launcher.put(b), bias, layout=layout, out=out, fused=fused)
    assert launcher.get(out).tolist() == [[1, 2, 3]] * 5


def test_the_last_rows_of_more_than_2_to_the_31_elements_are_reached():
    """The last tile of a product whose left operand and result are that large."""
    last = Simulator(80, blocks=lambda grid: [(grid[0] - 1, 0, 0)])
    where = gemm.Context(
        Device(name="big", compute_capability=(8, 0), num_sms=4),
        last,
        lambda problem, *_: SplitKernel(variant.find(problem.operation, "float32", family="simt", vector=1)),
    )
    rows = 2**31 // 3 + 5
    a, out = (cases.reserved((rows, 3), np.float32) for _ in range(2))
    random = np.random.default_rng(0)
    a[-2:], b = cases.drawn(random, (2, 3)), cases.drawn(random, (3, 3))
    gemm.gemm(where, a, b, out=out)
    want = np.float64(a[-2:]) @ np.float64(b).T
    assert_within(out[-2:], want, cases.bound(3, np.abs(a[-2:]) @ np.abs(b).T, want))


@pytest.mark.parametrize(("rows", "depth", "columns"), [(3, 46341, 46341), (2**31, 1, 1)])
def test_a_product_by_an_operand_beyond_32_bits_runs_on_what_counts_further(rows, depth, columns):
    """A gradient's filter and images are counted in 32 bits: one less, and the code of a convolution may run it."""
    volta = Device(name="V100", compute_capability=(7, 0), num_sms=80)
    large = Problem("gemm_nn", "float16", rows, columns, depth, vector=8)
    small = attrs.evolve(large, n=columns - 1) if rows == 3 else attrs.evolve(large, m=rows - 1)
    assert {one.family for one in ranked(small, volta)} == {"mma", "simt"}
    assert {one.family for one in ranked(large, volta)} == {"mma"}
    assert not any(can_run(large, one) for one in ranked(small, volta) if one.family == "simt")
    with pytest.raises(InvalidArgument, match=r"fewer than 2\^31 rows and elements"):
        ranked(attrs.evolve(large, vector=1), volta)


def test_a_variant_that_cannot_count_so_far_is_refused_even_if_forced():
    """2^31 rows of one element, none of which is touched."""
    where = gemm.Context(
        Device(name="big", compute_capability=(8, 0), num_sms=4),
        Simulator(80),
        lambda problem, *_: SplitKernel(variant.find(problem.operation, "float32", family="simt", vector=1)),
    )
    a, out = (cases.reserved((2**31, 1), np.float32) for _ in range(2))
    with pytest.raises(InvalidArgument, match="right operand"):
        gemm.gemm(where, a, np.ones((1, 1), np.float32), layout="nn", out=out)

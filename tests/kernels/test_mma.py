"""
kernels/mma: every operation, tile shape, load width and type against float64, on the atoms of three architectures.

Operands are rounded to their type first, tf32 included, so that products are exact in float32 and a bound is that of
the sums alone.  Tensor cores cut off where others round (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA
tensor cores", PeerJ CS 2021, section 4): each of their additions counts as two roundings.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.engine.native import conv, gemm
from cubatch.hardware.facts import Device
from cubatch.kernels import ranking, variant
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma
from tests.cpusim.simulator import SCHEDULES, Simulator
from tests.kernels import cases, conftest, epilogues
from tests.kernels.passes import Passes, check_last_images, moments, repeats, watched
from tests.kernels.tiles import ACTIVATIONS, SEEDS, widened
from tests.thorough import examples

# Which tile an operation is tested with, by architecture and type: each tile shape, and each operation of each type.
OPERATIONS = ("gemm_nt", "gemm_nn", "gemm_tn", "conv2d_fprop", "conv2d_dgrad", "conv2d_wgrad")
TILES = {
    (70, "float16"): (*("128x128x32_s2_w4",) * 3, "64x64x32_s2", "128x64x32_s2", "128x128x32_s2"),
    (75, "float16"): ("128x64x32_s2", "128x128x32_s2", "64x64x32_s2", "128x128x32_s2", "64x64x32_s2", "256x128x32_s2"),
    (80, "float16"): ("128x128x32", "256x128x32", "64x64x32", "128x64x32", "64x64x32", "128x128x32_w4"),
    (80, "bfloat16"): ("64x64x32", "128x64x32", "128x128x32_w4", "64x64x32", "128x128x32", "64x64x32"),
    (80, "tf32"): ("128x64x16", "64x64x16_s3", "128x128x16", "64x64x16_s3", "64x64x16_s3", "256x128x16"),
}  # fmt: skip
NARROW = {70: "128x64x32_s2", 75: "128x64x32_s2", 80: "128x64x32"}
VECTORS = {"float16": 8, "bfloat16": 8, "tf32": 4}

FEW = settings(max_examples=12, deadline=None)


@pytest.fixture(scope="session", params=["cpusim-70", "cpusim-75", "cpusim-80", conftest.CUDA])
def launcher(request):
    """Give a target for each family of atoms, and the GPU of this machine."""
    return conftest.target(request.param)


def chooser(problem, device, prepare=None):
    """Choose the tile under test; on a GPU of another architecture, the first of the family."""
    arch = 10 * device.compute_capability[0] + device.compute_capability[1]
    if problem.vector == 4 and problem.dtype != "tf32":
        tile = NARROW[min(arch, 80)]
    elif (arch, problem.dtype) in TILES:
        tile = TILES[arch, problem.dtype][OPERATIONS.index(problem.operation)]
    else:
        first = next(found for found in ranking.ranked(problem, device) if found.family == "mma")
        return ranking.SplitKernel.modelled(problem, first, device)
    found = variant.find(problem.operation, problem.dtype, tile=tile, vector=problem.vector, family="mma")
    return ranking.SplitKernel.modelled(problem, found, device)


def context(launcher, dtype="float16", choose=chooser):
    return launcher.context(chooser=choose, tf32=dtype == "tf32")


def dtypes(launcher):
    """Give the types that the architecture multiplies."""
    return ("float16",) if launcher.arch < 80 else ("float16", "bfloat16", "tf32")


def stored(dtype):
    return "float32" if dtype == "tf32" else dtype


def drawn(random, shape, dtype):
    return cases.drawn(random, shape, stored(dtype))


def multiplied(array, dtype):
    """Give what an operand's elements are to the tensor cores: tf32 is rounded to 10 bits after the point."""
    values = cases.decoded(array)
    if dtype != "tf32":
        return values
    unit = 2.0 ** (np.frexp(values)[1] - 11)
    return np.sign(values) * np.floor(np.abs(values) / unit + 0.5) * unit


def bound(terms, magnitude, want, dtype):
    return cases.bound(2 * terms, magnitude, want, stored(dtype))


@st.composite
def products(draw):
    """Draw layout and extents (m, n, k) in vectors, so that residues are on every axis."""
    layout = draw(st.sampled_from(["nn", "nt", "tn"]))
    return layout, *(draw(st.integers(1, most)) for most in (18, 18, 8))


CONVOLUTIONS = cases.convolutions(most_n=3, most_extent=7, most_channels=5)
DIRECTIONS = ("fprop", "dgrad", "wgrad")


def passes(launcher, dtype, seed, choose=chooser):
    where, values = context(launcher, dtype, choose), functools.partial(multiplied, dtype=dtype)
    return Passes(launcher, where, stored(dtype), seed, values, bound)


def check(launcher, direction, shape, dtype, seed):
    """Forward with a bias and ReLU; the gradient of an input into a residual, in place, where a mask lets it."""
    ends = {
        "fprop": {"activation": "relu"}, "dgrad": {"parts": ("residual", "positive"), "in_place": "residual"}
    }.get(direction, {})  # fmt: skip
    getattr(passes(launcher, dtype, seed), direction)(shape, **ends)


@given(products(), st.integers(0, 2), ACTIVATIONS, epilogues.PARTS, SEEDS)
@FEW
def test_products_stay_within_the_rounding_of_their_sums(launcher, product, number, activation, parts, seed):
    """Each output is a dot product of length k and its layout's epilogue, in every type, residues on every axis."""
    dtype = dtypes(launcher)[number % len(dtypes(launcher))]
    layout, *extents = product
    extents = [VECTORS[dtype] * extent for extent in extents]
    passes(launcher, dtype, seed).product(layout, extents, activation=activation, parts=parts)


@given(products(), ACTIVATIONS, epilogues.PARTS, SEEDS)
@FEW
def test_products_of_narrow_rows_stay_within_the_rounding_of_their_sums(launcher, product, activation, parts, seed):
    """Rows of an odd number of 8 bytes, which nt and tn run by the code of 1x1 convolutions for."""
    layout, *extents = product
    narrow = variant.find(f"gemm_{layout}", "float16", tile=NARROW[min(launcher.arch, 80)], vector=4, family="mma")
    assert (narrow.entry == narrow.operation) == (layout == "nn")
    extents = [4 * (extent | 1) for extent in extents]
    passes(launcher, "float16", seed).product(layout, extents, activation=activation, parts=parts)


@given(CONVOLUTIONS, st.integers(0, 2), st.sampled_from(DIRECTIONS), SEEDS)
@settings(max_examples=examples(32), deadline=None)
def test_convolutions_stay_within_the_rounding_of_their_sums(launcher, shape, number, direction, seed):
    """All passes: any stride, one-sided pad, dilation and groups; phases without a tap too."""
    dtype = dtypes(launcher)[number % len(dtypes(launcher))]
    check(launcher, direction, widened(shape, VECTORS[dtype]), dtype, seed)


@pytest.mark.parametrize("channels", [8, 24, 64, 100, 512])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_channels_of_networks(launcher, direction, channels):
    """Whole steps of gemm_k, parts of one, several; 100 are loaded 4 at a time."""
    filters = min(channels, 104) if direction != "dgrad" else 24 if channels % 8 == 0 else 12
    shape = cases.Conv(n=3, h=5, w=4, c=channels, k=filters, r=3, s=2, stride=(2, 1), pad=(1, 0, 2, 1), dilation=(1, 2))
    for seed, dtype in enumerate(dtypes(launcher)):
        if channels % 8 == 0 or dtype != "bfloat16":
            check(launcher, direction, shape, dtype, seed)


def test_groups_see_nothing_of_each_other(launcher):
    """Channels of two groups, more than a tile of one, in all passes."""
    shape = cases.Conv(n=2, h=5, w=6, c=48, k=160, r=2, s=3, stride=(1, 2), pad=(1, 1, 0, 1), groups=2)
    for direction in DIRECTIONS:
        check(launcher, direction, shape, "float16", 2)


@pytest.mark.parametrize("kind", ["none", "relu", "silu"])
@pytest.mark.parametrize("columns", [76, 70])
def test_an_epilogue_folds_a_batch_norm_adds_a_residual_and_activates(launcher, kind, columns):
    """In this order, whether columns are stored 4 at a time or one by one; nothing is stored beyond the last."""
    for dtype in dtypes(launcher):
        passes(launcher, dtype, len(kind)).columns((70, columns, 40), kind)


@given(st.integers(1, 300), st.sampled_from([8, 7, 72]), st.integers(1, 6), SEEDS)
@settings(max_examples=6, deadline=None)
def test_statistics_give_batch_norm_its_mean_and_variance(launcher, pixels, filters, channels, seed):
    """The moments of the sums before they are rounded to be stored; also where the mean is far from zero."""
    random = np.random.default_rng(seed)
    x, w = drawn(random, (pixels, 8 * channels), "float16"), drawn(random, (filters, 8 * channels), "float16")
    b = cases.encoded(random.uniform(50, 100, filters), "float16")
    where, operands = context(launcher), [launcher.put(array) for array in (x, w, b)]
    _, got = moments(launcher, pixels, filters, lambda fused: gemm.gemm(where, *operands, fused=fused))
    count, mean, squares = got[:, 0], got[:, 1], got[:, 2]
    plain = cases.decoded(x) @ cases.decoded(w).T
    slack = bound(8 * channels + 300, abs(cases.decoded(x)) @ abs(cases.decoded(w)).T, plain, "tf32").max(axis=0)
    centre = gamma(4, UNIT_ROUNDOFF["float32"]) * 100
    assert (count.sum(axis=0) == pixels).all()
    total = (count * mean).sum(axis=0) / pixels
    assert_within(total, plain.mean(axis=0) + cases.decoded(b), slack + centre, axes="k", label="mean")
    whole = squares.sum(axis=0) + (count * (mean - total) ** 2).sum(axis=0)
    spread = abs(plain - plain.mean(axis=0)).max(axis=0)
    error = slack + centre  # of each deviation
    tolerance = pixels * (gamma(900, UNIT_ROUNDOFF["float32"]) * spread**2 + 4 * spread * error + 4 * error**2)
    assert_within(whole, ((plain - plain.mean(axis=0)) ** 2).sum(axis=0), tolerance, axes="k", label="squares")


SPLIT = {
    "wgrad": cases.Conv(n=4, h=17, w=18, c=8, k=8, r=2, s=2),
    "fprop": cases.Conv(n=1, h=3, w=3, c=120, k=8, r=3, s=3, pad=(1, 1, 1, 1)),
    "dgrad": cases.Conv(n=1, h=5, w=4, c=8, k=360, r=3, s=3, stride=(2, 1), pad=(1, 1, 1, 1)),
}


@pytest.mark.parametrize("direction", SPLIT)
def test_a_split_product_stays_within_its_bound_and_repeats_itself_to_the_bit(launcher, direction):
    """Few tiles and a long gemm_k are split into slices, which are added up in one order."""
    choose, slices = watched(chooser)
    repeats(passes(launcher, "float16", 1, choose), direction, SPLIT[direction])
    assert min(slices) > 1


@pytest.mark.parametrize("mode", list(itertools.product(SCHEDULES, ("late", "early"))), ids="-".join)
@pytest.mark.parametrize("layout", ["nt", "tn"])
def test_no_order_of_threads_and_copies_changes_a_bit(mode, layout):
    """Whoever goes first, and whenever a copy arrives: a ring that is read or filled too soon would show."""
    conftest.target("cpusim-80")
    random, device = np.random.default_rng(11), Device(name="small", compute_capability=(8, 0), num_sms=4)
    a, b = (drawn(random, (200, 72) if layout == "tn" else (72, 200), "float16") for _ in range(2))

    def multiply(schedule, copies):
        simulator = Simulator(80, conftest.BUILD, schedule=schedule, copies=copies, seed=7)
        return gemm.gemm(conv.Context(device, simulator, chooser), a, b, layout=layout)

    assert multiply(*mode).tobytes() == multiply("in_order", "early").tobytes()


BIG = cases.Conv(n=2**16 + 3, h=8, w=8, c=512, k=8, r=3, s=3, pad=(1, 1, 1, 1))


@pytest.mark.heavy
def test_offsets_beyond_2_to_the_31_reach_the_last_images():
    """A batch whose activation has more than 2^31 elements: the last tile of the forward pass and of the gradient."""
    conftest.target("cpusim-80")
    last = Simulator(80, conftest.BUILD, blocks=lambda grid: [(grid[0] - 1, 0, 0)])
    where = conv.Context(Device(name="big", compute_capability=(8, 0), num_sms=4), last, chooser)
    check_last_images(where, BIG, "float16", bound)


def is_free_of_conflicts(bytes_, size, together):
    """Tell whether threads that are served together, `size` bytes each, meet no bank twice; equal places are one."""
    groups = (np.unique(group) // 4 % 32 for group in bytes_.reshape(-1, together))
    return all(
        len(set(banks)) == len(banks) for banks in (np.add.outer(g, np.arange(size // 4)).ravel() for g in groups)
    )


MMA_TILES = sorted({(found.min_arch, found.dtype, found.tile.name, found.vector) for found in variant.kernels()
                    if found.family == "mma" and found.dtype != "bfloat16"})  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize(("arch", "dtype", "tile", "vector"), MMA_TILES)
def test_no_two_threads_that_are_served_together_meet_in_a_bank(arch, dtype, tile, vector):
    """Shared memory serves 128 bytes at a time: 8 threads of 16 bytes, 16 of 8, 32 of 4, and the 8 rows of a matrix."""
    conftest.target(f"cpusim-{arch}")
    of_gemm = variant.find("gemm_nt", dtype, tile=tile, vector=vector, family="mma")
    source = str(Path(__file__).parent / "mma_places.cu")
    found = cases.attrs.evolve(of_gemm, source=source, entry="places", operation="places")
    places = np.empty((4, found.threads, 2), np.uint32)
    Simulator(arch, conftest.BUILD).launch(found, (1, 1, 1), [places])
    copied = vector * (4 if dtype == "tf32" else 2)
    for layout in range(4):
        along_outer = layout % 2 == 1
        read = 16
        if along_outer and dtype == "tf32":
            read = 4
        elif along_outer and arch < 75:
            read = 8
        assert is_free_of_conflicts(places[layout, :, 0], copied, 128 // copied)
        assert is_free_of_conflicts(places[layout, :, 1], read, 128 // read)


def test_every_tile_is_tested():
    """A new one belongs into this file."""
    ours = [found for found in variant.kernels() if found.family == "mma"]
    tested = {tile for tiles in TILES.values() for tile in tiles}
    assert {found.tile.name for found in ours} == tested
    assert {found.tile.name for found in ours if found.vector == 4 and found.dtype != "tf32"} == set(NARROW.values())

"""kernels/hopper: every operation and type against float64, blocks that compute several tiles each."""

from __future__ import annotations

import functools
import itertools

import attrs
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from cubatch.engine.native import gemm
from cubatch.engine.native.context import Context
from cubatch.engine.native.operands import Fused
from cubatch.errors import DeviceFailed
from cubatch.kernels import tensor_map
from cubatch.kernels.problem import Problem
from cubatch.kernels.ranking import most_partial_bytes, ranked
from cubatch.kernels.workspace.product_scratch import product_workspace
from cubatch.network.windows import conv_shape
from tests.checks import assert_within
from tests.kernels import cases, epilogues, hopper_cases, patches
from tests.kernels.conftest import BUILD
from tests.kernels.hopper_cases import H200, TILES, bound, context, element
from tests.kernels.passes import Passes
from tests.kernels.tiles import SEEDS

launcher = hopper_cases.launcher

FEW = settings(max_examples=16 if BUILD == "plain" else 4, deadline=None)


@st.composite
def products(draw):
    """
    Draw type, layout, extents (m, n, k) and whether tiles are swapped.

    Rows of whole 16 bytes, all else odd; k goes around the ring, and m beyond two tiles.
    """
    dtype, layout = draw(st.sampled_from([
        *itertools.product(("float16", "bfloat16", "float32"), ("nn", "nt", "tn")),
    ]))  # fmt: skip
    swapped = layout != "tn" and draw(st.booleans())
    along_k = layout != "tn" or dtype == "float32"  # whose operands are transposed first
    rows = {"m": layout[0] == "t", "n": layout[1] == "n", "k": along_k}
    extents = {"m": 1100, "n": 150, "k": 400} if swapped else {"m": 300, "n": 290, "k": 600}
    units = {name: (4 if dtype == "float32" else 8) if rows[name] else 1 for name in extents}
    drawn = (units[name] * draw(st.integers(1, most // units[name])) for name, most in extents.items())
    return dtype, layout, *drawn, swapped


def passes(launcher, dtype, seed=0, **how):
    return Passes(launcher, context(launcher, **how), dtype, seed, bound=bound)


@given(products(), st.sampled_from(["none", "relu", "silu"]), epilogues.PARTS, SEEDS)
@example(("float16", "nn", 200, 136, 72, False), "none", (), 1)  # stored by the copy engine
@example(("bfloat16", "tn", 200, 136, 72, False), "none", (), 2)
@FEW
def test_products_stay_within_the_rounding_of_their_sums(launcher, product, activation, parts, seed):
    """Each output is a dot product of length k and its layout's epilogue, residues on every axis."""
    dtype, layout, *extents, swapped = product
    check = passes(launcher, dtype, seed, swapped=swapped)
    check.product(layout, extents, activation=activation, parts=parts)


@st.composite
def convolutions(draw, *dtypes, most_n=3):
    """Draw a type and a convolution without groups, of channels in 16-byte rows: less than a box, a box, and more."""
    dtype = draw(st.sampled_from(dtypes))
    drawn = draw(cases.convolutions(most_n=most_n, most_extent=12).filter(lambda conv: conv.groups == 1))
    channels = st.sampled_from([8, 24, 64, 72, 136, *([100] if dtype == "float32" else [])])
    return dtype, attrs.evolve(drawn, c=draw(channels), k=draw(channels))


@given(convolutions(*cases.DTYPES, most_n=11), st.booleans(), SEEDS)
@FEW
def test_fprop_stays_within_the_rounding_of_its_sums(launcher, convolution, swapped, seed):
    """Any stride, one-sided pad and dilation, images that differ in height and width, with bias and ReLU."""
    dtype, drawn = convolution
    passes(launcher, dtype, seed, swapped=swapped).fprop(drawn, activation="relu")


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_plain_dgrad_of_one_phase_is_stored_by_the_copy_engine(launcher, dtype):
    """What training runs most: stride 1 and nothing fused; the last rows are a part of a tile."""
    drawn = cases.Conv(n=3, h=9, w=11, c=72, k=64, r=3, s=2, pad=(1, 1, 0, 1))
    passes(launcher, dtype).dgrad(drawn)


@given(
    convolutions(*cases.DTYPES, most_n=11),
    st.booleans(),
    st.booleans(),
    st.sampled_from(("residual", "positive")),
    SEEDS,
)
@FEW
def test_dgrad_adds_to_a_residual_and_masks_by_relu(launcher, convolution, swapped, phased, in_place, seed):
    """Each phase of the stride writes its pixels, also those without a tap; one operand has the output's memory."""
    dtype, drawn = convolution
    check = passes(launcher, dtype, seed, swapped=swapped, phased=phased)
    check.dgrad(drawn, parts=("residual", "positive"), in_place=in_place)


@pytest.mark.parametrize("parts", [(), ("residual",), ("positive",), ("residual", "positive")], ids="-".join)
@pytest.mark.parametrize(("stride", "taps"), [((2, 2), 3), ((2, 2), 1), ((3, 2), 3)], ids=str)
@pytest.mark.parametrize(("dtype", "how"), [*((dtype, {}) for dtype in TILES), ("float16", {"swapped": True})], ids=str)
def test_phases_finished_in_registers_are_stored_as_staged_ones(launcher, walks, dtype, how, stride, taps, parts):
    """Bit by bit: phases of unequal width, several tiles each, some without a tap, six of them in two launches."""
    drawn = cases.Conv(n=9, h=13, w=15, c=72, k=64, r=taps, s=taps, stride=stride, pad=(taps // 2,) * 4)
    staged = passes(launcher, dtype, **how).dgrad(drawn, parts=parts)
    assert not any(walk["stores_tiles"] for walk in walks)
    walks.clear()
    finished = passes(launcher, dtype, **how, phased=True).dgrad(drawn, parts=parts)
    flags = [tuple(bool(walk[name]) for name in ("stores_tiles", "adds_tiles", "masks_tiles")) for walk in walks]
    assert {*flags} == {(True, "residual" in parts, "positive" in parts)}
    np.testing.assert_array_equal(finished, staged)


def test_strides_beyond_a_tensor_maps_are_staged(launcher, walks):
    """Pixels more than 8 apart have no window; the same kernel stores them the other way."""
    drawn = cases.Conv(n=2, h=20, w=11, c=24, k=64, r=1, s=1, stride=(9, 1))
    passes(launcher, "float16", phased=True).dgrad(drawn, parts=("positive",))
    assert [bool(walk["stores_tiles"]) for walk in walks] == [False] * len(walks) != []


class Counting:
    """A launcher that counts the phases of each gradient that it prepares."""

    def __init__(self, launcher):
        self.launcher, self.module, self.phases = launcher, launcher.module, []

    def bind(self, kernel, grid, arguments):
        """Prepare a launch."""
        walks = next(one["of"] for one in arguments if getattr(getattr(one, "dtype", None), "names", None) == ("of",))
        self.phases.append(int((walks["tiles_m"] > 0).sum()))
        return self.launcher.bind(kernel, grid, arguments)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_phases_of_a_stride_are_launched_four_at_a_time(launcher, dtype):
    """Nine of a stride of 3, of which those that two taps reach have twice the steps; the last launch has one."""
    drawn = cases.Conv(n=2, h=11, w=13, c=72, k=64, r=4, s=5, stride=(3, 3), pad=(1, 1, 2, 0))
    counting, check = Counting(launcher.launcher), passes(launcher, dtype)
    if dtype == "float32":  # transposed by a launch that has no phases
        counting.bind = launcher.launcher.bind
    attrs.evolve(check, where=attrs.evolve(check.where, launcher=counting)).dgrad(drawn)
    assert counting.phases == ([] if dtype == "float32" else [4, 4, 1])


@pytest.mark.parametrize(("is_added", "is_masked", "phases"), [(True, False, 1), (True, True, 4), (False, False, 4)])
def test_phases_without_a_tap_are_done_where_they_change_something(launcher, is_added, is_masked, phases):
    """Of a 1x1 filter at stride 2 one phase of four has a tap: the others write zeros, mask, or add nothing."""
    drawn = cases.Conv(n=2, h=9, w=11, c=72, k=64, r=1, s=1, stride=(2, 2))
    counting, check = Counting(launcher.launcher), passes(launcher, "float16")
    check = attrs.evolve(check, where=attrs.evolve(check.where, launcher=counting))
    parts = ("residual",) * is_added + ("positive",) * is_masked
    check.dgrad(drawn, parts=parts, in_place="residual" if is_added else "")
    assert counting.phases == [phases]


ROWS = [
    cases.Conv(n=3, h=7, w=9, c=16, k=24, r=4, s=4),  # 7x7 of stride 2 over patches: a row of taps fills a box
    cases.Conv(n=4, h=9, w=10, c=16, k=64, r=2, s=2, dilation=(2, 1)),  # 3x3 of stride 2: half a box
    cases.Conv(n=2, h=8, w=13, c=8, k=8, r=3, s=4, stride=(2, 3), pad=(1, 2, 0, 0)),
    cases.Conv(n=2, h=5, w=12, c=24, k=72, r=2, s=4, stride=(1, 2)),  # a box and a half
]


@pytest.mark.parametrize("drawn", ROWS, ids=["4x4", "2x2", "3x4", "2x4"])
@pytest.mark.parametrize(("dtype", "swapped"), [*((dtype, False) for dtype in cases.DTYPES), ("float16", True)])
def test_taps_of_a_row_are_gathered_as_channels_of_one_pixel(launcher, drawn, dtype, swapped):
    """Pixels of few channels overlap in the tensor map, forward and for the filter; no other tap or row is met."""
    shape = conv_shape(drawn.x_shape[1:], drawn.w_shape, drawn.stride, drawn.pad, drawn.dilation)
    assert tensor_map.gathered(shape)[0].taps == drawn.r
    assert tensor_map.can_gather("conv2d_fprop", shape, drawn.n)
    check = passes(launcher, dtype, swapped=swapped)
    check.fprop(drawn, activation="relu")
    if dtype in TILES and not swapped:
        check.wgrad(drawn)


def test_a_driver_that_refuses_overlapping_pixels_loses_only_their_problems(launcher, monkeypatch):
    """That convolution is right by another family and asks once; other convolutions stay with this one."""
    check, bind, bound_families = passes(launcher, "float16"), launcher.launcher.bind, []

    def refuse(kernel, grid, arguments):
        images = [each for each in arguments if isinstance(each, tensor_map.TensorMap) and each.window]
        bound_families.append(kernel.family)
        if any(image.strides[0] < image.dims[0] * image.item_bytes for image in images):
            raise DeviceFailed.by_driver(f"launching {kernel.name}", 1)
        return bind(kernel, grid, arguments)

    monkeypatch.setattr(check.where.launcher, "bind", refuse)
    for drawn in (ROWS[0], ROWS[0], attrs.evolve(ROWS[0], c=32)):
        check.fprop(drawn)
    first, second, again, other = bound_families
    assert first == other == "hopper"
    assert "hopper" not in {second, again}


@pytest.mark.parametrize("name", patches.SHAPES)
@pytest.mark.parametrize("dtype", TILES)
def test_a_batch_in_patches_is_convolved(launcher, dtype, name):
    """Forward and for the filter, whose taps and channels come from those of three channels and return there."""
    drawn = attrs.evolve(patches.SHAPES[name], k=24)
    check = attrs.evolve(passes(launcher, dtype), stored=functools.partial(patches.cut, drawn))
    if drawn.stride == (3, 1):  # rows of 12 channels are no multiples of 16 bytes
        check = attrs.evolve(check, where=launcher.context())
    check.fprop(drawn)
    check.wgrad(drawn)


@given(convolutions(*TILES), SEEDS)
@FEW
def test_wgrad_stays_within_the_rounding_of_its_sums(launcher, convolution, seed):
    """A filter element's gradient is a sum over all output pixels, of whichever tap and box of channels."""
    dtype, drawn = convolution
    passes(launcher, dtype, seed).wgrad(drawn)


@pytest.mark.parametrize("adds", [False, True])
def test_the_filters_gradient_of_a_1x1_convolution_is_transposed_in_tf32(launcher, adds):
    """Its operands have a row for each pixel, and its result has four axes."""
    passes(launcher, "float32").wgrad(cases.Conv(n=3, h=6, w=10, c=36, k=140, r=1, s=1), adds=adds)


@pytest.fixture
def walks(monkeypatch):
    """Return a list that receives how each launch walks over its tiles."""
    seen, launch = [], Context.launch

    def noted(context, kernel, grid, arguments):
        seen.extend(value["of"][0] for value in arguments if isinstance(value, np.void) and "of" in value.dtype.names)
        launch(context, kernel, grid, arguments)

    monkeypatch.setattr(Context, "launch", noted)
    return seen


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mask_comes_through_the_ring(launcher, walks, dtype, swapped, is_added):
    """A sum passes where its own element is positive or NaN, not where it is zero: of several tiles, cut off twice."""
    (m, n), k, random = (1100, 72) if swapped else (300, 296), 72, np.random.default_rng(4)
    a, b = cases.drawn(random, (m, k), dtype), cases.drawn(random, (k, n), dtype)
    values = random.choice([-1.0, -0.0, 0.0, 2.0, np.nan], size=(m, n))
    residual = cases.drawn(random, (m, n), dtype) if is_added else cases.encoded(np.zeros((m, n)), dtype)
    fused = Fused(mask=launcher.put(cases.encoded(values, dtype)))
    fused = attrs.evolve(fused, residual=launcher.put(residual)) if is_added else fused
    out = launcher.unwritten((m, n), element(dtype))
    where = context(launcher, swapped=swapped)
    gemm.gemm(where, launcher.put(a), launcher.put(b), layout="nn", out=out, fused=fused)
    assert [(bool(w["stores_tiles"]), bool(w["adds_tiles"]), bool(w["masks_tiles"])) for w in walks] == [
        (True, is_added, True)
    ]
    a, b, residual = map(cases.decoded, (a, b, residual))
    passes = ~(values <= 0)
    want, magnitude = np.where(passes, a @ b + residual, 0), abs(a) @ abs(b) + abs(residual)
    within = np.where(passes, bound(k + 1, magnitude, want, dtype), 0)
    assert_within(cases.decoded(launcher.get(out)), want, within, axes="mn", label=dtype)


@pytest.mark.parametrize("swapped", [False, True])
def test_scale_and_shift_are_of_columns(launcher, swapped):
    """A folded batch norm, bias and residual at once, where rows are stored 4 at a time and where not."""
    for n in (72, 70):
        passes(launcher, "float16", n, swapped=swapped).columns((130, n, 64))


@pytest.mark.parametrize("extents", [(300, 296, 72), (130, 72, 200)], ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_residual_comes_to_its_own_element(launcher, swapped, in_place, dtype, extents):
    """Of several tiles, cut off on both axes, with bias and ReLU; from the output's own place too."""
    (m, n, k), random = extents, np.random.default_rng(9)
    a, b, bias = (cases.drawn(random, shape, dtype) for shape in ((m, k), (n, k), (n,)))
    residual = cases.encoded(np.arange(m * n).reshape(m, n) % 251 - 125.0, dtype)  # neighbours far apart
    added = launcher.put(residual)
    out = added if in_place else launcher.unwritten((m, n), element(dtype))
    fused = Fused(residual=added, activation="relu")
    where = context(launcher, swapped=swapped)
    gemm.gemm(where, launcher.put(a), launcher.put(b), launcher.put(bias), out=out, fused=fused)
    a, b, bias, residual = map(cases.decoded, (a, b, bias, residual))
    want, magnitude = a @ b.T + bias + residual, abs(a) @ abs(b).T + abs(bias) + abs(residual)
    within = bound(k + 3, magnitude, np.maximum(want, 0), dtype)
    assert_within(cases.decoded(launcher.get(out)), np.maximum(want, 0), within, axes="mn", label=dtype)


def test_a_residual_takes_the_ring_where_it_can(launcher, walks):
    """Of 16 bits, at multiples of 16 bytes, with a bias and a ReLU at most; else sums are stored another way."""
    n = 72

    def ways(dtype, *, tile=None, offset=0, ends=()):
        """Whether the copy engine stores the product, and whether it brings the residual."""
        random, kind = np.random.default_rng(1), element(dtype)
        a, b = (launcher.put(cases.drawn(random, shape, dtype)) for shape in ((130, 64), (n, 64)))
        residual = launcher.put(np.zeros(130 * n + offset, kind))[offset:].reshape(130, n)
        fused = Fused(residual=residual, **{name: launcher.put(np.ones(n, np.float32)) for name in ends})
        where = launcher.context(chooser=functools.partial(hopper_cases.chooser, tile=tile), tf32=True)
        walks.clear()
        gemm.gemm(where, a, b, out=launcher.put(np.zeros((130, n), kind)), fused=fused)
        (walk,) = walks
        return bool(walk["stores_tiles"]), bool(walk["adds_tiles"])

    assert ways("float16") == ways("bfloat16") == (True, True)
    assert ways("float32") == (False, False)
    assert ways("float16", offset=4) == (False, False)
    assert ways("float16", ends=("scale", "shift")) == (True, True)
    assert ways("float16", tile="256x64x64") == (True, True)
    assert ways("float32", tile="256x64x32") == (False, False)


@pytest.mark.parametrize(
    ("extents", "taken"),
    [((64, 8192, 16384), True), ((64, 8192, 16388), False), ((64, 4, 32 * 65535), True), ((64, 4, 32 * 65536), False)],
)
def test_a_large_operand_is_not_transposed(extents, taken):
    """Tf32 wants b along gemm_k: a copy of up to 512 MiB, of rows that a grid's second axis has."""
    problem = Problem("gemm_nn", "tf32", *extents, vector=4)
    assert ("hopper" in {found.family for found in ranked(problem, H200)}) == taken
    assert "hopper" in {found.family for found in ranked(attrs.evolve(problem, dtype="float16", vector=8), H200)}
    copied = 4 * extents[1] * extents[2] if taken else 0
    partials = max(most_partial_bytes(problem, found) for found in ranked(problem, H200))
    assert copied <= product_workspace(problem, H200) <= copied + partials


REFUSED = [
    ("conv2d_fprop", {"groups": 2}, "groups"),
    ("conv2d_fprop", {"stride": (9, 1)}, "steps of more than 8 pixels"),
    ("conv2d_wgrad", {"dilation": (1, 130)}, "a corner beyond -128"),
    ("conv2d_dgrad", {"dilation": (130, 1)}, "the same, of the gradient"),
    ("conv2d_fprop", {"samples": 1 << 18}, "2^31 pixels"),
]


@pytest.mark.parametrize(("operation", "change", "reason"), REFUSED, ids=lambda value: str(value)[:14])
def test_what_tensor_maps_cannot_say_goes_elsewhere(operation, change, reason):
    """Each limit refuses alone; the same convolution without it is taken."""
    facts = {"stride": (1, 1), "dilation": (1, 1), "groups": 1, "samples": 4}

    def taken(stride, dilation, groups, samples):
        shape = conv_shape((300, 301, 64), (64, 3, 3, 64 // groups), stride, (2, 2, 2, 2), dilation, groups=groups)
        return tensor_map.can_gather(operation, shape, samples)

    assert taken(**facts)
    assert not taken(**facts | change), reason

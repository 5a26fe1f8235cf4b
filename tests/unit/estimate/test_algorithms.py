"""What a vendor's library could run for a pass, against the layer's own arithmetic, and its time by hand."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.estimate.block_counts import FUSED_PIXELS, num_blocks
from cubatch.estimate.vendor.algorithms import (
    FAMILIES,
    PASSES,
    TILES,
    WINOGRAD_TILES,
    Work,
    algorithms,
    seconds,
)
from cubatch.network.layers import Conv2d, Linear
from cubatch.network.passes import Pass
from tests.checks import assert_within, gamma
from tests.thorough import THOROUGH, examples
from tests.unit.estimate.building import CASES, constants_of, convolutions, places_of, work_of

FEW = settings(max_examples=examples(40))


def by_name(found):
    """The algorithms, by name."""
    return {one.name: one for one in found}


# --- the product of a pass -----------------------------------------------------------------------------------


@FEW
@given(layer=convolutions(), n=st.integers(1, 300))
def test_the_product_of_a_pass_is_the_layers_own(layer, n):
    """Forward and filter gradient are one product each; the phases of an input gradient share its pixels and depth."""
    work = work_of(*((layer, pass_, n) for pass_ in PASSES))
    got = np.stack([work.m, work.columns, work.depth], axis=1).tolist()
    (forward,), (filters,) = layer.gemms(Pass.FPROP, n), layer.gemms(Pass.WGRAD, n)
    assert got[0] == [forward.m, forward.n, forward.k]
    assert got[2] == [filters.m, filters.n, filters.k]
    phases = layer.gemms(Pass.DGRAD, n)
    assert got[1][1] == phases[0].n
    # A pixel between the taps of a stride beyond the filter is in no phase, though its gradient, zero, is written.
    assert sum(gemm.m for gemm in phases) <= got[1][0] == n * layer.h * layer.w
    assert sum(gemm.k for gemm in phases) <= got[1][2] == layer.k // layer.groups * layer.r * layer.s
    if layer.stride == (1, 1):
        assert len(phases) == 1
        assert got[1] == [phases[0].m, phases[0].n, phases[0].k]


@FEW
@given(layer=st.builds(Linear, c=st.integers(1, 5000), k=st.integers(1, 5000)), n=st.integers(1, 5000))
def test_a_linear_layer_is_a_convolution_of_one_pixel(layer, n):
    """Its three products are those of a 1x1 filter, and it does not count as a convolution."""
    work = work_of(*((layer, pass_, n) for pass_ in PASSES))
    want = [[gemm.m, gemm.n, gemm.k] for pass_ in PASSES for gemm in layer.gemms(pass_, n)]
    assert np.stack([work.m, work.columns, work.depth], axis=1).tolist() == want
    assert not work.convolution.any()


@FEW
@given(layer=convolutions(), n=st.integers(1, 300))
def test_flops_and_elements_are_those_of_the_layer(layer, n):
    """Every pass of a convolution has the FLOP of its forward pass, and moves the same three tensors."""
    work = work_of(*((layer, pass_, n) for pass_ in PASSES))
    assert work.flops.tolist() == [n * layer.flops()] * 3
    assert work.input_elements.tolist() == [n * math.prod(layer.input_shape)] * 3
    assert work.output_elements.tolist() == [n * math.prod(layer.output_shape)] * 3
    assert work.filter_elements.tolist() == [layer.parameters] * 3


@FEW
@given(cases=CASES)
def test_a_table_is_cut_row_by_row(cases):
    """`take` keeps the rows of a mask."""
    got, want = work_of(*cases).take(np.arange(len(cases)) % 2 == 0), work_of(*cases[::2])
    for field in attrs.fields(Work):
        assert getattr(got, field.name).tolist() == getattr(want, field.name).tolist(), field.name


# --- grids ---------------------------------------------------------------------------------------------------


@FEW
@given(layer=convolutions(strides=(1,)), pass_=st.sampled_from(list(Pass)), n=st.integers(1, 300))
def test_tiles_of_a_product_are_counted_as_everywhere_in_cubatch(layer, pass_, n):
    """The grid of each tile is `blocks.num_blocks`, groups included."""
    found = by_name(algorithms(work_of((layer, pass_, n)), np.array([48.0])))
    for tile in TILES:
        one = found["{}x{}".format(*tile)]
        assert one.blocks.tolist() == [num_blocks(layer, pass_, n, tile)]
        assert one.tile == tile[0] * tile[1]


@FEW
@given(layer=convolutions(), n=st.integers(1, 100))
def test_a_scattered_gradient_is_the_product_of_outputs_and_filters(layer, n):
    """Outputs times filters, for each tap of each channel one: every product is added to the pixel it belongs to."""
    found = by_name(algorithms(work_of((layer, Pass.DGRAD, n)), np.array([48.0])))
    p, q, k = layer.output_shape
    taps = layer.c // layer.groups * layer.r * layer.s
    # As if each output were the only pixel of an image, and each tap a channel of its own.
    alone = Conv2d(h=1, w=1, c=k, k=layer.groups * taps, r=1, s=1, groups=layer.groups)
    for tile in TILES:
        one = found["{}x{} scattered".format(*tile)]
        assert one.blocks.tolist() == [num_blocks(alone, Pass.FPROP, n * p * q, tile)]
        assert one.depth.tolist() == [k // layer.groups]
        assert one.partial_elements.tolist() == [n * p * q * layer.groups * taps]


@FEW
@given(
    h=st.integers(1, 40), w=st.integers(1, 40), c=st.integers(1, 200), k=st.integers(1, 200), n=st.integers(1, 100),
    pass_=st.sampled_from([Pass.FPROP, Pass.DGRAD]), pad=st.integers(1, 2),
)  # fmt: skip
def test_winograds_grids_are_counted_as_everywhere_in_cubatch(h, w, c, k, n, pass_, pad):
    """Fused takes the fewest blocks of the vendor's shapes; the 36 products have tiles of their own."""
    layer = Conv2d(h=h, w=w, c=c, k=k, r=3, s=3, pad=pad)
    found = by_name(algorithms(work_of((layer, pass_, n)), np.array([48.0])))
    rows, columns, filters = layer.output_shape if pass_ is Pass.FPROP else layer.input_shape
    pieces = (
        len(range(0, n, images)) * len(range(0, rows, height)) * len(range(0, columns, width))
        for images, height, width in FUSED_PIXELS
    )
    assert {math.prod(pixels) for pixels in FUSED_PIXELS} == {128}
    assert found["winograd 2x2"].blocks.tolist() == [min(pieces) * len(range(0, filters, 32))]
    for tile in WINOGRAD_TILES:
        one = found["winograd 4x4 {}x{}".format(*tile)]
        tiles = len(range(0, n * -(-rows // 4) * -(-columns // 4), tile[0])) * len(range(0, filters, tile[1]))
        assert one.blocks.tolist() == [36 * tiles]
        assert one.depth.tolist() == [c if pass_ is Pass.FPROP else k]


def test_winograds_filter_gradient_sums_over_the_pieces_of_the_image():
    """3 images of 9 x 7 are 3 x 3 x 2 pieces of 4 x 4: 36 products of 100 x 70 over 18, in tiles of 64 x 64."""
    layer = Conv2d(h=9, w=7, c=100, k=70, r=3, s=3, pad=1)
    one = by_name(algorithms(work_of((layer, Pass.WGRAD, 3)), np.array([48.0])))["winograd 4x4 64x64"]
    assert (one.blocks.tolist(), one.depth.tolist()) == ([36 * 2 * 2], [18])


def test_fouriers_grid_of_one_layer_by_hand():
    """
    Transforms of 16 x 16 leave 12 x 12 outputs of a filter of 5 x 5.

    24 x 24 outputs of 3 images are 12 pieces; 16 x 9 frequencies, each a product of 12 x 64 over 20.
    """
    layer = Conv2d(h=28, w=28, c=20, k=64, r=5, s=5)
    one = by_name(algorithms(work_of((layer, Pass.FPROP, 3)), np.array([48.0])))["fft 16"]
    assert (one.blocks.tolist(), one.depth.tolist(), one.tile) == ([16 * 9 * 1 * 2], [20], 4 * 32 * 32)
    # Elements made of one of the input (12 pieces of 256, from 3 images of 784) and of one of the filter's 25.
    assert np.multiply(one.input_factor, [3 * 784]).tolist() == pytest.approx([12 * 256])
    assert np.multiply(one.filter_factor, [25]).tolist() == pytest.approx([256])


@FEW
@given(layer=convolutions(), pass_=st.sampled_from(list(Pass)), n=st.integers(1, 100))
def test_one_output_at_a_time_is_every_multiply_add_spread_over_the_sms(layer, pass_, n):
    """A block an SM, each with its share, whatever the pass and its grid in tiles."""
    one = by_name(algorithms(work_of((layer, pass_, n)), np.array([48.0])))["direct"]
    assert one.blocks.tolist() == [48]
    assert one.depth * one.tile * 48 == pytest.approx([n * layer.flops() / 2])


@FEW
@given(
    case=st.tuples(convolutions(strides=(1,)), st.just(Pass.WGRAD))
    | st.tuples(st.builds(Linear, c=st.integers(1, 5000), k=st.integers(1, 500)), st.sampled_from(list(Pass))),
    n=st.integers(1, 300),
    num_sms=st.sampled_from([20, 48, 80, 132]),
)
def test_the_depth_is_split_while_two_blocks_an_sm_are_not_there(case, n, num_sms):
    """
    Slices double while the blocks stay within two an SM, the slices within 32 and the steps of each at least 64.

    So it is in filter gradients of convolutions, and in all three passes of a linear layer.
    """
    layer, pass_ = case
    found = by_name(algorithms(work_of((layer, pass_, n)), np.array([float(num_sms)])))
    (gemm,) = layer.gemms(pass_, n)
    for tile in TILES:
        slices, blocks = 1, num_blocks(layer, pass_, n, tile)
        while 2 * slices * blocks <= 2 * num_sms and 2 * slices <= 32 and gemm.k >= 64 * 2 * slices:
            slices *= 2
        one = found["{}x{} split".format(*tile)]
        assert one.usable.tolist() == [slices > 1]
        assert one.blocks.tolist() == [slices * blocks]
        assert one.depth.tolist() == [gemm.k / slices]
        # Each slice writes its sums and reads them again.
        assert np.ravel(one.partial_elements).tolist() == [2 * slices * gemm.m * gemm.n * gemm.count]


# --- what can compute what -----------------------------------------------------------------------------------


@FEW
@given(cases=CASES)
def test_an_algorithm_is_offered_only_for_what_it_computes(cases):
    """Rules of the algorithms, one by one: Winograd's and Fourier's need strides and dilations of one and no groups."""
    found = algorithms(work_of(*cases), np.full(len(cases), 48.0))
    for i, (layer, pass_, _) in enumerate(cases):
        convolution = layer.h * layer.w * layer.r * layer.s > 1
        plain = convolution and layer.stride == layer.dilation == (1, 1) and layer.groups == 1
        for one in found:
            if one.group == "fft":
                size = int(one.name.split()[1])
                want = plain and 1 < layer.r < size
            else:
                want = {
                    "winograd 2x2": plain and layer.r == 3 and pass_ is not Pass.WGRAD,
                    "winograd 4x4": plain and layer.r == 3,
                    "winograd 2x2 of 5x5": plain and layer.r == 5,
                    "scattered": pass_ is Pass.DGRAD and convolution,
                    "direct": convolution,
                    # How many slices is a test of its own.
                    "split": bool(one.usable[i]) and (pass_ is Pass.WGRAD or not convolution),
                }.get(one.group, True)
            assert bool(one.usable[i]) is want, (one.name, str(layer), pass_)


def test_without_transforms_only_tiles_are_left():
    """Tensor Cores multiply tiles: no other algorithm is offered to them."""
    conv = Conv2d(h=28, w=28, c=64, k=64, r=3, s=3, pad=1)
    work, num_sms = work_of((conv, Pass.FPROP, 8)), np.array([48.0])
    families = {one.family for one in algorithms(work, num_sms, transforms=False)}
    assert families == {"tiles", "scattered"}
    assert {one.family for one in algorithms(work, num_sms)} == set(FAMILIES)


@FEW
@given(cases=CASES, transforms=st.booleans())
def test_every_case_can_be_computed_by_something(cases, transforms):
    """The shortest time is a positive number; what cannot compute the case is infinite, never a time."""
    work, places = work_of(*cases), places_of(len(cases))
    found = algorithms(work, places.num_sms, transforms=transforms)
    times = seconds(work, places, constants_of(), found)
    assert times.shape == (len(found), len(cases))
    assert (np.isfinite(times) == np.stack([one.usable for one in found])).all()
    assert np.isfinite(times.min(axis=0)).all()
    assert (times > 0).all()


# --- time ----------------------------------------------------------------------------------------------------

CHESS = Conv2d(h=8, w=8, c=128, k=128, r=3, s=3, pad=1)


# A rounding for each operation of `seconds` and of the test.
ROUNDING = gamma(60, 2.0**-53)


def test_the_time_of_a_forward_pass_is_as_by_pocket_calculator():
    """
    97 boards on 48 SMs in tiles of 128 x 128 are 49 blocks: one wave, and one with a single block.

    A block makes 16384 multiply-adds in each of 1152 + 32 steps, an SM 115.2e9 a second.
    """
    constants = constants_of(cost_128x128=1.1, extra_tiles=32, launch_tiles=5, x_tiles=3, y_tiles=2, w_tiles=4,
                             tail_tiles=0.55)  # fmt: skip
    work, places = work_of((CHESS, Pass.FPROP, 97)), places_of(1, compute=1.25, memory=0.5)
    (one,) = (one for one in algorithms(work, places.num_sms) if one.name == "128x128")
    waves = 1 + 0.55 + 0.45 * (1 / 48)
    arithmetic = 1.1 * waves * 16384 * (1152 + 32) / 115.2e9
    board = 97 * 64 * 128 * 4 / 500e9
    moved = 3 * board + 2 * board + 4 * (128 * 9 * 128 * 4 / 500e9)
    want = 5e-6 + 1.25 * arithmetic + 0.5 * moved
    assert_within(seconds(work, places, constants, [one]), np.array([[want]]), ROUNDING * want, axes="ai")


def test_the_time_of_a_split_filter_gradient_is_as_by_pocket_calculator():
    """
    A gradient of 128 x 1152 over 12800 outputs is 9 tiles of 128 x 128: 8 slices of each, two blocks an SM at most.

    So 72 blocks on 48 SMs, of 1600 steps each, and 8 partial sums of the whole gradient, written and read.
    """
    constants = constants_of(wgrad=1.3, tail_sliced=0.6, partial=1.5)
    work, places = work_of((CHESS, Pass.WGRAD, 200)), places_of(1, element_bytes=2)
    (one,) = (one for one in algorithms(work, places.num_sms) if one.name == "128x128 split")
    arithmetic = 1.3 * (1 + 0.6 + 0.4 * 0.5) * 16384 * 1600 / 115.2e9
    # Partial sums are float32 whatever is stored.
    want = arithmetic + 1.5 * (2 * 8 * 128 * 1152) * 4 / 500e9
    assert_within(seconds(work, places, constants, [one]), np.array([[want]]), ROUNDING * want, axes="ai")


def test_the_time_of_a_scattered_gradient_is_as_by_pocket_calculator():
    """64 outputs of 32 images are 16 tiles of 128 rows, 9 taps of 128 channels as many of 128 columns: 144 blocks."""
    layer = Conv2d(h=16, w=16, c=128, k=128, r=3, s=3, pad=1, stride=2)
    work, places = work_of((layer, Pass.DGRAD, 32)), places_of(1)
    (one,) = (one for one in algorithms(work, places.num_sms) if one.name == "128x128 scattered")
    constants = constants_of(dgrad=1.2, cost_128x128=1.1, scattered=1.5, partial=100)
    arithmetic = 1.2 * 1.1 * 3 * 16384 * 128 / 115.2e9
    want = arithmetic + 1.5 * (2048 * 9 * 128) * 4 / 500e9
    assert_within(seconds(work, places, constants, [one]), np.array([[want]]), ROUNDING * want, axes="ai")


@pytest.mark.parametrize(
    ("name", "family", "own", "factor"),
    [("128x128", "tiles", "sliced", 2), ("winograd 4x4 64x64", "winograd", "winograd sliced", 3)],
)
def test_the_filter_gradient_of_a_convolution_has_constants_of_its_own(name, family, own, factor):
    """Launch, bytes and factor of tiles and of Winograd's products are others there; of a linear layer as forward."""
    linear = Linear(c=128, k=128)
    cases = [(CHESS, pass_, 32) for pass_ in PASSES] + [(linear, Pass.WGRAD, 32)]
    work, places = work_of(*cases), places_of(len(cases))
    constants = constants_of(wgrad=2, wgrad_winograd=3) | {
        f"launch {family}": 1e6,
        f"launch {own}": 5e6,
        f"w {own}": 7.0,
    }
    (one,) = (one for one in algorithms(work, places.num_sms) if one.name == name)
    (got,), (bare,) = (seconds(work, places, of, [one]) for of in (constants, constants_of()))
    filters = 7 * 9 * 128 * 128 * 4 / 500e9
    want = [1 + bare[0], 1 + bare[1], 5 + factor * bare[2] + filters, 1 + 2 * bare[3]]
    assert got.tolist() == pytest.approx(want, rel=1e-12)


def test_fouriers_bytes_are_those_of_what_it_makes():
    """Of 3 images of 28 x 28 it makes 12 pieces of 256 for each channel, and 256 of the 25 taps of each filter."""
    layer = Conv2d(h=28, w=28, c=20, k=64, r=5, s=5)
    work, places = work_of((layer, Pass.FPROP, 3)), places_of(1)
    (one,) = (one for one in algorithms(work, places.num_sms) if one.name == "fft 16")
    constants = constants_of(cost_fft=0, x_fft=3, y_fft=2, w_fft=5)
    want = (3 * 12 * 256 * 20 + 2 * 3 * 24 * 24 * 64 + 5 * 256 * 20 * 64) * 4 / 500e9
    assert_within(seconds(work, places, constants, [one]), np.array([[want]]), ROUNDING * want, axes="ai")


def test_a_grid_of_less_than_a_wave_takes_as_long_as_a_block_alone():
    """1 to 48 blocks on 48 SMs take `alone` of a wave, whatever their number."""
    n = np.arange(2, 97, 2)  # two boards are a tile
    work, places = work_of(*((CHESS, Pass.FPROP, int(boards)) for boards in n)), places_of(len(n))
    (one,) = (one for one in algorithms(work, places.num_sms) if one.name == "128x128")
    assert one.blocks.tolist() == list(range(1, 49))
    (got,) = seconds(work, places, constants_of(alone=1.4, tail_tiles=0.55), [one])
    want = np.full(48, 1.4 * 16384 * 1152 / 115.2e9)
    assert_within(got, want, ROUNDING * want, axes="n")


def test_one_block_more_than_the_sms_starts_a_wave():
    """From 48 blocks to 49 the time grows by the tail of a wave and no more; from 49 to 50 by its share of the rest."""
    work, places = work_of(*((CHESS, Pass.FPROP, n) for n in (96, 97, 99))), places_of(3)
    (one,) = (one for one in algorithms(work, places.num_sms) if one.name == "128x128")
    (got,) = seconds(work, places, constants_of(alone=1, tail_tiles=0.55), [one])
    want = np.array([1, 1 + 0.55 + 0.45 / 48, 1 + 0.55 + 0.45 * 2 / 48]) * 16384 * 1152 / 115.2e9
    assert_within(got, want, ROUNDING * want, axes="n")


@settings(max_examples=40 if THOROUGH else 10)
@given(
    layer=convolutions(), pass_=st.sampled_from([Pass.FPROP, Pass.DGRAD]), n=st.integers(1, 200),
    extra=st.sampled_from([1, 2, 7, 64]), what=st.sampled_from(["n", "c", "k"]), tail=st.floats(0, 1),
)  # fmt: skip
def test_more_work_never_takes_less(layer, pass_, n, extra, what, tail):
    """Another image, channel or filter shortens no algorithm of a forward pass or an input gradient."""
    grown = layer if what == "n" else attrs.evolve(layer, **{what: getattr(layer, what) + extra * layer.groups})
    work = work_of((layer, pass_, n), (grown, pass_, n + extra if what == "n" else n))
    constants = constants_of(alone=0.9, **{f"tail_{family}": tail for family in FAMILIES})
    constants |= {f"{name} {family}": 2.0 for name in ("launch", "extra", "x", "y", "w") for family in FAMILIES}
    places = places_of(2)
    found = algorithms(work, places.num_sms)
    for one, (before, after) in zip(found, seconds(work, places, constants, found), strict=True):
        if np.isfinite(before):  # of what it does not compute an algorithm takes an infinite time
            assert after >= before * (1 - ROUNDING), one.name

"""Each kind of layer: extents by counting windows, products by counting multiply-adds, bytes by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from cubatch.errors import InvalidSpec
from cubatch.network.graph import as_network
from cubatch.network.layer import Layer
from cubatch.network.layers import (
    GELU,
    LAYERS,
    Add,
    Attention,
    AvgPool2d,
    BatchNorm2d,
    ClassToken,
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    HardSigmoid,
    HardSwish,
    LayerNorm,
    LayerScale,
    Linear,
    MaxPool2d,
    Opaque,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Slice,
    Softmax,
    Tokens,
)
from cubatch.network.passes import Gemm, Pass

QUADS = st.tuples(*[st.integers(0, 3)] * 4)
PAIRS = st.tuples(st.integers(1, 4), st.integers(1, 4))


@st.composite
def convolutions(draw: st.DrawFn) -> Conv2d:
    groups = draw(st.integers(1, 3))
    values = {
        "h": draw(st.integers(1, 12)),
        "w": draw(st.integers(1, 12)),
        "c": groups * draw(st.integers(1, 3)),
        "k": groups * draw(st.integers(1, 3)),
        "r": draw(st.integers(1, 5)),
        "s": draw(st.integers(1, 5)),
        "stride": draw(PAIRS),
        "pad": draw(QUADS),
        "dilation": draw(PAIRS),
        "groups": groups,
    }
    for extent, taps, spread, pads in (
        (values["h"], values["r"], values["dilation"][0], values["pad"][:2]),
        (values["w"], values["s"], values["dilation"][1], values["pad"][2:]),
    ):
        assume(extent + sum(pads) >= (taps - 1) * spread + 1)
    return Conv2d(**values)


def positions(extent: int, taps: int, step: int, low: int, high: int, spread: int) -> list[int]:
    """Where a window may start in the padded input, found by trying every place."""
    padded = extent + low + high
    return [start for start in range(0, padded, step) if start + (taps - 1) * spread < padded]


@given(conv=convolutions())
def test_convolutions_have_as_many_outputs_as_window_positions(conv: Conv2d) -> None:
    """Extents p and q are the number of places at which the dilated filter lies inside the padded input."""
    p, q, k = conv.output_shape
    assert p == len(positions(conv.h, conv.r, conv.stride[0], *conv.pad[:2], conv.dilation[0]))
    assert q == len(positions(conv.w, conv.s, conv.stride[1], *conv.pad[2:], conv.dilation[1]))
    assert k == conv.k


@given(
    h=st.integers(1, 15), w=st.integers(1, 15), r=st.integers(1, 5), s=st.integers(1, 5),
    stride=PAIRS, pad=QUADS, ceil=st.booleans(), kind=st.sampled_from([MaxPool2d, AvgPool2d]),
)  # fmt: skip
def test_pools_have_as_many_outputs_as_window_positions(
    h: int,
    w: int,
    r: int,
    s: int,
    stride: tuple[int, int],
    pad: tuple[int, int, int, int],
    ceil: bool,
    kind: type,
) -> None:
    """
    Windows rounded down lie inside the padded input; rounded up, one more that only begins inside counts.

    The additional window must begin on the input or its leading border, or it would see nothing real.
    """
    assume(h + pad[0] + pad[1] >= r and w + pad[2] + pad[3] >= s)
    assume(max(pad[:2]) < r and max(pad[2:]) < s)
    pool = kind(h=h, w=w, c=3, r=r, s=s, stride=stride, pad=pad, ceil=ceil)
    expected = []
    for extent, taps, step, (low, high) in ((h, r, stride[0], pad[:2]), (w, s, stride[1], pad[2:])):
        inside = positions(extent, taps, step, low, high, 1)
        following = inside[-1] + step
        reaches_uncovered = inside[-1] + taps < extent + low + high
        expected.append(len(inside) + (ceil and reaches_uncovered and following < extent + low))
    assert pool.output_shape == (*expected, 3)


@given(conv=convolutions(), n=st.integers(1, 3))
def test_every_pass_of_a_convolution_multiplies_each_output_by_each_tap_once(conv: Conv2d, n: int) -> None:
    """
    Counted from each pass's own side, pixel by pixel and tap by tap: outputs, the padded input, the filter.

    A pixel of the padded input has the gradient of those outputs that read it, which the products of dgrad
    exceed by what a kernel multiplies by zero: outputs beyond the border.
    """
    rows, columns = (
        positions(conv.h, conv.r, conv.stride[0], *conv.pad[:2], conv.dilation[0]),
        positions(conv.w, conv.s, conv.stride[1], *conv.pad[2:], conv.dilation[1]),
    )
    taps = list(itertools.product(range(conv.r), range(conv.s)))
    padded = itertools.product(range(conv.h + sum(conv.pad[:2])), range(conv.w + sum(conv.pad[2:])))
    counted = {
        Pass.FPROP: sum(len(taps) for _ in itertools.product(rows, columns)),
        Pass.DGRAD: sum(
            y - r * conv.dilation[0] in rows and x - s * conv.dilation[1] in columns
            for (y, x), (r, s) in itertools.product(padded, taps)
        ),
        Pass.WGRAD: sum(len(rows) * len(columns) for _ in taps),
    }
    channels = n * conv.k * (conv.c // conv.groups)
    assert {pass_: conv.pass_flops(pass_, n) for pass_ in Pass} == {
        pass_: 2 * channels * pairs for pass_, pairs in counted.items()
    }


def test_a_plain_convolution_has_one_product_for_each_pass() -> None:
    """The extents of the field's table: m, n, k of fprop, dgrad and wgrad."""
    conv = Conv2d(h=56, w=56, c=64, k=128, r=3, s=3, pad=1)
    assert conv.gemms(Pass.FPROP, 2) == (Gemm(2 * 56 * 56, 128, 9 * 64),)
    assert conv.gemms(Pass.DGRAD, 2) == (Gemm(2 * 56 * 56, 64, 9 * 128),)
    assert conv.gemms(Pass.WGRAD, 2) == (Gemm(128, 9 * 64, 2 * 56 * 56),)


def test_enormous_strides_are_counted_at_once() -> None:
    """Phases are counted by taps, not by steps, or a stride of 2^31 would take minutes."""
    conv = Conv2d(h=2**31 - 1, w=1, c=1, k=1, r=3, s=1, stride=[2**31 - 1, 1])
    assert conv.gemms(Pass.DGRAD, 1) == (Gemm(1, 1, 1), Gemm(1, 1, 1), Gemm(1, 1, 1))


def test_depthwise_convolutions_are_as_many_products_as_channels() -> None:
    """Each channel is a product of its own with one row of the filter."""
    conv = Conv2d(h=8, w=8, c=32, k=32, r=3, s=3, pad=1, groups=32, bias=False)
    assert conv.gemms(Pass.FPROP, 1) == (Gemm(64, 1, 9, 32),)
    assert conv.parameters == 32 * 9


@given(c=st.integers(1, 9), k=st.integers(1, 9), n=st.integers(1, 9))
def test_all_passes_of_a_linear_layer_have_equal_flop(c: int, k: int, n: int) -> None:
    """Each pass multiplies every weight once per sample."""
    layer = Linear(c=c, k=k)
    for pass_ in Pass:
        assert sum(gemm.flops for gemm in layer.gemms(pass_, n)) == 2 * n * c * k
    assert layer.parameters == c * k + k


def test_attention_counts_projections_and_products_between_tokens() -> None:
    """
    A block of deit-tiny by hand: 197 tokens, 192 channels, 3 heads.

    The backward products between tokens are twice the forward ones: four gradients of two products.
    """
    layer = Attention(h=197, w=1, c=192, heads=3)
    projections = 2 * 197 * (3 * 192 * 192 + 192 * 192)
    between = 2 * 2 * 197 * 197 * 192
    flops = {pass_: sum(gemm.flops for gemm in layer.gemms(pass_, 1)) for pass_ in Pass}
    assert flops == {Pass.FPROP: projections + between, Pass.DGRAD: projections + 2 * between, Pass.WGRAD: projections}
    assert layer.parameters == 4 * 192 * 192 + 4 * 192


@pytest.mark.parametrize(
    ("layer", "elements"),
    [
        (ReLU(h=4, w=5, c=6), {Pass.FPROP: 240, Pass.DGRAD: 360, Pass.WGRAD: 0}),  # dy and y in, dx out
        (SiLU(h=4, w=5, c=6), {Pass.FPROP: 240, Pass.DGRAD: 360, Pass.WGRAD: 0}),
        (BatchNorm2d(h=4, w=5, c=6), {Pass.FPROP: 252, Pass.DGRAD: 372, Pass.WGRAD: 252}),  # 12 parameters
        (Softmax(h=1, w=1, c=10), {Pass.FPROP: 20, Pass.DGRAD: 30, Pass.WGRAD: 0}),
        (Linear(c=10, k=3), {Pass.FPROP: 13 + 33, Pass.DGRAD: 13 + 33, Pass.WGRAD: 13 + 33}),
        (Add(h=4, w=5, c=6), {Pass.FPROP: 360, Pass.DGRAD: 360, Pass.WGRAD: 0}),
        (Flatten(h=4, w=5, c=6), {Pass.FPROP: 0, Pass.DGRAD: 0, Pass.WGRAD: 0}),
        (MaxPool2d(h=4, w=4, c=6, r=2, s=2), {Pass.FPROP: 96 + 24, Pass.DGRAD: 96 + 24, Pass.WGRAD: 0}),
    ],
    ids=lambda value: value.type if isinstance(value, Layer) else "",
)
def test_traffic_counts_each_tensor_once(layer: Layer, elements: dict[Pass, int]) -> None:
    """What a pass must at least read and write, by hand, saved values of the backward pass included."""
    assert {pass_: layer.traffic(pass_, 1) for pass_ in Pass} == elements


@given(conv=convolutions(), n=st.integers(1, 4))
def test_traffic_grows_by_activations_only(conv: Conv2d, n: int) -> None:
    """Parameters are moved once, whatever the batch."""
    x, y = conv.h * conv.w * conv.c, math.prod(conv.output_shape)
    for pass_ in Pass:
        assert conv.traffic(pass_, n) == n * (x + y) + conv.parameters


@pytest.mark.parametrize(
    ("layer", "saved"),
    [
        (MaxPool2d(h=4, w=4, c=6, r=2, s=2), {"argmax": (24, 1)}),
        (Dropout(h=1, w=1, c=10), {"mask": (10, 1)}),
        (LayerNorm(h=7, w=1, c=10), {"statistics": (14, 4)}),
        (Attention(h=7, w=1, c=10, heads=2), {"qkv": (210, 0), "weights": (98, 0), "mixed": (70, 0)}),
        (Sigmoid(h=4, w=4, c=6), {}),
    ],
    ids=lambda value: value.type if isinstance(value, Layer) else "",
)
def test_saved_elements_are_counted_by_hand(layer: Layer, saved: dict[str, tuple[int, int]]) -> None:
    """What the forward pass keeps beside its input and output, with bytes per element."""
    assert layer.saved_elements() == saved


def test_activations_keep_their_input_only_where_they_must() -> None:
    """The slope of a monotone activation follows from its output; the others need the input."""
    reads = {kind.type: kind.backward_reads for kind in (ReLU, ReLU6, Sigmoid, HardSigmoid, HardSwish, SiLU, GELU)}
    of_output = {key: {"y"} for key in ("relu", "relu6", "sigmoid", "hard_sigmoid")}
    assert reads == of_output | {key: {"x"} for key in ("hard_swish", "silu", "gelu")}


def test_token_layers_turn_pixels_to_rows_and_back() -> None:
    """A vision transformer of 14 x 14 patches has 197 tokens, and reads the first at its end."""
    tokens = Tokens(h=14, w=14, c=192)
    assert tokens.output_shape == (197, 1, 192)
    assert tokens.parameters == 192 + 197 * 192
    assert ClassToken(h=197, w=1, c=192).output_shape == (1, 1, 192)


def test_layer_scale_has_a_factor_a_channel_and_reads_its_input_backward() -> None:
    """c parameters; wgrad pairs input and gradient, dgrad reads the gradient, and the input for the factors'."""
    layer = LayerScale(h=2, w=3, c=5)
    assert (layer.output_shape, layer.parameter_shapes, layer.flops()) == ((2, 3, 5), {"gamma": (5,)}, 0)
    assert [layer.traffic(pass_, 4) for pass_ in Pass] == [2 * 120 + 5, 3 * 120 + 5, 2 * 120 + 5]


def test_an_opaque_layer_has_what_it_was_given() -> None:
    """A product of a query and a key, 3 heads of 4 x 4 tokens over 8: FLOP, bytes, gradients of both inputs."""
    layer = Opaque(h=4, w=3, c=8, others=[[4, 3, 8]], output=[4, 3, 4], operator="matmul", flop=2 * 3 * 4 * 4 * 8)
    assert (layer.output_shape, layer.parameters, layer.flops()) == ((4, 3, 4), 0, 768)
    assert layer.flops("training") == 3 * 768
    assert layer.traffic(Pass.FPROP, 2) == 2 * (96 + 96 + 48)
    assert layer.gemms(Pass.FPROP, 2) == (Gemm(24, 4, 8),)
    assert Opaque(h=1, w=1, c=5, flop=30, weights=7).flops("training") == 90
    assert Opaque(h=2, w=1, c=5).output_shape == (2, 1, 5)


@pytest.mark.parametrize(("inputs", "weights"), [(1, 7), (2, 0), (2, 7), (3, 0)])
def test_an_opaque_layer_trains_at_three_times_its_flop(inputs: int, weights: int) -> None:
    """A product of two factors has two gradients, of x and w, of q and k; attention is two of its three inputs each."""
    others = [[4, 1, 8]] * (inputs - 1)
    assert (
        Opaque(h=4, w=1, c=8, others=others, flop=4 * 4 * 4 * 8, weights=weights).flops("training") == 3 * 4 * 4 * 4 * 8
    )


def test_an_opaque_layer_refuses_what_is_no_shape_or_name() -> None:
    """Neither its output nor its inputs can be anything but (h, w, c), nor its operator but text."""
    wrong = (("output", (1, 2)), ("output", "abc"), ("others", [(1, 0, 3)]), ("others", 3), ("operator", None))
    for field, value in wrong:
        with pytest.raises(InvalidSpec) as caught:
            Opaque(**{field: value})
        assert caught.value.field == field


def test_pools_step_by_their_window_unless_told() -> None:
    """The stride of a pool defaults to its window, separately for height and width."""
    pool = MaxPool2d(h=8, w=9, c=1, r=2, s=3)
    assert pool.stride == (2, 3)
    assert pool.output_shape == (4, 3, 1)


def test_pad_and_stride_are_read_in_every_form() -> None:
    """One number, [h, w] and [top, bottom, left, right] mean what the contract says."""
    conv = Conv2d(k=1, r=1, s=1, pad=[1, 2], stride=[3, 4])
    assert conv.pad == (1, 1, 2, 2)
    assert conv.stride == (3, 4)
    assert Conv2d(k=1, r=1, s=1, pad=(1, 2, 3, 4)).pad == (1, 2, 3, 4)
    assert Conv2d(k=1, r=1, s=1, pad=2).pad == (2, 2, 2, 2)


def test_a_lone_layer_is_checked_when_it_is_made() -> None:
    """Extents that are given at once are judged at once, not when the layer is first used."""
    with pytest.raises(InvalidSpec) as caught:
        Conv2d(h=5, w=5, c=1, k=1, r=7, s=3)
    assert (caught.value.field, caught.value.value) == ("r", 7)
    assert "at most 5" in str(caught.value)


@pytest.mark.parametrize("value", [0, 10**12, 2.0, "3", None, [3], True])
@pytest.mark.parametrize("name", ["k", "stride", "h"])
def test_bad_sizes_name_field_and_value(name: str, value: object) -> None:
    """Every size of a convolution refuses what is no whole number in range."""
    values: dict[str, Any] = {"h": 8, "w": 8, "c": 4, "k": 4, "r": 3, "s": 3, name: value}
    if name in {"stride", "dilation"} and value == [3]:
        value = (3,)
    if name == "h" and value is None:
        assert not Conv2d(**values).resolved
        return
    with pytest.raises(InvalidSpec) as caught:
        Conv2d(**values)
    assert caught.value.field == name
    assert caught.value.allowed


def test_concat_of_a_lone_layer_must_add_up() -> None:
    """The channels of the parts are those of the whole."""
    assert Concat(h=2, w=2, c=5, channels=(2, 3)).input_shapes == ((2, 2, 2), (2, 2, 3))
    with pytest.raises(InvalidSpec):
        Concat(h=2, w=2, c=6, channels=(2, 3))


def test_a_slice_has_the_channels_of_its_range_and_moves_no_others_forward() -> None:
    """3 of 8 channels of 4 pixels, read and written; backward that of 3 is read, and that of all 8 written."""
    layer = Slice(h=2, w=2, c=8, start=2, end=5)
    assert layer.output_shape == (2, 2, 3)
    assert layer.traffic(Pass.FPROP, 10) == 10 * 4 * (3 + 3)
    assert layer.traffic(Pass.DGRAD, 10) == 10 * 4 * (3 + 8)
    assert layer.traffic(Pass.WGRAD, 10) == layer.flops("training") == 0


@settings(max_examples=30)
@given(kind=st.sampled_from(sorted(LAYERS)), n=st.integers(1, 3))
def test_work_scales_with_the_batch(kind: str, n: int) -> None:
    """FLOP of every pass of every layer are proportional to the batch."""
    needed = {"k": 4, "r": 2, "s": 2, "heads": 2, "end": 3}
    names = LAYERS[kind].__attrs_attrs__  # type: ignore[attr-defined]
    values: dict[str, Any] = {a.name: needed[a.name] for a in names if a.name in needed}
    if kind == "concat":
        values["channels"] = (2, 2)
    layer = LAYERS[kind](h=4, w=4, c=4, **values)
    for pass_ in Pass:
        one, many = (sum(gemm.flops for gemm in layer.gemms(pass_, size)) for size in (1, n))
        assert many == n * one


def test_a_max_pool_names_its_largest_window():
    """The winner is kept in a byte, so 15 x 17 = 255 taps are refused when the layer is made, not when it runs."""
    with pytest.raises(InvalidSpec, match="at most 254"):
        MaxPool2d(h=20, w=20, c=1, r=15, s=17)
    assert MaxPool2d(h=20, w=20, c=1, r=14, s=18).output_shape == (1, 1, 1)


def test_a_layer_on_its_own_draws_no_warning_about_its_input(recwarn):
    """Extents given by name are not mistaken for channels first."""
    as_network(Conv2d(h=3, w=8, c=8, k=4, r=1, s=1))
    assert not recwarn.list

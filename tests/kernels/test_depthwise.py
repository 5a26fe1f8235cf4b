"""The depthwise kernels against float64: every filter, stride, storage and load, at shapes that leave residues."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from cubatch.engine import backend
from cubatch.engine.native import conv as native_conv, depthwise as native_depthwise, naive
from cubatch.errors import InvalidArgument
from cubatch.hardware.facts import Device
from cubatch.kernels.workspace import depthwise_grid
from cubatch.network.windows import conv_shape
from tests.checks import assert_within
from tests.cpusim.simulator import Simulator
from tests.kernels import cases
from tests.kernels.cases import Conv
from tests.kernels.passes import Passes, clamped
from tests.thorough import examples

FEW = settings(max_examples=examples(40), deadline=None)
H200 = Device(name="H200", num_sms=132, compute_capability=(9, 0))


def convolution(*, n=1, h=5, w=5, c=8, taps=3, stride=1, pad=(1, 1, 1, 1)):
    return Conv(n=n, h=h, w=w, c=c, k=c, r=taps, s=taps, stride=(stride, stride), pad=pad, groups=c)


@st.composite
def depthwise_cases(draw):
    """Draw a convolution that the kernels support, how it is stored, and by how many elements its arrays are off."""
    taps, stride = draw(st.sampled_from([3, 5, 7])), draw(st.sampled_from([1, 2]))
    pad = tuple(draw(st.integers(0, taps + 1)) for _ in range(4))
    h = draw(st.integers(max(1, taps - pad[0] - pad[1]), 9))
    w = draw(st.integers(max(1, taps - pad[2] - pad[3]), 11))
    c = draw(st.sampled_from([1, 3, 4, 6, 8, 16, 24, 40]))
    conv = convolution(n=draw(st.integers(1, 3)), h=h, w=w, c=c, taps=taps, stride=stride, pad=pad)
    return (
        conv,
        draw(st.sampled_from(cases.DTYPES)),
        draw(st.sampled_from([0, 0, 0, 1])),
        draw(st.integers(0, 2**32 - 1)),
    )


def check(launcher, direction, conv, dtype, shift=0, seed=0, **run):
    """Check a pass; by the seed with or without bias and ReLU."""
    passes = Passes(launcher, launcher.context(), dtype, seed, ends=clamped, shift=shift)
    more = {
        "fprop": {"bias": seed % 2 == 1, "activation": "relu" if seed // 2 % 2 else "none"}, "dgrad": {},
        "wgrad": {"bias": seed % 2 == 1},
    }  # fmt: skip
    getattr(passes, direction)(conv, **more[direction], **run)


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
@given(case=depthwise_cases())
@FEW
def test_passes_stay_within_the_rounding_of_their_sums(launcher, direction, case):
    """
    An output has a product for each tap, then a bias; a tap's gradient and a bias's are sums over all output pixels.

    Also where arrays start between vectors, or pads are wide; pixels that no tap read have gradients of zero.
    """
    check(launcher, direction, *case)


# Many slabs, the last one short (c = 140 is 35 vectors of 4, 140 of 1; 70 is 35 of 2); many strips, of 3 channels one
# by one too; more blocks than one.
LARGE = [
    (convolution(n=2, h=3, w=6, c=140), "float32", 0),
    (convolution(n=1, h=3, w=4, c=140), "float32", 1),
    (convolution(n=3, h=37, w=21, c=4, stride=2, pad=(0, 1, 0, 1)), "float32", 0),
    (convolution(n=3, h=11, w=19, c=3), "float32", 0),
    (convolution(n=1, h=19, w=9, c=24, taps=5, stride=2, pad=(1, 2, 2, 1)), "float16", 0),
    (convolution(n=5, h=7, w=7, c=264, pad=(1, 1, 1, 1)), "bfloat16", 0),
    (convolution(n=2, h=17, w=13, c=70, taps=7, pad=(3, 3, 3, 3)), "float16", 0),
    (convolution(n=1, h=15, w=9, c=140, taps=7, stride=2, pad=(3, 3, 3, 3)), "float32", 0),
]
NAIVE = {"fprop": naive.conv2d, "dgrad": naive.conv2d_dgrad, "wgrad": naive.conv2d_wgrad}


@pytest.mark.parametrize("direction", NAIVE)
@pytest.mark.parametrize(("conv", "dtype", "shift"), LARGE, ids=str)
def test_naive_and_depthwise_are_right_for_the_same_large_shapes(launcher, conv, dtype, shift, direction):
    """Several blocks, slabs and strips: both families keep the bound."""
    check(launcher, direction, conv, dtype, shift, seed=3)
    check(launcher, direction, conv, dtype, shift, seed=3, run=NAIVE[direction])


def test_sums_do_not_depend_on_the_order_of_blocks(launcher):
    """The filter's gradient is the same to the last bit whichever block or thread runs first."""
    conv = convolution(n=4, h=9, w=13, c=20)
    random = np.random.default_rng(0)
    x, dy = (launcher.put(cases.drawn(random, shape)) for shape in (conv.x_shape, conv.y_shape))
    found = []
    for schedule, seed in (("in_order", 0), ("reversed", 0), ("shuffled", 1)):
        simulated = isinstance(launcher.launcher, Simulator)
        runner = Simulator(launcher.arch, launcher.launcher.build, schedule=schedule, seed=seed) if simulated else None
        context = launcher.context(launcher=runner or launcher.launcher)
        dw = launcher.unwritten(conv.w_shape, np.float32)
        found.append(launcher.get(native_conv.conv2d_wgrad(context, x, dy, dw=dw, **conv.options)).copy())
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_offsets_go_beyond_31_bits(launcher):
    """The last pixels of tensors of more than 2^31 elements are computed from where they lie, in fprop and dgrad."""
    if not isinstance(launcher.launcher, Simulator):
        pytest.skip("takes 8 GiB where memory is not reserved page by page")
    conv = convolution(n=1025, h=16, w=16, c=8192)
    build = launcher.launcher.build
    context = launcher.context(launcher=Simulator(launcher.arch, build, blocks=lambda g: [(g[0] - 1, g[1] - 1, 0)]))
    x, y, dx = (cases.reserved(conv.x_shape, np.float16) for _ in range(3))
    random = np.random.default_rng(0)
    w = cases.drawn(random, conv.w_shape, "float16")
    x[-1, ..., -4:] = random.uniform(-1, 1, (16, 16, 4))
    part = convolution(n=1, h=16, w=16, c=4)
    native_conv.conv2d(context, x, w, out=y, **conv.options)
    want = cases.conv2d(part, cases.decoded(x[-1:, ..., -4:]), cases.decoded(w[-4:]))
    assert_within(y[-1:, -1:, :, -4:], want[:, -1:], cases.bound(9, 9.0, want[:, -1:], "float16"), axes="npqc")
    y[-1, ..., -4:] = x[-1, ..., -4:]
    native_conv.conv2d_dgrad(context, y, w, x_shape=conv.x_shape, out=dx, **conv.options)
    want = cases.conv2d_dgrad(part, cases.decoded(y[-1:, ..., -4:]), cases.decoded(w[-4:]))
    assert_within(dx[-1:, -1:, :, -4:], want[:, -1:], cases.bound(9, 9.0, want[:, -1:], "float16"), axes="nhwc")


def test_offsets_of_sums_go_beyond_31_bits(launcher, monkeypatch):
    """The gradient of a filter sees the last pixels of tensors of more than 2^31 elements."""
    if not isinstance(launcher.launcher, Simulator):
        pytest.skip("takes 8 GiB where memory is not reserved page by page")
    conv = convolution(n=1025, h=16, w=16, c=8192)
    one_item = depthwise_grid.DepthwiseSums(vector=4, strip_rows=16, slabs=64, slab_vectors=32, blocks=1025)
    monkeypatch.setattr(
        native_depthwise, "depthwise_sums", lambda *_: one_item
    )  # so that a block's share is quickly walked
    x, dy = (cases.reserved(conv.x_shape, np.float16) for _ in range(2))
    x[-1, -1, -1, -1], dy[-1, -1, -1, -1] = 3, 5
    partials = cases.reserved((1025 * 10 * 8192 * 4,), np.uint8)

    def blocks(grid):
        return [(grid[0] - 1, grid[1] - 1, 0)]

    context = launcher.context(launcher=Simulator(launcher.arch, launcher.launcher.build, blocks=blocks))
    dw, db = np.zeros(conv.w_shape, np.float16), np.zeros(conv.k, np.float16)
    monkeypatch.setattr(native_depthwise, "take_workspace", lambda *_: partials)
    native_conv.conv2d_wgrad(context, x, dy, dw=dw, db=db, **conv.options)
    sums = partials.view(np.float32).reshape(1025, 10, 8192)
    assert sums[-1, :, -1].tolist() == [0, 0, 0, 0, 15, 0, 0, 0, 0, 5]
    assert db[-1] == 5  # the last block of the reduction: the bias's row, the last channels


@pytest.mark.parametrize(
    ("change", "supported"),
    [
        ({}, True),
        ({"w": (8, 5, 5, 1), "stride": (2, 2)}, True),
        ({"w": (8, 3, 5, 1)}, False),
        ({"w": (8, 7, 7, 1)}, True),
        ({"w": (8, 9, 9, 1)}, False),
        ({"stride": (1, 2)}, False),
        ({"stride": (3, 3)}, False),
        ({"dilation": (2, 2)}, False),
        ({"w": (16, 3, 3, 1)}, False),
        ({"w": (8, 3, 3, 2), "groups": 4}, False),
        ({"x": (9, 2**28, 8)}, False),
    ],
)
def test_other_shapes_are_left_to_other_kernels(change, supported):
    case = {"x": (9, 9, 8), "w": (8, 3, 3, 1), "stride": (1, 1), "dilation": (1, 1), "groups": 8} | change
    options = {"stride": case["stride"], "pad": (0, 0, 0, 0), "dilation": case["dilation"], "groups": case["groups"]}
    assert depthwise_grid.supports(conv_shape(case["x"], case["w"], **options)) == supported


def test_a_launch_numbers_its_threads_in_31_bits(launcher):
    """More strips than that are an error, not a wrong answer."""
    conv = convolution(n=2**31, h=1, w=1, c=1)
    x = cases.reserved(conv.x_shape, np.float16)
    with pytest.raises(InvalidArgument, match="fewer samples"):
        native_conv.conv2d(launcher.context(), x, np.zeros(conv.w_shape, np.float16), out=x, **conv.options)


def test_no_samples_give_no_gradient(launcher):
    """Sums over nothing are zeros; there is nothing to launch for the other passes."""
    conv = convolution(n=0)
    x, dw, db = np.zeros(conv.x_shape, np.float32), np.ones(conv.w_shape, np.float32), np.ones(8, np.float32)
    x, dw, db = launcher.put(x), launcher.put(dw), launcher.put(db)
    native_conv.conv2d(launcher.context(), x, dw, out=x, **conv.options)
    native_conv.conv2d_wgrad(launcher.context(), x, x, dw=dw, db=db, **conv.options)
    assert not launcher.get(dw).any()
    assert not launcher.get(db).any()


def test_recorded_launches_repeat_on_new_contents(launcher):
    """What `prepare` records reads its arrays anew each time."""
    conv = convolution()
    x, w = launcher.unwritten(conv.x_shape, np.float32), launcher.put(np.ones(conv.w_shape, np.float32))
    y = launcher.unwritten(conv.y_shape, np.float32)
    repeat = backend.prepare(native_conv.conv2d, launcher.context(), x, w, out=y, **conv.options)
    for value in (1, 2):
        x[...] = value
        repeat()
        assert launcher.get(y)[0, 2, 2].tolist() == [9 * value] * 8


def test_a_single_sample_is_cut_into_short_strips():
    """At batch 1 strips get short until there are threads for every SM; at batch 256 they stay long, loaded once."""
    rows = [depthwise_grid.depthwise_strip_rows(112, n * 28 * 8, H200) for n in (1, 256)]
    assert rows == [2, 23]
    small = depthwise_grid.depthwise_strip_rows(7, 256 * 2 * 240, H200)
    assert small == 7  # a strip of less would load its inputs more than once, and the device is full


def test_a_filters_gradient_launches_the_blocks_that_the_sms_hold(monkeypatch):
    """More would be a second, short wave: on 132 SMs that hold two or three blocks there are 264 or 396."""
    shape = conv_shape((56, 56, 64), (64, 3, 3, 1), (1, 1), (1, 1, 1, 1), (1, 1), groups=64)
    for resident in (2, 3):
        monkeypatch.setattr(depthwise_grid, "resident_blocks", lambda *_, resident=resident: resident)
        sums = depthwise_grid.depthwise_sums(shape, 256, 4, "float32", H200)
        assert sums.blocks * sums.slabs == resident * H200.num_sms


@given(st.integers(1, 2000))
@example(37)  # five slabs of eight, the narrowest
def test_slabs_of_sums_cover_all_channels_and_keep_threads_busy(vectors):
    """Slabs hold every vector once, a block has room for them, and above 8 vectors at most 1 thread in 8 idles."""
    shape = conv_shape((8, 8, 4 * vectors), (4 * vectors, 3, 3, 1), (1, 1), (1, 1, 1, 1), (1, 1), groups=4 * vectors)
    sums = depthwise_grid.depthwise_sums(shape, 64, 4, "float32", H200)
    assert (sums.slabs - 1) * sums.slab_vectors < vectors <= sums.slabs * sums.slab_vectors
    used = 128 // sums.slab_vectors * sums.slab_vectors * vectors / (sums.slabs * sums.slab_vectors)
    assert used >= 128 * 7 / 8 or vectors < 24


def test_the_workspace_suffices_whatever_the_alignment():
    """The bytes are those of the launch with vectors and of the one without."""
    for c, n, taps in itertools.product((7, 8, 96, 960), (1, 64), (3, 5, 7)):
        shape = conv_shape((14, 14, c), (c, taps, taps, 1), (1, 1), (2, 2, 2, 2), (1, 1), groups=c)
        total = depthwise_grid.depthwise_wgrad_workspace(shape, n, "float16", H200)
        for vector in (1, depthwise_grid.depthwise_vector(taps * taps, 2)):
            blocks = depthwise_grid.depthwise_sums(shape, n, vector, "float16", H200).blocks
            assert blocks * (taps * taps + 1) * c * 4 <= total

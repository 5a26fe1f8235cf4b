"""kernels/hopper: every operation, type, tile and schedule against float64, blocks that compute several tiles each."""

from __future__ import annotations

import itertools

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubatch import catalogue, kernel, tensor_map, variants
from cubatch.engine.native import conv, gemm, product
from cubatch.engine.native.product import Fused
from cubatch.windows import conv_shape
from tests.checks import assert_within
from tests.cpusim import building
from tests.cpusim.simulator import SCHEDULES, Simulator
from tests.kernels import cases
from tests.kernels.conftest import BUILD, CudaTarget, Target, _gpu

# Two SMs, so that a block computes several tiles, one after another around its ring of stages.
H200 = attrs.evolve(catalogue.find("h200-sxm"), num_sms=2)

# Each storage type is tested with one tile, so that there are few units to compile.
TILES = {"float16": "128x128x64", "bfloat16": "128x256x64"}
TF32_TILES = {"gemm_nt": "128x128x32_h", "conv2d_fprop": "128x256x32"}

SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=12 if BUILD == "plain" else 4, deadline=None)


@pytest.fixture(scope="session", params=["cpusim-90", pytest.param("cuda", marks=pytest.mark.gpu)])
def launcher(request):
    """Give the simulator of an H200 of two SMs, or the Hopper GPU of this machine."""
    if request.param == "cuda":
        gpu = _gpu()
        if gpu is None or gpu.compute_capability != (9, 0):
            pytest.skip("no Hopper GPU in this machine")
        from cubatch.launch import CudaLauncher

        return CudaTarget(gpu, CudaLauncher(gpu))
    if reason := building.reason_to_skip():
        pytest.skip(reason)
    return Target(H200, Simulator(90, BUILD))


def chooser(problem, device, prepare=None):
    """Choose the tile that a type is tested with."""
    tile = TF32_TILES[problem.operation] if problem.dtype == "tf32" else TILES[problem.dtype]
    return kernel.find(problem.operation, problem.dtype, family="hopper", tile=tile)


def context(launcher):
    return launcher.context(chooser=chooser, tf32=True)


def element(dtype):
    return cases.encoded(0, dtype).dtype


def bound(operations, magnitude, want, dtype):
    """As cases.bound; operands of tf32 lose what lies beyond 10 bits after the point, cut off or rounded."""
    lost = 2 * 2.0**-10 + 2.0**-20 if dtype == "float32" else 0
    return cases.bound(operations, (1 + lost) * magnitude, want, dtype) + lost * magnitude


@st.composite
def products(draw):
    """Draw type, layout and extents (m, n, k): rows of whole 16 bytes, all else odd; k goes around the ring."""
    dtype, layout = draw(st.sampled_from([
        *itertools.product(("float16", "bfloat16"), ("nn", "nt", "tn")), ("float32", "nt"),
    ]))  # fmt: skip
    rows = {"m": layout[0] == "t", "n": layout[1] == "n", "k": "n" in layout[0] or "t" in layout[1]}
    extents = {"m": 300, "n": 290, "k": 600}
    units = {name: (4 if dtype == "float32" else 8) if rows[name] else 1 for name in extents}
    return dtype, layout, *(units[name] * draw(st.integers(1, most // units[name])) for name, most in extents.items())


def operand(random, rows, columns, dtype, *, turned):
    return cases.drawn(random, (columns, rows) if turned else (rows, columns), dtype)


@given(products(), st.sampled_from(["none", "relu", "silu"]), SEEDS)
@FEW
def test_products_stay_within_the_rounding_of_their_sums(launcher, product, activation, seed):
    """Each output is a dot product of length k and a bias, in every layout, residues on every axis."""
    (dtype, layout, m, n, k), random = product, np.random.default_rng(seed)
    a = operand(random, m, k, dtype, turned=layout[0] == "t")
    b = operand(random, k, n, dtype, turned=layout[1] == "t")
    bias = cases.drawn(random, (n,), dtype)
    out = launcher.unwritten((m, n), element(dtype))
    fused = Fused(activation=activation)
    gemm.gemm(
        context(launcher), launcher.put(a), launcher.put(b), launcher.put(bias), layout=layout, out=out, fused=fused
    )
    left = cases.decoded(a).T if layout[0] == "t" else cases.decoded(a)
    right = cases.decoded(b).T if layout[1] == "t" else cases.decoded(b)
    want = left @ right + cases.decoded(bias)
    magnitude = abs(left) @ abs(right) + abs(cases.decoded(bias))
    error, slope = bound(k + 1, magnitude, want, dtype), 1.0
    if activation == "relu":
        want = np.maximum(want, 0)
    elif activation == "silu":  # its slope is below 1.1; 4 more roundings
        want, slope = want / (1 + np.exp(-want)), 1.1
        error = error + cases.bound(8, abs(want), want, dtype)
    assert_within(cases.decoded(launcher.get(out)), want, slope * error, axes="mn", label=f"{dtype} {layout}")


@st.composite
def convolutions(draw):
    """Draw a convolution without groups, of channels in 16-byte rows: less than a block, a block, and more."""
    drawn = draw(cases.convolutions(most_extent=12).filter(lambda conv: conv.groups == 1))
    channels = st.sampled_from([8, 24, 64, 72, 136])
    return attrs.evolve(drawn, c=draw(channels), k=draw(channels))


@given(convolutions(), st.sampled_from(cases.DTYPES), SEEDS)
@FEW
def test_fprop_stays_within_the_rounding_of_its_sums(launcher, drawn, dtype, seed):
    """Any stride, one-sided pad and dilation, images that differ in height and width, with bias and ReLU."""
    random = np.random.default_rng(seed)
    x, w, b = (cases.drawn(random, shape, dtype) for shape in (drawn.x_shape, drawn.w_shape, (drawn.k,)))
    y = launcher.unwritten(drawn.y_shape, element(dtype))
    fused = Fused(activation="relu")
    conv.conv2d(
        context(launcher), launcher.put(x), launcher.put(w), launcher.put(b), out=y, fused=fused, **drawn.options
    )
    x, w, b = cases.decoded(x), cases.decoded(w), cases.decoded(b)
    want, magnitude = cases.conv2d(drawn, x, w, b), cases.conv2d(drawn, abs(x), abs(w), abs(b))
    tolerance = bound(w[0].size + 1, magnitude, want, dtype)
    assert_within(cases.decoded(launcher.get(y)), np.maximum(want, 0), tolerance, axes="npqk", label=str(drawn))


@given(convolutions(), st.sampled_from(sorted(TILES)), SEEDS)
@FEW
def test_dgrad_adds_to_a_residual_and_masks_by_relu(launcher, drawn, dtype, seed):
    """Every phase of the stride writes its pixels, those without a tap too: the residual, where the mask lets it."""
    random = np.random.default_rng(seed)
    dy, w = cases.drawn(random, drawn.y_shape, dtype), cases.drawn(random, drawn.w_shape, dtype)
    residual, mask = cases.drawn(random, drawn.x_shape, dtype), cases.drawn(random, drawn.x_shape, dtype)
    dx = launcher.put(residual)
    conv.conv2d_dgrad(
        context(launcher), launcher.put(dy), launcher.put(w), x_shape=drawn.x_shape, out=dx,
        fused=Fused(residual=dx, mask=launcher.put(mask)), **drawn.options,
    )  # fmt: skip
    dy, w, residual = cases.decoded(dy), cases.decoded(w), cases.decoded(residual)
    passes = cases.decoded(mask) > 0
    want = np.where(passes, cases.conv2d_dgrad(drawn, dy, w) + residual, 0)
    magnitude = cases.conv2d_dgrad(drawn, abs(dy), abs(w)) + abs(residual)
    tolerance = np.where(passes, bound(drawn.k * drawn.r * drawn.s + 1, magnitude, want, dtype), 0)
    assert_within(cases.decoded(launcher.get(dx)), want, tolerance, axes="nhwc", label=str(drawn))


@given(convolutions(), st.sampled_from(sorted(TILES)), SEEDS)
@FEW
def test_wgrad_stays_within_the_rounding_of_its_sums(launcher, drawn, dtype, seed):
    """A filter element's gradient is a sum over all output pixels, of whichever tap and block of channels."""
    random = np.random.default_rng(seed)
    x, dy = cases.drawn(random, drawn.x_shape, dtype), cases.drawn(random, drawn.y_shape, dtype)
    dw = launcher.unwritten(drawn.w_shape, element(dtype))
    conv.conv2d_wgrad(context(launcher), launcher.put(x), launcher.put(dy), dw=dw, **drawn.options)
    x, dy = cases.decoded(x), cases.decoded(dy)
    (want, _), (magnitude, _) = cases.conv2d_wgrad(drawn, x, dy), cases.conv2d_wgrad(drawn, abs(x), abs(dy))
    tolerance = bound(dy[..., 0].size + 1, magnitude, want, dtype)
    assert_within(cases.decoded(launcher.get(dw)), want, tolerance, axes="krsc", label=str(drawn))


def test_512_channels_go_around_the_ring_for_every_tap(launcher):
    """72 steps along gemm_k through 6 stages, of a strided and padded filter."""
    drawn, random = cases.Conv(n=2, h=5, w=7, c=512, k=40, r=3, s=3, stride=(2, 1), pad=(1, 1, 0, 1)), rng(0)
    x, w = cases.drawn(random, drawn.x_shape, "float16"), cases.drawn(random, drawn.w_shape, "float16")
    y = conv.conv2d(context(launcher), launcher.put(x), launcher.put(w), **drawn.options)
    x, w = cases.decoded(x), cases.decoded(w)
    want, magnitude = cases.conv2d(drawn, x, w), cases.conv2d(drawn, abs(x), abs(w))
    assert_within(cases.decoded(launcher.get(y)), want, bound(512 * 9, magnitude, want, "float16"), axes="npqk")


def test_scale_and_shift_are_of_columns(launcher):
    """A folded batch norm, bias and residual at once, where rows are stored 4 at a time and where not."""
    for n in (72, 70):
        random = rng(n)
        a, b = cases.drawn(random, (130, 64), "float16"), cases.drawn(random, (n, 64), "float16")
        bias, residual = cases.drawn(random, (n,), "float16"), cases.drawn(random, (130, n), "float16")
        scale, shift = cases.drawn(random, (n,)), cases.drawn(random, (n,))
        fused = Fused(scale=launcher.put(scale), shift=launcher.put(shift), residual=launcher.put(residual))
        out = gemm.gemm(context(launcher), launcher.put(a), launcher.put(b), launcher.put(bias), fused=fused)
        a, b, bias, residual = map(cases.decoded, (a, b, bias, residual))
        want = scale * (a @ b.T) + shift + bias + residual
        magnitude = abs(scale) * (abs(a) @ abs(b).T) + abs(shift) + abs(bias) + abs(residual)
        assert_within(cases.decoded(launcher.get(out)), want, bound(64 + 4, magnitude, want, "float16"), axes="mn")


def rng(seed):
    return np.random.default_rng(seed)


def integers(random, *shape):
    """Draw integers whose products and sums are exact in every type."""
    return random.integers(-2, 3, shape).astype(np.float16)


@pytest.mark.skipif(BUILD == "thread", reason="the same lines as above, in more orders")
@pytest.mark.parametrize("mode", list(itertools.product(SCHEDULES, ("late", "early"))), ids="-".join)
@pytest.mark.parametrize("tile", ["128x64x64", "128x128x64", "128x256x64"])
def test_results_are_exact_in_every_schedule(tile, mode):
    """Three tiles a block, five times around the ring and a residue, in every order of threads and copies."""
    if reason := building.reason_to_skip():
        pytest.skip(reason)
    random, simulator = rng(5), Simulator(90, BUILD, schedule=mode[0], copies=mode[1], seed=11)
    where = Target(H200, simulator).context(
        chooser=lambda problem, *_: kernel.find(problem.operation, problem.dtype, family="hopper", tile=tile)
    )
    a, b = integers(random, 264, 520), integers(random, 264, 520)
    assert np.array_equal(gemm.gemm(where, a, b), a.astype(float) @ b.T.astype(float))
    drawn = cases.Conv(n=3, h=7, w=10, c=72, k=136, r=3, s=2, stride=(2, 1), dilation=(1, 2), pad=(2, 1, 0, 3))
    x, w, dy = (integers(random, *shape) for shape in (drawn.x_shape, drawn.w_shape, drawn.y_shape))
    wide = [array.astype(np.float64) for array in (x, w, dy)]
    dw = np.full_like(w, np.nan)
    assert np.array_equal(conv.conv2d(where, x, w, **drawn.options), cases.conv2d(drawn, wide[0], wide[1]))
    dx = conv.conv2d_dgrad(where, dy, w, x_shape=x.shape, **drawn.options)
    assert np.array_equal(dx, cases.conv2d_dgrad(drawn, wide[2], wide[1]))
    conv.conv2d_wgrad(where, x, dy, dw=dw, **drawn.options)
    assert np.array_equal(dw, cases.conv2d_wgrad(drawn, wide[0], wide[2])[0])


def test_a_split_product_repeats_itself_to_the_bit(launcher):
    """Few tiles and many pixels are split into slices, whose sums are added up in one order."""
    drawn, seen = cases.Conv(n=3, h=30, w=28, c=24, k=16, r=1, s=2), []

    def watch(problem, device, prepare):
        chosen = chooser(problem, device)
        seen.append(variants.slices(problem, chosen, device))
        return chosen

    x, dy = (cases.drawn(rng(1), shape, "float16") for shape in (drawn.x_shape, drawn.y_shape))
    results = []
    for _ in range(2):
        dw = launcher.unwritten(drawn.w_shape, np.float16)
        where = attrs.evolve(launcher.context(chooser=watch), device=attrs.evolve(launcher.device, num_sms=100))
        conv.conv2d_wgrad(where, launcher.put(x), launcher.put(dy), dw=dw)
        results.append(launcher.get(dw))
    assert min(seen) > 1
    assert results[0].tobytes() == results[1].tobytes()
    x, dy = cases.decoded(x), cases.decoded(dy)
    (want, _), (magnitude, _) = cases.conv2d_wgrad(drawn, x, dy), cases.conv2d_wgrad(drawn, abs(x), abs(dy))
    assert_within(cases.decoded(results[0]), want, bound(dy[..., 0].size + seen[0], magnitude, want, "float16"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_clusters_share_their_operands(launcher, dtype, monkeypatch):
    """Two blocks that load half of B each for both give what one gives alone, to the bit; odd tiles leave one idle."""
    if launcher.arch == 90 and isinstance(launcher.launcher, Simulator):
        pytest.skip("clusters are the GPU's alone")
    monkeypatch.setattr(product, "slices", lambda *_: 1)  # an idle block may be worth another split
    random, tile = rng(6), "128x256x32" if dtype == "float32" else "128x256x64"
    drawn = cases.Conv(n=3, h=29, w=27, c=136, k=264, r=3, s=2, stride=(2, 1), dilation=(1, 2), pad=(2, 1, 0, 3))
    x, w, dy = (
        launcher.put(cases.drawn(random, shape, dtype)) for shape in (drawn.x_shape, drawn.w_shape, drawn.y_shape)
    )
    a, b = (launcher.put(cases.drawn(random, (rows, 1160), dtype)) for rows in (1304, 2056))
    results = []
    for suffix in ("", "_c2"):
        where = launcher.context(
            tf32=True,
            chooser=lambda problem, *_, name=tile + suffix: kernel.find(
                problem.operation, problem.dtype, family="hopper", tile=name
            ),
        )
        found = [gemm.gemm(where, a, b), conv.conv2d(where, x, w, **drawn.options)]
        if dtype != "float32":
            dw = launcher.unwritten(drawn.w_shape, element(dtype))
            conv.conv2d_wgrad(where, x, dy, dw=dw, **drawn.options)
            dx = conv.conv2d_dgrad(where, dy, w, x_shape=drawn.x_shape, **drawn.options)
            turned = gemm.gemm(where, b.reshape(1160, 2056), a.reshape(1160, 1304), layout="tn")
            found += [dw, dx, turned, gemm.gemm(where, a, b.reshape(1160, 2056), layout="nn")]
        results.append([launcher.get(array).tobytes() for array in found])
    assert results[0] == results[1]


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
        shape = conv_shape((300, 301, 64), (64, 3, 3, 64 // groups), stride, (2, 2, 2, 2), dilation, groups)
        return tensor_map.can_gather(operation, shape, samples)

    assert taken(**facts)
    assert not taken(**facts | change), reason

"""
Batch norm and sums of rows against float64.

A sum is made in a known tree: rows of a thread one after the other, then five halvings of a warp, eight
warps, and tiles; bounds count the roundings on its longest path, taken from the grid.
"""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.engine.batch_norm import ACTIVATIONS
from cubatch.engine.native import batch_norm, reductions, scaling
from cubatch.engine.native.arrays import tile_arguments
from cubatch.hardware.facts import Device
from cubatch.kernels import variant
from cubatch.kernels.workspace.misc import THREADS, summed_tiles
from cubatch.network.layers import LAYERS
from tests.checks import assert_within, gamma
from tests.cpusim.simulator import Simulator
from tests.kernels.cases import DTYPES, bound, decoded, drawn, encoded
from tests.kernels.conftest import BUILD, Target
from tests.kernels.placing import place, room
from tests.reference import CURVES

U = 2.0**-24
EPS = 1e-5

SHAPES = [
    ((1, 1), 0),  # one row of one channel
    ((3, 1, 1, 2048), 0),  # many channels, hardly a row
    ((7, 7, 1, 17), 0),  # odd channels: single elements
    ((3, 7, 7, 24), 0),
    ((3, 7, 7, 24), 1),  # starts between vectors
    ((2500, 1), 0),  # one channel: whole warps over the rows
    ((1100, 8), 0),  # several tiles
]


def _steps(launcher, shape, itemsize):
    """Count the additions on the longest path of a sum, whichever vector the launch takes; and the tiles."""
    rows, channels = int(np.prod(shape[:-1])), shape[-1]
    found = [summed_tiles(rows, channels, vector, itemsize, launcher.device) for vector in (1, 16 // itemsize)]
    within = max(-(-tiles.rows_per_tile * tiles.lanes // THREADS) for tiles in found) + 5 + 8
    tiles = max(tiles.tiles for tiles in found)
    return within, tiles, -(-tiles // 32) + 2 + 8


def _case(shape, dtype, *, mean=0.5, std=1.0):
    random = np.random.default_rng(np.prod(shape))
    x = encoded(mean + std * random.standard_normal(shape), dtype)
    gamma_, beta = (drawn(random, shape[-1:], dtype) for _ in range(2))
    return random, x, gamma_, beta


def _statistics(x):
    """Give mean, biased variance, largest deviation and rows of each channel, in float64."""
    rows = decoded(x).reshape(-1, x.shape[-1])
    mean = rows.mean(axis=0)
    deviations = rows - mean
    return mean, (deviations**2).mean(axis=0), abs(deviations).max(axis=0), len(rows)


def _statistics_bounds(launcher, x):
    """
    Bound the errors of mean, before it is rounded to be stored, and variance; neither knows how large the mean is.

    Shifted sums are of x - pivot, which is at most twice the largest deviation D in size, as is the distance from
    x[0] to a pivot or the mean of tiles; each merge of tiles rounds such a distance, and what it moves it by.
    """
    _, _, largest, _ = _statistics(x)
    steps, tiles, merges = _steps(launcher, x.shape, x.itemsize)
    merges = min(merges, tiles)
    mean_bound = gamma(steps + 4 + 6 * merges, U) * 2 * largest
    var_bound = gamma(2 * steps + 8 * merges + 4, U) * 8 * largest**2 + 4 * largest * mean_bound
    return mean_bound, var_bound


def _train(launcher, x, gamma_, beta, shift, *, relu=False):
    c = x.shape[-1]
    y = room(launcher, x.shape, x.dtype, shift)
    mean, inv_std = (room(launcher, (c,), np.float32) for _ in range(2))
    running_mean, running_var = launcher.put(np.full(c, 2, np.float32)), launcher.put(np.full(c, 3, np.float32))
    batch_norm.batch_norm_train(
        launcher.context(), place(launcher, x, shift), launcher.put(gamma_), launcher.put(beta), mean=mean,
        inv_std=inv_std, running_mean=running_mean, running_var=running_var, momentum=0.25, eps=EPS, relu=relu, out=y,
        count=x.size // c, reduce=lambda _: pytest.fail("one member has nobody to sum with"),
    )  # fmt: skip
    return [decoded(launcher.get(array)) for array in (y, mean, inv_std, running_mean, running_var)]


def _assert_trained(launcher, x, gamma_, beta, got, *, relu, label):
    mean, var, _, rows = _statistics(x)
    mean_bound, var_bound = _statistics_bounds(launcher, x)
    y, got_mean, got_inv_std, running_mean, running_var = got
    assert_within(got_mean, mean, mean_bound + U * abs(mean), label=f"mean {label}")
    inv_std = 1 / np.sqrt(var + EPS)
    # The derivative of v^(-1/2) is v^(-3/2) / 2, taken where v is smallest; then a division, a sum, a root, a division.
    least = np.maximum(var + EPS - var_bound, EPS)
    std_bound = 0.5 * least**-1.5 * var_bound + gamma(4, U) * least**-0.5
    assert_within(got_inv_std, inv_std, std_bound, label=f"inv_std {label}")
    assert_within(
        running_mean, 0.75 * 2 + 0.25 * mean, 0.25 * mean_bound + gamma(4, U) * (2 + abs(mean)), label="running mean"
    )
    if rows == 1:  # one value has no unbiased variance: what ran before stays
        assert (running_var == 3).all(), label
    else:
        unbiased = var * rows / (rows - 1)
        running_bound = 0.25 * var_bound * rows / (rows - 1) + gamma(5, U) * (3 + unbiased)
        assert_within(running_var, 0.75 * 3 + 0.25 * unbiased, running_bound, label=f"running variance {label}")

    scale, deviation = decoded(gamma_), decoded(x) - mean
    want = scale * deviation * inv_std + decoded(beta)
    magnitude = abs(scale) * inv_std * abs(deviation) + abs(decoded(beta))
    error = abs(scale) * ((mean_bound + U * abs(mean)) * (inv_std + std_bound) + abs(deviation) * std_bound)
    dtype = {2: "float16", 4: "float32"}[x.itemsize] if x.dtype != np.uint16 else "bfloat16"
    if relu:
        want = np.maximum(want, 0)
    assert_within(y, want, error + bound(4, magnitude + error, want, dtype), label=f"y {label}")


def _assert_gradients(launcher, got, x, errors, norm, dtype, *, off=0.0, label=""):
    """Check dx, dgamma and dbeta of errors behind a norm, which are off by `off` themselves."""
    gamma_, mean, inv_std = norm
    c, shape = x.shape[-1], x.shape
    errors, off = errors.reshape(-1, c), np.broadcast_to(off, shape).reshape(-1, c)
    rows, xhat = len(errors), (decoded(x).reshape(-1, c) - mean) * inv_std.astype(np.float64)
    steps, tiles, merges = _steps(launcher, shape, x.itemsize)
    additions = steps + min(merges, tiles) + 13
    sums, sizes, offs = (
        ((part * weight).sum(axis=0), part.sum(axis=0))
        for part, weight in ((errors, xhat), (abs(errors), abs(xhat)), (off, abs(xhat)))
    )
    for found, want, size, error, name in zip(got[1:], sums, sizes, offs, ("dgamma", "dbeta"), strict=True):
        within = bound(additions + 4, size, want, dtype) + error
        assert_within(found, want, within, label=f"{name} {label} {shape} {dtype}")
    factor = decoded(gamma_) * inv_std
    want = factor * (errors - sums[1] / rows - xhat * sums[0] / rows)
    magnitude = abs(factor) * (abs(errors) + sizes[1] / rows + abs(xhat) * sizes[0] / rows)
    error = abs(factor) * (off + offs[1] / rows + abs(xhat) * offs[0] / rows)
    within = (bound(additions + 12, magnitude, want, dtype) + error).reshape(shape)
    assert_within(got[0], want.reshape(shape), within, label=f"dx {label} {shape} {dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "shift"), SHAPES)
def test_training_normalises_by_the_statistics_of_the_batch(launcher, shape, shift, dtype):
    """Mean, deviation, running statistics and result, each within the rounding of the sums behind it."""
    _, x, gamma_, beta = _case(shape, dtype)

    got = _train(launcher, x, gamma_, beta, shift, relu=shift == 0)

    _assert_trained(launcher, x, gamma_, beta, got, relu=shift == 0, label=f"{shape} {dtype}")


@pytest.mark.parametrize("ratio", [1, 10, 100, 1000, 10000])
def test_a_large_mean_costs_no_digits_of_the_deviation(launcher, ratio):
    """
    Sums are taken around a pivot: E[x^2] - E[x]^2 in float32 would be off by 6 % at mean 1000 and deviation 1.

    Nor do merges round the mean: beyond a deviation's own rounding it has that of being stored, and no more.
    """
    _, x, gamma_, beta = _case((4000, 64), "float32", mean=float(ratio))
    mean_bound, var_bound = _statistics_bounds(launcher, x)
    assert (var_bound < 0.02).all()
    assert (mean_bound < 1e-4).all()

    got = _train(launcher, x, gamma_, beta, 0)

    _assert_trained(launcher, x, gamma_, beta, got, relu=False, label=f"mean {ratio}")


def test_the_deviation_does_not_depend_on_the_mean(launcher):
    """In steps of 1/256 all differences of elements are exact, and only those are summed: not a bit moves."""
    deviations = np.round(np.random.default_rng(13).standard_normal((4000, 64)) * 256) / 256
    gamma_, beta = np.ones(64, np.float32), np.zeros(64, np.float32)
    first, *others = (
        _train(launcher, (mean + deviations).astype(np.float32), gamma_, beta, 0) for mean in (0, 1, 1000, 10000)
    )
    for _, _, inv_std, _, running_var in others:
        np.testing.assert_array_equal(inv_std, first[2])
        np.testing.assert_array_equal(running_var, first[4])


def test_constant_channels_have_no_variance(launcher):
    """Deviations are exactly zero, so that 1 / sqrt(eps) comes out and not the root of something negative."""
    x = np.full((300, 4), 1234.567, np.float32)
    y, _, inv_std, _, _ = _train(launcher, x, np.ones(4, np.float32), np.zeros(4, np.float32), 0)
    assert_within(inv_std, np.full(4, EPS**-0.5), gamma(5, U) * EPS**-0.5, label="inv_std")
    assert_within(y, np.zeros(x.shape), 2 * U * 1234.567 * EPS**-0.5, label="y")


@pytest.mark.parametrize(("tiles", "channels"), [(1, 3), (70, 9), (1500, 9)])
def test_moments_of_any_number_of_tiles_are_merged(launcher, tiles, channels):
    """Those of an epilogue: tiles of unequal counts, beyond 1024 merged in two steps (Chan et al., 1983)."""
    random = np.random.default_rng(tiles)
    counts = random.integers(1, 129, (tiles, 1)).astype(np.float32)
    means = random.uniform(-1, 1, (tiles, channels)).astype(np.float32)
    squares = (counts * random.uniform(0, 1, (tiles, channels))).astype(np.float32)
    partials = np.stack([np.broadcast_to(counts, means.shape), means, squares], axis=1)

    mean, inv_std = (room(launcher, (channels,), np.float32) for _ in range(2))
    flat = launcher.put(np.ascontiguousarray(partials).reshape(-1))
    batch_norm.batch_norm_finish(launcher.context(), flat, tiles, dtype="float32", mean=mean, inv_std=inv_std, eps=EPS)

    total = counts.sum(dtype=np.float64)
    want = (counts * means.astype(np.float64)).sum(axis=0) / total
    var = (squares + counts * (means.astype(np.float64) - want) ** 2).sum(axis=0) / total
    merges = 2 * (-(-min(tiles, 1024) // 32) + 2 + 8)
    mean_bound = gamma(6 * merges, U) * 2  # means lie in (-1, 1), so what a merge moves one by is below 2
    assert_within(launcher.get(mean), want, mean_bound, label="mean")
    var_bound = gamma(8 * merges, U) * (var + 4) + 4 * mean_bound
    want_std = 1 / np.sqrt(var + EPS)
    std_bound = 0.5 * (var + EPS - var_bound) ** -1.5 * var_bound + gamma(4, U) * want_std
    assert_within(launcher.get(inv_std), want_std, std_bound, label="inv_std")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "shift"), [((2, 3, 5, 24), 0), ((2, 3, 5, 24), 1), ((9, 7), 0)])
def test_inference_normalises_by_running_statistics(launcher, shape, shift, dtype):
    """Nothing is summed: a difference, a root, two products and a sum."""
    random, x, gamma_, beta = _case(shape, dtype)
    mean = random.uniform(-1, 1, shape[-1]).astype(np.float32)
    var = random.uniform(0.5, 2, shape[-1]).astype(np.float32)

    y = room(launcher, shape, x.dtype, shift)
    batch_norm.batch_norm_inference(
        launcher.context(), place(launcher, x, shift), launcher.put(gamma_), launcher.put(beta),
        running_mean=launcher.put(mean), running_var=launcher.put(var), eps=EPS, out=y,
    )  # fmt: skip

    product = decoded(gamma_) * (decoded(x) - mean) / np.sqrt(var.astype(np.float64) + EPS)
    want = product + decoded(beta)
    within = bound(8, abs(product) + abs(decoded(beta)), want, dtype)
    assert_within(decoded(launcher.get(y)), want, within, label=f"inference {shape} {dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "shift"), [((2, 3, 5, 24), 0), ((2, 3, 5, 24), 1), ((9, 7), 0)])
def test_a_branch_is_added_to_what_is_normalised_and_written_over(launcher, shape, shift, dtype):
    """In place, then clamped: one sum more than a normalisation, rounded once."""
    random, x, gamma_, beta = _case(shape, dtype)
    mean = random.uniform(-1, 1, shape[-1]).astype(np.float32)
    inv_std = random.uniform(0.5, 2, shape[-1]).astype(np.float32)
    branch = drawn(random, shape, dtype)
    y = place(launcher, branch, shift)
    batch_norm.batch_norm_apply(
        launcher.context(), launcher.put(x), launcher.put(gamma_), launcher.put(beta), mean=launcher.put(mean),
        inv_std=launcher.put(inv_std), residual=y, relu=True, out=y,
    )  # fmt: skip
    product = decoded(gamma_) * (decoded(x) - mean) * inv_std.astype(np.float64)
    want = product + decoded(beta) + decoded(branch)
    terms = abs(product) + abs(decoded(beta)) + abs(decoded(branch))
    assert_within(
        decoded(launcher.get(y)), np.maximum(want, 0), bound(8, terms, want, dtype), label=str((shape, dtype))
    )


# Of each activation, the inputs at which its slope jumps.
JUMPS = {"relu": (0,), "relu6": (0, 6), "silu": (), "hard_swish": (-3, 3), "gelu": ()}


def test_norms_compute_the_activations_that_the_schedule_leaves_to_them():
    """Those whose slope has one formula in their input; ReLU's result is clamped by the plain kernel."""
    assert ACTIVATIONS == {kind.type for kind in LAYERS.values() if kind.slope_of_input} == {*JUMPS}


def _normed(dtype, shape, kind):
    """Draw a norm whose results reach beyond all bends; give it, its results in float64, and their largest terms."""
    random = np.random.default_rng(len(kind))
    x, dy, gamma_, beta = (drawn(random, each, dtype) for each in (shape, shape, shape[-1:], shape[-1:]))
    mean = random.uniform(-1, 1, shape[-1]).astype(np.float32)
    inv_std = random.uniform(6, 9, shape[-1]).astype(np.float32)
    product = decoded(gamma_) * (decoded(x) - mean) * inv_std.astype(np.float64)
    return x, dy, gamma_, beta, mean, inv_std, product + decoded(beta), abs(product) + abs(decoded(beta))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [kind for kind in JUMPS if kind != "relu"])
@pytest.mark.parametrize(("shape", "shift"), [((2, 3, 5, 24), 0), ((2, 3, 5, 24), 1), ((9, 7), 0)])
def test_an_activation_is_applied_before_what_is_normalised_is_stored(launcher, shape, shift, kind, dtype):
    """By running statistics and by the batch's: slopes are at most 1.5, and one rounding to 16 bits remains."""
    x, _, gamma_, beta, mean, inv_std, pre, terms = _normed(dtype, shape, kind)
    arrays = place(launcher, x, shift), launcher.put(gamma_), launcher.put(beta)
    variance = (1 / inv_std.astype(np.float64) ** 2).astype(np.float32)
    ys = [room(launcher, shape, x.dtype, shift) for _ in range(2)]
    batch_norm.batch_norm_apply(
        launcher.context(), *arrays, mean=launcher.put(mean), inv_std=launcher.put(inv_std), activation=kind, out=ys[0]
    )
    batch_norm.batch_norm_inference(
        launcher.context(), *arrays, running_mean=launcher.put(mean), running_var=launcher.put(variance), eps=0.0,
        activation=kind, out=ys[1],
    )  # fmt: skip
    want = CURVES[kind][0](pre)
    for y in ys:
        within = bound(20, 1.5 * terms + abs(pre) * (1 + abs(pre)), want, dtype)
        assert_within(decoded(launcher.get(y)), want, within, label=f"{kind} {shape} {dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", JUMPS)
@pytest.mark.parametrize(("shape", "shift"), [((3, 7, 7, 24), 0), ((3, 7, 7, 24), 1), ((1100, 8), 0), ((9, 7), 0)])
def test_the_slope_behind_a_norm_is_computed_from_its_input(launcher, shape, shift, kind, dtype):
    """All three gradients are those of the two layers one after the other; dx is written over dy."""
    _assert_undone(launcher, shape, shift, kind, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["none", "relu", "silu"])
@pytest.mark.parametrize(
    ("shape", "shift", "pooled_at"),
    [((3, 7, 7, 24), 0, 0), ((3, 7, 7, 24), 1, 0), ((3, 7, 7, 24), 0, 1), ((25, 11, 4, 8), 0, 0), ((9, 7), 0, 0)],
)
def test_the_gradient_of_a_global_pool_is_added_before_the_slope(launcher, shape, shift, pooled_at, kind, dtype):
    """One value for each sample and channel, divided among the pixels; tiles of rows begin and end inside a sample."""
    _assert_undone(launcher, shape, shift, kind, dtype, pooled_at=pooled_at)


def _assert_undone(launcher, shape, shift, kind, dtype, *, pooled_at=None):
    """
    Check the gradients of a norm with an activation behind it.

    Args:
        pooled_at: Elements between the start of an allocation and the gradient of a global pool behind the two; None
            for no pool.
    """
    x, dy, gamma_, beta, mean, inv_std, pre, terms = _normed(dtype, shape, kind)
    n, c, rows, is_pooled = shape[0], shape[-1], int(np.prod(shape[:-1])), pooled_at is not None
    pooled = encoded(rows / n * decoded(drawn(np.random.default_rng(1), (n, c), dtype)), dtype)
    dx, dgamma, dbeta = place(launcher, dy, shift), *(room(launcher, (c,), x.dtype) for _ in range(2))
    batch_norm.batch_norm_backward(
        launcher.context(), dx, place(launcher, x, shift), launcher.put(gamma_), mean=launcher.put(mean),
        inv_std=launcher.put(inv_std), dgamma=dgamma, dbeta=dbeta, beta=launcher.put(beta),
        activation=None if kind == "none" else kind, pooled=place(launcher, pooled, pooled_at) if is_pooled else None,
        count=rows, out=dx,
    )  # fmt: skip

    # Rounding of an element's input changes its slope by less than the input's own error; near a bend, by the jump.
    apart = abs(np.subtract.outer(pre, np.array(JUMPS.get(kind, ())))) <= 8 * U * (terms[..., None] + 1)
    unsure = np.where(apart.any(axis=-1), 1.0, gamma(14, U) * (1 + abs(pre) * (1 + abs(pre)) + terms))
    assert apart.any(axis=-1).mean() < 0.01
    share = (is_pooled * n / rows * decoded(pooled)).reshape(n, *(1 for _ in shape[2:]), c)
    slope = CURVES[kind][1](pre) if kind in CURVES else 1.0
    errors, size = (decoded(dy) + share) * slope, abs(decoded(dy)) + abs(share)
    off = size * (unsure + is_pooled * gamma(3, U) * 1.5)
    got = [decoded(launcher.get(array)) for array in (dx, dgamma, dbeta)]
    _assert_gradients(launcher, got, x, errors, (gamma_, mean, inv_std), dtype, off=off, label=kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "shift"), [*SHAPES, ((25, 11, 4, 8), 0)])
def test_sums_may_start_at_the_last_row(launcher, shape, shift, dtype):
    """Blocks take the rows in turns; in the last turn some of them have fewer rows than others, or none."""
    backwards = attrs.evolve(launcher, options={"reverses_sums": True})
    _, x, gamma_, beta = _case(shape, dtype)
    got = _train(backwards, x, gamma_, beta, shift)
    _assert_trained(backwards, x, gamma_, beta, got, relu=False, label=f"{shape} {dtype}")
    _assert_undone(backwards, shape, shift, "none", dtype)
    _assert_undone(backwards, shape, shift, "silu", dtype, pooled_at=0)


def test_all_kernels_that_sum_rows_start_at_the_last_one(launcher):
    """Those that write rows follow them, and find the first rows in the cache."""
    launched = set()
    bound = SimpleNamespace(module=np, bind=lambda kernel, *_: launched.add(kernel.operation) or (lambda: None))
    context = launcher.context(launcher=bound, reverses_sums=True)
    x, norm = np.zeros((1100, 8), np.float32), np.zeros(8, np.float32)
    statistics, sums = {"mean": norm, "inv_std": norm}, {"dgamma": norm, "dbeta": norm}
    reductions.column_sums(context, x)
    batch_norm.batch_norm_train(context, x, norm, norm, **statistics, out=x)
    for kind in (None, "relu"):
        batch_norm.batch_norm_backward(context, x, x, norm, **statistics, **sums, beta=norm, activation=kind, out=x)
    scaling.layer_scale_backward(context, x, x, norm, dgamma=norm, out=x)
    known = {kernel.operation for kernel in variant.kernels() if kernel.operation.endswith("_reversed")}
    assert {name for name in launched if "sums" in name or "statistics" in name} == known | {"column_sums_finish"}


def test_the_block_that_owns_a_row_reads_it_in_its_turn(launcher):
    """Of two blocks with as many rows as a turn has, the first sums the last rows."""
    x = np.arange(2.0 * THREADS, dtype=np.float32).reshape(-1, 1)
    tiles = summed_tiles(*x.shape, 1, 4, launcher.device)
    assert tiles.lanes == 1
    partials = launcher.unwritten((2,), np.float32)
    numbers = tile_arguments(*x.shape, tiles)
    launcher.context().run("column_sums_reversed", x, (2, 1, 1), launcher.put(x), partials, *numbers)
    assert launcher.get(partials).tolist() == [x[THREADS:].sum(), x[:THREADS].sum()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [1, 35])
def test_folding_gives_the_scale_and_shift_of_every_norm(launcher, norms, dtype):
    """More norms than a launch takes, of different widths, with and without a bias: a root and a few roundings."""
    random = np.random.default_rng(norms)
    widths = [random.integers(1, 300) for _ in range(norms)]
    gammas, betas, biases = ([drawn(random, (c,), dtype) for c in widths] for _ in range(3))
    means = [random.uniform(-1, 1, c).astype(np.float32) for c in widths]
    variances = [random.uniform(0.5, 2, c).astype(np.float32) for c in widths]
    scales, shifts = ([launcher.unwritten((c,), np.float32) for c in widths] for _ in range(2))
    epsilons = [1e-5 * (1 + number) for number in range(norms)]
    given = [None if number % 3 == 1 else array for number, array in enumerate(biases)]
    put = [[None if array is None else launcher.put(array) for array in arrays] for arrays in (gammas, betas, given)]
    batch_norm.fold_batch_norms(
        launcher.context(), *put, means=[launcher.put(mean) for mean in means],
        variances=[launcher.put(variance) for variance in variances], epsilons=epsilons, scales=scales, shifts=shifts,
    )  # fmt: skip
    for number in range(norms):
        want = decoded(gammas[number]) / np.sqrt(variances[number].astype(np.float64) + epsilons[number])
        bias = 0 if given[number] is None else decoded(given[number])
        shift = (bias - means[number]) * want + decoded(betas[number])
        terms = (abs(bias) + abs(means[number])) * abs(want) + abs(decoded(betas[number]))
        assert_within(launcher.get(scales[number]), want, gamma(6, U) * abs(want), label=f"scale {number}")
        assert_within(launcher.get(shifts[number]), shift, gamma(9, U) * terms, label=f"shift {number}")


def test_sums_of_gradients_launch_the_blocks_that_the_sms_hold(monkeypatch):
    """More would be a second, short wave: on 80 SMs that hold two or three blocks there are 157 and 224."""
    grids = []
    device = Device(name="V100", num_sms=80, compute_capability=(7, 0))
    context = SimpleNamespace(
        device=device, aligned=lambda *_: True, launch=lambda _, grid, __: grids.append(grid), reverses_sums=False
    )  # fmt: skip
    monkeypatch.setattr(batch_norm, "finish_gradients", lambda *_, **__: None)
    x, workspace = np.zeros((100352, 64), np.float16), np.zeros(1 << 20, np.uint8)
    for resident in (2, 3):
        monkeypatch.setattr(batch_norm, "resident_blocks", lambda *_, resident=resident: resident)
        batch_norm.gradient_sums(
            context, x, x, mean=None, inv_std=None, dgamma=None, dbeta=None, means=None, workspace=workspace
        )
    assert [tiles * blocks for tiles, blocks, _ in grids] == [157, 224]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "shift"), SHAPES)
def test_backward_gives_all_three_gradients(launcher, shape, shift, dtype):
    """Two sums over the rows, and dx from them; by the formula in float64 with the statistics it was handed."""
    random, x, gamma_, _ = _case(shape, dtype)
    dy = drawn(random, shape, dtype)
    c, rows = shape[-1], int(np.prod(shape[:-1]))
    mean = random.uniform(0, 1, c).astype(np.float32)
    inv_std = random.uniform(0.5, 2, c).astype(np.float32)

    dx, dgamma, dbeta = (room(launcher, s, x.dtype, at) for s, at in ((shape, shift), ((c,), 0), ((c,), 0)))
    batch_norm.batch_norm_backward(
        launcher.context(), place(launcher, dy, shift), place(launcher, x, shift), launcher.put(gamma_),
        mean=launcher.put(mean), inv_std=launcher.put(inv_std), dgamma=dgamma, dbeta=dbeta, count=rows, out=dx,
    )  # fmt: skip

    got = [decoded(launcher.get(array)) for array in (dx, dgamma, dbeta)]
    _assert_gradients(launcher, got, x, decoded(dy), (gamma_, mean, inv_std), dtype)


@given(rows=st.integers(1, 700), channels=st.sampled_from([1, 2, 5, 8, 16, 40, 130]), dtype=st.sampled_from(DTYPES),
       shift=st.sampled_from([0, 1]), reverses=st.booleans())  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_column_sums_stay_within_the_rounding_of_their_tree(launcher, rows, channels, dtype, shift, reverses):
    """The gradient of a bias: one sum over all rows for each channel, from the first row or the last."""
    x = drawn(np.random.default_rng(rows), (rows, channels), dtype)

    out = room(launcher, (channels,), x.dtype)
    reductions.column_sums(launcher.context(reverses_sums=reverses), place(launcher, x, shift), out=out)

    steps, tiles, merges = _steps(launcher, x.shape, x.itemsize)
    want, size = decoded(x).sum(axis=0), abs(decoded(x)).sum(axis=0)
    within = bound(steps + min(merges, tiles) + 13, size, want, dtype)
    assert_within(decoded(launcher.get(out)), want, within, label=f"column sums of {rows} x {channels} {dtype}")


def test_sums_do_not_depend_on_the_schedule(launcher):
    """No atomics: two schedules of threads and blocks give the same bits."""
    if not isinstance(launcher.launcher, Simulator):
        pytest.skip("a GPU draws its schedule itself")
    _, x, gamma_, beta = _case((1100, 8), "float32")
    results = []
    for schedule in ("in_order", "shuffled"):
        target = Target(launcher.device, Simulator(launcher.arch, BUILD, schedule=schedule, seed=3))
        results.append([array.tobytes() for array in _train(target, x, gamma_, beta, 0)])
        results[-1].append(reductions.column_sums(target.context(), x).tobytes())
    assert results[0] == results[1]

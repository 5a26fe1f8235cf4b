"""Pooling, norms, dropout and losses on arrays, against the reference loops and their own slopes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.engine import functional
from cubatch.errors import InvalidArgument
from cubatch.memory import blocks as scratch_blocks
from cubatch.network.windows import Window, pool_axes
from tests import reference
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma
from tests.engine.slopes import U, check_gradient
from tests.thorough import examples


@st.composite
def poolings(draw):
    """A small pooling: extents, window, options and whether blocks are single rows."""
    r, s = draw(st.sampled_from([(2, 2), (3, 3), (1, 2), (3, 2)]))
    return {
        "x": draw(st.tuples(st.integers(1, 3), st.integers(3, 8), st.integers(3, 9), st.integers(1, 3))),
        "options": {
            "r": r,
            "s": s,
            "stride": draw(st.sampled_from([(1, 1), (2, 2), (3, 2), (r, s)])),
            "pad": tuple(draw(st.integers(0, extent - 1)) for extent in (r, r, s, s)),
            "ceil_mode": draw(st.booleans()),
        },
        "seed": draw(st.integers(0, 2**32 - 1)),
        "rows_only": draw(st.booleans()),
    }


def _pool_workspace(case):
    n, h, w, c = case["x"]
    v, q = pool_axes((h, w), Window(**case["options"]))
    need = scratch_blocks.Pool(itemsize=8, rows=v.out, vertical=v, horizontal=q, channels=c)
    return np.full(scratch_blocks.workspace_bytes([need], n, 0 if case["rows_only"] else 2**20), 0xFF, dtype=np.uint8)


@given(poolings())
@settings(max_examples=examples(150), deadline=None)
def test_max_pool2d_takes_the_first_of_the_largest(case):
    """Small whole numbers tie often, so the rule for ties is tested with the values."""
    x = np.random.default_rng(case["seed"]).integers(-2, 3, case["x"]).astype(np.float64)
    want, winner = reference.max_pool2d(x, **case["options"])
    argmax = np.full(want.shape, 0xEE, np.uint8)
    y = functional.max_pool2d(x, Window(**case["options"]), argmax=argmax, workspace=_pool_workspace(case))
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(argmax, winner)


@given(poolings())
@settings(max_examples=examples(100), deadline=None)
def test_max_pool2d_with_relu_is_relu_then_max_pool2d(case):
    """Values agree exactly, and so do gradients, since neither passes any where nothing is positive."""
    random = np.random.default_rng(case["seed"])
    x = random.integers(-3, 3, case["x"]).astype(np.float64)
    clamped = np.maximum(x, 0)
    want, winner = reference.max_pool2d(clamped, **case["options"])
    argmax, workspace = np.empty(want.shape, np.uint8), _pool_workspace(case)
    window = Window(**case["options"])
    y = functional.max_pool2d(x, window, relu=True, argmax=argmax, workspace=workspace)
    np.testing.assert_array_equal(y, want)
    dy = random.integers(-4, 5, want.shape).astype(np.float64)
    fused = functional.max_pool2d_backward(dy, argmax, window, x_shape=x.shape, workspace=workspace)
    plain = functional.max_pool2d_backward(dy, winner.astype(np.uint8), window, x_shape=x.shape)
    np.testing.assert_array_equal(fused, plain * (clamped > 0))


@given(poolings())
@settings(max_examples=examples(100), deadline=None)
def test_max_pool2d_backward_gives_each_gradient_to_its_winner(case):
    """Every dy arrives once, at the tap the reference names; overlapping windows add up."""
    random = np.random.default_rng(case["seed"])
    x = random.standard_normal(case["x"])
    options = case["options"]
    y, winner = reference.max_pool2d(x, **options)
    dy = random.integers(-4, 5, y.shape).astype(np.float64)
    want = np.zeros(x.shape)
    for n, p, q, c in np.ndindex(y.shape):
        r, s = divmod(winner[n, p, q, c] - 1, options["s"])
        want[
            n, p * options["stride"][0] - options["pad"][0] + r, q * options["stride"][1] - options["pad"][2] + s, c
        ] += dy[n, p, q, c]
    dx = functional.max_pool2d_backward(
        dy,
        winner.astype(np.uint8),
        Window(**options),
        x_shape=x.shape,
        out=np.full(x.shape, np.nan),
        workspace=_pool_workspace(case),
    )
    np.testing.assert_array_equal(dx, want)


@given(poolings(), st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_avg_pool2d_divides_by_what_it_counts(case, include):
    """A mean of m numbers is a sum of m and at most two divisions; the gradient spreads it evenly."""
    random = np.random.default_rng(case["seed"])
    x, options = random.uniform(-1, 1, case["x"]), {**case["options"], "count_include_pad": include}
    want, workspace = reference.avg_pool2d(x, **options), _pool_workspace(case)
    y = functional.avg_pool2d(x, Window(**options), workspace=workspace)
    taps = options["r"] * options["s"]
    bound = gamma(taps + 2, UNIT_ROUNDOFF["float64"]) * reference.avg_pool2d(abs(x), **options)
    assert_within(y, want, bound, axes="npqc", label=str(case))
    dy, other = random.standard_normal(y.shape), random.standard_normal(x.shape)
    dx = functional.avg_pool2d_backward(dy, Window(**options), x_shape=x.shape, workspace=workspace)
    # The pooling is linear, so its gradient is its transpose: <dy, pool(v)> = <dx, v> for every v.
    assert (dx * other).sum() == pytest.approx(
        (dy * reference.avg_pool2d(other, **options)).sum(), rel=1e-10, abs=1e-10
    )


def test_global_avg_pool_is_the_mean_and_spreads_evenly():
    """One number per sample and channel."""
    x = np.random.default_rng(6).standard_normal((2, 3, 4, 5))
    np.testing.assert_allclose(
        functional.global_avg_pool(x), [[x[n, :, :, c].mean() for c in range(5)] for n in range(2)]
    )
    dx = functional.global_avg_pool_backward(np.ones((2, 5)), x_shape=x.shape)
    np.testing.assert_array_equal(dx, np.full(x.shape, 1 / 12))


@pytest.mark.parametrize("in_place", [False, True])
def test_the_gradient_of_a_global_pool_is_added_to_that_of_other_readers(in_place):
    """By the pool, here a sample at a time, and by a norm whose result is pooled: as if the sum had been stored."""
    random = np.random.default_rng(9)
    dy, (x, others) = random.standard_normal((3, 5)), random.standard_normal((2, 3, 2, 4, 5))
    want, given = others + dy[:, None, None] / 8, others.copy()
    out, workspace = given if in_place else np.empty_like(x), np.empty(64, np.uint8)
    functional.global_avg_pool_backward(dy, x_shape=x.shape, residual=given, out=out, workspace=workspace)
    np.testing.assert_allclose(out, want, rtol=1e-15)
    row, results = np.ones(5), []
    for errors, more in ((want, {}), (others, {"pooled": dy})):
        dx = errors.copy()
        gradients = {"dgamma": np.empty(5), "dbeta": np.empty(5), "out": dx if in_place else np.empty_like(x)}
        functional.batch_norm_backward(
            dx, x, row, mean=row, inv_std=row, beta=row, activation="silu", **gradients, **more
        )  # fmt: skip
        results.append(list(gradients.values()))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_relu_and_its_gradient_work_in_place_and_at_zero():
    """At zero nothing passes, at NaN all, as in PyTorch; an infinite gradient behind a closed gate stays out."""
    x = np.array([-1.0, 0.0, 2.0, np.nan] * 3000)
    y = functional.relu(x.copy())
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    dy = np.array([np.inf, 5.0, 7.0, 9.0] * 3000)
    functional.relu_backward(dy, y, out=dy, workspace=np.empty(64, np.uint8))
    np.testing.assert_array_equal(dy, [0.0, 0.0, 7.0, 9.0] * 3000)


@pytest.mark.parametrize("blocks", ["many", "one"])
@pytest.mark.parametrize(("center", "deviation"), [(0, 1), (1, 1), (10, 1), (100, 1), (1000, 1), (10000, 1), (1000, 0)])
def test_batch_norm_train_normalises_by_the_batch(blocks, center, deviation):
    """
    Statistics, output and running averages against loops, however large the mean: sums are of deviations.

    The first estimate of the mean may be off by a sum of n elements, what it is corrected by only by one of n
    deviations from it; after that the mean is rounded once where it is stored, and not at all where it is subtracted.
    """
    random = np.random.default_rng(7)
    x = (center + deviation * random.standard_normal((5, 5, 8, 6))).astype(np.float32)
    gamma_, beta = random.standard_normal((2, 6)).astype(np.float32)
    want, mean, var = reference.batch_norm(x, gamma_, beta)
    got_mean, inv_std = np.empty(6, np.float32), np.empty(6, np.float32)
    running_mean, running_var = np.ones(6, np.float32), np.ones(6, np.float32)
    need = scratch_blocks.Norm(itemsize=4, channels=6)
    workspace = np.full(need.least if blocks == "many" else need.whole(200), 0xFF, np.uint8)

    y = functional.batch_norm_train(
        x,
        gamma_,
        beta,
        mean=got_mean,
        inv_std=inv_std,
        running_mean=running_mean,
        running_var=running_var,
        workspace=workspace,
    )

    n, deviations = 200, abs(x.reshape(-1, 6) - mean)
    estimate = gamma(n, U) * abs(x.astype(np.float64)).reshape(-1, 6).mean(axis=0) + U * abs(mean)
    mean_bound = gamma(n + 2, U) * (deviations.mean(axis=0) + estimate)
    # A mean of squared deviations from the estimate, less the square of what it was off by.
    var_bound = gamma(n + 3, U) * (var + estimate**2) + gamma(4, U) * estimate**2
    var_bound += 2 * estimate * mean_bound + mean_bound**2
    least, std = np.maximum(var + 1e-5 - var_bound, 1e-5), np.sqrt(var + 1e-5)
    std_bound = 0.5 * least**-1.5 * var_bound + gamma(2, U) * least**-0.5
    factor = abs(gamma_) * (1 / std + std_bound)
    y_bound = gamma(6, U) * ((deviations + mean_bound + 2 * U * abs(mean)) * factor + abs(beta))
    y_bound += mean_bound * factor + deviations * abs(gamma_) * std_bound
    label, unbiased = f"center {center}, deviation {deviation}", 200 / 199
    assert_within(got_mean, mean, mean_bound + U * (abs(mean) + mean_bound), label=f"mean, {label}")
    assert_within(inv_std, 1 / std, std_bound, label=f"inv_std, {label}")
    assert_within(y.reshape(-1, 6), want.reshape(-1, 6), y_bound, label=f"y, {label}")
    within = 0.1 * mean_bound + gamma(5, U) * (1 + abs(mean))
    assert_within(running_mean, 0.9 + 0.1 * mean, within, label=f"running mean, {label}")
    within = 0.1 * var_bound * unbiased + gamma(6, U) * (1 + var * unbiased)
    assert_within(running_var, 0.9 + 0.1 * var * unbiased, within, label=f"running variance, {label}")


def test_batch_norm_of_one_value_leaves_the_running_variance():
    """Its unbiased variance is 0 / 0; the running mean moves, a tenth of the way from 1 to 5."""
    running_mean, running_var, saved = np.ones(1), np.ones(1), {"mean": np.empty(1), "inv_std": np.empty(1)}
    one = np.ones(1)
    functional.batch_norm_train(
        np.full((1, 1, 1, 1), 5.0), one, one, **saved, running_mean=running_mean, running_var=running_var
    )
    np.testing.assert_allclose(running_mean, [1.4])
    np.testing.assert_array_equal(running_var, [1.0])


def test_batch_norm_mends_a_first_estimate_that_is_off():
    """The mean that deviations are taken from may be half a deviation away: mean and variance come out all the same."""
    x = np.random.default_rng(8).standard_normal((200, 6))
    want, mean, var = reference.batch_norm(x, np.ones(6), np.zeros(6))
    sums = []

    def reduce(array):
        sums.append(array)
        if len(sums) == 1:
            array += 100  # of 200 positions

    got_mean, inv_std = np.empty(6), np.empty(6)
    y = functional.batch_norm_train(x, np.ones(6), np.zeros(6), mean=got_mean, inv_std=inv_std, reduce=reduce)
    assert len(sums) == 2
    np.testing.assert_allclose(got_mean, mean, atol=1e-13)
    np.testing.assert_allclose(inv_std, 1 / np.sqrt(var + 1e-5), rtol=1e-13)
    np.testing.assert_allclose(y, want, atol=1e-12)


def test_rounding_leaves_no_negative_variance():
    """A channel of equal numbers has none to lose: the root of less than nothing would be NaN."""
    x = np.repeat(np.random.default_rng(8).uniform(1, 2000, (1, 500)), 4099, axis=0).astype(np.float32)
    one, inv_std = np.ones(500, np.float32), np.empty(500, np.float32)
    workspace = np.empty(scratch_blocks.Norm(itemsize=4, channels=500).whole(len(x)), np.uint8)
    y = functional.batch_norm_train(
        x, one, one, mean=np.empty(500, np.float32), inv_std=inv_std, eps=1e-16, workspace=workspace
    )
    assert np.isfinite(inv_std).all()
    assert np.isfinite(y).all()


@pytest.mark.parametrize("activation", [None, "relu", "relu6", "silu", "hard_swish", "gelu"])
def test_batch_norm_gradients_are_its_slopes(activation):
    """Through the statistics too: they depend on x; with an activation also through its curve."""
    random = np.random.default_rng(8)
    x, gamma_, beta = random.standard_normal((3, 2, 2, 4)), random.standard_normal(4), random.standard_normal(4)
    weights, saved = random.standard_normal(x.shape), {"mean": np.empty(4), "inv_std": np.empty(4)}

    def loss(x=x, gamma_=gamma_, beta=beta):
        y = functional.batch_norm_train(
            x, gamma_, beta, mean=np.empty(4), inv_std=np.empty(4), activation=activation
        )  # fmt: skip
        return (y * weights).sum()

    functional.batch_norm_train(x, gamma_, beta, **saved)
    dgamma, dbeta, dx = np.empty(4), np.empty(4), weights.copy()
    functional.batch_norm_backward(
        dx, x, gamma_, **saved, dgamma=dgamma, dbeta=dbeta, beta=beta, activation=activation, out=dx
    )
    check_gradient(lambda value: loss(x=value), x, dx)
    check_gradient(lambda value: loss(gamma_=value), gamma_, dgamma)
    check_gradient(lambda value: loss(beta=value), beta, dbeta)


def test_batch_norm_inference_uses_the_running_statistics():
    """In place, with ReLU: what a deployed network does."""
    x = np.array([[1.0, 10.0], [3.0, -10.0]])
    y = functional.batch_norm_inference(
        x, np.array([2.0, 1.0]), np.array([1.0, 0.0]),
        running_mean=np.array([1.0, 0.0]), running_var=np.array([4.0, 25.0]), eps=0.0, relu=True, out=x,
    )  # fmt: skip
    np.testing.assert_allclose(y, [[1.0, 2.0], [3.0, 0.0]])
    x, running = np.array([[1.0], [-8.0]]), {"running_mean": np.zeros(1), "running_var": np.ones(1)}
    y = functional.batch_norm_inference(x, np.array([2.0]), np.ones(1), **running, eps=0.0, activation="hard_swish")
    np.testing.assert_allclose(y, [[3.0], [0.0]])


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_with_a_folded_batch_norm_is_the_two_one_after_the_other(has_bias):
    """By running statistics, then a branch in place and ReLU: convolutions, grouped ones and linear layers alike."""
    random = np.random.default_rng(14)
    gamma_, beta, mean, b = random.standard_normal((4, 6))
    var, b = random.uniform(0.5, 2, 6), b if has_bias else None
    scale, shift = np.empty(6), np.empty(6)
    functional.fold_batch_norms(
        [gamma_], [beta], [b], means=[mean], variances=[var], epsilons=[1e-3], scales=[scale], shifts=[shift]
    )
    x, branch = random.standard_normal((3, 5, 4, 4)), random.standard_normal((3, 5, 4, 6))
    for groups, function in ((1, functional.conv2d), (2, functional.conv2d), (0, functional.linear)):
        w = random.standard_normal((6, 1, 1, 4 // groups) if groups else (6, 4))
        options = {"groups": groups} if groups else {}
        plain = function(x, w, b, **options)
        normed = functional.batch_norm_inference(
            plain, gamma_, beta, running_mean=mean, running_var=var, eps=1e-3, residual=branch, relu=True
        )
        np.testing.assert_allclose(normed, np.maximum((plain - mean) / np.sqrt(var + 1e-3) * gamma_ + beta + branch, 0))
        out = branch.copy()
        function(x, w, None, scale=scale, shift=shift, residual=out, relu=True, out=out, **options)
        np.testing.assert_allclose(out, normed, rtol=1e-12, atol=1e-12)
    with pytest.raises(InvalidArgument, match="groups"):
        functional.conv2d(x, random.standard_normal((4, 1, 1, 1)), scale=scale[:4], shift=shift[:4], groups=4)


@pytest.mark.parametrize("room", [0, 1 << 16], ids=["row by row", "at once"])
def test_batch_norm_adds_a_branch_that_it_writes_over(room):
    """In training, in blocks of a position too: the sum clamped, nothing else otherwise."""
    random = np.random.default_rng(15)
    x, branch = random.standard_normal((2, 7, 3, 5)), random.standard_normal((2, 7, 3, 5))
    gamma_, beta = random.standard_normal((2, 5))
    plain = functional.batch_norm_train(x, gamma_, beta, mean=np.empty(5), inv_std=np.empty(5))
    need = scratch_blocks.Norm(itemsize=8, channels=5)
    workspace, out = np.full(max(need.least, room), 0xFF, np.uint8), branch.copy()
    functional.batch_norm_train(
        x, gamma_, beta, mean=np.empty(5), inv_std=np.empty(5), residual=out, relu=True, out=out, workspace=workspace
    )
    np.testing.assert_allclose(out, np.maximum(plain + branch, 0), rtol=1e-12, atol=1e-12)


def test_dropout_drops_its_share_and_keeps_the_mean():
    """Of 40 000 draws at p = 0.3 the share lies within 5 standard deviations, 0.0115, of p."""
    x = np.ones((200, 200), np.float32)
    y, mask = functional.dropout(x, p=0.3, seed=(1, 2))
    assert abs((~mask).mean() - 0.3) < 5 * math.sqrt(0.3 * 0.7 / x.size)
    np.testing.assert_array_equal(y, np.where(mask, np.float32(1 / 0.7), 0))
    np.testing.assert_array_equal(functional.dropout_backward(x, mask, p=0.3), y)


def test_dropout_repeats_with_its_seed_whatever_the_blocks():
    """A replayed step must draw the same mask."""
    x = np.ones(5000, np.float32)
    first = functional.dropout(x, p=0.5, seed=(3, 1))[1]
    again = functional.dropout(x, p=0.5, seed=(3, 1), workspace=np.empty(256, np.uint8))[1]
    other = functional.dropout(x, p=0.5, seed=(3, 2))[1]
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize("seed", [5, 2**32, 2**63, 2**64 - 1, 2**100, (2**63, 7)])
def test_dropout_takes_any_whole_number_as_its_seed(seed):
    """The draws are those of NumPy's own generator, seeded with the numbers of the seed and the step in a row."""
    numbers = [*seed, 4] if isinstance(seed, tuple) else [seed, 4]
    draws = np.random.Generator(np.random.SFC64(numbers)).random(100, dtype=np.float32)
    _, mask = functional.dropout(np.ones(100, np.float32), p=0.5, seed=seed, step=4)
    np.testing.assert_array_equal(mask, draws >= 0.5)


def test_concat_and_its_gradient_are_inverse():
    """A branch whose gradient nobody wants is skipped."""
    branches = [np.arange(6.0).reshape(1, 2, 1, 3), np.arange(4.0).reshape(1, 2, 1, 2)]
    joined = functional.concat(branches)
    assert joined.shape == (1, 2, 1, 5)
    back = np.empty_like(branches[1])
    functional.concat_backward(joined, [3, 2], outs=[None, back])
    np.testing.assert_array_equal(back, branches[1])


def test_a_range_of_channels_and_its_gradient_are_inverse():
    """The other channels have no gradient, or keep the one that is there."""
    x = np.arange(12.0).reshape(1, 2, 1, 6)
    y = functional.slice_channels(x, 2, 5)
    np.testing.assert_array_equal(y.ravel(), [2, 3, 4, 8, 9, 10])
    alone = functional.slice_channels_backward(y, 2, out=np.full_like(x, np.nan))
    np.testing.assert_array_equal(alone.ravel(), [0, 0, 2, 3, 4, 0, 0, 0, 8, 9, 10, 0])
    there = x.copy()
    for out in (np.full_like(x, np.nan), there):
        beside = functional.slice_channels_backward(y, 1, parts=there, out=out)
        np.testing.assert_array_equal(beside.ravel(), [0, 2, 3, 4, 4, 5, 6, 8, 9, 10, 10, 11])


@pytest.mark.parametrize("room", [0, 1 << 16], ids=["row by row", "at once"])
def test_softmax_cross_entropy_and_its_gradient(room):
    """The loss against loops, the gradient against its slopes; logits of 1000 must not overflow."""
    random = np.random.default_rng(9)
    logits, labels = random.standard_normal((3, 4, 6)) + 1000, random.integers(0, 6, (3, 4))
    need = scratch_blocks.Scores(itemsize=8, channels=6)
    workspace = np.full(max(need.least, room), 0xFF, np.uint8)
    dlogits = np.empty_like(logits)
    loss = functional.softmax_cross_entropy(logits, labels, dlogits=dlogits, workspace=workspace)
    assert loss.item() == pytest.approx(reference.softmax_cross_entropy(logits, labels), rel=1e-12)
    check_gradient(lambda value: reference.softmax_cross_entropy(value, labels), logits, dlogits)


def test_losses_of_shards_add_up_to_the_batchs():
    """Each shard divides by the whole batch's count."""
    random = np.random.default_rng(10)
    logits, labels = random.standard_normal((5, 3)), np.array([0, 2, 1, 1, 0])
    parts = [functional.softmax_cross_entropy(logits[s], labels[s], count=5) for s in (slice(0, 2), slice(2, 5))]
    assert sum(parts).item() == pytest.approx(reference.softmax_cross_entropy(logits, labels), rel=1e-14)


def test_softmax_backward_is_its_slope():
    """Rows sum to one, so the gradient by a constant is zero."""
    random = np.random.default_rng(11)
    x, weights = random.standard_normal((4, 5)), random.standard_normal((4, 5))
    y = functional.softmax(x)
    np.testing.assert_allclose(y.sum(axis=1), 1)
    check_gradient(
        lambda value: (functional.softmax(value) * weights).sum(), x, functional.softmax_backward(weights, y)
    )

"""The references against values worked out by hand, and against each other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests import reference


def test_conv2d_of_a_worked_example():
    """A 3x3 input of 1 to 9 and the filter [[1, 2], [3, 4]]: 1 + 4 + 12 + 20 = 37, and so on by hand."""
    x = np.arange(1.0, 10.0).reshape(1, 3, 3, 1)
    w = np.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 2, 2, 1)
    np.testing.assert_array_equal(reference.conv2d(x, w)[0, :, :, 0], [[37, 47], [67, 77]])


def test_conv2d_pads_each_side_by_itself():
    """One row above and two columns to the right, and nothing else: the ones count the taps inside."""
    y = reference.conv2d(np.ones((1, 2, 2, 1)), np.ones((1, 2, 2, 1)), pad=(1, 0, 0, 2))
    np.testing.assert_array_equal(y[0, :, :, 0], [[2, 1, 0], [4, 2, 0]])


def test_conv2d_strides_and_dilates():
    """At stride 2 and dilation 2, output (1, 1) of a 1x5x5 count reads 12, 14, 22, 24."""
    x = np.arange(25.0).reshape(1, 5, 5, 1)
    y = reference.conv2d(x, np.ones((1, 2, 2, 1)), stride=(2, 2), dilation=(2, 2))
    np.testing.assert_array_equal(
        y[0, :, :, 0], [[0 + 2 + 10 + 12, 2 + 4 + 12 + 14], [10 + 12 + 20 + 22, 12 + 14 + 22 + 24]]
    )


def test_groups_do_not_see_each_other():
    """The first output channel ignores the second input channel."""
    x = np.array([3.0, 1e9]).reshape(1, 1, 1, 2)
    y = reference.conv2d(x, np.array([2.0, 0.0]).reshape(2, 1, 1, 1), groups=2)
    np.testing.assert_array_equal(y.ravel(), [6, 0])


def test_gradients_are_the_transposes_of_conv2d():
    """For y linear in x and in w: <dy, conv(x, w)> = <dgrad(dy, w), x> = <wgrad(x, dy), w>."""
    random = np.random.default_rng(0)
    options = {"stride": (2, 1), "pad": (1, 0, 2, 1), "dilation": (1, 2), "groups": 2}
    x, w = random.standard_normal((2, 5, 6, 4)), random.standard_normal((6, 3, 2, 2))
    y = reference.conv2d(x, w, **options)
    dy = random.standard_normal(y.shape)
    dw, db = reference.conv2d_wgrad(x, dy, w_shape=w.shape, **options)
    assert (reference.conv2d_dgrad(dy, w, x_shape=x.shape, **options) * x).sum() == pytest.approx((dy * y).sum())
    assert (dw * w).sum() == pytest.approx((dy * y).sum())
    np.testing.assert_allclose(db, dy.sum(axis=(0, 1, 2)))


def test_pooling_of_a_worked_example():
    """A 3x3 count in 2x2 windows at stride 2: ceil mode adds the windows over the edge."""
    x = np.arange(9.0).reshape(1, 3, 3, 1)
    options = {"r": 2, "s": 2, "stride": (2, 2)}
    np.testing.assert_array_equal(reference.max_pool2d(x, **options)[0].ravel(), [4])
    y, winner = reference.max_pool2d(x, **options, ceil_mode=True)
    np.testing.assert_array_equal(y.ravel(), [4, 5, 7, 8])
    np.testing.assert_array_equal(winner.ravel(), [4, 3, 2, 1])
    np.testing.assert_array_equal(reference.avg_pool2d(x, **options, ceil_mode=True).ravel(), [2, 3.5, 6.5, 8])


def test_average_pooling_counts_the_padding_or_not():
    """The corner window of a padded input holds one number: a quarter of it, or it."""
    options = {"r": 2, "s": 2, "stride": (2, 2), "pad": (1, 1, 1, 1)}
    x = np.full((1, 2, 2, 1), 8.0)
    assert reference.avg_pool2d(x, **options)[0, 0, 0, 0] == 2
    assert reference.avg_pool2d(x, **options, count_include_pad=False)[0, 0, 0, 0] == 8


def test_batch_norm_of_a_worked_example():
    """Mean 2 and biased variance 1 of 1 and 3."""
    y, mean, var = reference.batch_norm(np.array([[1.0], [3.0]]), np.array([10.0]), np.array([5.0]), eps=0.0)
    assert (mean.item(), var.item(), y.ravel().tolist()) == (2.0, 1.0, [-5.0, 15.0])


def test_softmax_cross_entropy_of_equal_scores_is_the_log_of_the_classes():
    """And it does not overflow at scores of 1000."""
    assert reference.softmax_cross_entropy(np.full((2, 7), 1000.0), np.array([0, 6])) == pytest.approx(np.log(7))


@pytest.mark.parametrize(
    ("kind", "x", "y"),
    [
        ("relu6", [-4, 0, 1, 6, 7], [0, 0, 1, 6, 6]),
        ("hard_sigmoid", [-4, -3, 0, 1, 3, 7], [0, 0, 1 / 2, 4 / 6, 1, 1]),
        ("hard_swish", [-4, -3, -1, 0, 1, 3, 7], [0, 0, -2 / 6, 0, 4 / 6, 3, 7]),
        ("sigmoid", [-math.log(9), 0, math.log(3)], [1 / 10, 1 / 2, 3 / 4]),
        ("silu", [-math.log(9), 0, math.log(3)], [-math.log(9) / 10, 0, math.log(3) * 3 / 4]),
        ("gelu", [-40, 0, 40], [0, 0, 40]),
    ],
)
def test_activations_of_worked_examples(kind, x, y):
    """Whole numbers for the hard curves; for the others logarithms, where exp(-x) is 9, 1 and a third."""
    np.testing.assert_allclose(reference.activation(np.array(x), kind=kind), y, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("kind", ["relu6", "sigmoid", "silu", "hard_sigmoid", "hard_swish", "gelu"])
def test_slopes_of_activations_are_those_of_finite_differences(kind):
    """
    Halfway between whole numbers, where no curve has a kink.

    A central difference with h = 1e-5 misses by h^2 and by 1e-15 / h of rounding: below 1e-9.
    """
    x, h = np.arange(-8.5, 9.0), 1e-5
    slopes = (reference.activation(x + h, kind=kind) - reference.activation(x - h, kind=kind)) / (2 * h)
    np.testing.assert_allclose(reference.activation_backward(np.ones(x.shape), x, kind=kind), slopes, atol=1e-9)


def test_attention_of_a_worked_example():
    """Two heads of one channel: scores of log 3 and 0 weigh 3 to 1; the other head, without scores, takes the mean."""
    x = np.array([[[1.0, 0.0], [0.0, 4.0]]])
    w_in = np.array([[math.log(3), 0], [0, 0], [1, 0], [0, 0], [1, 0], [0, 1.0]])
    y, _, weights, mixed = reference.attention(x, w_in, np.array([[0, 1.0], [1, 0]]), heads=2)
    np.testing.assert_allclose(weights[0, 0], [[3 / 4, 1 / 4], [1 / 2, 1 / 2]])
    np.testing.assert_allclose(mixed[0], [[3 / 4, 2], [1 / 2, 2]])
    np.testing.assert_allclose(y[0], mixed[0, :, ::-1])


def test_layer_norm_of_a_worked_example():
    """Mean 2 and biased variance 1 of 1 and 3."""
    y, mean, var = reference.layer_norm(np.array([[1.0, 3.0]]), np.full(2, 10.0), np.full(2, 5.0), eps=0.0)
    assert (mean.item(), var.item(), y.ravel().tolist()) == (2.0, 1.0, [-5.0, 15.0])

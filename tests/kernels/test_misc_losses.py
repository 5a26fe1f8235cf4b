"""Softmax, its gradient and its cross-entropy against float64, for short, long and very large scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.engine import backend
from cubatch.engine.native import losses
from cubatch.hardware.facts import Device
from tests import reference
from tests.checks import assert_within, gamma
from tests.kernels.cases import DTYPES, bound, decoded, drawn, encoded
from tests.kernels.placing import place, room

U = 2.0**-24
# A part of a warp, a whole warp, several classes a thread, the whole block.
CLASSES = st.sampled_from([1, 2, 10, 33, 200, 1500])
ROWS = st.sampled_from([1, 3, 40])
SPREADS = st.sampled_from([1.0, 30.0, 10000.0])


def _scores(rows, classes, spread, dtype):
    random = np.random.default_rng(rows * classes)
    return encoded(random.uniform(-spread, spread, (rows, classes)), dtype)


def _softmax(scores):
    """Give probabilities, and how far each may be off in float32, relative to itself."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    y = exponentials / exponentials.sum(axis=-1, keepdims=True)
    # exp(s (1 + u)) is off by |s| u, CUDA's expf by 2 units in the last place, that is 4 roundings; then a sum and a
    # division.  In the sum the errors of the terms weigh as the terms do.
    drift = U * (abs(shifted) + (y * abs(shifted)).sum(axis=-1, keepdims=True))
    return y, drift + gamma(scores.shape[-1] + 10, U)


@given(rows=ROWS, classes=CLASSES, spread=SPREADS, dtype=st.sampled_from(DTYPES), in_place=st.booleans())
@settings(max_examples=25, deadline=None)
def test_softmax_gives_probabilities_whatever_the_scores(launcher, rows, classes, spread, dtype, in_place):
    """Scores are shifted by the row's maximum, so that those of 10000 neither overflow nor lose digits."""
    x = _scores(rows, classes, spread, dtype)
    given_x = place(launcher, x)
    y = given_x if in_place else room(launcher, x.shape, x.dtype)
    losses.softmax(launcher.context(), given_x, out=y)

    want, relative = _softmax(decoded(x))
    within = want * relative + bound(1, want, want, dtype) + 2.0**-126
    assert_within(decoded(launcher.get(y)), want, within, label=f"softmax {rows} x {classes} {dtype}")


@given(rows=ROWS, classes=CLASSES, padding=st.sampled_from([1, 3, 7]), dtype=st.sampled_from(DTYPES))
@settings(max_examples=20, deadline=None)
def test_padding_behind_rows_is_neither_read_nor_written(launcher, rows, classes, padding, dtype):
    """Both passes over rows that end with NaN: the bits of rows without them, and NaN where they were."""
    random, context = np.random.default_rng(rows * classes), launcher.context()
    x, dy = _scores(rows, classes, 3.0, dtype), drawn(random, (rows, classes), dtype)
    y = losses.softmax(context, place(launcher, x))
    dx = losses.softmax_backward(context, place(launcher, dy), y)

    def padded(array):
        longer = np.empty((rows, classes + padding), array.dtype)
        longer.view(np.uint8)[...] = 0xFF
        longer[:, :classes] = array
        return place(launcher, longer)

    in_place, errors = padded(x), padded(dy)
    losses.softmax_rows(context, in_place, classes, out=in_place)
    losses.softmax_rows_backward(context, errors, in_place, classes, out=errors)
    for got, want in ((in_place, y), (errors, dx)):
        found = launcher.get(got)
        np.testing.assert_array_equal(found[:, :classes], launcher.get(want))
        assert np.isnan(decoded(found[:, classes:])).all()


@given(rows=ROWS, classes=CLASSES, dtype=st.sampled_from(DTYPES), in_place=st.booleans())
@settings(max_examples=15, deadline=None)
def test_softmax_backward_stays_within_the_rounding_of_its_sum(launcher, rows, classes, dtype, in_place):
    """A sum of products over the classes, a difference and a product."""
    random = np.random.default_rng(rows * classes)
    dy, y = drawn(random, (rows, classes), dtype), encoded(random.uniform(0, 1, (rows, classes)), dtype)
    given_dy = place(launcher, dy)
    dx = given_dy if in_place else room(launcher, dy.shape, dy.dtype)
    losses.softmax_backward(launcher.context(), given_dy, place(launcher, y), out=dx)

    products = decoded(dy) * decoded(y)
    want = decoded(y) * (decoded(dy) - products.sum(axis=1, keepdims=True))
    magnitude = decoded(y) * (abs(decoded(dy)) + abs(products).sum(axis=1, keepdims=True))
    within = bound(classes + 3, magnitude, want, dtype)
    assert_within(decoded(launcher.get(dx)), want, within, label=f"softmax_backward {rows} x {classes} {dtype}")


@given(rows=ROWS, classes=CLASSES, spread=SPREADS, dtype=st.sampled_from(DTYPES), in_place=st.booleans(),
       count=st.sampled_from([None, 100]))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_cross_entropy_gives_loss_and_gradient(launcher, rows, classes, spread, dtype, in_place, count):
    """The loss is -log of the right class's probability, the gradient softmax less one there; both over `count`."""
    logits = _scores(rows, classes, spread, dtype)
    labels = np.random.default_rng(rows).integers(0, classes, rows).astype(np.int32)
    given_logits = place(launcher, logits)
    dlogits = given_logits if in_place else room(launcher, logits.shape, logits.dtype)
    loss = losses.softmax_cross_entropy(
        launcher.context(), given_logits, place(launcher, labels), dlogits=dlogits, count=count
    )

    share = 1 / (count or rows)
    scores = decoded(logits)
    probabilities, relative = _softmax(scores)
    want = reference.softmax_cross_entropy(scores, labels) * rows * share
    shifted = abs(scores - scores.max(axis=1, keepdims=True))
    # log(sum) inherits the sum's relative error and adds logf's (1 unit, 2 roundings); then a score is taken off.
    log_sum = np.log(np.exp(-shifted).sum(axis=1))
    errors = relative.max(axis=1, where=probabilities > U, initial=0) + 3 * U * log_sum + 2 * U * shifted.max(axis=1)
    assert_within(launcher.get(loss), [want], share * errors.sum() + gamma(4, U) * abs(want), label="loss")

    hit = np.arange(classes) == labels[:, None]
    gradient = (probabilities - hit) * share
    within = share * (probabilities * relative + 2.0**-126) + bound(3, share * (probabilities + hit), gradient, dtype)
    assert_within(decoded(launcher.get(dlogits)), gradient, within, label=f"dlogits {rows} x {classes} {dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [2.0**7, 3.0])
def test_a_scale_multiplies_the_gradient_before_it_is_rounded_and_not_the_loss(launcher, dtype, scale):
    """A gradient of 2^-26, which float16 rounds to 0, is there once it is scaled; read when it runs, not before."""
    rows, classes = 5, 9
    logits = _scores(rows, classes, 3.0, dtype)
    labels = np.arange(rows, dtype=np.int32)
    dlogits, word = room(launcher, logits.shape, logits.dtype), launcher.put(np.ones(1, np.float32))
    loss = launcher.put(np.zeros(1))
    step = backend.prepare(
        losses.softmax_cross_entropy, launcher.context(), place(launcher, logits), place(launcher, labels),
        dlogits=dlogits, loss=loss, count=2**22, scale=word,
    )  # fmt: skip
    word[...] = np.float32(scale)
    step()
    scores = decoded(logits)
    probabilities, relative = _softmax(scores)
    want = reference.softmax_cross_entropy(scores, labels) * rows / 2**22
    assert_within(launcher.get(loss), [want], gamma(40, U) * want, label="loss")
    share, hit = scale / 2**22, np.arange(classes) == labels[:, None]
    gradient = (probabilities - hit) * share
    within = share * probabilities * relative + bound(4, share * (probabilities + hit), gradient, dtype)
    assert_within(decoded(launcher.get(dlogits)), gradient, within, label=f"scaled dlogits {dtype}")


def test_blocks_step_over_more_rows_than_they_hold(launcher):
    """A GPU of one SM gets 16 blocks of 32 rows; every row beyond those must be seen, and once."""
    logits = _scores(1500, 8, 3.0, "float32")
    labels = np.random.default_rng(0).integers(0, 8, 1500).astype(np.int32)
    small = Device(name="one SM", compute_capability=launcher.device.compute_capability, num_sms=1)
    dlogits = room(launcher, logits.shape, logits.dtype)
    loss = losses.softmax_cross_entropy(
        launcher.context(device=small), place(launcher, logits), place(launcher, labels), dlogits=dlogits
    )
    want = reference.softmax_cross_entropy(logits, labels)
    assert_within(launcher.get(loss), [want], gamma(20, U) * 20, label="loss")
    rows = decoded(launcher.get(dlogits)).sum(axis=1)
    assert_within(rows, np.zeros(1500), gamma(40, U) * 2 / 1500, label="each row's gradient sums to nothing")


def test_a_label_that_is_no_class_takes_nothing_off(launcher):
    """As in the NumPy engine: the loss is log of the sum of the shifted exponentials, the gradient plain softmax."""
    logits = np.float32([[0.0, 0.0]])
    dlogits = room(launcher, (1, 2), np.float32)
    loss = losses.softmax_cross_entropy(
        launcher.context(), place(launcher, logits), place(launcher, np.int32([-1])), dlogits=dlogits
    )
    assert_within(launcher.get(loss), [np.log(2)], gamma(3, U), label="loss")
    assert_within(launcher.get(dlogits), [[0.5, 0.5]], gamma(8, U), label="dlogits")


def test_a_nan_among_the_scores_is_seen_in_the_loss(launcher):
    """A run that diverged must not be told to go well."""
    logits = np.float32([[0.0, np.nan, 1.0], [0.0, 1.0, 2.0]])
    dlogits = room(launcher, (2, 3), np.float32)
    loss = losses.softmax_cross_entropy(
        launcher.context(), place(launcher, logits), place(launcher, np.int32([0, 1])), dlogits=dlogits
    )
    assert np.isnan(launcher.get(loss)).all()
    assert np.isnan(launcher.get(dlogits)[0]).all()

"""Arrays that a kernel would read or write beyond are refused before anything is launched."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.engine.native import (
    activation_functions,
    batch_norm,
    losses,
    optim,
    pointwise,
    reductions,
    scaling,
    window_pooling,
)
from cubatch.engine.native.context import Context
from cubatch.errors import InvalidArgument
from cubatch.hardware.facts import Device
from cubatch.network.windows import Window


def _f32(*shape):
    return np.zeros(shape, np.float32)


X = _f32(2, 4, 4, 8)
# What is called, and the argument that its error must name.
WRONG = {
    "smaller out": (lambda c: activation_functions.relu(c, X, out=_f32(2, 4, 4, 7)), "out"),
    "other type": (lambda c: activation_functions.relu(c, X, out=X.astype(np.float16)), "out"),
    "float64": (lambda c: activation_functions.relu(c, X.astype(np.float64)), "dtype"),
    "strided": (lambda c: activation_functions.relu(c, X[..., ::2]), "x"),
    "branch": (lambda c: pointwise.add(c, [X, _f32(2, 4, 4, 9)]), "branch 1"),
    "one branch": (lambda c: pointwise.add(c, [X]), "branches"),
    "concatenated": (lambda c: pointwise.concat(c, [X, X], out=_f32(2, 4, 4, 15)), "out"),
    "cut": (lambda c: pointwise.concat_backward(c, X, [4, 3], outs=[None, None]), "dy"),
    "range": (lambda c: pointwise.slice_channels(c, X, 2, 5, out=_f32(2, 4, 4, 4)), "out"),
    "range placed": (lambda c: pointwise.slice_channels_backward(c, X, 1, out=_f32(2, 4, 5, 9)), "out"),
    "other ranges": (lambda c: pointwise.slice_channels_backward(c, X, 1, parts=X, out=_f32(2, 4, 4, 9)), "parts"),
    "mask": (lambda c: pointwise.dropout_backward(c, X, np.zeros(3, np.bool_), p=0.5), "mask"),
    "pooled": (lambda c: window_pooling.max_pool2d(c, X, Window(2, 2), out=_f32(2, 2, 2, 4)), "out"),
    "winners": (
        lambda c: window_pooling.max_pool2d(c, X, Window(2, 2), argmax=np.zeros((2, 2, 2, 4), np.uint8)),
        "argmax",
    ),
    "gradient": (lambda c: window_pooling.avg_pool2d_backward(c, X, Window(2, 2), x_shape=(2, 4, 4, 8)), "dy"),
    "factors": (lambda c: scaling.scale(c, X, _f32(2, 8)), "s"),
    "scale": (lambda c: batch_norm.batch_norm_apply(c, X, _f32(7), _f32(8), mean=_f32(8), inv_std=_f32(8)), "gamma"),
    "added": (
        lambda c: window_pooling.global_avg_pool_backward(c, _f32(2, 8), x_shape=X.shape, residual=_f32(2, 4, 8)),
        "residual",
    ),
    "mean's gradient": (
        lambda c: batch_norm.batch_norm_backward(
            c, X, X, _f32(8), mean=_f32(8), inv_std=_f32(8), dgamma=_f32(8), dbeta=_f32(8), pooled=_f32(3, 8)
        ),
        "pooled",
    ),
    "labels": (lambda c: losses.softmax_cross_entropy(c, _f32(4, 3), np.zeros(3, np.int32)), "labels"),
    "state": (lambda c: optim.momentum(c, _f32(8), [_f32(8)], _f32(7), lr=0.1), "state 0"),
    "workspace": (lambda c: reductions.column_sums(c, X, workspace=np.zeros(4, np.uint8)), "workspace"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(name):
    """The error says which argument, what it is and what was wanted; there is no launcher to get as far as a launch."""
    call, culprit = WRONG[name]
    with pytest.raises(InvalidArgument) as caught:
        call(Context(Device(name="any", num_sms=1), launcher=None))
    assert caught.value.field == culprit

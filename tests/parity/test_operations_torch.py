"""The engine beside PyTorch on the CPU in float64: the same numbers up to rounding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.engine import functional
from cubatch.network.windows import Window
from tests.thorough import examples

torch = pytest.importorskip("torch")
F = torch.nn.functional

CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def _nchw(array, *, grad=True):
    return torch.tensor(np.ascontiguousarray(array.transpose(0, 3, 1, 2)), requires_grad=grad)


def _nhwc(tensor):
    return tensor.detach().numpy().transpose(0, 2, 3, 1)


@given(
    rs=st.sampled_from([(2, 2), (3, 3), (3, 2)]),
    stride=st.sampled_from([(1, 1), (2, 2), (3, 2)]),
    padded=st.booleans(),
    ceil_mode=st.booleans(),
    include=st.booleans(),
    hw=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=examples(80), deadline=None)
def test_pooling_and_gradients(rs, stride, padded, ceil_mode, include, hw, seed):
    """PyTorch's rules for ceil mode, for counting the padding and for ties, which small numbers make common."""
    random = np.random.default_rng(seed)
    x = random.integers(-2, 3, (2, *hw, 3)).astype(np.float64)
    one = 1 if padded else 0
    window = Window(*rs, stride, (one, one, one, one), ceil_mode, include)
    theirs = {"kernel_size": rs, "stride": stride, "padding": one, "ceil_mode": ceil_mode}
    tx = _nchw(x)
    ty = F.max_pool2d(tx, **theirs)
    winners = np.empty(_nhwc(ty).shape, np.uint8)
    y = functional.max_pool2d(x, window, argmax=winners)
    np.testing.assert_array_equal(y, _nhwc(ty))
    dy = random.standard_normal(y.shape)
    ty.backward(_nchw(dy, grad=False))
    np.testing.assert_allclose(
        functional.max_pool2d_backward(dy, winners, window, x_shape=x.shape), _nhwc(tx.grad), **CLOSE
    )
    tx.grad = None
    ty = F.avg_pool2d(tx, **theirs, count_include_pad=include)
    ty.backward(_nchw(dy, grad=False))
    np.testing.assert_allclose(functional.avg_pool2d(x, window), _nhwc(ty), **CLOSE)
    dx = functional.avg_pool2d_backward(dy, window, x_shape=x.shape)
    np.testing.assert_allclose(dx, _nhwc(tx.grad), **CLOSE)


@pytest.mark.parametrize("ratio", [1, 10, 100, 1000, 10000])
def test_batch_norm_in_float32_loses_no_more_than_pytorch(ratio):
    """
    With the mean so many deviations away, both are compared with float64: root mean squares of what they are off by.

    dgamma is divided by 56, the root of its 3136 terms, to be of order one as all else.  The backward pass gets the
    mean as it is stored, rounded, in PyTorch too.  10 u are for what does not grow with the ratio: PyTorch sums in
    float64 what is summed in float32 here.
    """
    random = np.random.default_rng(ratio)
    x = (ratio + random.standard_normal((16, 14, 14, 32))).astype(np.float32)
    dy = random.standard_normal(x.shape).astype(np.float32)
    one, zero = np.ones(32, np.float32), np.zeros(32, np.float32)

    def theirs(dtype):
        tx, weight = _nchw(x.astype(dtype)), torch.tensor(one.astype(dtype), requires_grad=True)
        y = F.batch_norm(tx, None, None, weight, torch.tensor(zero.astype(dtype)), training=True)
        y.backward(_nchw(dy.astype(dtype), grad=False))
        return _nhwc(y), _nhwc(tx.grad), weight.grad.numpy() / 56

    saved = {"mean": np.empty(32, np.float32), "inv_std": np.empty(32, np.float32)}
    y, dgamma = functional.batch_norm_train(x, one, zero, **saved), np.empty(32, np.float32)
    dx = functional.batch_norm_backward(dy, x, one, **saved, dgamma=dgamma, dbeta=np.empty(32, np.float32))

    exact = theirs(np.float64)
    for name, got, other, want in zip(
        ("y", "dx", "dgamma"), (y, dx, dgamma / 56), theirs(np.float32), exact, strict=True
    ):
        error, allowed = (np.sqrt(np.mean((array - want) ** 2)) for array in (got, other))
        assert error <= 1.5 * allowed + 10 * 2.0**-24, f"{name}: {error / allowed:.2f} times PyTorch's"

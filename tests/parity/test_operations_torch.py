"""The engine beside PyTorch on the CPU in float64: the same numbers up to rounding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubatch.engine import functional, optim
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
    groups=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([(1, 1), (2, 3), (1, 4)]),
    rs=st.sampled_from([(1, 1), (3, 3), (5, 2)]),
    stride=st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 4)]),
    dilation=st.sampled_from([(1, 1), (2, 1), (3, 2)]),
    pad=st.tuples(*[st.integers(0, 3)] * 4),
    nhw=st.tuples(st.integers(1, 3), st.integers(13, 17), st.integers(7, 12)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=examples(100), deadline=None)
def test_conv2d_and_gradients(groups, width, rs, stride, dilation, pad, nhw, seed):
    """Larger than the reference loops can go: several blocks, every option at once."""
    random = np.random.default_rng(seed)
    x, w = random.standard_normal((*nhw, groups * width[0])), random.standard_normal((groups * width[1], *rs, width[0]))
    b = random.standard_normal(len(w))
    options = {"stride": stride, "pad": pad, "dilation": dilation, "groups": groups}
    workspace = np.full(1 << 17, 0xFF, np.uint8)
    y = functional.conv2d(x, w, b, **options, workspace=workspace)
    tx, tw, tb = _nchw(x), _nchw(w), torch.tensor(b, requires_grad=True)
    padded = F.pad(tx, (pad[2], pad[3], pad[0], pad[1]))
    ty = F.conv2d(padded, tw, tb, stride=stride, dilation=dilation, groups=groups)
    np.testing.assert_allclose(y, _nhwc(ty), **CLOSE)
    dy, dw, db = random.standard_normal(y.shape), np.empty_like(w), np.empty_like(b)
    ty.backward(_nchw(dy, grad=False))
    functional.conv2d_wgrad(x, dy, dw=dw, db=db, **options, workspace=workspace)
    dx = functional.conv2d_dgrad(dy, w, x_shape=x.shape, **options, workspace=workspace)
    for got, want in ((dx, _nhwc(tx.grad)), (dw, _nhwc(tw.grad)), (db, tb.grad.numpy())):
        np.testing.assert_allclose(got, want, **CLOSE)


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


def test_batch_norm_and_gradients():
    """Training, running statistics and inference."""
    random = np.random.default_rng(0)
    x, gamma, beta = random.standard_normal((4, 5, 6, 7)), random.standard_normal(7), random.standard_normal(7)
    theirs = torch.nn.BatchNorm2d(7, dtype=torch.float64)
    theirs.weight.data, theirs.bias.data = torch.tensor(gamma), torch.tensor(beta)
    tx = _nchw(x)
    ty = theirs(tx)
    saved, running = (
        {"mean": np.empty(7), "inv_std": np.empty(7)},
        {"running_mean": np.zeros(7), "running_var": np.ones(7)},
    )
    np.testing.assert_allclose(functional.batch_norm_train(x, gamma, beta, **saved, **running), _nhwc(ty), **CLOSE)
    np.testing.assert_allclose(running["running_mean"], theirs.running_mean.numpy(), **CLOSE)
    np.testing.assert_allclose(running["running_var"], theirs.running_var.numpy(), **CLOSE)
    dy, dgamma, dbeta = random.standard_normal(x.shape), np.empty(7), np.empty(7)
    ty.backward(_nchw(dy, grad=False))
    dx = functional.batch_norm_backward(dy, x, gamma, **saved, dgamma=dgamma, dbeta=dbeta)
    for got, want in ((dx, _nhwc(tx.grad)), (dgamma, theirs.weight.grad.numpy()), (dbeta, theirs.bias.grad.numpy())):
        np.testing.assert_allclose(got, want, **CLOSE)
    theirs.eval()
    np.testing.assert_allclose(
        functional.batch_norm_inference(x, gamma, beta, **running), _nhwc(theirs(_nchw(x))), **CLOSE
    )


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        ("relu6", F.relu6),
        ("sigmoid", torch.sigmoid),
        ("silu", F.silu),
        ("hard_sigmoid", lambda x: F.relu6(x + 3) / 6),  # F.hardsigmoid's gradient has 1 / 6 in float32 alone
        ("hard_swish", F.hardswish),
        ("gelu", F.gelu),
    ],
)
def test_activations_and_gradients(kind, theirs):
    """Eighths from -10 to 10: on every kink, and on both sides of it."""
    x = np.arange(-80.0, 81) / 8
    tx = torch.tensor(x, requires_grad=True)
    ty = theirs(tx)
    y = functional.activation(x, kind=kind)
    np.testing.assert_allclose(y, ty.detach().numpy(), **CLOSE)
    dy = np.random.default_rng(3).standard_normal(x.shape)
    ty.backward(torch.tensor(dy))
    dx = functional.activation_backward(dy, x if kind in {"silu", "hard_swish", "gelu"} else y, kind=kind)
    np.testing.assert_allclose(dx, tx.grad.numpy(), **CLOSE)


def test_scale_and_gradients():
    """A factor for each sample and channel, broadcast over the pixels."""
    random = np.random.default_rng(4)
    x, dy, s = *random.standard_normal((2, 3, 9, 8, 5)), random.standard_normal((3, 1, 1, 5))
    tx, ts = _nchw(x), _nchw(s)
    ty = tx * ts
    ty.backward(_nchw(dy, grad=False))
    dx, ds = np.empty_like(x), np.empty_like(s)
    functional.scale_backward(dy, x, s, dx=dx, ds=ds, workspace=np.full(2048, 0xFF, np.uint8))
    for got, want in ((functional.scale(x, s), ty), (dx, tx.grad), (ds, ts.grad)):
        np.testing.assert_allclose(got, _nhwc(want), **CLOSE)


def test_softmax_cross_entropy_and_gradient():
    """Per position: logits (n, t, classes)."""
    random = np.random.default_rng(1)
    logits, labels = random.standard_normal((3, 4, 6)), random.integers(0, 6, (3, 4))
    theirs = torch.tensor(logits, requires_grad=True)
    loss = F.cross_entropy(theirs.reshape(-1, 6), torch.tensor(labels).reshape(-1))
    loss.backward()
    dlogits = np.empty_like(logits)
    assert functional.softmax_cross_entropy(logits, labels, dlogits=dlogits).item() == pytest.approx(
        loss.item(), rel=1e-13
    )
    np.testing.assert_allclose(dlogits, theirs.grad.numpy(), **CLOSE)


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_optimizers(name, decay):
    """Five steps with a fresh gradient each."""
    random = np.random.default_rng(2)
    w = random.standard_normal(500)
    theirs = torch.nn.Parameter(torch.tensor(w))
    make = {
        "sgd": lambda: torch.optim.SGD([theirs], lr=0.1, weight_decay=decay),
        "momentum": lambda: torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=decay),
        "adam": lambda: torch.optim.Adam([theirs], lr=0.1, weight_decay=decay),
    }
    optimizer, state = make[name](), [np.zeros(500), np.zeros(500)]
    for step in range(1, 6):
        gradient = random.standard_normal(500)
        theirs.grad = torch.tensor(gradient)
        optimizer.step()
        if name == "sgd":
            optim.sgd(w, [gradient], lr=0.1, weight_decay=decay)
        elif name == "momentum":
            optim.momentum(w, [gradient], state[0], lr=0.1, weight_decay=decay)
        else:
            optim.adam(w, [gradient], *state, step=step, lr=0.1, weight_decay=decay)
        np.testing.assert_allclose(w, theirs.detach().numpy(), **CLOSE)

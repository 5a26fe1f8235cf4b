"""Calls on arrays: what they take besides their results, and how they are prepared and refused."""

from __future__ import annotations

import functools
import tracemalloc

import numpy as np
import pytest

from cubatch.engine import backend, functional
from cubatch.engine.team import Team
from cubatch.errors import InvalidArgument
from cubatch.memory import conv_blocks
from cubatch.network.windows import Window, conv_shape
from tests import reference


def _large_calls():
    """Every operation that has scratch memory, on arrays of megabytes with all its arrays given."""
    random = np.random.default_rng(12)

    def new(*shape):
        return random.standard_normal(shape, dtype=np.float32)

    x, big, w, b = new(24, 32, 32, 16), new(24, 32, 32, 16), new(16, 3, 3, 16), new(16)
    pooled, argmax = new(24, 16, 16, 16), np.ones((24, 16, 16, 16), np.uint8)
    x1, w1 = new(64, 32, 32, 1), new(16, 3, 3, 1)
    y1 = new(64, 32, 32, 16)
    scores, other, labels = new(20000, 10), new(20000, 10), random.integers(0, 10, 20000)
    factors, curves = new(24, 1, 1, 16), ("relu6", "sigmoid", "silu", "hard_sigmoid", "hard_swish", "gelu")
    mask, flat, joined, rows = np.ones(x.shape, bool), new(2**20), new(2**18, 8), new(24 * 1024, 16)
    room = np.empty(1 << 19, np.uint8)
    words, kept = new(24, 64, 1, 48), [new(24, count) for count in (3 * 64 * 48, 4 * 64 * 64, 64 * 48)]
    w_in, w_out, b_in, b_out, more = new(144, 48), new(48, 48), new(144), new(48), new(24, 65, 1, 48)
    position, statistics, other_words = new(65, 48), new(24, 128), new(24, 64, 1, 48)
    pad = {"pad": (1, 1, 1, 1), "workspace": room}
    f = functional
    return {
        "conv2d": lambda: f.conv2d(x, w, b, **pad, relu=True, out=big),
        "conv2d of one channel": lambda: f.conv2d(x1, w1, b, **pad, out=y1),
        "conv2d strided": lambda: f.conv2d(x, w, b, **pad, stride=(2, 2), out=pooled),
        "conv2d grouped": lambda: f.conv2d(x, w[..., :8].copy(), b, **pad, groups=2, out=big),
        "depthwise": lambda: f.conv2d(x, w[..., :1].copy(), b, **pad, groups=16, out=big),
        "conv2d_dgrad": lambda: f.conv2d_dgrad(big, w, x_shape=x.shape, **pad, out=x),
        "conv2d_dgrad strided": lambda: f.conv2d_dgrad(pooled, w, x_shape=x.shape, **pad, stride=(2, 2), out=x),
        "depthwise dgrad": lambda: f.conv2d_dgrad(big, w[..., :1].copy(), x_shape=x.shape, **pad, groups=16, out=x),
        "conv2d_wgrad": lambda: f.conv2d_wgrad(x, big, dw=w, db=b, **pad),
        "conv2d_wgrad of one channel": lambda: f.conv2d_wgrad(x1, y1, dw=w1, db=b, **pad),
        "depthwise wgrad": lambda: f.conv2d_wgrad(x, big, dw=new(16, 3, 3, 1), db=b, **pad, groups=16),
        "linear": lambda: f.linear(rows, w[:, 0, 0], b, out=big.reshape(-1, 16), relu=True),
        "linear_dgrad": lambda: f.linear_dgrad(big.reshape(-1, 16), w[:, 0, 0].copy(), out=rows),
        "linear_wgrad": lambda: f.linear_wgrad(rows, big.reshape(-1, 16), dw=new(16, 16), db=b),
        "max_pool2d": lambda: f.max_pool2d(x, Window(2, 2), out=pooled, argmax=argmax, workspace=room),
        "max_pool2d_backward": lambda: f.max_pool2d_backward(
            pooled, argmax, Window(2, 2), x_shape=x.shape, out=x, workspace=room
        ),
        "max_pool2d_backward overlapping": lambda: f.max_pool2d_backward(
            pooled, argmax, Window(3, 3, (2, 2), (1, 1, 1, 1)), x_shape=x.shape, out=x, workspace=room
        ),
        "avg_pool2d": lambda: f.avg_pool2d(x, Window(2, 2), out=pooled, workspace=room),
        "avg_pool2d_backward": lambda: f.avg_pool2d_backward(
            pooled, Window(2, 2), x_shape=x.shape, out=x, workspace=room
        ),
        "global_avg_pool": lambda: f.global_avg_pool(x, out=rows[:24]),
        "global_avg_pool_backward": lambda: f.global_avg_pool_backward(rows[:24], x_shape=x.shape, out=x),
        "global_avg_pool_backward with others": lambda: f.global_avg_pool_backward(
            rows[:24], x_shape=x.shape, residual=x, out=x, workspace=room
        ),
        "relu": lambda: f.relu(x, out=big),
        "relu_backward": lambda: f.relu_backward(big, x, out=big, workspace=room),
        **{kind: lambda kind=kind: f.activation(x, kind=kind, out=big, workspace=room) for kind in curves},
        **{
            f"{kind} backward": lambda kind=kind: f.activation_backward(x, big, kind=kind, out=x, workspace=room)
            for kind in curves
        },
        "scale": lambda: f.scale(x, factors, out=big),
        "scale_backward": lambda: f.scale_backward(big, x, factors, dx=big, ds=factors, workspace=room),
        "batch_norm_train": lambda: f.batch_norm_train(x, b, b, mean=new(16), inv_std=new(16), out=big, workspace=room),
        "batch_norm_inference": lambda: f.batch_norm_inference(
            x, b, b, running_mean=b, running_var=b * b, out=big, workspace=room
        ),
        "batch_norm_backward": lambda: f.batch_norm_backward(
            big, x, b, mean=b, inv_std=b, dgamma=new(16), dbeta=new(16), out=big, workspace=room
        ),
        "batch_norm_backward with a pool": lambda: f.batch_norm_backward(
            big, x, b, mean=b, inv_std=b, dgamma=new(16), dbeta=new(16), pooled=rows[:24], out=big, workspace=room
        ),
        "layer_norm": lambda: f.layer_norm(words, b_out, b_out, statistics=statistics, out=other_words, workspace=room),
        "layer_norm_backward": lambda: f.layer_norm_backward(
            words, words, b_out, statistics=statistics, dgamma=new(48), dbeta=new(48), out=other_words, workspace=room
        ),
        "layer_scale": lambda: f.layer_scale(words, b_out, out=words),
        "layer_scale_backward": lambda: f.layer_scale_backward(
            words, words, b_out, dgamma=new(48), out=other_words, workspace=room
        ),
        "tokens": lambda: f.tokens(words, b_out, position, out=more),
        "tokens_backward": lambda: f.tokens_backward(more, dtoken=b_out, dposition=position, out=words),
        "class_token": lambda: f.class_token(words, out=new(24, 48)),
        "class_token_backward": lambda: f.class_token_backward(words[:, 0], x_shape=more.shape, out=more),
        "attention": lambda: f.attention(
            words, w_in, w_out, b_in, b_out, heads=4, keep=kept, out=other_words, workspace=room
        ),
        "attention without keeping": lambda: f.attention(
            words, w_in, w_out, b_in, b_out, heads=4, out=other_words, workspace=room
        ),
        "attention_backward": lambda: f.attention_backward(
            words, words, w_in, w_out, heads=4, saved=kept, dw_in=w_in.copy(), dw_out=w_out.copy(), db_in=b_in,
            db_out=b_out, out=other_words, workspace=room,
        ),
        "dropout": lambda: f.dropout(x, p=0.5, seed=1, out=big, mask=mask, workspace=room),
        "dropout_backward": lambda: f.dropout_backward(x, mask, p=0.5, out=big),
        "add": lambda: f.add([x, big, x], relu=True, out=big),
        "concat": lambda: f.concat([flat.reshape(-1, 4), flat.reshape(-1, 4)], out=joined),
        "concat_backward": lambda: f.concat_backward(joined, [4, 4], outs=[flat.reshape(-1, 4), None]),
        "slice_channels": lambda: f.slice_channels(joined, 1, 5, out=flat.reshape(-1, 4)),
        "slice_channels_backward": lambda: f.slice_channels_backward(flat.reshape(-1, 4), 1, out=joined),
        "softmax": lambda: f.softmax(scores, out=scores, workspace=room),
        "softmax_backward": lambda: f.softmax_backward(scores, other, out=scores, workspace=room),
        "softmax_cross_entropy": lambda: f.softmax_cross_entropy(
            scores, labels, loss=np.empty(1), dlogits=scores, workspace=room
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", _large_calls())
def test_temporaries_do_not_grow_with_the_batch(name):
    """Beyond its arrays a call may take two of NumPy's casting buffers, 64 KiB each; the arrays here are megabytes."""
    run = _large_calls()[name]
    run()
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 160 * 1024


def test_a_prepared_call_repeats_the_call():
    """Recording keeps the calls and the views, so new contents of the same arrays give new results."""
    random = np.random.default_rng(13)
    x, w, y = random.standard_normal((7, 6, 5, 3)), random.standard_normal((4, 3, 3, 3)), np.empty((7, 6, 5, 4))
    step = backend.prepare(functional.conv2d, x, w, pad=(1, 1, 1, 1), out=y, workspace=np.empty(1 << 14, np.uint8))
    for _ in range(2):
        x[...] = random.standard_normal(x.shape)
        step()
        np.testing.assert_allclose(y, reference.conv2d(x, w, pad=(1, 1, 1, 1)), rtol=1e-12, atol=1e-12)


def test_a_call_with_too_many_blocks_is_prepared_as_it_is():
    """A recording longer than the limit would cost more memory than time."""
    x, out = np.ones(1 << 15), np.empty(1 << 15)
    step = backend.prepare(
        functional.dropout, x, p=0.0, seed=1, out=out, mask=np.empty(x.shape, bool), workspace=np.empty(64, np.uint8)
    )
    assert isinstance(step, functools.partial)
    assert step.func is functional.dropout
    step()
    np.testing.assert_array_equal(out, x)


def test_a_call_whose_result_would_be_lost_cannot_be_recorded():
    """A recording only works on arrays that exist already."""
    with pytest.raises(TypeError, match="out="):
        backend.prepare(lambda: backend.of(np.ones(1)).add(1, 1))


def test_batch_norm_in_a_team_is_batch_norm_of_the_whole_batch():
    """Shards of different sizes are normalised by common statistics, forward and backward."""
    random = np.random.default_rng(14)
    x, dy, gamma_, beta = *random.standard_normal((2, 5, 3, 2, 4)), *random.standard_normal((2, 4))

    def run(x, dy, saved, **shared):
        y = functional.batch_norm_train(x, gamma_, beta, **saved, **shared)
        dgamma, dbeta = np.empty(4), np.empty(4)
        dx = functional.batch_norm_backward(dy, x, gamma_, **saved, dgamma=dgamma, dbeta=dbeta, **shared)
        return y, dx, dgamma, dbeta

    y, dx, dgamma, dbeta = run(x, dy, {"mean": np.empty(4), "inv_std": np.empty(4)})
    parts = {}
    with Team(2) as team:

        def work(rank):
            shard, saved = team.shard(5, rank), {"mean": np.empty(4), "inv_std": np.empty(4)}
            parts[rank] = run(x[shard], dy[shard], saved, count=30, reduce=functools.partial(team.sum, rank))

        team.run(work)
    np.testing.assert_allclose(np.concatenate([parts[0][0], parts[1][0]]), y, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([parts[0][1], parts[1][1]]), dx, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(parts[0][2] + parts[1][2], dgamma, rtol=1e-11)
    np.testing.assert_allclose(parts[0][3] + parts[1][3], dbeta, rtol=1e-11)


def test_a_workspace_below_one_row_is_an_error_with_both_numbers():
    """Nothing is silently allocated in its place."""
    with pytest.raises(InvalidArgument) as failure:
        functional.conv2d(np.ones((1, 4, 4, 1)), np.ones((1, 3, 3, 1)), workspace=np.empty(16, np.uint8))
    (need,) = conv_blocks.conv2d_forward(conv_shape((4, 4, 1), (1, 3, 3, 1), (1, 1), (0, 0, 0, 0), (1, 1)), 8)
    assert failure.value.args[:3] == ("workspace", 16, f"at least {need.least} bytes")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (((4, 4, 3), (2, 3, 3, 2), (1, 1), (0, 0, 0, 0), (1, 1), 1), "w"),
        (((4, 4, 3), (2, 3, 3, 1), (1, 1), (0, 0, 0, 0), (1, 1), 3), "groups"),
        (((4, 4, 3), (2, 5, 3, 3), (1, 1), (0, 0, 0, 0), (1, 1), 1), "filter height"),
        (((4, 4, 3), (2, 3, 3, 3), (0, 1), (0, 0, 0, 0), (1, 1), 1), "filter height"),
        (((4, 4, 3), (2, 3, 3, 3), (1, 1), (0, 0, -1, 0), (1, 1), 1), "pad"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_go_together_are_named(arguments, field):
    """The field says which argument to look at."""
    with pytest.raises(InvalidArgument) as failure:
        conv_shape(*arguments[:5], groups=arguments[5])
    assert failure.value.field == field

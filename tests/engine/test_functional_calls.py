"""Calls on arrays: what they take besides their results, and how they are prepared and refused."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from cubatch.engine import backend, functional
from cubatch.engine.team import Team
from cubatch.errors import InvalidArgument
from tests import reference


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


def test_a_workspace_below_one_row_of_outputs_is_refused():
    """A row of 2 outputs takes 2 x 9 inputs of 8 bytes at least: an array of 16 bytes is refused, and not replaced."""
    with pytest.raises(InvalidArgument) as failure:
        functional.conv2d(np.ones((1, 4, 4, 1)), np.ones((1, 3, 3, 1)), workspace=np.empty(16, np.uint8))
    assert failure.value.args[:2] == ("workspace", 16)
    assert int(failure.value.allowed.split()[2]) >= 2 * 9 * 8


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

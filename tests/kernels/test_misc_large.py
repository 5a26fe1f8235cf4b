"""Offsets past 2^31 elements: reserved memory of which only the last blocks of a grid touch anything."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cubatch.engine.native import activation_functions, batch_norm, window_pooling
from cubatch.kernels.workspace.misc import batch_norm_backward_workspace
from cubatch.network.windows import Window
from tests.cpusim.simulator import Simulator
from tests.kernels.cases import reserved
from tests.kernels.conftest import BUILD, Target


@pytest.fixture
def last_block(launcher):
    """Give a target that runs the last block of a grid alone."""
    if not isinstance(launcher.launcher, Simulator):
        pytest.skip("a GPU runs whole grids")
    simulator = Simulator(launcher.arch, BUILD, blocks=lambda grid: [tuple(extent - 1 for extent in grid)])
    return Target(launcher.device, simulator)


def test_elementwise_offsets_reach_past_32_bits(last_block):
    """The last of 2^31 + 20 elements is where it should be, and nothing is written before its block."""
    size = 2**31 + 20
    x, y = reserved((size,), np.float16), reserved((size,), np.float16)
    x[-25:] = np.arange(25)
    activation_functions.relu(last_block.context(), x, out=y)
    np.testing.assert_array_equal(y[-20:], np.arange(5, 25))
    assert not y[-25:-20].any()


def test_pooling_offsets_reach_past_32_bits(last_block):
    """Images are counted in 64 bits: the last of 32769 images of 2^16 elements lies past 2^31."""
    shape = (2**15 + 1, 32, 32, 64)
    assert math.prod(shape) > 2**31
    x, y = reserved(shape, np.float16), reserved((shape[0], 16, 16, 64), np.float16)
    argmax = reserved(y.shape, np.uint8)
    x[-1, -2:, -2:] = np.float16([[1, 2], [4, 3]])[:, :, None]
    window_pooling.max_pool2d(last_block.context(), x, Window(2, 2), out=y, argmax=argmax)
    assert (y[-1, -1, -1] == 4).all()
    assert (argmax[-1, -1, -1] == 3).all()

    window_pooling.max_pool2d_backward(last_block.context(), y, argmax, Window(2, 2), x_shape=shape, out=x)
    np.testing.assert_array_equal(x[-1, -1, -2:, 0], [4, 0])  # the last block has the last row


def test_rows_times_channels_reach_past_32_bits(last_block):
    """Rows are counted in 64 bits, so that a tile's first element may lie past 2^31."""
    rows, channels = 2**25 + 3, 64
    x, y = reserved((rows, channels), np.float16), reserved((rows, channels), np.float16)
    x[-3:] = np.arange(64)
    one, zero = np.ones(channels, np.float32), np.zeros(channels, np.float32)
    weights = one.astype(np.float16), zero.astype(np.float16)
    batch_norm.batch_norm_inference(
        last_block.context(), x, *weights, running_mean=zero, running_var=one, eps=0.0, out=y
    )
    np.testing.assert_array_equal(y[-3:], x[-3:])
    assert y[-3:].any()

    # The gradient of the sums is there for the last tile alone and next to nothing, over 2^25 rows: dx is dy.
    dy, dx = x, y
    dx[-3:] = 0
    device = last_block.device
    workspace = np.zeros(batch_norm_backward_workspace(rows, channels, "float16", device), np.uint8)
    dgamma, dbeta = np.zeros_like(weights[0]), np.zeros_like(weights[0])
    batch_norm.batch_norm_backward(
        last_block.context(), dy, x, weights[0], mean=zero, inv_std=one, dgamma=dgamma, dbeta=dbeta, out=dx,
        workspace=workspace,
    )  # fmt: skip
    np.testing.assert_array_equal(dx[-3:], dy[-3:])
    assert dbeta[-1] == 3 * 63  # the last tile was summed

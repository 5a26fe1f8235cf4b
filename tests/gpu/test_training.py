"""`train` on a GPU: cut off and gone on with to the bit, and batches added up; skipped where there is none."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from cubatch.engine.network import Model
from cubatch.engine.train import train
from cubatch.hardware import arithmetic
from cubatch.measure import kernel_context
from cubatch.network.graph import Network
from cubatch.network.layers import BatchNorm2d, Conv2d, Dropout, Flatten, Linear, ReLU
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma
from tests.gpu.here import GPU, NEEDS_GPU

pytestmark = NEEDS_GPU

SAMPLE = Path(__file__).parents[1] / "data" / "mnist-sample"
LAYERS = [
    Conv2d(k=8, r=3, s=3, stride=4, bias=False), BatchNorm2d(), ReLU(), Flatten(), Dropout(p=0.3), Linear(k=10),
]  # fmt: skip
NETWORK = Network(input_shape=(28, 28, 1), layers=LAYERS)


class CutOff(Exception):
    """A run that ends in the middle."""


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_run_that_was_cut_off_ends_as_one_that_was_not(dtype, tmp_path):
    """Cut off in each of two epochs, between steps of four batches: the same weights, byte for byte."""
    if dtype not in arithmetic.supported_dtypes(GPU):
        pytest.skip(f"{GPU} has no {dtype}")
    context = kernel_context.kernel_context(GPU, dtype, overlaps=False, seconds=0.0, path=None)  # the same variants
    run = functools.partial(
        train, NETWORK, data=SAMPLE, batch_size=50, target_batch_size=200, device=GPU, epochs=2, dtype=dtype,
        optimizer="adam", learning_rate=0.003, context=context,
    )  # fmt: skip
    whole = run(save=tmp_path / "whole.safetensors")

    def until(last):
        def stepped(step):
            if step.done == last:
                raise CutOff

        return stepped

    for last in (3, 6):
        with pytest.raises(CutOff):
            run(checkpoint=tmp_path / "run.safetensors", checkpoint_seconds=0, stepped=until(last))
    again = run(checkpoint=tmp_path / "run.safetensors", save=tmp_path / "again.safetensors")
    assert [epoch.loss for epoch in again.epochs] == [epoch.loss for epoch in whole.epochs]
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_batches_that_are_added_up_have_the_gradient_of_the_large_one():
    """
    Four of 16 samples beside one of 64, in float32, of a linear layer.

    A gradient is the mean of 64 terms of at most |x|, since softmax less label lies within 1. Both sides err by at most
    gamma of 64 roundings of it, and of those of the scores, sums of 256 terms, and of the softmax.
    """
    network = Network(input_shape=(1, 1, 256), layers=[Linear(name="fc", k=10)])
    random = np.random.default_rng(0)
    x, labels = random.standard_normal((64, 1, 1, 256), dtype=np.float32), random.integers(0, 10, 64)
    context = kernel_context.kernel_context(GPU, "float32", overlaps=False, seconds=0.0, path=None)
    found = []
    for micro in (16, 64):
        with Model(network, device=GPU, mode="training", context=context) as model:
            model.prepare(micro, 64)
            for start in range(0, 64, micro):
                model.load(x[start : start + micro], labels[start : start + micro])
                model.step()
            found.append(model.gradients["fc"]["w"].get())
    bound = 2 * gamma(256 + 64 + 16, UNIT_ROUNDOFF["float32"]) * np.abs(x).reshape(64, 256).mean(axis=0)
    assert_within(found[0], found[1], np.broadcast_to(bound, found[1].shape), label="gradient")

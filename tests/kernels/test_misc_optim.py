"""Optimiser steps against their formulas in float64, with and without a master copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubatch.engine.native import optim
from cubatch.errors import InvalidArgument
from tests.checks import assert_within, gamma
from tests.kernels.cases import DTYPES, decoded, drawn, encoded
from tests.kernels.placing import place

U = 2.0**-24
SIZES = st.sampled_from([1, 9, 4096, 4099])


class _Case:
    """Weights, gradient and state, on the device and as the float64 values that a step starts from."""

    def __init__(self, launcher, size, dtype, shift, states):
        random = np.random.default_rng(size)
        self.launcher, self.dtype = launcher, dtype
        master = random.uniform(-1, 1, size).astype(np.float32)
        gradient = drawn(random, size, dtype)
        state = [random.uniform(0, 1, size).astype(np.float32) for _ in range(states)]
        self.w, self.g = master.astype(np.float64), decoded(gradient)
        self.state = [part.astype(np.float64) for part in state]
        self.parameters = place(launcher, encoded(master, dtype), shift)
        self.gradient = place(launcher, gradient, shift)
        self.arrays = [place(launcher, part, shift) for part in state]
        self.master = None if dtype == "float32" else place(launcher, master, shift)

    def stepped(self):
        """Give the new weights; 16-bit ones must be those of the master copy, rounded."""
        if self.master is None:
            return self.launcher.get(self.parameters)
        master = self.launcher.get(self.master)
        np.testing.assert_array_equal(self.launcher.get(self.parameters), encoded(master, self.dtype))
        return master


@given(size=SIZES, dtype=st.sampled_from(DTYPES), shift=st.sampled_from([0, 1]), decay=st.sampled_from([0.0, 0.1]))
@settings(max_examples=12, deadline=None)
def test_sgd_steps_down_the_gradient(launcher, size, dtype, shift, decay):
    """Two fused multiply-adds, with rate and decay rounded to float32."""
    case = _Case(launcher, size, dtype, shift, 0)
    optim.sgd(launcher.context(), case.parameters, [case.gradient], lr=0.3, weight_decay=decay, master=case.master)
    change = 0.3 * (abs(case.g) + decay * abs(case.w))
    want = case.w - 0.3 * (case.g + decay * case.w)
    assert_within(case.stepped(), want, gamma(4, U) * change + U * abs(want), label=f"sgd {size} {dtype}")


@given(size=SIZES, dtype=st.sampled_from(DTYPES), shift=st.sampled_from([0, 1]), decay=st.sampled_from([0.0, 0.1]))
@settings(max_examples=12, deadline=None)
def test_momentum_steps_along_the_velocity(launcher, size, dtype, shift, decay):
    """v = factor * v + g + decay * w, then w -= lr * v; both are kept."""
    case = _Case(launcher, size, dtype, shift, 1)
    optim.momentum(
        launcher.context(), case.parameters, [case.gradient], *case.arrays, lr=0.3, factor=0.9, weight_decay=decay,
        master=case.master,
    )  # fmt: skip
    velocity = 0.9 * case.state[0] + case.g + decay * case.w
    size_of = 0.9 * abs(case.state[0]) + abs(case.g) + decay * abs(case.w)
    within = gamma(4, U) * size_of
    assert_within(launcher.get(case.arrays[0]), velocity, within, label=f"velocity {size} {dtype}")
    want = case.w - 0.3 * velocity
    assert_within(case.stepped(), want, 0.3 * gamma(6, U) * size_of + U * abs(want), label=f"momentum {size} {dtype}")


@given(size=SIZES, dtype=st.sampled_from(DTYPES), shift=st.sampled_from([0, 1]), decay=st.sampled_from([0.0, 0.1]),
       step=st.sampled_from([1, 7, 10**5]))  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_adam_steps_as_its_paper_has_it(launcher, size, dtype, shift, decay, step):
    """Kingma and Ba (2015), algorithm 1; 1 - b2 is 0.001 to the last digit, not what float32 leaves of it."""
    case = _Case(launcher, size, dtype, shift, 2)
    optim.adam(
        launcher.context(), case.parameters, [case.gradient], *case.arrays, step=step, lr=0.01, weight_decay=decay,
        master=case.master,
    )  # fmt: skip
    g, size_of_g = case.g + decay * case.w, abs(case.g) + decay * abs(case.w)
    mean = 0.9 * case.state[0] + 0.1 * g
    size_of_mean = 0.9 * case.state[0] + 0.1 * size_of_g
    assert_within(launcher.get(case.arrays[0]), mean, gamma(6, U) * size_of_mean, label=f"m {size} {dtype}")
    square = 0.999 * case.state[1] + 0.001 * g**2
    within = gamma(4, U) * square + 0.001 * gamma(8, U) * size_of_g**2
    assert_within(launcher.get(case.arrays[1]), square, within, label=f"v {size} {dtype}")
    rate = 0.01 / (1 - 0.9**step)
    spread = np.sqrt(square) / np.sqrt(1 - 0.999**step) + 1e-8
    want = case.w - rate * mean / spread
    # The root halves the relative error of v; every g^2 in it is at most v itself.
    relative = gamma(16, U) + 0.5 * within / square
    change = rate * (size_of_mean / spread) * relative
    assert_within(case.stepped(), want, change + U * abs(want), label=f"adam {size} {dtype} step {step}")


def test_sixteen_bits_alone_are_refused(launcher):
    """A weight of 1 plus a step of 1e-4 is the weight again in bfloat16: training would stand still, unnoticed."""
    w = np.zeros(8, np.float16)
    with pytest.raises(InvalidArgument, match="master"):
        optim.sgd(launcher.context(), w, [w], lr=0.1)


def test_gradients_of_several_members_are_refused(launcher):
    """One member runs on a GPU; a second part would be left out."""
    w = np.zeros(8, np.float32)
    with pytest.raises(InvalidArgument, match="one member"):
        optim.sgd(launcher.context(), w, [w, w], lr=0.1)

"""Optimiser steps against their formulas in float64, with and without a master copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.engine import loss_scale
from cubatch.engine.native import optim
from cubatch.kernels.workspace.misc import loss_scale_workspace
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


@pytest.mark.parametrize("step", [1, 7])
def test_adam_without_memory_steps_by_the_sign_of_the_gradient(launcher, step):
    """Decays of 0, which have no logarithm: m is g, v is g^2, and both sums of weights are 1 at any step."""
    case = _Case(launcher, 4099, "float32", 0, 2)
    optim.adam(
        launcher.context(), case.parameters, [case.gradient], *case.arrays, step=step, lr=0.25, betas=(0.0, 0.0)
    )  # fmt: skip
    want = case.w - 0.25 * case.g / (abs(case.g) + 1e-8)
    assert_within(case.stepped(), want, 0.25 * gamma(8, U) + U * abs(want), label=f"adam step {step}")


# --- the loss's scale ----------------------------------------------------------------------------------------

NOT_FINITE = st.sampled_from([np.inf, -np.inf, np.nan])


def updated(launcher, state, gradient, **options):
    """The state after a step with a gradient, in exactly the scratch memory that is planned for it."""
    device = launcher.put(np.array(state, np.float32))
    room = launcher.unwritten((loss_scale_workspace(gradient.size, "float16"),), np.uint8)
    optim.update_loss_scale(launcher.context(), device, [gradient], workspace=room, **options)
    return launcher.get(device).tolist()


@given(size=st.sampled_from([1, 7, 4099, 8192, 3 * 8192 + 1]), shift=st.sampled_from([0, 1]), data=st.data())
@settings(max_examples=30, deadline=None)
def test_one_number_that_is_not_finite_halves_the_scale(launcher, size, shift, data):
    """
    Wherever it is: at the first and last element, between vectors, in any block.

    65504 and the least denormal are finite.
    """
    gradient = np.full(size, 65504, np.float16)
    gradient[::2] = -65504
    gradient[::3] = 2.0**-24
    assert updated(launcher, [1024, 0, 5, 2], place(launcher, gradient, shift)) == [1024, 1 / 1024, 6, 2]
    at = data.draw(st.one_of(st.sampled_from([0, size - 1]), st.integers(0, size - 1)))
    gradient[at] = data.draw(NOT_FINITE)
    assert updated(launcher, [1024, 0, 5, 2], place(launcher, gradient, shift)) == [512, 0, 0, 3]


@given(steps=st.lists(st.sampled_from([True, True, True, False]), max_size=25), interval=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_the_scale_follows_pytorchs_rule(launcher, steps, interval):
    """
    Halved by every overflow, doubled after `interval` steps without one, counted anew from either.

    The rule is that of torch's _amp_update_scale_, written out; the engine's own on NumPy must do the same.
    """
    kept, host = launcher.put(loss_scale.initial_state()), loss_scale.initial_state()
    scale, good, skipped = 65536.0, 0, 0
    for is_finite in steps:
        gradient = np.array([1, 1 if is_finite else np.nan], np.float16)
        optim.update_loss_scale(launcher.context(), kept, [launcher.put(gradient)], interval=interval)
        loss_scale.update_loss_scale(host, [gradient], interval=interval)
        unscale = 1 / scale if is_finite else 0
        good, skipped = (good + 1, skipped) if is_finite else (0, skipped + 1)
        scale *= 1 if is_finite else 0.5
        if good == interval:
            scale, good = 2 * scale, 0
        assert launcher.get(kept).tolist() == host.tolist() == [scale, unscale, good, skipped]


@pytest.mark.parametrize(("gradient", "scale"), [(np.nan, 2.0**-126), (1.0, 2.0**126)])
def test_the_scale_stays_a_normal_number(launcher, gradient, scale):
    """A run that only ever overflows does not end in a scale of 0, whose inverse is infinite; nor the other way."""
    for update in (lambda g: updated(launcher, [scale, 0, 0, 0], launcher.put(g), interval=1), _on_numpy(scale)):
        after = update(np.array([gradient], np.float16))
        assert after[0] == scale
        assert after[1] == (0 if np.isnan(gradient) else 1 / scale)


def _on_numpy(scale):
    state = np.array([scale, 0, 0, 0], np.float32)

    def update(gradient):
        loss_scale.update_loss_scale(state, [gradient], interval=1)
        return state.tolist()

    return update


def run(rule, case, context, **options):
    """Take a step of a rule with the state and hyper-parameters that it has."""
    given = {"adam": {"step": 9}}.get(rule, {}) | options
    step = getattr(optim, rule)
    step(context, case.parameters, [case.gradient], *case.arrays, lr=0.25, master=case.master, **given)


STATES = {"sgd": 0, "momentum": 1, "adam": 2}


@pytest.mark.parametrize("rule", STATES)
def test_a_skipped_step_changes_no_bit(launcher, rule):
    """Infinite gradients and an unscale of 0: parameters, master weights and state are what they were."""
    case = _Case(launcher, 4099, "float16", 0, STATES[rule])
    case.gradient[...] = np.inf
    arrays = [case.parameters, case.master, *case.arrays]
    before = [launcher.get(array).copy() for array in arrays]
    run(rule, case, launcher.context(), scaling=launcher.put(np.array([512, 0, 0, 1], np.float32)))
    for array, want in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(launcher.get(array), want)


@pytest.mark.parametrize("rule", STATES)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_scaled_gradient_gives_the_step_of_the_true_one(launcher, rule, decay):
    """
    A gradient of 2^9 times another's, unscaled by 2^-9, steps to the same bits: powers of two round nothing.

    Two of the nine steps were skipped, so Adam is at its seventh.
    """
    true, scaled = (_Case(launcher, 4099, "float16", 0, STATES[rule]) for _ in range(2))
    scaled.gradient[...] = launcher.put((launcher.get(true.gradient) * np.float16(512)).astype(np.float16))
    step = {"step": 7} if rule == "adam" else {}
    run(rule, true, launcher.context(), weight_decay=decay, **step)
    state = launcher.put(np.array([512, 2.0**-9, 3, 2], np.float32))
    run(rule, scaled, launcher.context(), weight_decay=decay, scaling=state)
    for name in ("parameters", "master"):
        np.testing.assert_array_equal(launcher.get(getattr(scaled, name)), launcher.get(getattr(true, name)))
    for got, want in zip(scaled.arrays, true.arrays, strict=True):
        np.testing.assert_array_equal(launcher.get(got), launcher.get(want))

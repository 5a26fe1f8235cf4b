"""Update rules against PyTorch's formulas written out per element in Python floats."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from cubatch.engine import optim

SIZE = 1000


def _parts(random, count):
    return [random.standard_normal(SIZE) for _ in range(count)]


def _room(elements):
    return np.full(2 * 8 * elements, 0xFF, np.uint8)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_follows_its_formula_and_adds_the_parts(parts, decay):
    """The gradient of a team is the sum of its members' parts; blocks of 64 do not divide 1000."""
    random = np.random.default_rng(0)
    w, gradients = random.standard_normal(SIZE), _parts(random, parts)
    want = [a - 0.1 * (sum(g[i] for g in gradients) + decay * a) for i, a in enumerate(w)]
    optim.sgd(w, gradients, lr=0.1, weight_decay=decay, workspace=_room(64))
    np.testing.assert_allclose(w, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_momentum_follows_its_formula_over_steps(decay):
    """Three steps, since the first starts from a velocity of zero and hides the factor."""
    random = np.random.default_rng(1)
    w, velocity = random.standard_normal(SIZE), np.zeros(SIZE)
    want, speed = w.copy(), [0.0] * SIZE
    for _ in range(3):
        gradients = _parts(random, 2)
        for i in range(SIZE):
            speed[i] = 0.8 * speed[i] + gradients[0][i] + gradients[1][i] + decay * want[i]
            want[i] -= 0.05 * speed[i]
        optim.momentum(w, gradients, velocity, lr=0.05, factor=0.8, weight_decay=decay, workspace=_room(96))
    np.testing.assert_allclose(w, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_follows_its_formula_over_steps(decay):
    """Kingma and Ba (2015), algorithm 1, element by element; the bias corrections change every step."""
    random = np.random.default_rng(2)
    w, mean, square = random.standard_normal(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    want, m, v = w.copy(), [0.0] * SIZE, [0.0] * SIZE
    for step in range(1, 4):
        gradients = _parts(random, 1)
        for i in range(SIZE):
            g = gradients[0][i] + decay * want[i]
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.99 * v[i] + 0.01 * g * g
            want[i] -= 0.01 * (m[i] / (1 - 0.9**step)) / (math.sqrt(v[i] / (1 - 0.99**step)) + 1e-6)
        optim.adam(
            w,
            gradients,
            mean,
            square,
            step=step,
            lr=0.01,
            betas=(0.9, 0.99),
            eps=1e-6,
            weight_decay=decay,
            workspace=_room(64),
        )
    np.testing.assert_allclose(w, want, rtol=1e-11, atol=1e-12)


def test_float32_stays_float32():
    """A Python number as learning rate must not turn the update into float64."""
    w, g = np.ones(10, np.float32), np.full(10, 0.3, np.float32)
    optim.sgd(w, [g], lr=0.1)
    np.testing.assert_array_equal(w, np.float32(1) - np.float32(0.1) * np.float32(0.3))


def test_updates_take_no_memory_that_grows_with_the_parameters():
    """Eight megabytes of parameters, 64 KiB of workspace: nothing else of size."""
    w, g, mean, square = (np.ones(1 << 21, np.float32) for _ in range(4))
    room = np.empty(1 << 16, np.uint8)
    tracemalloc.start()
    optim.adam(w, [g, g], mean, square, step=1, lr=0.1, weight_decay=0.1, workspace=room)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 1024

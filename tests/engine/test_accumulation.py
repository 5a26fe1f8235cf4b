"""Gradients of several batches added up: those of the one large batch, and the optimiser's step by them."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from cubatch.engine import storage
from cubatch.engine.flat_parameters import Stepper
from cubatch.engine.network import Model
from cubatch.engine.team import Team
from cubatch.errors import InvalidArgument
from cubatch.memory.plan import ALIGNMENT
from cubatch.network.graph import Network
from cubatch.network.layers import Conv2d, Dropout, Flatten, Linear, MaxPool2d, ReLU
from cubatch.tuning.step_memory import footprint
from tests.checks import UNIT_ROUNDOFF, assert_within
from tests.engine import rounded
from tests.engine.networks import cpu, deal, flat

WHOLE = 12
LAYERS = [
    Conv2d(name="conv", k=4, r=3, s=3, pad=1), ReLU(), MaxPool2d(r=2, s=2), Flatten(), Linear(k=9), ReLU(), Linear(k=5),
]  # fmt: skip
NETWORK = Network(input_shape=(6, 8, 3), layers=LAYERS, name="plain")


def steps(micro, *, dtype="float64", threads=1, **options):
    """Losses, last gradients and parameters of steps of the whole batch, cut into batches of `micro` samples."""
    losses, gradients = [], None
    with Model(NETWORK, device=cpu(threads), mode="training", dtype=dtype, learning_rate=0.1, **options) as model:
        model.prepare(micro, None if micro == WHOLE else WHOLE)
        for step in range(3):
            images, labels = deal(NETWORK, WHOLE, step)
            loss = 0.0
            for start in range(0, WHOLE, micro):
                model.load(images[start : start + micro], labels[start : start + micro])
                model.step()
                loss += model.loss()
            losses.append(loss)
            gradients = flat(model.gradients)
            if micro != WHOLE:
                model.update()
        return {"loss": np.array(losses), "gradient": gradients, "parameters": flat(model.parameters)}


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize(("micro", "threads"), [(1, 1), (4, 1), (4, 3), (6, 2)])
def test_batches_that_are_added_up_teach_what_the_large_one_does(optimizer, micro, threads):
    """
    Losses, gradients and parameters of three steps, for every optimiser and cut.

    Only the order of sums differs, over at most 12 samples of 48 places. What rounding comes to in float32 here, the
    step of the whole batch shows: its error E. In float64 that is E u64 / u32, for sums in another order up to
    sqrt(12 x 48) times that, and both sides err.
    """
    want, rough = (steps(WHOLE, dtype=dtype, optimizer=optimizer) for dtype in ("float64", "float32"))
    found = steps(micro, optimizer=optimizer, threads=threads)
    growth = 2 * math.sqrt(WHOLE * 48) * UNIT_ROUNDOFF["float64"] / UNIT_ROUNDOFF["float32"]
    for name, values in want.items():
        bound = growth * np.abs(rough[name] - values).max()
        assert_within(found[name], values, bound, label=f"{optimizer} {name}")


def test_a_sum_is_for_one_step():
    """Two steps of the same two batches from the same parameters, with a rate of 0, have the same gradients."""
    images, labels = deal(NETWORK, WHOLE)
    with Model(NETWORK, device=cpu(2), mode="training", dtype="float64", learning_rate=0.0) as model:
        model.prepare(6, WHOLE)
        seen = []
        for _ in range(2):
            for half in (slice(6), slice(6, 12)):
                model.load(images[half], labels[half])
                model.step()
            seen.append(flat(model.gradients))
            model.update()
        assert np.array_equal(*seen)
        assert np.abs(seen[0]).max() > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_added_in_float32_and_rounded_once(dtype):
    """The sum that the optimiser reads is that of the batches' gradients in float32, rounded to the 16 bits."""
    images, labels = deal(NETWORK, WHOLE)
    images = images.astype(np.float32) / 64  # so that gradients of the scaled loss stay in float16's range
    options = {"mode": "training", "dtype": dtype, "learning_rate": 0.25, "operations": rounded.operations()}
    parts = []
    for start in range(0, WHOLE, 4):
        with Model(NETWORK, device=cpu(1), **options) as model:
            model.prepare(4, WHOLE)
            model.load(images[start : start + 4], labels[start : start + 4])
            model.step()
            parts.append(flat(model.gradients))
    with Model(NETWORK, device=cpu(1), **options) as model:
        before, scale = flat(model.parameters).astype(np.float32), model.loss_scale
        model.prepare(4, WHOLE)
        for start in range(0, WHOLE, 4):
            model.load(images[start : start + 4], labels[start : start + 4])
            model.step()
        kind = model.parameters["conv"]["w"].dtype
        total = ((parts[0] + parts[1]) + parts[2]).astype(np.float32)
        assert flat(model.gradients).dtype == np.float32
        assert np.array_equal(flat(model.gradients), total)
        model.update()
        gradient = storage.decoded(storage.encoded(total, kind)) / np.float32(scale)
        want = storage.encoded(before - np.float32(0.25) * gradient, kind)
        assert np.array_equal(flat(model.parameters), want)


def test_each_batch_of_a_sum_has_dropout_masks_of_its_own():
    """The same samples twice: the second batch adds another gradient than the first."""
    network = Network(input_shape=(1, 1, 64), layers=[Dropout(p=0.5), Linear(name="fc", k=3)])
    images, labels = deal(network, 4)
    with Model(network, device=cpu(1), mode="training", dtype="float64") as model:
        model.prepare(4, 8)
        seen = []
        for _ in range(2):
            model.load(images, labels)
            model.step()
            seen.append(flat(model.gradients).copy())
        assert not np.allclose(seen[1], 2 * seen[0])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_the_sum_takes_is_planned_held_and_given_back(dtype, threads):
    """
    As many bytes again as the parameters have in float32, once for all members; only rounding up is not held.

    Seven pieces are rounded up beside the arenas: parameters, gradients of two members, the sum, what the optimiser
    keeps, the scale, running statistics.
    """
    options = {"mode": "training", "dtype": dtype, "optimizer": "adam", "operations": rounded.operations()}
    with Model(NETWORK, device=cpu(threads), **options) as model:
        model.prepare(4)
        alone = model.held_bytes
        model.prepare(4, WHOLE)
        assert model.held_bytes == alone + 4 * NETWORK.parameters
        assert 0 <= model.plan.total - model.held_bytes < 7 * ALIGNMENT
        if dtype == "float32":
            asked = {"mode": "training", "optimizer": "adam", "device": cpu(threads)}
            assert model.plan.total == footprint(NETWORK, batch_size=4, target_batch_size=WHOLE, **asked).total
        model.prepare(4)
        assert model.held_bytes == alone


@pytest.mark.parametrize("kind", [np.float16, np.uint16])
def test_adding_up_16_bits_takes_little_beside_the_sum(kind):
    """No plan has room for a gradient in float32: they are converted a piece at a time, and the sums are right."""
    gradient = storage.encoded(np.linspace(-1, 1, 5 << 20, dtype=np.float32), kind)
    stepper = Stepper(gradient, dtype="bfloat16", optimizer="sgd", operations=None, xp=np)
    stepper.begin_sums()
    with Team(1) as team:
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            stepper.accumulate(team, [gradient, gradient], 0)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak - before < len(gradient) * 4  # a gradient in float32; a fifth of its elements are two words
    assert np.array_equal(stepper.sums, 2 * storage.decoded(gradient))


def test_a_target_is_of_a_network_that_is_trained():
    """In inference there are no gradients to add up."""
    with Model(NETWORK, device=cpu(1)) as model, pytest.raises(InvalidArgument, match="target_batch_size"):
        model.prepare(4, 8)

"""What a model has learnt, copied out and put back: training goes on to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.engine import storage
from cubatch.engine.network import Model
from cubatch.errors import InvalidArgument
from cubatch.network.graph import Network
from cubatch.network.layers import Flatten, Linear
from tests.engine import rounded
from tests.engine.networks import branched, cpu, deal

SAMPLES = 6


def go_on(model, network, steps):
    """Train on batches that are told from each other by the step's number."""
    for step in steps:
        images, labels = deal(network, SAMPLES, step)
        model.load(images.astype(np.float32), labels)
        model.step()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_model_that_was_put_back_goes_on_to_the_bit(optimizer, threads):
    """Parameters, running statistics and optimiser state after five steps, the last two in a new model."""
    network = branched(p=0.5)
    options = {"device": cpu(threads), "mode": "training", "optimizer": optimizer, "learning_rate": 0.1}
    with Model(network, seed=1, **options) as model:
        model.prepare(SAMPLES)
        go_on(model, network, range(3))
        kept = model.snapshot()
        go_on(model, network, range(3, 5))
        want = model.snapshot()
    assert any(not np.array_equal(want[name], kept[name]) for name in kept)
    with Model(network, seed=1, **options) as model:
        for arrays in model.parameters.values():  # as where they were drawn otherwise
            for array in arrays.values():
                array[...] = 7
        model.restore(kept)
        model.prepare(SAMPLES)
        go_on(model, network, range(3, 5))
        found = model.snapshot()
    assert found.keys() == want.keys()
    for name, array in want.items():
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_master_weights_and_the_loss_scale_are_kept(dtype):
    """Training in 16 bits goes on to the bit, and the weights that it gives are the master's."""
    network = Network(input_shape=(2, 2, 3), layers=[Flatten(), Linear(name="fc", k=5)])
    options = {"device": cpu(1), "mode": "training", "dtype": dtype, "operations": rounded.operations()}
    with Model(network, **options) as model:
        model.prepare(SAMPLES)
        go_on(model, network, range(2))
        kept = model.snapshot()
        go_on(model, network, range(2, 4))
        want, trained = model.snapshot(), model.trained().weights["fc"]["w"]
    assert ("loss_scale" in kept) == (dtype == "float16")
    assert np.array_equal(trained, want["master.fc.w"])
    assert trained.dtype == np.float32
    rounded_again = storage.decoded(storage.encoded(trained, want["parameters.fc.w"].dtype))
    assert not np.array_equal(trained, rounded_again)
    with Model(network, **options) as model:
        model.restore(kept)
        model.prepare(SAMPLES)
        go_on(model, network, range(2, 4))
        found = model.snapshot()
    assert all(found[name].tobytes() == array.tobytes() for name, array in want.items())


def test_the_weights_of_a_model_are_those_that_another_begins_with():
    """Parameters and running statistics: a model of the trained network puts out the same."""
    network = branched()
    images, _ = deal(network, SAMPLES)
    with (
        Model(network, device=cpu(1), mode="training", learning_rate=0.1) as model,
        Model(network, device=cpu(1), share=model) as tested,
    ):
        model.prepare(SAMPLES)
        go_on(model, network, range(2))
        tested.prepare(SAMPLES)
        tested.load(images)
        tested.step()
        want, trained = tested.output(), model.trained()
    with Model(trained, device=cpu(1), seed=5) as again:
        again.prepare(SAMPLES)
        again.load(images)
        again.step()
        assert np.array_equal(again.output(), want)


def test_between_a_batch_and_the_step_by_the_sum_no_snapshot_is_taken():
    """The sum is no part of it: it is refused, with the remedy, until the optimiser has stepped."""
    network = branched()
    with Model(network, device=cpu(2), mode="training") as model:
        model.prepare(SAMPLES, 2 * SAMPLES)
        model.snapshot()
        go_on(model, network, range(2))
        with pytest.raises(InvalidArgument, match=r"gradients of 2 batches added up.*update\(\)"):
            model.snapshot()
        model.update()
        assert model.snapshot()["clock"].tolist() == [2, 1]


def test_putting_a_snapshot_back_forgets_the_sum():
    """A batch that was added up before it has no part in the next step, which goes on to the bit."""
    network = branched()
    seen = []
    for is_disturbed in (False, True):
        with Model(network, device=cpu(2), mode="training", optimizer="momentum", learning_rate=0.1) as model:
            model.prepare(SAMPLES, 2 * SAMPLES)
            kept = model.snapshot()
            if is_disturbed:
                go_on(model, network, [7])
                model.restore(kept)
            go_on(model, network, range(2))
            model.update()
            seen.append(model.snapshot())
    assert all(seen[0][name].tobytes() == seen[1][name].tobytes() for name in seen[0])


def test_a_snapshot_of_another_optimiser_or_network_is_refused():
    """Before anything is changed."""
    network = branched()
    with (
        Model(network, device=cpu(1), mode="training") as plain,
        Model(network, device=cpu(1), mode="training", optimizer="adam") as adam,
    ):
        before = adam.snapshot()
        for other in (plain.snapshot(), before | {"clock": np.zeros(3, np.int64)}, before | {"clock": np.zeros(2)}):
            with pytest.raises(InvalidArgument, match="snapshot"):
                adam.restore(other)
        assert all(np.array_equal(before[name], array) for name, array in adam.snapshot().items())

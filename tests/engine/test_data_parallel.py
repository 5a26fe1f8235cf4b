"""Ranks that share a step: they learn what one device learns from the whole batch, whatever their shares are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cubatch.engine.data_parallel import DataParallel, Share, buckets
from cubatch.engine.exchange import totals
from cubatch.engine.network import Model
from cubatch.memory.schedule import schedule
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import BatchNorm2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, ReLU
from tests.checks import UNIT_ROUNDOFF, assert_within
from tests.engine.networks import cpu, deal, flat, narrow
from tests.engine.thread_ranks import Group

WHOLE = 12
NETWORK = Network(
    input_shape=(6, 8, 3),
    layers=[
        Conv2d(name="conv", k=4, r=3, s=3, pad=1), ReLU(), MaxPool2d(r=2, s=2), Flatten(), Linear(k=9), ReLU(),
        Linear(k=5),
    ],
    name="plain",
)  # fmt: skip


def alone(dtype, *, count=3, **options):
    """Losses, last gradient and parameters of steps of the whole batch on one device."""
    losses, gradient = [], None
    with Model(NETWORK, device=cpu(1), mode="training", dtype=dtype, learning_rate=0.1, **options) as model:
        model.prepare(WHOLE)
        for number in range(count):
            model.load(*deal(NETWORK, WHOLE, number))
            model.step()
            losses.append(model.loss())
            gradient = flat(model.gradients)
        return {"loss": np.array(losses), "gradient": gradient, "parameters": flat(model.parameters)}


def shared(shares, *, threads=1, cuts=1, count=3, bucket_bytes=64, **options):
    """The same of each rank, whose shares are of `shares` samples, in `cuts` batches each."""

    def train(exchange):
        mine, begin = shares[exchange.rank], sum(shares[: exchange.rank])
        size, losses, gradient = mine // cuts, [], None
        model = DataParallel(
            NETWORK, exchange=exchange, device=cpu(threads), dtype="float64", learning_rate=0.1, **options
        )
        with model:
            model.prepare(size, None if cuts == 1 else mine)
            for number in range(count):
                images, labels = deal(NETWORK, WHOLE, number)
                loss = 0.0
                for start in range(begin, begin + mine, size):
                    model.load(images[start : start + size], labels[start : start + size])
                    model.step()
                    loss += model.loss()
                losses.append(loss)
                if cuts == 1:
                    gradient = flat(model.gradients)
                else:
                    model.update()
            found = {"loss": np.array(losses), "parameters": flat(model.parameters)}
            return found if gradient is None else found | {"gradient": gradient}

    return Group(len(shares), bucket_bytes).together(train)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize(
    ("shares", "threads", "cuts"),
    [((6, 6), 1, 1), ((8, 4), 1, 1), ((4, 4, 4), 2, 1), ((3, 9), 3, 1), ((6, 6), 1, 3), ((8, 4), 2, 2)],
)
def test_ranks_learn_what_one_device_does(optimizer, shares, threads, cuts):
    """
    Losses, gradients and parameters of three steps on every rank, for equal and unequal shares, threads, and cuts.

    Only the order of sums differs, over at most 12 samples of 48 places. What rounding comes to in float32, the step
    of one device shows: its error E. In float64 that is E u64 / u32, for sums in another order up to sqrt(12 x 48)
    times that, and both sides err.
    """
    want, rough = (alone(dtype, optimizer=optimizer) for dtype in ("float64", "float32"))
    growth = 2 * math.sqrt(WHOLE * 48) * UNIT_ROUNDOFF["float64"] / UNIT_ROUNDOFF["float32"]
    for rank, found in enumerate(shared(shares, threads=threads, cuts=cuts, optimizer=optimizer)):
        for name, values in found.items():
            bound = growth * np.abs(rough[name] - want[name]).max()
            assert_within(values, want[name], bound, label=f"rank {rank} {optimizer} {name}")


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 10**9])
def test_the_size_of_pieces_changes_nothing(bucket_bytes):
    """However the gradient is cut for its sums, all ranks hold the same parameters, to the bit."""
    first, second = shared((6, 6), bucket_bytes=64)
    assert np.array_equal(first["parameters"], second["parameters"])
    for found in shared((6, 6), bucket_bytes=bucket_bytes):
        assert np.array_equal(found["parameters"], first["parameters"])


@pytest.mark.parametrize(("name", "factor"), [("resnet18", 8), ("mobilenet-v3-large", 8), ("deit-tiny", 4)])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_piece_is_whole_when_its_sum_begins(name, factor, recompute):
    """Run on graphs of real networks: what is there after its operation is there after the step; each element once."""
    network = narrow(models.build(name, input_shape=(32, 32, 3)), factor)
    program = schedule(network, "training", recompute=recompute)
    cut = buckets(program, 4, 1 << 12)
    covered = np.zeros(network.parameters, int)
    for bucket in cut:
        covered[bucket.part] += 1
    assert (covered == 1).all()
    assert [bucket.after for bucket in cut] == sorted(bucket.after for bucket in cut)
    with Model(
        network, device=cpu(1), mode="training", dtype="float32", recompute=recompute, learning_rate=0.0
    ) as model:
        model.prepare(2)
        model.load_random()
        watcher = Watcher(model, cut)
        model.step(watcher)
        (final,) = model._gradients
        for bucket, seen in zip(cut, watcher.seen, strict=True):
            assert np.array_equal(seen, final[bucket.part])


class Watcher:
    """A trace that copies each piece of the gradient right after the operation that makes the last of it."""

    def __init__(self, model, cut):
        self._model, self._cut, self.seen = model, cut, []
        model._gradients[0][...] = np.nan

    def run(self, rank, number, work):
        """Do the operation, and copy what is whole then."""
        work()
        self.seen += [self._model._gradients[0][bucket.part].copy() for bucket in self._cut if bucket.after == number]

    def wait(self, rank, meet):
        """Wait."""
        meet()


def test_the_first_sum_begins_while_the_backward_pass_goes_on():
    """Of resnet18's pieces of 1 MiB the first is whole before three quarters of the backward operations are done."""
    program = schedule(models.build("resnet18"), "training")
    backward = [number for number, op in enumerate(program.ops) if op.kind == "backward"]
    first = buckets(program, 4, 1 << 20)[0]
    assert first.after < backward[len(backward) // 4]


class Masks:
    """A trace that copies the mask of the one dropout right after it was drawn."""

    def __init__(self, model):
        ops = model.plan.schedule.ops
        (self._number,) = [n for n, op in enumerate(ops) if op.kind == "forward" and op.node.name == "drop"]
        self._places, self._buffer = model._places[0], ops[self._number].writes["mask"]
        self.seen = {}

    def run(self, rank, number, work):
        """Do the operation, and copy what it drew."""
        work()
        if number == self._number:
            self.seen[rank] = np.array(self._places[rank].arena[self._buffer])

    def wait(self, rank, meet):
        """Wait."""
        meet()


def test_ranks_drop_different_samples():
    """Dropout's masks of two ranks are two draws."""
    layers = [Flatten(), Linear(name="in", k=64), Dropout(p=0.5, name="drop"), Linear(k=5)]
    network = Network(input_shape=(6, 8, 3), layers=layers, name="dropping")

    def masks(exchange):
        with DataParallel(network, exchange=exchange, device=cpu(1), dtype="float32") as model:
            model.prepare(4)
            model.load_random()
            trace = Masks(model)
            model.step(trace)
            return trace.seen[0]

    first, second = Group(2).together(masks)
    assert first.shape == second.shape
    assert not np.array_equal(first, second)


def test_statistics_are_those_of_the_first_rank():
    """Batch norms see their rank's samples; afterwards every rank has what rank 0 saw."""
    network = Network(
        input_shape=(4, 4, 3), layers=[Conv2d(k=4, r=1, s=1), BatchNorm2d(name="bn"), Flatten(), Linear(k=3)], name="bn"
    )

    def means(exchange):
        with DataParallel(network, exchange=exchange, device=cpu(1), dtype="float64") as model:
            model.prepare(4)
            images, labels = deal(network, 8)
            part = slice(4 * exchange.rank, 4 * exchange.rank + 4)
            model.load(images[part], labels[part])
            model.step()
            before = model.states["bn"]["mean"].copy()
            model.share_statistics()
            return before, model.states["bn"]["mean"].copy()

    (first, kept), (second, taken) = Group(2).together(means)
    assert not np.array_equal(first, second)
    assert np.array_equal(kept, first)
    assert np.array_equal(taken, first)


def test_a_rank_alone_exchanges_nothing():
    """Steps within alone() begin no sum; those after it do."""

    def count(exchange):
        with DataParallel(NETWORK, exchange=exchange, device=cpu(1), dtype="float64") as model:
            model.prepare(6)
            model.load_random()
            before = exchange.sums
            with model.alone():
                model.step()
            between = exchange.sums
            model.step()
            return before, between, exchange.sums

    for before, between, after in Group(2).together(count):
        assert before == between < after


def test_shares_tell_each_rank_its_samples():
    """Of shares of 5, 2 and 1 samples: where each lies in the batch of 8, and the batch size of rank 0."""
    found = Group(3).together(lambda exchange: Share.of(exchange, (5, 2, 1)[exchange.rank], (5, 2, 1)[exchange.rank]))
    assert [share.part for share in found] == [slice(0, 5), slice(5, 7), slice(7, 8)]
    assert {(share.total, share.batch_size) for share in found} == {(8, 5)}
    assert [share.is_first for share in found] == [True, False, False]


def test_numbers_are_summed_at_once():
    """totals() gives every rank the sums of what each has said."""
    assert Group(2).together(lambda exchange: totals(exchange, [1.5, exchange.rank])) == [[3.0, 1.0], [3.0, 1.0]]

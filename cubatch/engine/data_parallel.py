"""
A model of which every rank has a copy: each steps its share of the batch, and the gradients are summed over all.

The loss is the mean over the samples of all ranks, so that the sum of their gradients is that of the whole batch, and
all take the same step.  A piece of the gradient is summed as soon as the backward pass has made it, while it goes on;
where gradients of several batches are added up, their sum is, once.  Batch norms see the samples of their rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self

import attrs
import numpy as np

from cubatch.engine.buckets import Bucket, buckets
from cubatch.engine.exchange import Exchange, totals
from cubatch.engine.network import Model
from cubatch.engine.place import Place
from cubatch.memory.plan import Plan
from cubatch.memory.schedule_records import Op


@attrs.frozen
class Share:
    """
    Which of a step's samples are this rank's.

    Attributes:
        part: Where they lie in the batch of all ranks.
        sizes: How many are each rank's.
        batch_size: How many of rank 0 go through together.
        is_first: Whether this is rank 0.
    """

    part: slice
    sizes: list[int]
    batch_size: int
    is_first: bool = True

    @property
    def total(self) -> int:
        """Samples of a step, of all ranks."""
        return sum(self.sizes)

    @classmethod
    def of(cls, exchange: Exchange | None, batch_size: int, samples: int) -> Self:
        """Tell the other ranks how many go through together and make a step here, and learn of theirs."""
        if exchange is None:
            return cls(slice(0, samples), [samples], batch_size)
        sizes = gathered(exchange, samples)
        begin = sum(sizes[: exchange.rank])
        first = gathered(exchange, batch_size)[0]
        return cls(slice(begin, begin + samples), sizes, first, exchange.rank == 0)


def gathered(exchange: Exchange, number: int) -> list[int]:
    """Give the number that each rank has, by rank."""
    mine = [float(number) if rank == exchange.rank else 0.0 for rank in range(exchange.size)]
    return [int(each) for each in totals(exchange, mine)]


class DataParallel(Model):
    """
    One rank's copy of a network in training.

    All ranks make it alike, and call `prepare`, `step`, `update`, `loss` and `share_statistics` together; batch sizes
    may differ.

    Args:
        spec: A network.
        exchange: Of this rank.
        options: As for `Model`.
    """

    def __init__(self, spec: Any, *, exchange: Exchange, **options: Any) -> None:
        super().__init__(spec, mode="training", graphs=False, **options)  # a sum over ranks is no part of a graph
        self._exchange = exchange
        self._after: dict[int, list[Bucket]] = {}
        self._is_alone = False

    def prepare(self, batch_size: int, target_batch_size: int | None = None) -> None:
        """
        Take the memory of this rank's share of the batch; see `Model.prepare`.

        Args:
            batch_size: Samples of this rank that go through together.
            target_batch_size: Its samples of an optimiser step.
        """
        self._first = sum(gathered(self._exchange, batch_size)[: self._exchange.rank])
        self._samples = sum(gathered(self._exchange, target_batch_size or batch_size))
        super().prepare(batch_size, target_batch_size)

    def _lay_out(self, plan: Plan) -> None:
        ops = plan.schedule.ops
        self._after = {}
        if self._target is None:
            for bucket in buckets(plan.schedule, self._flat.itemsize, self._exchange.bucket_bytes):
                self._after.setdefault(id(ops[bucket.after]), []).append(bucket)
        super()._lay_out(plan)

    def _bind(self, op: Op, place: Place) -> Callable[[], object]:
        work, made = super()._bind(op, place), self._after.get(id(op), [])
        if op.kind == "update":

            def await_sums() -> None:  # not within what was recorded of the update, which is replayed
                if place.rank == 0:
                    self._exchange.finish()
                work()

            return await_sums
        if not made:
            return work

        def then_sum() -> None:
            work()
            for bucket in made:
                self._begin(place, bucket.part)

        return then_sum

    def _begin(self, place: Place, part: slice) -> None:
        """Add up what the members have of a piece, and begin to sum it over the ranks."""
        if len(self._gradients) > 1:
            place.team.barrier(place.rank)
            share = place.team.shard(part.stop - part.start, place.rank)
            mine = slice(part.start + share.start, part.start + share.stop)
            for gradient in self._gradients[1:]:
                np.add(self._gradients[0][mine], gradient[mine], out=self._gradients[0][mine])
            place.team.barrier(place.rank)
        if place.rank == 0 and not self._is_alone:
            self._exchange.begin(self._gradients[0][part])

    @property
    def _whole(self) -> list[Any]:
        """All of the gradient: the first member's holds that of the others, too, and of the other ranks."""
        return self._gradients if self._target is not None else self._gradients[:1]

    def update(self) -> None:
        """Let the optimiser step by the gradients that were added up, on all ranks."""
        if self._stepper is not None and self._stepper.sums is not None and self.plan is not None:
            for bucket in buckets(self.plan.schedule, self._stepper.sums.itemsize, self._exchange.bucket_bytes):
                self._exchange.begin(self._stepper.sums[bucket.part])
            self._exchange.finish()
        super().update()

    def loss(self) -> float:
        """Give the mean loss over the last step's samples of all ranks."""
        (loss,) = totals(self._exchange, [super().loss()])
        return loss

    def share_statistics(self) -> None:
        """Have all ranks take the running statistics of rank 0, whose model is then the model."""
        for by_name in self.states.values():
            for array in by_name.values():
                if self._exchange.rank:
                    array[...] = 0
                self._exchange.begin(array)
        self._exchange.finish()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Step without the other ranks, to see what a step takes without them; its gradient is of one rank then."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

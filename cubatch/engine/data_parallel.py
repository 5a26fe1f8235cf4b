"""
Data parallel training: every rank has a copy of the model, and gradients are summed over all ranks.

The loss is the mean over the samples of all ranks. So the sum of their gradients is that of the whole batch, and all
ranks take the same step. A piece of the gradient is summed as soon as the backward pass has computed it. Where
gradients of several batches are added up, their total is summed once. Batch norms use the samples of their rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self

import attrs
import numpy as np

from cubatch.engine.exchange import Exchange, totals
from cubatch.engine.flat_parameters import places
from cubatch.engine.network import Model
from cubatch.engine.place import Place
from cubatch.memory.plan import Plan
from cubatch.memory.schedule_records import Op, Schedule


@attrs.frozen
class Share:
    """This rank's share of a step's samples."""

    part: slice  # range of this rank's samples in the batch of all ranks
    sizes: list[int]  # samples of each rank
    batch_size: int  # samples that go through rank 0 together
    is_first: bool = True  # whether this is rank 0

    @property
    def total(self) -> int:
        """Samples of all ranks in a step."""
        return sum(self.sizes)

    @classmethod
    def of(cls, exchange: Exchange | None, batch_size: int, samples: int) -> Self:
        """
        Return which samples of a step this rank computes, with the counts of all ranks; all ranks must call this.

        `batch_size` of this rank's `samples` go through together; that of the result is rank 0's. `exchange` None: one
        rank has the whole step.
        """
        if exchange is None:
            return cls(slice(0, samples), [samples], batch_size)
        sizes = gathered(exchange, samples)
        begin = sum(sizes[: exchange.rank])
        first = gathered(exchange, batch_size)[0]
        return cls(slice(begin, begin + samples), sizes, first, exchange.rank == 0)


def gathered(exchange: Exchange, number: int) -> list[int]:
    """Return the numbers that all ranks pass, in order of rank; every rank must call this."""
    mine = [float(number) if rank == exchange.rank else 0.0 for rank in range(exchange.size)]
    return [int(each) for each in totals(exchange, mine)]


@attrs.frozen
class Bucket:
    """A piece of the flat gradient that one exchange sums over the ranks."""

    part: slice  # range of the piece in the flat gradient
    after: int  # number of the operation that completes the piece


def buckets(program: Schedule, itemsize: int, least_bytes: int) -> list[Bucket]:
    """
    Cut the gradient into pieces, in the order in which the backward pass completes them.

    A piece is closed once it has `least_bytes`.

    Returns:
        list[Bucket]: The pieces, which together are the whole gradient.
    """
    made = {op.node.name: number for number, op in enumerate(program.ops) if op.kind == "backward" and op.node}
    pieces: list[Bucket] = []
    is_open = False
    for (layer, _), part in reversed(places(program.network).items()):
        after = made[layer]
        # The backward pass fills the array from its end; a parameter that is complete earlier starts its own piece.
        if is_open and after >= pieces[-1].after:
            pieces[-1] = Bucket(slice(part.start, pieces[-1].part.stop), after)
        else:
            pieces.append(Bucket(part, after))
        size = pieces[-1].part.stop - pieces[-1].part.start
        is_open = size * itemsize < least_bytes
    return sorted(pieces, key=lambda bucket: bucket.after)


class DataParallel(Model):
    """
    The copy of a network that one rank, a process with a device, trains.

    All ranks create it with the same network and settings, and call `prepare`, `step`, `update`, `loss` and
    `share_statistics` together; batch sizes may differ.

    Args:
        spec: A network.
        exchange: The exchange of this rank.
        options: As for `Model`.
    """

    def __init__(self, spec: Any, *, exchange: Exchange, **options: Any) -> None:
        super().__init__(spec, mode="training", graphs=False, **options)  # a sum over ranks is no part of a graph
        self._exchange = exchange
        self._after: dict[int, list[Bucket]] = {}
        self._is_alone = False

    def prepare(self, batch_size: int, target_batch_size: int | None = None) -> None:
        """
        Allocate the memory of this rank's share of the batch; see `Model.prepare`.

        The target is the samples of this rank in an optimizer step; None: one batch.
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

            def await_sums() -> None:  # not recorded: the recording of the update is replayed
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
        """Add up all members' gradients of a range of the parameters, and begin to sum the result over the ranks."""
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
        """Arrays whose sum is the gradient: those of all members, or the first member's if ranks have exchanged it."""
        return self._gradients if self._target is not None else self._gradients[:1]

    def update(self) -> None:
        """Sum the added-up gradients over all ranks, and take an optimizer step with the sum."""
        if self._stepper is not None and self._stepper.sums is not None and self.plan is not None:
            for bucket in buckets(self.plan.schedule, self._stepper.sums.itemsize, self._exchange.bucket_bytes):
                self._exchange.begin(self._stepper.sums[bucket.part])
            self._exchange.finish()
        super().update()

    def loss(self) -> float:
        """Return the mean loss over the last step's samples of all ranks; for a target batch size see `Model.loss`."""
        (loss,) = totals(self._exchange, [super().loss()])
        return loss

    def share_statistics(self) -> None:
        """Copy the running statistics of rank 0 to all ranks."""
        for by_name in self.states.values():
            for array in by_name.values():
                if self._exchange.rank:
                    array[...] = 0
                self._exchange.begin(array)
        self._exchange.finish()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Run steps without summing over the ranks inside the context, to time them without communication."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

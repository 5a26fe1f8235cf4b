"""
Occupancy as one resource of a launch changes: threads, registers or shared memory.

Occupancy is a step function of each.  A sweep lists its steps, so each fall lies between two of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from cubatch.errors import InvalidArgument
from cubatch.hardware import architectures
from cubatch.hardware.waves import Occupancy
from cubatch.kernels.resources import Needs

QUANTITIES = ("threads", "registers", "shared")


@attrs.frozen
class Step:
    """A range of values of one resource (threads, registers or shared memory) with equal occupancy."""

    first: int  # first, last: smallest and largest value of the range
    last: int
    blocks_per_sm: int  # blocks_per_sm, occupancy, limiters: see `waves.Occupancy`
    occupancy: float
    limiters: tuple[str, ...]
    cliff: bool = False  # whether occupancy falls at the next value


@attrs.frozen
class Sweep:
    """Occupancy for all values of one resource of a launch, with the other resources unchanged."""

    quantity: str  # the resource that changes: one of QUANTITIES
    value: int  # its present value
    steps: tuple[Step, ...]  # ranges of values with equal occupancy, in ascending order, without gaps
    better: int | None  # the nearest value with higher occupancy; None if there is none

    def at(self, value: int) -> Step:
        """Return the range of equal occupancy that contains a value."""
        return next(step for step in self.steps if step.first <= value <= step.last)


def sweep(needs: Needs, compute_capability: tuple[int, int], quantity: str) -> Sweep:
    """
    Return the occupancy for all values of one resource of a launch.

    Args:
        needs: The present threads, registers and shared memory of a block.
        compute_capability: Compute capability of the GPU.
        quantity: "threads" (1 to 1024), "registers" (0 to 255) or "shared" (0 bytes to all of an SM).

    Raises:
        InvalidArgument: If the quantity is unknown, or a number is out of its range.
        UnknownName: If the compute capability is unknown.

    Example:
        With 96 registers per thread two blocks of 256 threads fit; with 80 a third one does:

        >>> registers = sweep(Needs(threads=256, registers=96), (7, 0), "registers")
        >>> registers.at(96).blocks_per_sm, registers.better, registers.at(80).blocks_per_sm
        (2, 80, 3)
    """
    sm, every = architectures.of(compute_capability), architectures.every()
    of_thread = every.register_unit // every.warp_threads
    fields = {
        "threads": ("threads", needs.threads, 1, every.warp_threads, every.threads_per_block),
        "registers": ("registers", needs.registers, 0, of_thread, every.registers_per_thread),
        "shared": ("shared_bytes", needs.shared_bytes, 0, sm.shared_unit_bytes, sm.shared_bytes_per_sm),
    }
    if quantity not in fields:
        raise InvalidArgument("sweep", quantity, "one of " + ", ".join(QUANTITIES))
    needs.on(compute_capability)  # checks the ranges of all numbers
    name, value, least, unit, most = fields[quantity]
    ends = [*range(unit, most, unit), most, *([value] if value > most else [])]  # above the SM's size nothing changes
    if least == 0:
        ends = [0, *ends]
    occupancies = [(end, attrs.evolve(needs, **{name: end}).on(compute_capability)) for end in ends]
    steps = _steps(occupancies, least)
    result = Sweep(quantity, value, steps, None)
    now = result.at(value).occupancy
    round_up = unit if quantity == "threads" else 1  # a partial warp costs as much as a full one
    return attrs.evolve(
        result,
        better=nearest(
            value,
            (
                (step.last if step.last < value else -(-step.first // round_up) * round_up)
                for step in steps
                if step.occupancy > now
            ),
        ),
    )


def _steps(occupancies: Iterable[tuple[int, Occupancy]], least: int) -> tuple[Step, ...]:
    """
    Return ranges of equal occupancy from (value, occupancy) pairs in ascending order.

    A pair's occupancy holds for all values since the previous pair's; the first range begins at `least`.
    """
    steps: list[Step] = []
    for end, occupied in occupancies:
        facts = (occupied.blocks_per_sm, occupied.occupancy, occupied.limiters)
        if steps and facts == (steps[-1].blocks_per_sm, steps[-1].occupancy, steps[-1].limiters):
            steps[-1] = attrs.evolve(steps[-1], last=end)
        else:
            steps.append(Step(steps[-1].last + 1 if steps else least, end, *facts))
    following = [*steps[1:], steps[-1]]
    return tuple(
        attrs.evolve(step, cliff=after.occupancy < step.occupancy) for step, after in zip(steps, following, strict=True)
    )


def nearest(value: int, others: Iterable[int]) -> int | None:
    """Return the value of `others` nearest to `value`, of two equally near ones the smaller; None if there are none."""
    return min(others, key=lambda other: (abs(other - value), other), default=None)

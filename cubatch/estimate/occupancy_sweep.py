"""
What becomes of occupancy when one thing of a launch changes: threads, registers or shared memory.

Occupancy is a staircase in each of them.  A sweep is given as its steps, so that every cliff lies between two.
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
    """
    Values over which occupancy stays as it is.

    Attributes:
        first, last: The values.
        blocks_per_sm, occupancy, limiters: See `waves.Occupancy`.
        cliff: Whether occupancy falls at the next value.
    """

    first: int
    last: int
    blocks_per_sm: int
    occupancy: float
    limiters: tuple[str, ...]
    cliff: bool = False


@attrs.frozen
class Sweep:
    """
    Occupancy against one of threads, registers and shared memory, the others as they are.

    Attributes:
        quantity: What changes: one of QUANTITIES.
        value: What it is now.
        steps: In ascending order, without gaps.
        better: The nearest value with higher occupancy; None where there is none.
    """

    quantity: str
    value: int
    steps: tuple[Step, ...]
    better: int | None

    def at(self, value: int) -> Step:
        """Return the step that a value is on."""
        return next(step for step in self.steps if step.first <= value <= step.last)


def sweep(needs: Needs, compute_capability: tuple[int, int], quantity: str) -> Sweep:
    """
    Let one thing of a launch change and say what becomes of its occupancy.

    Args:
        needs: What a block takes now.
        compute_capability: Of the GPU.
        quantity: "threads" (1 to 1024), "registers" (0 to 255) or "shared" (0 bytes to all that an SM has).

    Raises:
        InvalidArgument: If there is no such quantity, or a number is out of its range.
        UnknownName: If the limits of the compute capability are not known.

    Example:
        With 96 registers for each of 256 threads a third block does not fit in; with 80 it does:

        >>> found = sweep(Needs(threads=256, registers=96), (7, 0), "registers")
        >>> found.at(96).blocks_per_sm, found.better, found.at(80).blocks_per_sm
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
    needs.on(compute_capability)  # all of its numbers are in their ranges
    name, value, least, unit, most = fields[quantity]
    ends = [*range(unit, most, unit), most, *([value] if value > most else [])]  # beyond the SM nothing changes
    if least == 0:
        ends = [0, *ends]
    found = [(end, attrs.evolve(needs, **{name: end}).on(compute_capability)) for end in ends]
    steps = _steps(found, least)
    result = Sweep(quantity, value, steps, None)
    now = result.at(value).occupancy
    round_up = unit if quantity == "threads" else 1  # part of a warp costs as much as all of it
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


def _steps(found: Iterable[tuple[int, Occupancy]], least: int) -> tuple[Step, ...]:
    """Join neighbouring values with equal answers; a value stands for all since the value before."""
    steps: list[Step] = []
    for end, held in found:
        facts = (held.blocks_per_sm, held.occupancy, held.limiters)
        if steps and facts == (steps[-1].blocks_per_sm, steps[-1].occupancy, steps[-1].limiters):
            steps[-1] = attrs.evolve(steps[-1], last=end)
        else:
            steps.append(Step(steps[-1].last + 1 if steps else least, end, *facts))
    following = [*steps[1:], steps[-1]]
    return tuple(
        attrs.evolve(step, cliff=after.occupancy < step.occupancy) for step, after in zip(steps, following, strict=True)
    )


def nearest(value: int, others: Iterable[int]) -> int | None:
    """Return the value next to this one; of two as near the smaller."""
    return min(others, key=lambda other: (abs(other - value), other), default=None)

"""In which pieces a gradient is summed over ranks, and from when on each of them is whole."""

from __future__ import annotations

import attrs

from cubatch.engine.weights import places
from cubatch.memory.schedule_records import Schedule


@attrs.frozen
class Bucket:
    """
    A piece of the flat gradient that is summed at once.

    Attributes:
        part: Where it lies.
        after: Number of the operation that makes the last of it.
    """

    part: slice
    after: int


def buckets(program: Schedule, itemsize: int, least_bytes: int) -> list[Bucket]:
    """
    Cut the gradient into pieces in the order in which the backward pass makes them.

    Args:
        program: A training step.
        itemsize: Bytes of an element.
        least_bytes: A piece is closed when it has so many.

    Returns:
        list[Bucket]: Together all of the gradient; those that are whole first come first.
    """
    made = {op.node.name: number for number, op in enumerate(program.ops) if op.kind == "backward" and op.node}
    found: list[Bucket] = []
    is_open = False
    for (layer, _), part in reversed(places(program.network).items()):
        after = made[layer]
        # The backward pass walks the array from its end; where it would turn back, the piece would wait for nothing.
        if is_open and after >= found[-1].after:
            found[-1] = Bucket(slice(part.start, found[-1].part.stop), after)
        else:
            found.append(Bucket(part, after))
        size = found[-1].part.stop - found[-1].part.start
        is_open = size * itemsize < least_bytes
    return sorted(found, key=lambda bucket: bucket.after)

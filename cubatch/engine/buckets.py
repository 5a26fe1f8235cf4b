"""Cut a gradient into pieces to sum over ranks, each ready after an operation of the backward pass."""

from __future__ import annotations

import attrs

from cubatch.engine.flat_parameters import places
from cubatch.memory.schedule_records import Schedule


@attrs.frozen
class Bucket:
    """
    A piece of the flat gradient that is summed at once.

    Attributes:
        part: Its range.
        after: Number of the operation that computes the last of it.
    """

    part: slice
    after: int


def buckets(program: Schedule, itemsize: int, least_bytes: int) -> list[Bucket]:
    """
    Cut the gradient into pieces in the order in which the backward pass computes them.

    Args:
        program: A training step.
        itemsize: Bytes of an element.
        least_bytes: A piece is closed once it has this size.

    Returns:
        list[Bucket]: All of the gradient, in the order in which pieces are complete.
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

"""Inputs and labels of a step, copied or drawn into the buffers of all shards, and results gathered from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cubatch.engine import backend, storage
from cubatch.engine.place import Place
from cubatch.errors import InvalidArgument
from cubatch.memory.plan import Plan
from cubatch.memory.schedule_records import Schedule
from cubatch.network.graph import INPUT

RANDOM_BLOCK = 2**16
"""Number of random numbers drawn; larger buffers repeat them."""

_SHIFT = 7919


def check(plan: Plan, x: Any, labels: Any) -> None:
    """Raise InvalidArgument if shapes do not fit the plan, or labels are no class numbers; labels may be None."""
    network = plan.schedule.network
    wanted = (plan.batch_size, *network.input_shape)
    if tuple(x.shape) != wanted:
        raise InvalidArgument("x", tuple(x.shape), f"of shape {wanted}")
    h, w, classes = network.output_shape
    if labels is not None:
        if math.prod(labels.shape) != plan.batch_size * h * w or len(labels) != plan.batch_size:
            raise InvalidArgument("labels", tuple(labels.shape), f"of shape {(plan.batch_size, h, w)}")
        least, most = int(labels.min()), int(labels.max())
        if least < 0 or most >= classes:
            raise InvalidArgument("labels", f"from {least} to {most}", f"class numbers from 0 to {classes - 1}")


def fill(plan: Plan, place: Place, x: Any, labels: Any, *, kind: np.dtype[Any], xp: Any) -> None:
    """
    Copy the shard of a `place` from a whole batch and its labels into the buffers of a step.

    Labels None leave their buffer as it is. `kind` is the type in which activations are stored, `xp` the module of the
    buffers.
    """
    shard = slice(place.begin, place.begin + place.arena.samples)
    for number in plan.schedule.given:
        target = place.arena[number]
        name = plan.schedule.buffers[number].name
        if name == INPUT:
            images = xp.asarray(storage.encoded(x[shard], kind))
            _clear_padding(target, plan.schedule)
            for part, inside, pixels in _pixels(target, plan.schedule):
                part[inside] = images[pixels]
        elif name == "labels" and labels is not None:
            target[...] = xp.asarray(labels[shard]).reshape(target.shape)


def fill_randomly(plan: Plan, places: Sequence[Place], block: Any, seed: int, xp: Any) -> None:
    """
    Fill the inputs of a step with random numbers, and its labels with random classes.

    Args:
        plan: The plan of the batch.
        places: All shards with their buffers.
        block: Random numbers from `random_block`.
        seed: Seed of the random classes.
        xp: The array module of the buffers: NumPy or CuPy.
    """
    random = np.random.default_rng(seed)
    # Each shard begins at another number of the block, so that no two hold the same samples.
    for count, place in enumerate(places):
        for number in sorted(plan.schedule.given):
            target = place.arena[number].reshape(-1)
            if plan.schedule.buffers[number].name == "labels":
                classes = plan.schedule.network.output_shape[2]
                target[...] = xp.asarray(random.integers(0, classes, size=target.size, dtype=np.int32))
                continue
            start, begin = 0, count * _SHIFT % block.size
            while start < target.size:
                piece = block[begin : begin + target.size - start]
                target[start : start + piece.size] = piece
                start, begin = start + piece.size, 0
            if plan.schedule.buffers[number].name == INPUT:
                _clear_padding(place.arena[number], plan.schedule)


def _pixels(stored: Any, program: Schedule) -> Iterator[tuple[Any, tuple[slice, ...], tuple[slice, ...]]]:
    """
    Yield for each pixel of a patch: its channels of the stored batch, the index of the unpadded part, and the images'.

    `stored` is the batch, cut into `Schedule.patches`; the third value indexes the images that are stored.
    """
    down, right = program.patches
    wide = stored.shape[-1] // (down.taps * right.taps)
    channels, every = slice(program.network.input_shape[2]), slice(None)
    for place, (y, x) in enumerate(itertools.product(range(down.taps), range(right.taps))):
        (rows, from_rows), (columns, from_columns) = down.valid(y, 0, down.out), right.valid(x, 0, right.out)
        part = stored[..., place * wide : (place + 1) * wide]
        yield part, (every, rows, columns, channels), (every, from_rows, from_columns)


def _clear_padding(stored: Any, program: Schedule) -> None:
    """Set the padding of a stored batch to zero."""
    for part, inside, _ in _pixels(stored, program):
        for axis, pixels in enumerate(inside[1:], 1):
            for padding in (slice(pixels.start or 0), slice(pixels.stop, None)):
                part[(slice(None),) * axis + (padding,)] = 0


def random_block(count: int, seed: int, kind: np.dtype[Any], xp: Any) -> Any:
    """Return `count` random numbers of the standard normal distribution as a 1-D array of the storage type `kind`."""
    drawn = np.random.default_rng(seed).standard_normal(count, dtype=np.float32)
    return xp.asarray(storage.encoded(drawn, kind))


def gathered(places: Sequence[Place], number: int) -> np.ndarray[Any, Any]:
    """Return the values of buffer `number` from all shards as one array on the host, in float32 or wider."""
    parts = [backend.to_host(place.arena[number]) for place in places]
    together: np.ndarray[Any, Any] = storage.decoded(np.concatenate(parts))
    return together

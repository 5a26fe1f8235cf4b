"""A training loop: its plain form, and the call of cubatch that a user of the loop makes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
from torch.utils.data import DataLoader, Dataset

from cubatch import TuningResult

Block = Callable[[int, float], tuple[int, float]]
"""Runs a loop at a batch size for at least that number of seconds; returns the timed samples and seconds."""
Train = Callable[[Any], None]
"""Trains on a batch of the loader: forward pass, backward pass, optimizer step."""
MakeLoader = Callable[[int], DataLoader]
"""Makes the loader of a batch size."""

CURRENT = 16  # the batch size that the user of each loop has now


@attrs.frozen(kw_only=True)
class Loop:
    """
    A training loop.

    Attributes:
        num_samples: Samples of its data set.
        open: Makes a new module with its optimizers and returns what runs the loop.
        tune: Calls cubatch as a user would, with a budget in seconds.
    """

    num_samples: int
    open: Callable[[], Block]
    tune: Callable[[float], TuningResult]


def plain_loop(
    data: Dataset,
    start: Callable[[], Train],
    tune: Callable[[MakeLoader, float], TuningResult],
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    workers: int = 0,
) -> Loop:
    """
    Return the loop `for batch in loader: train(batch)`.

    Args:
        data: The data set, with a length.
        start: Makes a new module with its optimizers and returns the function that trains on a batch.
        tune: Calls cubatch with what makes the loader, and a budget in seconds.
        collate, workers: Of the loader.
    """

    def make_loader(batch_size: int) -> DataLoader:
        return DataLoader(
            data, batch_size, shuffle=True, drop_last=True, collate_fn=collate, num_workers=workers,
            persistent_workers=workers > 0,
        )  # fmt: skip

    def open_loop() -> Block:
        train = start()
        return lambda batch_size, seconds: _run(make_loader(batch_size), train, batch_size, seconds)

    return Loop(num_samples=len(data), open=open_loop, tune=lambda budget: tune(make_loader, budget))


def _run(loader: DataLoader, train: Train, batch_size: int, seconds: float) -> tuple[int, float]:
    batches = epochs(loader)
    prefetched = loader.num_workers * (loader.prefetch_factor or 0)
    for batch in itertools.islice(batches, prefetched + 1):  # neither start-up nor a full queue counts
        first = batch
    train(first)
    count, began = 0, time.perf_counter()
    while not count or time.perf_counter() - began < seconds:
        train(next(batches))
        count += batch_size
    return count, time.perf_counter() - began


def epochs(loader: DataLoader) -> Iterator[Any]:
    """Yield the batches of a loader, epoch after epoch."""
    while True:
        yield from loader

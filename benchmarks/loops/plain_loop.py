"""A training loop: its plain form, and the call of cubatch that a user of the loop makes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own abbreviation
from torch.utils.data import DataLoader, Dataset

from cubatch import TuningResult, autotune_module

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
        collate, workers: Of the loader; `collate` None is PyTorch's own.
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


def module_loop(
    data: Dataset,
    build: Callable[[], nn.Module],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    workers: int = 0,
    clip: float | None = None,
    **options: Any,
) -> Loop:
    """
    Return a loop that trains a module with one optimizer.

    Args:
        data: The data set, with a length.
        build: Makes the module.
        make_optimizer: Makes the optimizer of parameters; also what cubatch gets, unless `options` has one.
        loss_of: Returns the loss of a module on a batch.
        collate, workers: Of the loader; `collate` None is PyTorch's own.
        clip: Largest norm of the gradients; None: any.
        options: Further arguments of `autotune_module`. Its `batches` are the loader if they
            are not among them. `compile` and `accumulate` also apply to the plain loop.
    """
    accumulate = options.get("accumulate", 1)

    def start() -> Train:
        model = build()
        steps, count = make_optimizer(model.parameters()), itertools.count(1)
        called = torch.compile(model, dynamic=True) if options.get("compile") else model

        def train(batch: Any) -> None:
            (loss_of(called, batch) / accumulate).backward()
            if next(count) % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                steps.step()
                steps.zero_grad()

        return train

    def tune(make_loader: MakeLoader, budget: float) -> TuningResult:
        loader = make_loader(CURRENT)
        batches = {"loader": loader} if "batches" in options else {"batches": loader}
        return autotune_module(
            build(), mode="training", budget=budget, **{"optimizer": make_optimizer} | batches | options
        )

    return plain_loop(data, start, tune, collate=collate, workers=workers)


def supervised(call: Any, batch: Any) -> torch.Tensor:
    """Return the cross entropy of a module whose inputs come before the labels in a batch."""
    *inputs, labels = batch
    return F.cross_entropy(call(*inputs), labels)


def _run(loader: DataLoader, train: Train, batch_size: int, seconds: float) -> tuple[int, float]:
    batches = epochs(loader)
    train(next(batches))  # warm-up
    prefetched = loader.num_workers * (loader.prefetch_factor or 0)
    for batch in itertools.islice(batches, prefetched + 1):  # a full queue does not count
        drawn = batch
    count, spent, began = 0, 0.0, time.perf_counter()
    # The clock starts and stops when a batch arrives: loading has no head start of a step.
    # Workers may deliver in step with each other: only whole rounds of them are counted.
    while not count or spent < seconds or count % max(1, loader.num_workers):
        train(drawn)
        drawn = next(batches)
        count, spent = count + 1, time.perf_counter() - began
    return count * batch_size, spent


def epochs(loader: DataLoader) -> Iterator[Any]:
    """Yield the batches of a loader, epoch after epoch."""
    while True:
        yield from loader

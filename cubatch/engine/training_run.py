"""What a training run tells while it goes on, and gives in the end."""

from __future__ import annotations

from typing import Any

import attrs

from cubatch.shown import Shown


@attrs.frozen(kw_only=True)
class Epoch:
    """
    One pass over the training set.

    Attributes:
        number: From 1.
        loss: Mean training loss over the epoch's batches.
        test_accuracy: Share of the test images that are classified right after it.
        seconds: Time of the training pass, reading the batches included, the test and checkpoints not.
        samples_per_second: Training images over those seconds.
    """

    number: int
    loss: float
    test_accuracy: float
    seconds: float
    samples_per_second: float


@attrs.frozen
class Step:
    """
    One step of the optimiser, as it is told while training goes on.

    Attributes:
        done, total: Steps so far, this one included, and of the whole run.
        epoch: Which pass it belongs to, from 1.
        loss: Of its batch.
        test_accuracy: After the epoch before; None in the first.
    """

    done: int
    total: int
    epoch: int
    loss: float
    test_accuracy: float | None


@attrs.frozen(kw_only=True)
class Training(Shown):
    """
    What a training run gave.

    Attributes:
        model: Name of the network.
        devices: How many share a step of the optimiser.
        batch_size: Samples that go through together, on one of them.
        target_batch_size: Samples of a step of the optimiser, of all of them.
        dtype, learning_rate, schedule, optimizer, seed, patience: How it was trained.
        parameters: Trainable parameters.
        epochs: One record per epoch.
        diverged: The loss left the range of numbers, and training ended there.
        stopped_early: The accuracy had not risen for `patience` epochs, and training ended there.
    """

    model: str
    devices: int
    batch_size: int
    target_batch_size: int
    dtype: str
    learning_rate: float
    schedule: str
    optimizer: str
    seed: int
    patience: int | None
    parameters: int
    epochs: tuple[Epoch, ...]
    diverged: bool
    stopped_early: bool

    def to_mapping(self) -> dict[str, Any]:
        """Give the run as a plain mapping, for JSON."""
        return attrs.asdict(self)

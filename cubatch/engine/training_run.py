"""Records of a training run, while it goes on and at its end."""

from __future__ import annotations

from typing import Any

import attrs

from cubatch.shown import Shown


@attrs.frozen(kw_only=True)
class Epoch:
    """
    A pass over the training set.

    Attributes:
        number: Number of the pass, from 1.
        loss: Mean training loss over the epoch's batches.
        test_accuracy: Share of the test images that are classified correctly after the pass, from 0 to 1.
        seconds: Seconds of the training pass with the reading of batches, without the test and checkpoints.
        samples_per_second: Training images of the pass, divided by `seconds`.
    """

    number: int
    loss: float
    test_accuracy: float
    seconds: float
    samples_per_second: float


@attrs.frozen
class Step:
    """A step of the optimizer, as reported while training goes on."""

    done: int  # done, total: steps so far, this one included, and of the whole run
    total: int
    epoch: int  # number of the pass, from 1
    loss: float  # mean loss of the step's samples
    test_accuracy: float | None  # accuracy after the previous epoch; None in the first


@attrs.frozen(kw_only=True)
class Training(Shown):
    """
    The result of a training run.

    Attributes:
        model: Name of the network.
        devices: Number of devices that share a step of the optimizer.
        batch_size: Samples that go through together on the first device.
        target_batch_size: Samples of a step of the optimizer, on all devices.
        dtype, learning_rate, schedule, optimizer, seed, patience: Settings of the run. `patience` None: no early stop.
        parameters: Trainable parameters.
        epochs: A record for each epoch.
        diverged: Whether training ended because the loss was not finite.
        stopped_early: Whether training ended because the accuracy had not risen for `patience` epochs.
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
        """Return the run as a plain mapping, for JSON."""
        return attrs.asdict(self)

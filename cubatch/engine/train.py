"""Training: epochs over a data set, and the accuracy on images that were not trained on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from cubatch.checks import check_whole
from cubatch.engine import data as data_module
from cubatch.engine.data import Dataset
from cubatch.engine.native.context import Context
from cubatch.engine.network import Model
from cubatch.errors import InvalidArgument
from cubatch.hardware.facts import Device
from cubatch.network.graph import Network
from cubatch.workload import OPTIMIZERS

_EVALUATION_BATCH = 500


@attrs.frozen(kw_only=True)
class Epoch:
    """
    One pass over the training set.

    Attributes:
        number: From 1.
        loss: Mean training loss over the epoch's batches.
        test_accuracy: Share of the test images that are classified right after it.
        seconds: Time of the training pass, reading the batches included, the test not.
        samples_per_second: Training images over those seconds.
    """

    number: int
    loss: float
    test_accuracy: float
    seconds: float
    samples_per_second: float


@attrs.frozen(kw_only=True)
class Training:
    """
    What a training run gave.

    Attributes:
        model: Name of the network.
        batch_size, dtype, learning_rate, optimizer, seed: How it was trained.
        parameters: Trainable parameters.
        epochs: One record per epoch.
        diverged: The loss left the range of numbers, and training ended there.
    """

    model: str
    batch_size: int
    dtype: str
    learning_rate: float
    optimizer: str
    seed: int
    parameters: int
    epochs: tuple[Epoch, ...]
    diverged: bool

    def to_mapping(self) -> dict[str, Any]:
        """Give the run as a plain mapping, for JSON."""
        return attrs.asdict(self)


def train(
    network: Network,
    *,
    data: str | Path,
    batch_size: int,
    device: Device,
    dtype: str = "float32",
    epochs: int = 5,
    learning_rate: float = 0.05,
    optimizer: str = "momentum",
    recompute: bool = False,
    seed: int = 0,
    context: Context | None = None,
    progress: Callable[[Epoch], None] | None = None,
) -> Training:
    """
    Train a network on a folder of IDX files, and test it after every epoch.

    The learning rate falls to zero along half a cosine, step by step (Loshchilov and Hutter, 2017,
    arXiv:1608.03983).

    Args:
        network: Ends in logits, one for each class.
        data: Folder with MNIST's four files, or others of their names and format.
        batch_size: Samples per step, at most the training set.
        device: A device in this machine.
        dtype: Storage of parameters and activations, see `Model`.
        epochs: Passes over the training set.
        learning_rate: Where the learning rate starts.
        optimizer: "sgd", "momentum" or "adam".
        recompute: Forget activations and compute them again in the backward pass.
        seed: Draws parameters, order and dropout masks.
        context: Runs the operations on hand-written kernels; None runs them on the array library's calls.
        progress: Called after every epoch.

    Returns:
        Training: Loss, accuracy and speed of every epoch.

    Raises:
        InvalidArgument: If an argument is out of range, or the network does not fit the data.
        InvalidData: If a file is missing or damaged.
        UnsupportedLayer: If the engine cannot run one of the layers.
    """
    check_whole("seed", seed, least=0)
    training_set, test_set = data_module.load_mnist(data)
    check(network, training_set, batch_size=batch_size, epochs=epochs, learning_rate=learning_rate)
    if optimizer not in OPTIMIZERS:
        raise InvalidArgument("optimizer", optimizer, "one of " + ", ".join(OPTIMIZERS))
    steps = len(training_set) // batch_size
    records: list[Epoch] = []
    with (
        Model(
            network, device=device, mode="training", dtype=dtype, optimizer=optimizer, learning_rate=learning_rate,
            recompute=recompute, seed=seed, context=context,
        ) as model,
        Model(network, device=device, dtype=dtype, share=model, context=context) as tested,
    ):  # fmt: skip
        model.prepare(batch_size)
        for number in range(1, epochs + 1):
            begun, losses = time.perf_counter(), []
            for step, (images, labels) in enumerate(training_set.shuffled(batch_size, seed + number)):
                done = ((number - 1) * steps + step) / (epochs * steps)
                model.learning_rate = learning_rate * (1 + math.cos(math.pi * done)) / 2
                model.load(images, labels)
                model.step()
                losses.append(model.loss())
            seconds = time.perf_counter() - begun
            record = Epoch(
                number=number,
                loss=sum(losses) / len(losses),
                test_accuracy=accuracy(tested, test_set),
                seconds=seconds,
                samples_per_second=steps * batch_size / seconds,
            )
            records.append(record)
            if progress:
                progress(record)
            if not math.isfinite(record.loss):
                break
    return Training(
        model=network.name,
        batch_size=batch_size,
        dtype=dtype,
        learning_rate=learning_rate,
        optimizer=optimizer,
        seed=seed,
        parameters=network.parameters,
        epochs=tuple(records),
        diverged=not math.isfinite(records[-1].loss),
    )


def accuracy(model: Model, test_set: Dataset) -> float:
    """Give the share of images whose largest logit is their label's; `model` is one for inference."""
    right = 0
    for start in range(0, len(test_set), _EVALUATION_BATCH):
        images, labels = test_set.batch(slice(start, start + _EVALUATION_BATCH))
        if model.plan is None or model.plan.batch_size != len(labels):
            model.prepare(len(labels))
        model.load(images)
        model.step()
        right += int((model.output().reshape(len(labels), -1).argmax(axis=1) == labels).sum())
    return right / len(test_set)


def check(
    network: Network, training_set: Dataset, *, batch_size: int = 1, epochs: int = 1, learning_rate: float = 1.0
) -> None:
    """
    Check that a network can be trained on a data set in this way.

    Raises:
        InvalidArgument: If it cannot; says which argument, and what would do.
    """
    shape = training_set.images.shape[1:]
    if network.input_shape != shape:
        raise InvalidArgument("input_shape", network.input_shape, f"{shape}, the images' (h, w, c)")
    h, w, classes = network.output_shape
    if (h, w) != (1, 1) or classes < training_set.classes:
        wanted = f"(1, 1, {training_set.classes}) or more classes, to train on these labels"
        raise InvalidArgument("output_shape", network.output_shape, wanted)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or not 1 <= batch_size <= len(training_set):
        raise InvalidArgument("batch_size", batch_size, f"from 1 to the {len(training_set)} training images")
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise InvalidArgument("epochs", epochs, "a whole number, at least 1")
    if not isinstance(learning_rate, int | float) or not 0 < learning_rate < math.inf:
        raise InvalidArgument("learning_rate", learning_rate, "a positive number")

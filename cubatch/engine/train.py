"""
Training: epochs over a data set, and the accuracy on test images.

An optimizer step uses one batch, or the summed gradients of several if the wanted batch does not fit. Several devices
share a step, each rank with its own run. A run with a checkpoint file continues from there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import attrs
import numpy as np

from cubatch import choices
from cubatch.checks import check_number, check_whole
from cubatch.engine import checkpoint as checkpoints, conditions, data as data_module
from cubatch.engine.data import Dataset
from cubatch.engine.data_parallel import DataParallel, Share
from cubatch.engine.exchange import Exchange, totals
from cubatch.engine.interrupts import Interrupts
from cubatch.engine.native.context import Context
from cubatch.engine.network import Model
from cubatch.engine.training_run import Epoch, Step, Training
from cubatch.errors import InvalidArgument
from cubatch.hardware.facts import Device
from cubatch.memory.dataflow import Dataflow
from cubatch.network.graph import Network
from cubatch.network.weight_files import save_weights
from cubatch.workload import OPTIMIZERS, check_target

SCHEDULES: tuple[str, ...] = get_args(choices.Schedule)
CHECKPOINT_SECONDS = 60.0
_TEST_BATCH = 500


def train(
    network: Network,
    *,
    data: str | Path | tuple[Dataset, Dataset],
    batch_size: int,
    device: Device,
    target_batch_size: int | None = None,
    dtype: str = "float32",
    epochs: int = 5,
    learning_rate: float = 0.05,
    schedule: str = "cosine",
    patience: int | None = None,
    optimizer: str = "momentum",
    recompute: bool = False,
    seed: int = 0,
    save: str | Path | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    context: Context | None = None,
    exchange: Exchange | None = None,
    progress: Callable[[Epoch], None] | None = None,
    stepped: Callable[[Step], None] | None = None,
) -> Training:
    """
    Train a network, test it after every epoch, and return the record; arguments and errors as in `tuning.train`.

    With "cosine" the learning rate falls to zero along half a cosine, step by step (Loshchilov and Hutter, 2017,
    arXiv:1608.03983). A run that continues from a checkpoint gives the same bits on the same machine, on a GPU with the
    same kernels.

    Args:
        network: Ends in logits, one for each class; its weights are the start of the training.
        data: A folder of IDX files; or (training set, test set), as from `load_mnist`.
        batch_size: Samples that go through together. Batch norms use them alone.
        target_batch_size: Samples of an optimizer step, a multiple of the batch size. Both are those of this rank.
        exchange: Sums the gradients of several ranks, which all call this alike; files are written by rank 0.
        context: Runs the operations on hand-written kernels; None uses the array library's calls.
        progress, stepped: Called with the record of each epoch, and of each optimizer step; None: not called.
    """
    seed = check_whole("seed", seed, least=0)
    checkpoints.check_files(save=save, checkpoint=checkpoint)
    training_set, test_set = data_module.both_sets(data)
    whole = batch_size if target_batch_size is None else target_batch_size
    share = Share.of(exchange, batch_size, whole)
    check(
        network, training_set, batch_size=batch_size, target_batch_size=whole, together=share.total, epochs=epochs,
        learning_rate=learning_rate, schedule=schedule, optimizer=optimizer, patience=patience,
        checkpoint_seconds=checkpoint_seconds,
    )  # fmt: skip
    _check_norms(network, batch_size)
    recipe = {
        "batch_size": share.batch_size, "target_batch_size": share.total, "dtype": dtype,
        "learning_rate": learning_rate, "schedule": schedule, "optimizer": optimizer, "seed": seed,
        "patience": patience,
    }  # fmt: skip
    resumed = checkpoints.Checkpoint(settings={}, conditions={})
    if checkpoint is not None:
        settings = {**recipe, "epochs": epochs, "recompute": recompute, "shares": share.sizes}
        settings |= _identity(network, training_set, test_set)
        draws_masks = any(node.layer.idle_in_inference for node in network.nodes)  # as dropout is
        resumed = checkpoints.resume(checkpoint, settings, conditions.arithmetic(device), draws_masks=draws_masks)
    keeper = checkpoints.Keeper(checkpoint if share.is_first else None, checkpoint_seconds, resumed)
    records = [Epoch(**epoch) for epoch in resumed.epochs]
    losses, spent = list(resumed.losses), resumed.seconds
    steps = len(training_set) // share.total
    with (
        _model(
            exchange, network, device=device, dtype=dtype, optimizer=optimizer, learning_rate=learning_rate,
            recompute=recompute, seed=seed, context=context,
        ) as model,
        Model(network, device=device, dtype=dtype, share=model, context=context) as tested,
        Interrupts(are_held=checkpoint is not None and exchange is None) as stop,
    ):  # fmt: skip
        if resumed.arrays:
            model.restore(resumed.arrays)
        while len(records) < epochs and not _has_diverged(records) and not _has_stalled(records, patience):
            model.prepare(batch_size, None if whole == batch_size else whole)
            number, begun = len(records) + 1, time.perf_counter() - spent
            accuracy_before = records[-1].test_accuracy if records else None
            drawn = training_set.shuffled(share.total, (seed, number), first=len(losses), part=share.part)
            for images, labels in drawn:
                done = (number - 1) * steps + len(losses)
                model.learning_rate = learning_rate * _SHARES[schedule](done / (epochs * steps))
                losses.append(_step(model, images, labels, batch_size))
                if stepped:
                    stepped(Step(done + 1, epochs * steps, number, losses[-1], accuracy_before))
                if keeper.is_due or stop.has_come:
                    seconds = time.perf_counter() - begun
                    keeper.write(model.snapshot, epochs=_plain(records), losses=losses, seconds=seconds)
                    begun = time.perf_counter() - seconds  # writing is no part of training
                stop.deliver()
            seconds = time.perf_counter() - begun
            if isinstance(model, DataParallel):
                model.share_statistics()
            model.release()  # the test may not fit in addition
            record = Epoch(
                number=number,
                loss=sum(losses) / len(losses),
                test_accuracy=accuracy(tested, test_set, batch_size, exchange),
                seconds=seconds,
                samples_per_second=steps * share.total / seconds,
            )
            records.append(record)
            losses, spent = [], 0.0
            keeper.write(model.snapshot, epochs=_plain(records), losses=losses, seconds=spent)
            if progress:
                progress(record)
            stop.deliver()
        if save is not None and share.is_first:
            save_weights(model.trained(), save)
    return Training(
        model=network.name,
        devices=len(share.sizes),
        parameters=network.parameters,
        epochs=tuple(records),
        diverged=_has_diverged(records),
        stopped_early=_has_stalled(records, patience),
        **recipe,  # type: ignore[arg-type]
    )


def _model(exchange: Exchange | None, network: Network, **options: Any) -> Model:
    if exchange is None:
        return Model(network, mode="training", **options)
    return DataParallel(network, exchange=exchange, **options)


def _step(model: Model, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], batch_size: int) -> float:
    """Take an optimizer step on the images, `batch_size` of them at a time; return the mean loss."""
    loss = 0.0
    for start in range(0, len(labels), batch_size):
        part = slice(start, start + batch_size)
        model.load(images[part], labels[part])
        model.step()
        loss += model.loss()
    if len(labels) > batch_size:
        model.update()
    return loss


_SHARES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "constant": lambda _: 1.0,
}
"""Factor of the learning rate, by the share of the run that is done."""


def _plain(records: Sequence[Epoch]) -> list[dict[str, Any]]:
    return [attrs.asdict(record) for record in records]


def _has_diverged(records: Sequence[Epoch]) -> bool:
    return bool(records) and not math.isfinite(records[-1].loss)


def _has_stalled(records: Sequence[Epoch], patience: int | None) -> bool:
    """Return whether the last `patience` epochs brought no new highest accuracy; False if `patience` is None."""
    if patience is None or len(records) <= patience:
        return False
    before, since = records[:-patience], records[-patience:]
    return max(epoch.test_accuracy for epoch in since) <= max(epoch.test_accuracy for epoch in before)


def _identity(network: Network, training_set: Dataset, test_set: Dataset) -> dict[str, Any]:
    layers = np.frombuffer(repr(network.to_mapping()).encode(), np.uint8)
    given = {f"{layer}.{name}": array for layer, arrays in network.weights.items() for name, array in arrays.items()}
    parts = {"training images": training_set.images, "training labels": training_set.labels}
    parts |= {"test images": test_set.images, "test labels": test_set.labels}
    return {
        "network": f"{network.name}, layers {checkpoints.digest({'layers': layers})}",
        "weights": f"given ones, {checkpoints.digest(given)}" if given else "drawn from the seed",
        "data": f"images and labels {checkpoints.digest(parts)}",
    }


def accuracy(model: Model, test_set: Dataset, batch_size: int, exchange: Exchange | None = None) -> float:
    """
    Return the share of images, from 0 to 1, whose largest logit is at their label.

    Args:
        model: A model for inference, which is released at the end.
        test_set: The images; ranks share them.
        batch_size: Most samples that go through together.
        exchange: Sums the counts of the ranks; None for one rank.
    """
    right, images = 0, len(test_set)
    rank, ranks = (exchange.rank, exchange.size) if exchange else (0, 1)
    begin, end = images * rank // ranks, images * (rank + 1) // ranks
    together = min(_TEST_BATCH, batch_size)
    for start in range(begin, end, together):
        pixels, labels = test_set.batch(slice(start, min(start + together, end)))
        if model.plan is None or model.plan.batch_size != len(labels):
            model.prepare(len(labels))
        model.load(pixels)
        model.step()
        right += int((model.output().reshape(len(labels), -1).argmax(axis=1) == labels).sum())
    model.release()
    if exchange is not None:
        (all_right,) = totals(exchange, [right])
        right = int(all_right)
    return right / images


def check(
    network: Network,
    training_set: Dataset,
    *,
    batch_size: int = 1,
    target_batch_size: int | None = None,
    together: int = 1,
    epochs: int = 1,
    learning_rate: float = 1.0,
    schedule: str = "cosine",
    optimizer: str = "sgd",
    patience: int | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> None:
    """
    Raise InvalidArgument if a network cannot be trained on a data set with these arguments of `train`.

    `together` is the number of samples of all devices in an optimizer step. `target_batch_size` None is one batch per
    optimizer step, and `patience` None trains all epochs.
    """
    shape = training_set.images.shape[1:]
    if network.input_shape != shape:
        raise InvalidArgument("input_shape", network.input_shape, f"{shape}, the images' (h, w, c)")
    h, w, classes = network.output_shape
    if (h, w) != (1, 1) or classes < training_set.classes:
        wanted = f"(1, 1, {training_set.classes}) or more classes, to train on these labels"
        raise InvalidArgument("output_shape", network.output_shape, wanted)
    origin = Dataflow(network, training=False).origin[network.nodes[-1].name]  # behind flatten and dropout
    if any(node.name == origin and node.layer.adds_up_to_one for node in network.nodes):
        raise InvalidArgument(
            "network", network.name, "one that ends in logits", "Leave out its last softmax: training adds it."
        )
    images, whole = len(training_set), batch_size if target_batch_size is None else target_batch_size
    for field, size in (("batch_size", batch_size), ("target_batch_size", whole)):
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= images:
            raise InvalidArgument(field, size, f"a whole number from 1 to {images}, the number of training images")
    if together > images:
        raise InvalidArgument("batch_size", together, f"at most the {images} training images, of all devices together")
    check_target(batch_size, whole)
    check_whole("epochs", epochs)
    check_number("learning_rate", learning_rate, above=0)
    check_number("checkpoint_seconds", checkpoint_seconds)
    for field, name, known in (("schedule", schedule, SCHEDULES), ("optimizer", optimizer, OPTIMIZERS)):
        if name not in known:
            raise InvalidArgument(field, name, "one of " + ", ".join(known))
    if patience is not None:
        check_whole("patience", patience)


def _check_norms(network: Network, batch_size: int) -> None:
    """Raise InvalidArgument if a batch norm would see a single value, which has no variance."""
    for node in network.nodes:
        if node.layer.has_statistics and batch_size * math.prod(node.layer.input_shape[:2]) < 2:  # noqa: PLR2004
            what = f"batch norm {node.name!r} sees one pixel of a sample, and a variance needs two values"
            raise InvalidArgument("batch_size", batch_size, f"at least 2: {what}")

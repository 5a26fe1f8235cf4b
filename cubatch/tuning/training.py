"""
train(): train a network on images in MNIST's format, after tuning the batch size if none is given.

Arguments are checked first. The batch size then comes from the checkpoint, if there is one, else from tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import attrs

from cubatch.checks import check_batch_size, check_path, check_whole
from cubatch.choices import Dtype, Optimizer, Schedule
from cubatch.engine import checkpoint as checkpoints, data as files, train as engine
from cubatch.engine.training_run import Epoch, Step, Training
from cubatch.errors import InvalidArgument
from cubatch.hardware import gpu_library
from cubatch.hardware.device_list import resolve_devices
from cubatch.hardware.facts import Device
from cubatch.measure import kernel_context
from cubatch.measure.rank_group import RankGroup
from cubatch.memory import fit
from cubatch.network import models
from cubatch.network.graph import Network, as_network
from cubatch.network.models import SpecLike
from cubatch.network.weight_files import load_weights
from cubatch.tuning import accumulation
from cubatch.tuning.results import TuningResult
from cubatch.tuning.subjects.network_subject import memory_limit
from cubatch.tuning.tune import autotune
from cubatch.workload import Workload


def train(
    spec: SpecLike,
    *,
    data: str | Path,
    download: bool = False,
    batch_size: int | Sequence[int] | Literal["auto"] = "auto",
    target_batch_size: int | None = None,
    epochs: int = 5,
    learning_rate: float = 0.05,
    schedule: Schedule = "cosine",
    patience: int | None = None,
    optimizer: Optimizer = "momentum",
    weights: str | Path | None = None,
    save: str | Path | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = engine.CHECKPOINT_SECONDS,
    device: Device | str | None = None,
    devices: int | Sequence[Device | str] | None = None,
    dtype: Dtype = "float32",
    recompute: bool = False,
    seed: int = 0,
    progress: Callable[[Epoch], None] | None = None,
    stepped: Callable[[Step], None] | None = None,
) -> Training:
    """
    Train a network on a folder of IDX files, and test it after every epoch.

    Args:
        spec: A network, a mapping, a model's name or a path to a spec file, that ends in logits.
        data: Folder with MNIST's four files, or others of their names and format.
        download: Download missing files of MNIST first.
        batch_size: Samples per batch; "auto" is that of the checkpoint, else the recommendation of `autotune`. A list
            has the share of each device, as from `FleetResult.shares`.
        target_batch_size: Samples per optimizer step: gradients of smaller batches are accumulated, and "auto" takes
            the divisor with the least total time. None: one batch per step.
        epochs: Passes over the training set.
        learning_rate: Initial learning rate.
        schedule: "cosine": to zero along half a cosine; "constant".
        patience: Stop after this many epochs without a better test accuracy; None: train all epochs.
        optimizer: "sgd", "momentum" or "adam".
        weights: Initial weights, as for `load_weights`; None: those of the network, or random.
        save: File for the weights of the last epoch, as for `save_weights`.
        checkpoint: File that is written after every epoch, and resumed if it exists.
        checkpoint_seconds: Also write the checkpoint within an epoch at this interval; 0: after every step. Ctrl-C
            writes it after the current step or test, except with several devices; a second Ctrl-C stops at once.
        device: A device in this machine, or its name; None is the first GPU, else the CPU.
        devices: Devices that share every step: a number or a list. `batch_size` is then per device,
            `target_batch_size` for all; running statistics of batch norms are those of the first device.
        dtype: Storage of parameters and activations.
        recompute: Discard activations and compute them again in the backward pass.
        seed: Draws parameters, order and dropout masks.
        progress: Called after every epoch of this call.
        stepped: Called after every optimizer step.

    Returns:
        Training: Loss, accuracy and speed of every epoch, also those before resuming.

    Raises:
        InvalidArgument: If an argument is out of range, the network does not match the data, or the checkpoint has
            another argument.
        InvalidData: If a file is missing or damaged, or cannot be downloaded.
        DoesNotFit: If not even one sample fits (also a MemoryError).
        OutOfMemory, DeviceFailed: If memory runs out or the GPU reports an error during training.
        UnsupportedLayer: If the engine cannot run one of the layers.

    Example:
        >>> run = train("mnist-cnn", data="tests/data/mnist-sample", batch_size=100, epochs=1, device="cpu")
        >>> run.batch_size, len(run.epochs), run.epochs[0].test_accuracy > 0.1
        (100, 1, True)
    """
    arranged = arrange(
        spec, data=data, download=download, batch_size=batch_size, target_batch_size=target_batch_size, epochs=epochs,
        learning_rate=learning_rate, schedule=schedule, patience=patience, optimizer=optimizer, weights=weights,
        save=save, checkpoint=checkpoint, checkpoint_seconds=checkpoint_seconds, device=device, devices=devices,
        dtype=dtype, recompute=recompute, seed=seed,
    )  # fmt: skip
    return arranged.run(progress, stepped)


@attrs.frozen(kw_only=True)
class Arranged:
    """A training run before its first step."""

    network: Network  # the network with its initial weights
    device: Device  # the device, or the first one
    devices: tuple[Device, ...] | None  # all devices that share a step; None for a single device
    batch_size: int  # as given, from the checkpoint, or tuned; per device
    shares: tuple[int, ...] | None  # batch sizes of all devices; None for a single device
    reasons: tuple[str, ...]  # progress of the checkpoint, or reasons of the tuned batch size; empty without both
    options: dict[str, Any]  # further arguments of the engine's `train`

    def run(self, progress: Callable[[Epoch], None] | None, stepped: Callable[[Step], None] | None) -> Training:
        """Train; return loss, accuracy and speed of each epoch. The callbacks get epochs and steps; None: no call."""
        if self.devices is not None:
            return self._run_together(self.devices, progress, stepped)
        with gpu_library.translating(f"training {self.network.name}"):
            context = kernel_context.usual_context(self.device, self.options["dtype"])
            return engine.train(
                self.network, device=self.device, batch_size=self.batch_size, context=context, progress=progress,
                stepped=stepped, **self.options,
            )  # fmt: skip

    def _run_together(
        self,
        devices: tuple[Device, ...],
        progress: Callable[[Epoch], None] | None,
        stepped: Callable[[Step], None] | None,
    ) -> Training:
        """Train in one process per device; return the record of the first, whose events the callbacks (or None) get."""

        def report(event: Epoch | Step) -> None:
            if isinstance(event, Epoch) and progress:
                progress(event)
            elif isinstance(event, Step) and stepped:
                stepped(event)

        target = self.options["target_batch_size"]
        options = {**self.options, "target_batch_size": None if target is None else target // len(devices)}
        with RankGroup(devices) as ranks:
            sized = zip(ranks.names, self.shares or (), strict=True)
            each = [(name, self.network, {**options, "batch_size": size}) for name, size in sized]
            trained: Training = ranks.do("train", each=each, progress=report)[0]
        return trained


def arrange(
    spec: SpecLike,
    *,
    data: str | Path,
    download: bool,
    batch_size: int | Sequence[int] | Literal["auto"],
    target_batch_size: int | None,
    weights: str | Path | None,
    save: str | Path | None,
    checkpoint: str | Path | None,
    checkpoint_seconds: float,
    device: Device | str | None,
    devices: int | Sequence[Device | str] | None,
    tune: Callable[..., TuningResult] | None = None,
    **options: Any,
) -> Arranged:
    """
    Return a training run ready to start: arguments checked, and the batch size tuned if it is "auto".

    `tune` replaces `autotune`, to show its progress. The other arguments, with the meaning of
    None, and the errors are those of `train`.
    """
    check_path(data, "data")
    checkpoints.check_files(save=save, checkpoint=checkpoint)
    check_whole("seed", options["seed"], least=0)
    network = as_network(models.resolve(spec))
    network = network if weights is None else load_weights(network, weights)
    facts = {name: options[name] for name in ("dtype", "optimizer", "recompute")}
    parts = resolve_devices(devices, device)
    work = Workload.of(network, parts[0] if parts else device, mode="training", present=True, **facts)
    shares = _shares(batch_size, target_batch_size, parts)
    if download:
        files.download_mnist(data)
    resumed, reasons = None if checkpoint is None else checkpoints.read(checkpoint), tuple[str, ...]()
    if resumed is not None:
        steps = f" and {len(resumed.losses)} steps" if resumed.losses else ""
        size = resumed.settings["batch_size"]
        reasons = (f"{checkpoint} ends after epoch {len(resumed.epochs)}{steps}, in batches of {size}",)
    if shares is not None:
        size = shares[0]
    elif not isinstance(batch_size, str) or batch_size != "auto":
        size = check_batch_size(cast("int", batch_size))
    elif resumed is None:
        training_set, _ = files.load_mnist(data)
        course = {name: options[name] for name in ("epochs", "learning_rate", "schedule", "patience", "optimizer")}
        engine.check(
            network, training_set, target_batch_size=target_batch_size, checkpoint_seconds=checkpoint_seconds, **course
        )
        size, reasons = _tuned(
            work, parts, target=target_batch_size, most=len(training_set), tune=tune or autotune, seed=options["seed"]
        )
    elif parts and target_batch_size is None and len(resumed.settings.get("shares", ())) == len(parts):
        shares = tuple(resumed.settings["shares"])  # one per device
    options |= {
        "data": data, "target_batch_size": target_batch_size, "save": save, "checkpoint": checkpoint,
        "checkpoint_seconds": checkpoint_seconds,
    }  # fmt: skip
    return Arranged(
        network=network, device=work.device, devices=parts, batch_size=size,
        shares=shares or (None if parts is None else (size,) * len(parts)), reasons=reasons, options=options,
    )  # fmt: skip


def _tuned(
    work: Workload, devices: Sequence[Device] | None, *, target: int | None, most: int,
    tune: Callable[..., TuningResult], seed: int,
) -> tuple[int, tuple[str, ...]]:  # fmt: skip
    """
    Tune the training step; return the batch size and sentences on the reasons.

    `target` is the number of samples of an optimizer step, None for one batch, and `most` the largest batch size.
    """
    count = 1 if devices is None else len(devices)
    target, most = None if target is None else target // count, most // count
    facts = {"dtype": work.dtype, "optimizer": work.optimizer, "recompute": work.recompute, "seed": seed}
    where: dict[str, Any] = {"device": work.device} if devices is None else {"devices": list(devices)}
    result = tune(work.spec, mode="training", max_batch_size=target or most, **where, **facts)
    if target is None:
        size = result.batch_size or result.fastest_batch_size or 1
        rank = "the recommended size" if result.recommended else "without a recommendation"
        chosen = f"training with batch size {size}, {rank} for training {work.name} with {work.optimizer}"
        return size, (chosen, *result.reasons)
    fitting = fit.cuts(work, target, memory_limit(devices, work.device, None).bytes)
    division = accumulation.cut(result, target, fitting=fitting)
    added_up = f", whose gradients are added up until they are of {target} samples" if division.steps > 1 else ""
    return division.batch_size, (f"training with batches of {division.batch_size}{added_up}", str(division))


def _shares(
    batch_size: int | Sequence[int] | str, target: int | None, devices: Sequence[Device] | None
) -> tuple[int, ...] | None:
    """
    Return the batch size of each device, None if `batch_size` is no list; raise InvalidArgument for invalid sizes.

    `target` is the number of samples of an optimizer step of all devices, None for one batch.
    """
    count = 1 if devices is None else len(devices)
    if isinstance(target, int) and target % count:
        below = target // count * count or count
        raise InvalidArgument("target_batch_size", target, f"a multiple of the {count} devices", f"{below} is one.")
    if not isinstance(batch_size, list | tuple):
        return None
    if devices is None:
        raise InvalidArgument("batch_size", batch_size, "one size", "A list has one for each of `devices`.")
    if len(batch_size) != count:
        raise InvalidArgument("batch_size", batch_size, f"one size, or a list of {count} sizes, one for each device")
    if target is not None and len(set(batch_size)) > 1:
        remedy = "To accumulate gradients, give all devices the same batch size."
        raise InvalidArgument("target_batch_size", target, "None where batch sizes differ", remedy)
    return tuple(check_batch_size(size) for size in batch_size)

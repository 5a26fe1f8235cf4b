"""`cubatch train`: train a network on MNIST, with a batch size that was tuned for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cubatch.choices import Schedule
from cubatch.cli import console
from cubatch.cli.options import (
    ClassesOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    Model,
    OptimizerOption,
    RecomputeOption,
    SeedOption,
    ShapeOption,
    TargetOption,
    read_spec,
)

if TYPE_CHECKING:
    from cubatch.engine.train import Step
    from cubatch.hardware.facts import Device
    from cubatch.network.graph import Network

_AUTO = "auto"


def train(
    model: Model,
    *,
    data: Annotated[str, typer.Option("--data", metavar="DIR", help="Folder with MNIST's files, plain or gzip.")],
    download: Annotated[bool, typer.Option("--download", help="First fetch what of MNIST is not there.")] = False,
    batch_size: Annotated[
        str, typer.Option("--batch-size", metavar="N|auto", help="auto: tune first, train with the answer.")
    ] = _AUTO,
    target_batch_size: TargetOption = None,
    epochs: Annotated[int, typer.Option("--epochs", help="Passes over the training set.")] = 5,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate at the start.")] = 0.05,
    schedule: Annotated[
        Schedule, typer.Option("--schedule", help="How the rate falls: to 0 along a cosine.")
    ] = "cosine",
    patience: Annotated[
        int | None, typer.Option("--patience", metavar="N", help="End after N epochs without a better test accuracy.")
    ] = None,
    optimizer: OptimizerOption = "momentum",
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="FILE", help="Begin with these: .safetensors or .npz, PyTorch's too."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the weights: .safetensors or .npz.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", metavar="FILE", help="Keep the run there; go on with it if it is there."),
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option("--checkpoint-seconds", metavar="S", min=0, help="Within an epoch, keep it so often.")
    ] = 60.0,
    device: DeviceOption = None,
    dtype: DtypeOption = "float32",
    recompute: RecomputeOption = False,
    seed: SeedOption = 0,
    input_shape: ShapeOption = None,
    classes: ClassesOption = None,
    json: JsonOption = None,
) -> None:
    """
    Train a network on MNIST, or data in its format.

    It is tested after each epoch.

    Example: cubatch train mnist-cnn --data mnist --download --batch-size 64 --save trained.safetensors
    """
    from cubatch.engine import data as files
    from cubatch.engine import train as engine
    from cubatch.hardware import arithmetic, probe
    from cubatch.measure import kernel_choice
    from cubatch.network.graph import as_network
    from cubatch.report.tables import common, training

    if batch_size != _AUTO and not batch_size.isdecimal():
        raise typer.BadParameter(f"--batch-size takes a whole number or auto, got {batch_size!r}")
    console.check_writable(json=json)
    _check_paths(save=save, checkpoint=checkpoint)
    network = _given_weights(as_network(read_spec(model, input_shape, classes)), weights)
    found = probe.resolve(device)
    arithmetic.check_dtype(found, dtype)
    if download:
        files.download_mnist(data)
    options: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "recompute": recompute, "seed": seed}
    course: dict[str, Any] = {"epochs": epochs, "learning_rate": lr, "schedule": schedule, "patience": patience}
    size = None if checkpoint is None else _kept_size(checkpoint)
    if batch_size != _AUTO:
        size = int(batch_size)
    elif size is None:
        training_set, _ = files.load_mnist(data)  # what makes no sense is refused before a minute is spent
        engine.check(network, training_set, target_batch_size=target_batch_size, optimizer=optimizer, **course)
        size = _tuned(model, network, found, target_batch_size, most=len(training_set), options=options)
    whole = f"{size}" if target_batch_size in {None, size} else f"{target_batch_size} of {size} at a time"
    title = f"{model}, {dtype}, batch {whole}, {optimizer}, learning rate {lr:g}, on {found}"
    done: list[engine.Epoch] = []
    try:
        with _watching(model, epochs) as tell:
            trained = engine.train(
                network,
                data=data,
                batch_size=size,
                target_batch_size=target_batch_size,
                device=found,
                save=save,
                checkpoint=checkpoint,
                checkpoint_seconds=checkpoint_seconds,
                context=kernel_choice.usual_context(found, dtype),
                progress=done.append,
                stepped=tell,
                **course,
                **options,
            )
    except KeyboardInterrupt:
        if done:
            partial = [common.plain(epoch) for epoch in done]
            console.emit([training.epochs(partial, title=title)], {"schema": 1, "epochs": partial}, json)
        raise
    facts = common.plain(trained)
    ends = {"diverged": trained.diverged, "stopped_early": trained.stopped_early}
    console.emit([training.epochs(facts["epochs"], title=title, **ends)], {"schema": 1, **facts}, json)


def _check_paths(**paths: Path | None) -> None:
    """Refuse files that cannot be written, before anything is computed."""
    from cubatch import array_file

    for option, path in paths.items():
        if path is not None:
            array_file.check_path(option, path)
    given = [path.resolve() for path in paths.values() if path is not None]
    if len(set(given)) < len(given):
        raise typer.BadParameter("--save and --checkpoint are two files: one holds weights, the other the run")


def _given_weights(network: Network, path: Path | None) -> Network:
    from cubatch.network.weights import load_weights

    return network if path is None else load_weights(network, path)


@contextlib.contextmanager
def _watching(model: str, epochs: int) -> Iterator[Callable[[Step], None]]:
    """Let each step move a bar on a terminal, and elsewhere write a line now and then."""
    with console.progress_bar(f"training {model}") as bar:
        line = console.progress_lines()

        def tell(step: Step) -> None:
            now = f"epoch {step.epoch} of {epochs}, loss {step.loss:.4f}"
            if step.test_accuracy is not None:
                now += f", test accuracy {100 * step.test_accuracy:.2f} %"
            if bar is not None:
                bar(step.done, step.total, now)
            else:
                line(now)

        yield tell


def _kept_size(checkpoint: Path) -> int | None:
    """Say how far a run that is kept has come, and give its batch size; None where nothing is kept."""
    from cubatch.engine import checkpoint as checkpoints

    kept = checkpoints.read(checkpoint)
    if kept is None:
        return None
    size = int(kept.settings["batch_size"])
    steps = f" and {len(kept.losses)} steps" if kept.losses else ""
    console.say(f"{checkpoint} ends after epoch {len(kept.epochs)}{steps}, in batches of {size}")
    return size


def _tuned(
    model: str, network: Network, device: Device, target: int | None, *, most: int, options: dict[str, Any]
) -> int:
    """Tune, and say what was chosen and why."""
    from cubatch.hardware import room
    from cubatch.memory import fit
    from cubatch.tuning import accumulation
    from cubatch.tuning import tune as tuner
    from cubatch.workload import Workload

    console.say("tuning the batch size first, for up to a minute; --batch-size N does without")
    with console.watching(model) as watch:
        result = tuner.autotune(
            network, device=device, progress=watch, mode="training", max_batch_size=target or most, **options
        )
    size = result.batch_size or 1
    if target is None:
        console.say(f"training with batch size {size}, the answer for training {model} with {options['optimizer']}")
        reasons = result.reasons
    else:
        settings = {name: value for name, value in options.items() if name != "seed"}
        work = Workload.of(network, device, mode="training", **settings)
        fitting = fit.cuts(work, target, room.memory_limit(device).bytes)
        found = accumulation.cut(result, target, fitting=fitting)
        size, reasons = found.batch_size, (str(found),)
        added_up = f", whose gradients are added up until they are of {target} samples" if found.steps > 1 else ""
        console.say(f"training with batches of {size}{added_up}")
    for reason in reasons:
        console.say(f"  {reason}")
    return size

"""`cubatch train`: train a network on MNIST, with a batch size that was tuned for it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cubatch.choices import Schedule
from cubatch.cli import console
from cubatch.cli.options import (
    ClassesOption,
    DevicesOption,
    DtypeOption,
    JsonOption,
    Model,
    OptimizerOption,
    PresentOption,
    RecomputeOption,
    SeedOption,
    ShapeOption,
    TargetOption,
    read_spec,
    several_devices,
)

if TYPE_CHECKING:
    from cubatch.engine.training_run import Epoch, Step
    from cubatch.network.graph import Network
    from cubatch.tuning.results import TuningResult
    from cubatch.tuning.training import Arranged

_AUTO = "auto"


def train(
    model: Model,
    *,
    data: Annotated[str, typer.Option("--data", metavar="DIR", help="Folder with MNIST's files, plain or gzip.")],
    download: Annotated[bool, typer.Option("--download", help="First fetch what of MNIST is not there.")] = False,
    batch_size: Annotated[
        str,
        typer.Option("--batch-size", metavar="N|auto", help="auto: tune first. 64,32: of each of --devices."),
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
    device: PresentOption = None,
    devices: DevicesOption = None,
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
    from cubatch.report.tables import common, training
    from cubatch.tuning import training as trainer

    console.check_writable(json=json)
    arranged = trainer.arrange(
        read_spec(model, input_shape, classes),
        data=data,
        download=download,
        batch_size=_sizes(batch_size),
        target_batch_size=target_batch_size,
        weights=weights,
        save=save,
        checkpoint=checkpoint,
        checkpoint_seconds=checkpoint_seconds,
        device=device,
        devices=several_devices(devices),
        tune=functools.partial(_tune, model),
        epochs=epochs,
        learning_rate=lr,
        schedule=schedule,
        patience=patience,
        optimizer=optimizer,
        dtype=dtype,
        recompute=recompute,
        seed=seed,
    )
    for number, reason in enumerate(arranged.reasons):
        console.say(f"  {reason}" if number else reason)
    title = f"{model}, {dtype}, batch {_batch(arranged)}, {optimizer}, learning rate {lr:g}, on {arranged.device}"
    done: list[Epoch] = []
    try:
        with _watching(model, epochs) as tell:
            trained = arranged.run(done.append, tell)
    except KeyboardInterrupt as stop:
        if done:
            partial = [common.plain(epoch) for epoch in done]
            console.emit([training.epochs(done, title=title)], {"schema": 1, "epochs": partial}, json)
        kept = "nothing is kept (--checkpoint FILE keeps a run)"
        if checkpoint is not None:
            is_there = checkpoint.is_file()
            kept = f"the same command goes on from {checkpoint}" if is_there else "nothing was kept yet"
        console.say(f"cubatch: interrupted; {kept}")
        raise typer.Exit(console.INTERRUPTED) from stop
    facts = common.plain(trained)
    ends = {"diverged": trained.diverged, "stopped_early": trained.stopped_early}
    console.emit([training.epochs(trained.epochs, title=title, **ends)], {"schema": 1, **facts}, json)


def _batch(arranged: Arranged) -> str:
    """Say how large a step is, and in which parts it is taken."""
    shares = arranged.shares or (arranged.batch_size,)
    whole = arranged.options["target_batch_size"] or sum(shares)
    at_a_time = "" if whole == sum(shares) else f" of {sum(shares)} at a time"
    return f"{whole}{at_a_time}{f' on {len(shares)} devices' if len(shares) > 1 else ''}"


def _sizes(text: str) -> Any:
    """Read "64", "64,32" or "auto"."""
    if text == _AUTO:
        return text
    sizes = text.split(",")
    if not all(size.isdecimal() for size in sizes):
        raise typer.BadParameter(f"--batch-size takes a whole number, one for each device, or auto, got {text!r}")
    return int(text) if len(sizes) == 1 else [int(size) for size in sizes]


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


def _tune(model: str, network: Network, **options: Any) -> TuningResult:
    """Tune, and show how it goes on."""
    from cubatch.tuning import tune as tuner

    console.say("tuning the batch size first, for up to a minute; --batch-size N does without")
    with console.watching(model) as watch:
        return tuner.autotune(network, progress=watch, **options)

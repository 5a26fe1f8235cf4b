"""`cubatch train`: train a network on MNIST, by default with a tuned batch size."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cubatch.choices import Schedule
from cubatch.cli import console, options as opt
from cubatch.errors import CubatchError

if TYPE_CHECKING:
    from cubatch.engine.training_run import Epoch, Step
    from cubatch.network.graph import Network
    from cubatch.tuning.results import TuningResult
    from cubatch.tuning.training import Arranged

_AUTO = "auto"


def train(
    model: opt.Model,
    *,
    data: Annotated[str, typer.Option("--data", metavar="DIR", help="Folder with MNIST's files, plain or gzip.")],
    download: Annotated[bool, typer.Option("--download", help="Download missing files of MNIST into --data.")] = False,
    batch_size: Annotated[
        str,
        typer.Option(
            "--batch-size", metavar="N|auto", help="auto: tune first, for a minute; 64,32: sizes of each of --devices."
        ),
    ] = _AUTO,
    target_batch_size: opt.TargetOption = None,
    epochs: Annotated[int, typer.Option("--epochs", help="Number of passes over the training set.")] = 5,
    lr: Annotated[float, typer.Option("--lr", help="Initial learning rate.")] = 0.05,
    schedule: Annotated[
        Schedule, typer.Option("--schedule", help="cosine: the learning rate falls to 0; constant: it stays.")
    ] = "cosine",
    patience: Annotated[
        int | None, typer.Option("--patience", metavar="N", help="Stop after N epochs without a better test accuracy.")
    ] = None,
    optimizer: opt.OptimizerOption = "momentum",
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights", metavar="FILE", help="Start from these weights: .safetensors or .npz, also of PyTorch."
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the trained weights: .safetensors or .npz.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", metavar="FILE", help="Save the run here; continue it if the file exists."),
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option("--checkpoint-seconds", metavar="S", min=0, help="Save at most this often within an epoch.")
    ] = 60.0,
    device: opt.PresentOption = None,
    devices: opt.DevicesOption = None,
    dtype: opt.DtypeOption = "float32",
    recompute: opt.RecomputeOption = False,
    seed: opt.SeedOption = 0,
    input_shape: opt.ShapeOption = None,
    classes: opt.ClassesOption = None,
    json: opt.JsonOption = None,
) -> None:
    """
    Train a network on MNIST, or on data in its format.

    The network is tested after each epoch.

    Example: cubatch train mnist-cnn --data mnist --download --batch-size 64 --save trained.safetensors
    """
    from cubatch.report.tables import common, training
    from cubatch.tuning import training as trainer

    console.check_writable(json=json)
    arranged = trainer.arrange(
        opt.read_spec(model, input_shape, classes),
        data=data,
        download=download,
        batch_size=_sizes(batch_size),
        target_batch_size=target_batch_size,
        weights=weights,
        save=save,
        checkpoint=checkpoint,
        checkpoint_seconds=checkpoint_seconds,
        device=device,
        devices=opt.several_devices(devices),
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
        with _progress(model, epochs) as show:
            trained = arranged.run(done.append, show)
    except (KeyboardInterrupt, CubatchError) as stop:
        if done:
            partial = [common.plain(epoch) for epoch in done]
            console.emit([training.epochs(done, title=title)], {"schema": 1, "epochs": partial}, json)
        if isinstance(stop, CubatchError):
            raise
        state = "nothing is saved; --checkpoint FILE saves a run"
        if checkpoint is not None:
            exists = checkpoint.is_file()
            state = f"repeat the command to continue from {checkpoint}" if exists else "nothing was saved yet"
        console.say(f"cubatch: interrupted; {state}")
        raise typer.Exit(console.INTERRUPTED) from stop
    facts = common.plain(trained)
    ends = {"diverged": trained.diverged, "stopped_early": trained.stopped_early}
    console.emit([training.epochs(trained.epochs, title=title, **ends)], {"schema": 1, **facts}, json)


def _batch(arranged: Arranged) -> str:
    """Return the samples per optimizer step as text, such as "64" or "256 of 64 at a time on 2 devices"."""
    shares = arranged.shares or (arranged.batch_size,)
    whole = arranged.options["target_batch_size"] or sum(shares)
    at_a_time = "" if whole == sum(shares) else f" of {sum(shares)} at a time"
    return f"{whole}{at_a_time}{f' on {len(shares)} devices' if len(shares) > 1 else ''}"


def _sizes(text: str) -> Any:
    """Parse the value of --batch-size: "64" becomes a number, "64,32" a list of numbers, and "auto" stays text."""
    if text == _AUTO:
        return text
    sizes = text.split(",")
    if not all(size.isdecimal() for size in sizes):
        raise typer.BadParameter(f"--batch-size takes whole numbers separated by commas, or auto, got {text!r}")
    return int(text) if len(sizes) == 1 else [int(size) for size in sizes]


@contextlib.contextmanager
def _progress(model: str, epochs: int) -> Iterator[Callable[[Step], None]]:
    with console.progress(f"training {model}") as show:

        def show_step(step: Step) -> None:
            text = f"epoch {step.epoch} of {epochs}, loss {step.loss:.4f}"
            if step.test_accuracy is not None:
                text += f", test accuracy {100 * step.test_accuracy:.2f} %"
            show(step.done, step.total, text)

        yield show_step


def _tune(model: str, network: Network, **options: Any) -> TuningResult:
    from cubatch.tuning import tune as tuner

    console.say("tuning the batch size first, for up to a minute; --batch-size N skips this")
    with console.watching(model) as watch:
        return tuner.autotune(network, progress=watch, **options)

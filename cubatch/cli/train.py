"""`cubatch train`: train a network on MNIST, with a batch size that was tuned for it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

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
    read_spec,
)


def train(
    model: Model,
    *,
    data: Annotated[str, typer.Option("--data", metavar="DIR", help="Folder with MNIST's files, plain or gzip.")],
    download: Annotated[bool, typer.Option("--download", help="First fetch what of MNIST is not there.")] = False,
    batch_size: Annotated[
        str, typer.Option("--batch-size", metavar="N|auto", help="auto: tune first, train with the answer.")
    ] = "auto",
    epochs: Annotated[int, typer.Option("--epochs", help="Passes over the training set.")] = 5,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate at the start; it falls to 0 along a cosine.")] = 0.05,
    optimizer: OptimizerOption = "momentum",
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

    Example: cubatch train mnist-cnn --data mnist --download --batch-size 64
    """
    from cubatch.engine import data as files
    from cubatch.engine import train as engine
    from cubatch.hardware import arithmetic, probe
    from cubatch.measure import kernel_choice
    from cubatch.network.graph import as_network
    from cubatch.report.tables import common, training
    from cubatch.tuning import tune as tuner

    if batch_size != "auto" and not batch_size.isdecimal():
        raise typer.BadParameter(f"--batch-size takes a whole number or auto, got {batch_size!r}")
    size = 0 if batch_size == "auto" else int(batch_size)
    console.check_writable(json=json)
    network = as_network(read_spec(model, input_shape, classes))
    found = probe.resolve(device)
    arithmetic.check_dtype(found, dtype)
    if download:
        files.download_mnist(data)
    shared: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "recompute": recompute, "seed": seed}
    if batch_size == "auto":
        training_set, _ = files.load_mnist(data)
        engine.check(network, training_set, epochs=epochs, learning_rate=lr)  # before a minute is spent
        console.say("tuning the batch size first, for up to a minute; --batch-size N does without")
        options: dict[str, Any] = {"mode": "training", "max_batch_size": len(training_set), **shared}
        with console.watching(model) as watch:
            size = tuner.autotune(network, device=found, progress=watch, **options).batch_size or 1
        console.say(f"training with batch size {size}, the answer for training {model} with {optimizer}")
    title = f"{model}, {dtype}, batch {size}, {optimizer}, learning rate {lr:g}, on {found}"
    done: list[engine.Epoch] = []
    try:
        with console.progress_bar(f"training {model}") as show:

            def tell(epoch: engine.Epoch) -> None:
                done.append(epoch)
                if show is not None:
                    show(epoch.number, epochs, f"loss {epoch.loss:.4f}")

            trained = engine.train(
                network,
                data=data,
                batch_size=size,
                device=found,
                epochs=epochs,
                learning_rate=lr,
                context=kernel_choice.usual_context(found, dtype),
                progress=tell,
                **shared,
            )
    except KeyboardInterrupt:
        if done:
            partial = [common.plain(epoch) for epoch in done]
            console.emit([training.epochs(partial, title=title)], {"schema": 1, "epochs": partial}, json)
        raise
    facts = common.plain(trained)
    grid = training.epochs(facts["epochs"], title=title, diverged=trained.diverged)
    console.emit([grid], {"schema": 1, **facts}, json)

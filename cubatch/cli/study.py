"""`cubatch study`: a question about batch sizes, measured and answered on a page."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from cubatch.choices import Mode, StudyName
from cubatch.cli import console
from cubatch.cli.options import (
    ClassesOption,
    DtypeOption,
    JsonOption,
    MaxOption,
    MemoryOption,
    OptimizerOption,
    PresentOption,
    SeedOption,
    ShapeOption,
    read_spec,
)
from cubatch.errors import install_command


def study(
    name: Annotated[
        StudyName,
        typer.Argument(metavar="NAME", help="Which question."),
    ],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As for `cubatch tune`. Default: the study's own.")
    ] = None,
    *,
    device: PresentOption = None,
    mode: Annotated[
        Mode | None,
        typer.Option(
            "--mode",
            help="Default: training, which these are about: powers-of-two, hyperparameter, numpy-mnist, generalisation "
            "(the last two know no other); both for memory-rules; else inference.",
        ),
    ] = None,
    dtype: DtypeOption = "float32",
    optimizer: OptimizerOption = "sgd",
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="DIR", help="Folder with MNIST's files: numpy-mnist and generalisation train on them."
        ),
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="First fetch what of MNIST is not there.")] = False,
    max_batch_size: MaxOption = None,
    memory_limit: MemoryOption = None,
    budget: Annotated[
        float | None, typer.Option("--budget", metavar="SECONDS", help="Measuring time, at most. Default: the study's.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A first answer in seconds.")] = False,
    seed: SeedOption = 0,
    input_shape: ShapeOption = None,
    classes: ClassesOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where it writes. Default: cubatch-study-NAME.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """
    Measure and answer a question about batch sizes.

    A page, figures and JSON; killed, it goes on.

    Example: cubatch study powers-of-two mlp --device cpu --quick
    """
    from cubatch.report.tables import study as table
    from cubatch.studies import run as studies
    from cubatch.studies.study_request import StudyRequest

    console.check_writable(json=json)
    if download:
        _fetch(data)
    called = studies.STUDIES[name].model if model is None else model
    spec = read_spec(called, input_shape, classes)
    folder = out or Path(f"cubatch-study-{name}")
    command = shlex.join(["cubatch", *sys.argv[1:]])
    try:
        with console.steps(name) as show:
            request = StudyRequest(
                spec=spec, model=called, folder=folder, device=device, modes=(mode,) if mode else (), dtype=dtype,
                optimizer=optimizer, data=data, max_batch_size=max_batch_size, memory_limit=memory_limit,
                budget=budget, quick=quick, seed=seed, show=show,
            )  # fmt: skip
            payload = studies.run(name, request, command=command)
    except KeyboardInterrupt as stop:
        console.say("cubatch: interrupted; what was measured is kept, the same command goes on with it")
        raise typer.Exit(console.INTERRUPTED) from stop
    written = studies.write(payload, folder)
    console.emit(table.grids(payload), payload, json)
    for path in written:
        console.say(f"wrote {path}")
    if importlib.util.find_spec("matplotlib") is None:
        console.say(f"No picture files: Matplotlib is missing; the page has its figure. {install_command('plot')}")


def _fetch(data: Path | None) -> None:
    """Fetch MNIST into the folder that was named."""
    from cubatch.engine import data as files

    if data is None:
        raise typer.BadParameter("--download needs --data, the folder to fetch MNIST into")
    files.download_mnist(data)

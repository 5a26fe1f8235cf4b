"""`cubatch study`: answer a question about batch sizes by measurements, on an HTML page."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from cubatch.choices import Mode, StudyName
from cubatch.cli import console, options as opt


def study(
    name: Annotated[
        Literal[StudyName, "list"],
        typer.Argument(metavar="NAME", help="One of the studies, or list: show their questions."),
    ],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As for `cubatch tune`. Default: the study's own.")
    ] = None,
    *,
    device: opt.PresentOption = None,
    mode: Annotated[
        Mode | None,
        typer.Option("--mode", help="Default: the study's own, see `cubatch study list`."),
    ] = None,
    dtype: opt.DtypeOption = "float32",
    optimizer: opt.OptimizerOption = "sgd",
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Folder with MNIST's files, for numpy-mnist and generalisation."),
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Download missing files of MNIST into --data.")] = False,
    max_batch_size: opt.MaxOption = None,
    memory_limit: opt.MemoryOption = None,
    budget: Annotated[
        float | None, typer.Option("--budget", metavar="SECONDS", help="Measuring time, at most. Default: the study's.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure fewer sizes, for a first impression in seconds.")
    ] = False,
    seed: opt.SeedOption = 0,
    input_shape: opt.ShapeOption = None,
    classes: opt.ClassesOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder to write into. Default: cubatch-study-NAME.")
    ] = None,
    json: opt.JsonOption = None,
) -> None:
    """
    Answer a question about batch sizes by measurements.

    Writes an HTML page, figures and JSON. Repeat an interrupted command to continue it.

    Example: cubatch study powers-of-two mlp --device cpu --quick
    """
    from cubatch.errors import install_command
    from cubatch.report.plots import style
    from cubatch.report.tables import study as table
    from cubatch.studies import run as studies
    from cubatch.studies.study_request import StudyRequest

    console.check_writable(json=json)
    if name == "list":
        listed = studies.describe()
        console.emit([table.studies(listed)], {"schema": 1, "studies": listed}, json)
        return
    if download:
        _download(data)
    called = studies.STUDIES[name].model if model is None else model
    spec = opt.read_spec(called, input_shape, classes)
    folder = out or Path(f"cubatch-study-{name}")
    command = shlex.join(["cubatch", *sys.argv[1:]])
    try:
        with console.progress(name, is_counted=True) as show:
            request = StudyRequest(
                spec=spec, model=called, folder=folder, device=device, modes=(mode,) if mode else (), dtype=dtype,
                optimizer=optimizer, data=data, max_batch_size=max_batch_size, memory_limit=memory_limit,
                budget=budget, quick=quick, seed=seed, show=show,
            )  # fmt: skip
            payload = studies.run(name, request, command=command)
    except KeyboardInterrupt as stop:
        console.say("cubatch: interrupted; the timings are cached, repeat the command to continue")
        raise typer.Exit(console.INTERRUPTED) from stop
    try:
        console.emit(table.grids(payload), payload, json)
    finally:  # if one fails, the other is still written
        for path in studies.write(payload, folder):
            console.say(f"wrote {path}")
    if not style.is_installed():
        console.say(f"No figures: Matplotlib is not installed. {install_command('plot')}")


def _download(data: Path | None) -> None:
    from cubatch.engine import data as files

    if data is None:
        raise typer.BadParameter("--download needs --data, the folder for the files")
    files.download_mnist(data)

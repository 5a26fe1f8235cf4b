"""`cubatch profile`: the time of a step by layer and pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cubatch.cli import console, options as opt
from cubatch.errors import CubatchError

if TYPE_CHECKING:
    from cubatch.measure.profile_records import StepProfile


def profile(
    model: opt.Model,
    *,
    batch_size: Annotated[
        str, typer.Option("--batch-size", metavar="N", help="Samples per step, or several sizes to compare: 1,16,256.")
    ] = "1",
    device: opt.PresentOption = None,
    mode: opt.ModeOption = "inference",
    dtype: opt.DtypeOption = "float32",
    optimizer: opt.OptimizerOption = "sgd",
    library: opt.LibraryOption = "auto",
    recompute: opt.RecomputeOption = False,
    input_shape: opt.ShapeOption = None,
    classes: opt.ClassesOption = None,
    seed: opt.SeedOption = 0,
    budget: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", help="Measuring time of each batch size, at most.")
    ] = 5.0,
    plot: opt.PlotOption = None,
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="Write the calls of one step for ui.perfetto.dev.")
    ] = None,
    json: opt.JsonOption = None,
) -> None:
    """
    Show where the time of a step goes.

    By layer and pass: time, share, FLOP/s, bytes/s, and the limiting factor.

    Example: cubatch profile mnist-cnn --mode training --batch-size 1,16,256
    """
    import json as writer

    from cubatch.measure import step_profile
    from cubatch.report.plots import profile as figure, style
    from cubatch.report.tables import profile as table

    sizes = opt.whole_numbers("--batch-size", batch_size)
    console.check_writable(json=json, plot=plot, trace=trace)
    if plot is not None:
        style.check(plot)
    spec = opt.read_spec(model, input_shape, classes)
    profiles: list[StepProfile] = []
    failure: BaseException | None = None
    for size in dict.fromkeys(sizes):
        try:
            measured = step_profile.profile(
                spec, size, device=device, mode=mode, dtype=dtype, optimizer=optimizer, library=library,
                recompute=recompute, seed=seed, budget=budget,
            )  # fmt: skip
        except (CubatchError, KeyboardInterrupt) as stop:
            if not profiles:
                raise
            failure = stop  # raised after the other sizes are shown
            break
        profiles.append(measured)
    payload = table.mapping(profiles, model) | ({} if failure is None else {"failure": str(failure) or "interrupted"})
    grids = [table.layers(payload["profiles"][-1], title=table.title(payload, payload["profiles"][-1]))]
    if len(profiles) > 1:
        grids.append(table.sizes(payload["profiles"]))
    console.emit(grids, payload, json)
    if failure is not None:
        raise failure
    if plot is not None:
        figure.draw(payload, plot)
        console.say(f"wrote {plot}")
    if trace is not None:
        console.write_text("--trace", trace, writer.dumps(profiles[-1].to_trace()) + "\n")
        console.say(f"wrote {trace}; ui.perfetto.dev opens it")

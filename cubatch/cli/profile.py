"""`cubatch profile`: where the time of a step goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cubatch.cli import console
from cubatch.cli.options import (
    ClassesOption,
    DtypeOption,
    JsonOption,
    LibraryOption,
    Model,
    ModeOption,
    OptimizerOption,
    PresentOption,
    RecomputeOption,
    SeedOption,
    ShapeOption,
    read_spec,
    whole_numbers,
)
from cubatch.errors import CubatchError

if TYPE_CHECKING:
    from cubatch.measure.profile_records import StepProfile


def profile(
    model: Model,
    *,
    batch_size: Annotated[
        str, typer.Option("--batch-size", metavar="N", help="Samples per step; several to compare: 1,16,256.")
    ] = "1",
    device: PresentOption = None,
    mode: ModeOption = "inference",
    dtype: DtypeOption = "float32",
    optimizer: OptimizerOption = "sgd",
    library: LibraryOption = "auto",
    recompute: RecomputeOption = False,
    input_shape: ShapeOption = None,
    classes: ClassesOption = None,
    seed: SeedOption = 0,
    budget: Annotated[float, typer.Option("--budget", metavar="SECONDS", help="Time for the steps of a size.")] = 5.0,
    plot: Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw it: .png, .svg or .pdf.")] = None,
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="Each call of one step, for ui.perfetto.dev.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """
    Say where the time of a step goes.

    By layer and pass: time, FLOP/s, bytes/s, and what bounds it.

    Example: cubatch profile mnist-cnn --mode training --batch-size 1,16,256
    """
    import json as writer

    from cubatch.measure import step_profile
    from cubatch.report.plots import profile as figure
    from cubatch.report.plots import style
    from cubatch.report.tables import profile as table

    sizes = whole_numbers("--batch-size", batch_size)
    console.check_writable(json=json, plot=plot, trace=trace)
    if plot is not None:
        style.check(plot)
    spec = read_spec(model, input_shape, classes)
    found: list[StepProfile] = []
    failure: BaseException | None = None
    for size in dict.fromkeys(sizes):
        try:
            one = step_profile.profile(
                spec, size, device=device, mode=mode, dtype=dtype, optimizer=optimizer, library=library,
                recompute=recompute, seed=seed, budget=budget,
            )  # fmt: skip
        except (CubatchError, KeyboardInterrupt) as stop:
            if not found:
                raise
            failure = stop  # after what the sizes before took
            break
        found.append(one)
    payload = table.mapping(found, model) | ({} if failure is None else {"failure": str(failure) or "interrupted"})
    grids = [table.layers(payload["profiles"][-1], title=table.title(payload, payload["profiles"][-1]))]
    if len(found) > 1:
        grids.append(table.sizes(payload["profiles"]))
    console.emit(grids, payload, json)
    if failure is not None:
        raise failure
    if plot is not None:
        figure.draw(payload, plot)
        console.say(f"wrote {plot}")
    if trace is not None:
        console.write_text("--trace", trace, writer.dumps(found[-1].to_trace()) + "\n")
        console.say(f"wrote {trace}; ui.perfetto.dev opens it")

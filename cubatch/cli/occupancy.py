"""`cubatch occupancy`: how many blocks of a kernel fit on an SM, and what would change that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from attrs import evolve

from cubatch.cli import console, options as opt

if TYPE_CHECKING:
    from cubatch.estimate.batch_sweep import BatchSweep
    from cubatch.estimate.occupancy_sweep import Sweep
    from cubatch.hardware.facts import Device
    from cubatch.kernels.resources import Needs
    from cubatch.kernels.variant import Kernel
    from cubatch.network.layer import Layer
    from cubatch.network.passes import Pass


_Fact = TypeVar("_Fact")
_SWEPT = Literal["threads", "registers", "shared", "batch-size"]


def occupancy(
    kernel: Annotated[
        str | None, typer.Argument(metavar="[KERNEL]", help="A name from `cubatch kernels`, or the beginning of one.")
    ] = None,
    *,
    device: Annotated[
        str | None, typer.Option("--device", help="A GPU's name or .toml file. Default: the GPU here.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Threads per block, instead of KERNEL.")] = None,
    registers: Annotated[
        int | None, typer.Option("--registers", help="Registers per thread, instead of KERNEL.")
    ] = None,
    shared: Annotated[
        str | None, typer.Option("--shared", metavar="SIZE", help="Shared memory per block, instead of KERNEL: 48KiB.")
    ] = None,
    blocks: Annotated[int | None, typer.Option("--blocks", help="Blocks of the grid, to count waves.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="A MODEL with a layer that KERNEL computes.")] = None,
    layer: Annotated[
        str | None, typer.Option("--layer", help="Name of that layer. Default: the one with most FLOP.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", metavar="N", help="Samples per step, for --model.")
    ] = None,
    sweep: Annotated[
        _SWEPT | None, typer.Option("--sweep", help="Vary this: show steps, drops and the nearest better value.")
    ] = None,
    plot: opt.PlotOption = None,
    input_shape: opt.ShapeOption = None,
    classes: opt.ClassesOption = None,
    json: opt.JsonOption = None,
) -> None:
    """
    Show how many blocks of a kernel fit on an SM, and why.

    Shows which resource limits them, and how the blocks of a grid are distributed over the SMs.

    Needs no GPU: registers and shared memory of cubatch kernels are recorded with their sources.

    Example: cubatch occupancy --device v100-sxm2-16gb --threads 256 --registers 96 --sweep registers
    """
    from functools import partial

    from cubatch.estimate import batch_sweep, occupancy_sweep
    from cubatch.hardware import architectures
    from cubatch.report.plots import occupancy as occupancy_figure, style
    from cubatch.report.tables import occupancy as occupancy_table
    from cubatch.report.tables.occupancy import Answer

    raw = {"--threads": threads, "--registers": registers, "--shared": shared}
    of_model = {"--layer": layer, "--batch-size": batch_size, "--input-shape": input_shape, "--classes": classes}
    _check_options(kernel, raw, of_model, blocks=blocks, model=model, sweep=sweep, plot=plot)
    console.check_writable(json=json, plot=plot)
    if plot is not None:
        style.check(plot)
    gpu = _gpu(device)
    capability = _known(gpu, gpu.compute_capability, "compute capability")
    launches = _launches(kernel, threads or 0, registers or 0, shared, gpu, single=bool(model or sweep))
    answers = [Answer(kernel_.name if kernel_ else None, needs, needs.on(capability)) for kernel_, needs in launches]
    (variant, needs), held = launches[0], answers[0].held
    subject = kernel or occupancy_table.subject(needs)
    at = place = None
    if model is not None and variant is not None:
        place = batch_sweep.heaviest_layer(opt.read_spec(model, input_shape, classes), variant, layer)
        at = partial(batch_sweep.grid_of, *place, variant, device=gpu, blocks_per_sm=held.blocks_per_sm)
        if batch_size is not None:
            answers = [Answer(variant.name, needs, held, spread=at(batch_size))]
    if blocks is not None:
        num_sms = _known(gpu, gpu.num_sms, "number of SMs")
        spread = batch_sweep.spread
        answers = [
            evolve(each, spread=spread(blocks, num_sms, blocks_per_sm=each.held.blocks_per_sm)) for each in answers
        ]
    title = f"{subject} on {gpu}{_of_layer(place, model, layer)}"
    tables = [occupancy_table.answers(answers, gpu, architectures.of(capability), title=title)]
    swept: Sweep | BatchSweep | None = None
    if sweep == "batch-size" and at is not None and place is not None:
        what = f"{model}, {place[0].name}, {place[1].value}, on {gpu}"
        swept = batch_sweep.batch_sweep(at, _known(gpu, gpu.num_sms, "number of SMs"), batch_size)
        tables.append(occupancy_table.batch_sweep(swept, subject=what))
        if plot is not None:
            occupancy_figure.saw(swept, plot, title=what, subject=subject)
    elif sweep is not None:
        swept = occupancy_sweep.sweep(needs, capability, sweep)
        tables.append(occupancy_table.sweep(swept))
        if plot is not None:
            most = architectures.of(capability).warps_per_sm
            occupancy_figure.staircase(swept, plot, title=f"Occupancy on {gpu}", subject=subject, warps=most)
    console.emit(tables, occupancy_table.mapping(gpu, answers, swept, place), json)
    if plot is not None:
        console.say(f"wrote {plot}")


def _of_layer(place: tuple[Layer, Pass] | None, model: str | None, requested: str | None) -> str:
    """
    Return the end of a title: the pass and layer that the kernel computes, and the model; empty if `place` is None.

    If the user named no layer (`requested` is None), the text adds that the layer is that with most FLOP.
    """
    if place is None:
        return ""
    chosen = "" if requested else ", the layer with most FLOP that it computes (--layer chooses another)"
    return f": {place[1].value} of {place[0].name} in {model}{chosen}"


def _check_options(
    kernel: str | None,
    raw: Mapping[str, object],  # options that replace KERNEL, by name
    of_model: Mapping[str, object],  # options that need --model, by name
    *,
    blocks: int | None,  # blocks, model, sweep, plot: the options of these names; None: not given
    model: str | None,
    sweep: str | None,
    plot: str | None,
) -> None:
    """Raise BadParameter if options exclude each other, or an option needs a second that was not given."""
    given = [name for name, value in raw.items() if value is not None]
    if kernel is not None and given:
        options = " and ".join(given)
        raise typer.BadParameter(
            f"leave out {options}, which KERNEL determines (--sweep varies them), or leave out KERNEL"
        )
    if kernel is None and not {"--threads", "--registers"} <= set(given):
        raise typer.BadParameter("give a KERNEL, or --threads and --registers (and --shared)")
    for option, value, needed, there in (
        ("--model", model, "a KERNEL, whose tile determines the number of blocks", kernel),
        *((option, value, "--model", model) for option, value in of_model.items()),
        ("--plot", plot, "--sweep", sweep),
        ("--sweep batch-size", sweep if sweep == "batch-size" else None, "KERNEL and --model", model),
    ):
        if value is not None and there is None:
            raise typer.BadParameter(f"{option} needs {needed}")
    if blocks is not None and model is not None:
        raise typer.BadParameter("--blocks and --model exclude each other: the layer determines the number of blocks")
    if model is not None and of_model["--batch-size"] is None and sweep != "batch-size":
        raise typer.BadParameter("--model needs --batch-size, or --sweep batch-size")


def _gpu(name: str | None) -> Device:
    from cubatch.errors import InvalidArgument
    from cubatch.hardware import probe

    device = probe.device() if name is None else probe.resolve(name, live=False)
    if device.kind != "cuda":
        raise InvalidArgument("--device", name, "a GPU: one in this machine, or a name from `cubatch devices`")
    return device


def _known(gpu: Device, fact: _Fact | None, name: str) -> _Fact:
    from cubatch.errors import InvalidArgument

    if fact is None:
        remedy = "Name one of `cubatch devices`, or a .toml file that has it."
        raise InvalidArgument("--device", str(gpu), f"a GPU whose {name} is known", remedy)
    return fact


def _launches(
    kernel: str | None, threads: int, registers: int, shared: str | None, gpu: Device, *, single: bool
) -> list[tuple[Kernel | None, Needs]]:
    """
    Return the kernel variants that `kernel` means and the GPU runs, each with the resources of a block.

    Without `kernel` the only item is None with the given resources. `single` makes several variants an InvalidArgument.
    """
    from cubatch.errors import InvalidArgument
    from cubatch.kernels import resources, survey
    from cubatch.kernels.variant import arch_number

    if kernel is None:
        return [(None, resources.Needs(threads, registers, _bytes(shared)))]
    arch, budget = gpu.arch or "", resources.recorded_figures()
    variants = resources.named(kernel)
    running = [each for each in variants if each.runs_on(arch_number(arch))] or variants[
        :1
    ]  # a variant that does not run raises the reason
    if single and len(running) > 1:
        names = ", ".join(each.name for each in running)
        raise InvalidArgument("KERNEL", kernel, f"the name of one variant for --model and --sweep: {names}")
    return [(each, survey.needs(each, arch, budget)) for each in running]


def _bytes(text: str | None) -> int:
    from cubatch.errors import InvalidArgument
    from cubatch.units import parse_bytes

    if text is None or text.strip() == "0":
        return 0
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InvalidArgument("--shared", text, "bytes, or a size such as 48KiB") from error

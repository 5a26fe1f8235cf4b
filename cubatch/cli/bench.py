"""`cubatch bench`: cubatch kernels compared with their rivals on products, convolutions, attention or a network."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cubatch.choices import Dtype
from cubatch.cli import console
from cubatch.cli.options import (
    ClassesOption,
    JsonOption,
    Model,
    ModeOption,
    OptimizerOption,
    SeedOption,
    ShapeOption,
    read_spec,
)

if TYPE_CHECKING:
    from cubatch.bench.calls import Case
    from cubatch.hardware.facts import Device


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Time cubatch kernels and those of other libraries.\n\n"
    "Each result is checked first.\n\n"
    "Example: cubatch bench gemm --m 4096 --n 4096 --k 4096",
)

_Pass = Literal["fprop", "dgrad", "wgrad", "all"]

DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cuda, cuda:1, or a GPU's name. Default: the first GPU.")
]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="Storage; sums are float32. tf32: float32, rounded for tensor cores.")
]
VariantsOption = Annotated[
    Literal["chosen", "all"],
    typer.Option(
        "--variants",
        help="chosen: the kernel variant ranked first; all: every variant that can run, and the naive kernel.",
    ),
]
RivalOption = Annotated[bool, typer.Option("--rival/--no-rival", help="Also time the vendor's libraries.")]
SecondsOption = Annotated[float, typer.Option("--seconds", min=0.01, help="Longest time spent on each case.")]
DryOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Only show what would run: variants, blocks and use of the SMs. Needs no GPU; name one with --device.",
    ),
]
PlotOption = Annotated[
    str | None, typer.Option("--plot", metavar="FILE", help="Draw shares of the roofline: .png, .svg or .pdf.")
]
BatchOption = Annotated[int, typer.Option("--batch-size", metavar="N", min=1, help="Samples.")]
PassOption = Annotated[
    _Pass, typer.Option("--pass", help="fprop: forward; dgrad: gradient of the input; wgrad: gradient of the weights.")
]


def gemm(
    *,
    m: Annotated[int, typer.Option("--m", min=1, help="Rows of the result.")],
    n: Annotated[int, typer.Option("--n", min=1, help="Columns of the result.")],
    k: Annotated[int, typer.Option("--k", min=1, help="Length of the sums.")],
    layout: Annotated[
        Literal["nn", "nt", "tn"], typer.Option("--layout", help="Layout of the two operands; t: stored transposed.")
    ] = "nt",
    dtype: DtypeOption = "float32",
) -> tuple[str, list[Any]]:
    """
    Time a matrix product (m, k) x (k, n).

    Example: cubatch bench gemm --m 4096 --n 4096 --k 4096 --variants all
    """
    from cubatch.bench import cases

    return "", [cases.gemm(m, n, k, layout=layout, dtype=dtype)]


def conv(
    *,
    h: Annotated[int, typer.Option("--h", min=1, help="Input height.")],
    w: Annotated[int, typer.Option("--w", min=1, help="Input width.")],
    c: Annotated[int, typer.Option("--c", min=1, help="Input channels.")],
    k: Annotated[int, typer.Option("--k", min=1, help="Output channels.")],
    r: Annotated[int, typer.Option("--r", min=1, help="Filter height.")] = 3,
    s: Annotated[int, typer.Option("--s", min=1, help="Filter width.")] = 3,
    stride: Annotated[int, typer.Option("--stride", min=1, help="Step of the filter.")] = 1,
    pad: Annotated[int, typer.Option("--pad", min=0, help="Zeros on every side.")] = 0,
    dilation: Annotated[int, typer.Option("--dilation", min=1, help="Distance between taps.")] = 1,
    groups: Annotated[int, typer.Option("--groups", min=1, help="Groups of channels; c is depthwise.")] = 1,
    batch_size: BatchOption = 32,
    passes: PassOption = "all",
    fused: Annotated[
        bool,
        typer.Option(
            "--fused",
            help="Also time the kernels with fused operations: norm, residual and ReLU; backward residual and mask.",
        ),
    ] = False,
    dtype: DtypeOption = "float32",
) -> tuple[str, list[Any]]:
    """
    Time a convolution's passes.

    Example: cubatch bench conv --h 56 --w 56 --c 64 --k 64 --pad 1 --batch-size 32 --dtype float16 --fused
    """
    from cubatch.bench.cases import of_layer
    from cubatch.errors import InvalidArgument
    from cubatch.network.layers import Conv2d
    from cubatch.network.passes import Pass

    layer = Conv2d(
        h=h, w=w, c=c, k=k, r=r, s=s, stride=stride, pad=pad, dilation=dilation, groups=groups, bias=False
    )  # fmt: skip
    listed = [of_layer(layer, pass_, batch_size, dtype) for pass_ in _passes(passes)]
    if fused and not layer.has_epilogue:
        remedy = "Its kernels end with a bias and a ReLU only."
        raise InvalidArgument("--fused", True, "left out for a depthwise convolution", remedy)
    if fused:
        listed += [
            of_layer(layer, pass_, batch_size, dtype, ending=[term, *residual], relu=pass_ is Pass.FPROP)
            for pass_, term in ((Pass.FPROP, "folded"), (Pass.DGRAD, "positive"))
            if pass_ in _passes(passes)
            for residual in ([], ["residual"])
        ]
    return "", listed


def attention(
    *,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Positions of a sample.")],
    c: Annotated[int, typer.Option("--c", min=1, help="Channels of all heads.")],
    heads: Annotated[int, typer.Option("--heads", min=1, help="Heads, which divide the channels.")],
    batch_size: BatchOption = 32,
    dtype: DtypeOption = "float32",
) -> tuple[str, list[Any]]:
    """
    Time self-attention with its projections: in inference, and both passes of training.

    Example: cubatch bench attention --tokens 197 --c 768 --heads 12 --dtype float16
    """
    from cubatch.bench.cases import of_layer
    from cubatch.network.layers import Attention
    from cubatch.network.passes import Pass

    layer = Attention(h=tokens, w=1, c=c, heads=heads)
    passes = ((Pass.FPROP, "inference"), (Pass.FPROP, "training"), (Pass.DGRAD, "training"))
    return "", [of_layer(layer, pass_, batch_size, dtype, mode=mode) for pass_, mode in passes]


def model(
    model: Model,
    *,
    batch_size: BatchOption = 32,
    mode: ModeOption = "inference",
    optimizer: OptimizerOption = "momentum",
    passes: PassOption = "all",
    dtype: DtypeOption = "float32",
    seconds: SecondsOption = 0.5,  # noqa: ARG001 - the default of one of many cases
    input_shape: ShapeOption = None,
    classes: ClassesOption = None,
) -> tuple[str, list[Any]]:
    """
    Time the distinct operations of a network's step, each counted as often as it occurs.

    The operations are those of the schedule: with their epilogues, the loss and the optimizer.

    Example: cubatch bench model resnet50 --batch-size 32 --pass fprop
    """
    from cubatch.bench.cases import of_step
    from cubatch.network.graph import as_network

    network = as_network(read_spec(model, input_shape, classes))
    listed = of_step(network, mode, batch_size, dtype, optimizer=optimizer)
    if passes != "all":
        listed = [case for case in listed if case.pass_ in _passes(passes)]
    return f"{network.name}, {mode}, batch {batch_size}", listed


def _passes(name: str) -> list[Any]:
    from cubatch.network.passes import Pass

    return list(Pass) if name == "all" else [Pass(name)]


_OWN = ("title", "cases")


def _command(make: Callable[..., tuple[str, list[Any]]]) -> None:
    """
    Register a command named as `make`, with the options of `make` and `_run`.

    `make` returns a title and cases, which `_run` times and shows.
    """
    own, shared = (inspect.signature(function, eval_str=True) for function in (make, _run))
    options = [option for name, option in shared.parameters.items() if name not in {*_OWN, *own.parameters}]

    @functools.wraps(make)
    def command(**given: Any) -> None:
        title, cases = make(**{name: given[name] for name in own.parameters})
        _run(title, cases, **{name: value for name, value in given.items() if name in shared.parameters})

    vars(command)["__signature__"] = inspect.Signature([*own.parameters.values(), *options])
    app.command()(command)


def _run(
    title: str,
    cases: list[Any],
    *,
    device: DeviceOption = None,
    variants: VariantsOption = "chosen",
    rival: RivalOption = True,
    seconds: SecondsOption = 2.0,
    dry_run: DryOption = False,
    seed: SeedOption = 0,
    plot: PlotOption = None,
    json: JsonOption = None,
) -> None:
    from cubatch.bench import figure, measure, rivals, tables
    from cubatch.engine import conditions
    from cubatch.errors import InvalidArgument
    from cubatch.report.plots import style

    console.check_writable(json=json, plot=plot)
    if plot is not None:
        if dry_run:
            raise typer.BadParameter("--plot draws times: leave out --dry-run")
        style.check(plot)
    gpu = _device(device, {case.dtype for case in cases}, dry_run=dry_run)
    if plot is not None and all(case.roofline_seconds(gpu) is None for case in cases):
        allowed = f"left out: it draws shares of peak rates, which are unknown for {gpu}"
        raise InvalidArgument("--plot", plot, allowed)
    copy, failure, results = None, None, []
    if dry_run:
        results = [measure.plan(case, gpu, variants=variants) for case in cases]
    else:
        copy, failure = _time(cases, gpu, results, variants=variants, with_rivals=rival, seconds=seconds, seed=seed)
    is_long = bool(title) and len(cases) > len(_passes("all"))  # a network's layers
    title = f"{title or 'cubatch bench'}, {'planned for' if dry_run else 'on'} {gpu}"
    grid = tables.summary(results, title=title) if is_long else tables.entries(results, title=title)
    payload = {
        "schema": 1,
        "measured": not dry_run,
        "device": gpu.to_mapping(),
        "environment": conditions.environment(gpu) | rivals.versions(),
        "copy_bytes_per_second": copy,
        "results": [result.to_mapping() for result in results],
    } | ({} if failure is None else {"failure": str(failure) or "interrupted"})
    console.emit([grid], payload, json)
    if failure is not None:
        raise failure
    if plot is not None:
        figure.rates(results, plot, title=title)
        console.say(f"wrote {plot}")


def _time(
    cases: list[Case], device: Device, results: list[Any], *, seed: int, **options: Any
) -> tuple[float, BaseException | None]:
    """Append the cases' results to `results`; return the bytes/s of a copy, and the error that ended it or None."""
    from cubatch.bench import measure
    from cubatch.bench.contest import Contest
    from cubatch.bench.target import on_gpu
    from cubatch.errors import DeviceFailed
    from cubatch.hardware import gpu_library

    with gpu_library.translating("using the GPU"):
        target = on_gpu(device)
        contest = Contest(target.clock, seed=seed, synchronize=target.synchronize)
        copy = measure.copy_bandwidth(target, contest)
    with console.progress_bar("timing") as show:
        for number, case in enumerate(cases):
            if show is not None:
                show(number, len(cases), case.name)
            try:
                with gpu_library.translating(case.name):
                    results.append(
                        measure.time_case(case, target, contest, seed=seed, copy_bytes_per_second=copy, **options)
                    )
            except (DeviceFailed, KeyboardInterrupt) as stop:  # earlier results are right
                if isinstance(stop, KeyboardInterrupt) and not results:
                    raise  # there is nothing to write
                return copy, stop
    return copy, None


def _device(name: str | None, dtypes: set[str], *, dry_run: bool) -> Device:
    from cubatch.errors import DeviceNotAvailable, InvalidArgument
    from cubatch.hardware import arithmetic, probe

    try:
        device = probe.resolve("cuda" if name is None else name, live=not dry_run)
    except DeviceNotAvailable as error:
        remedy = "With --dry-run --device NAME it shows what would run on an absent GPU."
        raise DeviceNotAvailable(error.device, error.reason, remedy) from error
    if device.kind != "cuda":
        raise InvalidArgument(
            "--device", name, "a GPU", "With --dry-run it may be any GPU that `cubatch devices` lists."
        )
    for dtype in dtypes:
        arithmetic.check_dtype(device, dtype)
    return device


for _make in (gemm, conv, attention, model):
    _command(_make)

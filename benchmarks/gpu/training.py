"""Whole networks in the GPU pass: their memory, their steps against PyTorch, and recommendations of autotune."""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from benchmarks import torch_network
from benchmarks.gpu import cases
from benchmarks.gpu.items import Session
from benchmarks.gpu.steps import Step
from cubatch.bench import rivals
from cubatch.bench.contest import OURS, Contest, Entrant, time_ratio
from cubatch.bench.target import Target
from cubatch.hardware.nvml import Monitor
from cubatch.measure.runner import Clock
from cubatch.network import models
from cubatch.report.tables.common import plain
from cubatch.tuning import step_memory

CHOICE_SECONDS = 6.0
STEP_SECONDS = 6.0
SPAN_SECONDS = 0.3
"""A timing spans several steps: the host waits for the device once in each of PyTorch's."""

COMPILE_MODES: Mapping[str, str | None] = {
    "eager": None,
    "compile": "default",
    "compile max-autotune": "max-autotune",
}
"""The mode of `torch.compile` by the name of the rival; `None` runs the module without it."""

WARM_UP_STEPS = 3
"""The first step compiles. Max-autotune records its CUDA graph in the second and replays it from the third on."""

TRANSFORMERS = ("vit-base", "deit-tiny")
_WITHOUT_STOCHASTIC_DEPTH = {"stochastic_depth_prob": 0.0}  # cubatch's networks have none
_DEIT_TINY = {
    "image_size": 224, "patch_size": 16, "num_layers": 12, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 768
}  # fmt: skip
TORCHVISION: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "resnet50": ("resnet50", {}),
    "convnext-tiny": ("convnext_tiny", _WITHOUT_STOCHASTIC_DEPTH),
    "efficientnet-b0": ("efficientnet_b0", _WITHOUT_STOCHASTIC_DEPTH),
    "mobilenet-v3-large": ("mobilenet_v3_large", {}),
    "vit-base": ("vit_b_16", {}),
    "deit-tiny": ("VisionTransformer", _DEIT_TINY),
}
"""The builder in `torchvision.models` and its arguments, by cubatch's name of the network."""


def memory_of(step: Step, library: str, session: Session) -> dict[str, Any]:
    """Return the planned bytes, the bytes that the engine took, and those that the driver reports."""
    name, batch_size = _sized(step.network, step.batch_size, session)
    optimizer = "momentum" if step.mode == "training" else "sgd"
    options: dict[str, Any] = {"mode": step.mode, "dtype": step.dtype, "optimizer": optimizer, "library": library}
    planned = step_memory.footprint(models.build(name), batch_size=batch_size, device=session.device, **options)
    monitor = Monitor(session.device.uuid) if session.device.uuid else None
    before = monitor.snapshot().used_bytes if monitor else None
    runner = _runner(name, session, **options)
    try:
        runner.prepare(batch_size)
        runner.clock.time(runner.step, 1)
        after = monitor.snapshot().used_bytes if monitor else None
        return {
            "planned_bytes": planned.total,
            "held_bytes": runner.peak_bytes,
            "process_bytes": runner.peak_device_bytes,
            "device_bytes": None if before is None or after is None else after - before,
        }
    finally:
        runner.close()


def whole_step(step: Step, rival_names: Sequence[str], session: Session) -> dict[str, Any]:
    """
    Time a whole step of cubatch and of PyTorch rivals in the same rounds.

    Args:
        step: The step. PyTorch trains with automatic mixed precision of its type.
        rival_names: Keys of `COMPILE_MODES`.
        session: The session of the pass.

    Returns:
        dict: Medians with confidence intervals in seconds, and each rival's ratio to cubatch. If PyTorch is
            missing, or torchvision for a network that needs it, only the reason, and "unavailable" as the status.
    """
    name, batch_size = _sized(step.network, step.batch_size, session)
    step = attrs.evolve(step, network=name, batch_size=batch_size)
    facts = {"network": name, "mode": step.mode, "dtype": step.dtype, "batch_size": batch_size}
    torch = rivals.torch_of(session.target.module)
    if torch is None:
        return facts | {"status": "unavailable", "message": "PyTorch with CUDA is not installed"}
    try:
        build = _builder(name)
    except ValueError as error:
        return facts | {"status": "unavailable", "message": f"torchvision is not installed; {error}"}
    runner = _runner(
        name, session, mode=step.mode, dtype=step.dtype, optimizer="momentum", library="cubatch",
        choice_seconds=CHOICE_SECONDS,
    )  # fmt: skip
    try:
        runner.prepare(batch_size)
        return facts | compared_with_rivals(
            runner.step,
            {rival: _binder(torch, build, step, rival) for rival in rival_names},
            batch_size,
            runner.clock,
            session.target,
        )
    finally:
        runner.close()
        torch.compiler.reset()  # frees CUDA graphs; PyTorch limits how often the same code may be compiled
        session.target.free_pools()


def compared_with_rivals(
    step: Callable[[], None],
    binders: Mapping[str, Callable[[], Callable[[], Any]]],
    batch_size: int,
    clock: Clock,
    target: Target,
) -> dict[str, Any]:
    """
    Time our step and the steps of rivals in the same rounds.

    Args:
        step: Our step.
        binders: By the rival's name, a function that compiles and warms up the rival's step and returns it.
        batch_size: Images of a step.
        clock: The clock of all timings.
        target: The device.

    Returns:
        dict: Our figures, and by rival its figures, its ratio to cubatch and the error that ended it (`None`: it ran).
    """
    ours = Entrant("cubatch", OURS, step)
    entrants: dict[str, Entrant] = {}
    results: dict[str, dict[str, Any]] = {}
    for rival, bind in binders.items():
        start = time.monotonic()
        bound = target.attempt(bind)
        results[rival] = {"warm_up_seconds": time.monotonic() - start}
        if isinstance(bound, str):
            results[rival] |= {"failure": bound}
        else:
            entrants[rival] = Entrant(rival, rival, bound)  # a side of its own: a slow rival stays in the rounds
    Contest(clock, SPAN_SECONDS, synchronize=target.synchronize).run([ours, *entrants.values()], STEP_SECONDS)
    for rival, entrant in entrants.items():
        failure = entrant.reason if entrant.status == "error" else None
        results[rival] |= {"failure": failure}
        if failure is None:
            ratio, interval = time_ratio(entrant, ours)
            results[rival] |= _figures(entrant, batch_size) | {"ratio": ratio, "ratio_interval": interval}
    return {"cubatch": _figures(ours, batch_size), "rivals": results}


def _figures(entrant: Entrant, batch_size: int) -> dict[str, Any]:
    return {
        "seconds": entrant.seconds,
        "seconds_interval": None if entrant.interval is None else list(entrant.interval),
        "images_per_second": batch_size / (entrant.seconds or float("nan")),
        "timings": [plain(timing) for timing in entrant.timings],
    }


def _torchvision() -> types.ModuleType | None:
    """Return torchvision; `None` if it is missing or does not fit the installed PyTorch."""
    try:
        import torchvision
    except (ImportError, OSError, RuntimeError):
        return None
    module: types.ModuleType = torchvision
    return module


def _builder(name: str) -> Callable[[], Any]:
    """
    Return a function that builds a network for PyTorch: torchvision's, else cubatch's layers as PyTorch's modules.

    Raises:
        ValueError: If torchvision is missing and PyTorch has no module for a layer.
    """
    if name in TORCHVISION and _torchvision() is not None:
        return functools.partial(torchvision_module, name)
    network = models.build(name)
    torch_network.module(network)  # raises for a layer that has no module
    return functools.partial(torch_network.module, network)


def _binder(
    torch: Any, build: Callable[[], Any], step: Step, rival: str, device: str = "cuda"
) -> Callable[[], Callable[[], Any]]:
    """Return a function that builds the step of a PyTorch network, compiles it and warms it up."""

    def bind() -> Callable[[], Any]:
        rivals.set_precision(torch, step.dtype)
        network = models.build(step.network)
        h, w, c = network.input_shape
        layout = torch.contiguous_format if step.network in TRANSFORMERS else torch.channels_last
        stored = getattr(torch, step.dtype) if step.mode == "inference" else torch.float32
        module = build().to(device, dtype=stored, memory_format=layout)
        x = torch.randn(step.batch_size, c, h, w, device=device, dtype=stored).to(memory_format=layout)
        labels = torch.randint(0, network.output_shape[-1], (step.batch_size,), device=device)
        trained = labels if step.mode == "training" else None
        run = torch_network.torch_step(module, x, trained, step.dtype, COMPILE_MODES[rival])
        for _ in range(WARM_UP_STEPS):
            run()
        return run

    return bind


def torchvision_module(name: str) -> Any:
    """Return a network of `TORCHVISION` with random parameters, on the CPU."""
    import torch
    import torchvision

    builder, options = TORCHVISION[name]
    module = getattr(torchvision.models, builder)(**options)
    if name in TRANSFORMERS:
        # torchvision sets this weight to 0. Gradients would be 0, and a GPU is faster on zeros than on random data.
        torch.nn.init.trunc_normal_(module.heads.head.weight, std=0.02)
    return module


def tuned(name: str, mode: str, dtype: str, library: str, session: Session) -> dict[str, Any]:
    """Return the result of autotune, and one of every size around the recommended batch size."""
    import cubatch as cb

    name, most = _sized(name, None, session)
    options: dict[str, Any] = {"mode": mode, "dtype": dtype, "device": "cuda", "library": library, "store": False}
    budget = max(2.0, session.seconds_left() / 2)
    result = cb.autotune(name, budget=min(6.0, budget), max_batch_size=most, **options)
    best = result.batch_size or 1
    largest = result.largest_batch_size or best
    steps = {max(1, round(best * 2 ** (step / 6))) for step in range(-9, 10)}
    sizes = sorted({size for size in steps | {best - 1, best, best + 1} if 1 <= size <= largest})
    swept = cb.autotune(name, batch_sizes=sizes, budget=min(8.0, max(2.0, session.seconds_left())), **options)
    return {"found": result.to_mapping(), "swept": swept.to_mapping()}


def _sized(name: str, batch_size: int | None, session: Session) -> tuple[str, int | None]:
    """Return the network and the batch size that run: the given ones (None: no size), or small ones in a rehearsal."""
    return (cases.NETWORK, cases.BATCH_SIZE) if session.small else (name, batch_size)


def _runner(name: str, session: Session, **options: Any) -> Any:
    from cubatch.measure.network_runner import network_runner

    spec = models.build(name).to_mapping()
    return network_runner(spec=spec, device=f"cuda:{session.device.index}", recompute=False, seed=0, **options)

"""
autotune(): the whole walk, top to bottom.

Each line of the walk takes records and returns records; no step calls back into an earlier one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from cubatch import checks, sqlite_file
from cubatch.errors import EnergyNotAvailable, InvalidArgument, StoreError
from cubatch.estimate import on_sms, roofline
from cubatch.hardware import arithmetic, load, probe, room
from cubatch.hardware.facts import Device
from cubatch.measure import clocks, kernel_choice
from cubatch.measure.callable_runner import CallableRunner
from cubatch.measure.conditions import conditions, environment
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Recorder
from cubatch.measure.runner import FactoryRef, RunnerFactory
from cubatch.memory import fit, parts
from cubatch.memory.plan import plan
from cubatch.network import models
from cubatch.network.graph import Spec, as_network
from cubatch.network.layer import Layer
from cubatch.network.models import SpecLike
from cubatch.search import walk
from cubatch.tuning import answer as answers
from cubatch.tuning import ladder, store
from cubatch.tuning.results import TuningResult

# On the CPU a plan above this share of the limit could take the user's process with it.
_ISOLATE_SHARE = 0.25
# Timing kernel variants takes at most this share of the budget.
_CHOICE_SHARE = 1 / 3


def autotune(
    layer_spec: SpecLike,
    *,
    device: Device | str | None = None,
    mode: str = "inference",
    dtype: str = "float32",
    objective: str = "throughput",
    tolerance: float = 0.01,
    batch_sizes: Iterable[int] | None = None,
    max_batch_size: int | None = None,
    memory_limit: int | str | None = None,
    latency_limit: float | None = None,
    optimizer: str = "sgd",
    library: str = "auto",
    recompute: bool = False,
    budget: float = 60.0,
    isolate: bool | str = "auto",
    store: bool | str | Path = True,  # noqa: A002, RUF100 - the contract's name
    seed: int = 0,
    progress: Callable[[walk.Event], None] | None = None,
) -> TuningResult:
    """
    Find the batch size at which a layer or network really runs fastest on a device, and say why.

    The candidates come from the device and the layers (`candidates`) and are bounded by the computed memory plan
    (`footprint`).  A few widely spaced ones are timed first, then whichever promises most for its seconds, also sizes
    between them, until the answer is known.  It is the smallest size whose median is within `tolerance` of the best;
    for latency the largest within it of the lowest.

    Args:
        layer_spec: A layer, a Network, a mapping, a model's name or a path to a .toml or .json file.
        device: None: the first GPU, else the CPU. "cpu", "cuda", "cuda:1", or a Device that is present.
        mode: "inference", or "training": forward, backward and optimiser step.
        dtype: "float32", "tf32" (sm_80 on), "float16", "bfloat16"; the CPU takes float32 only. 16-bit types are
            storage: sums are float32, training steps float32 master weights, and float16 scales its loss. Where
            there are no Tensor Cores for them, products are float32 too, and the result says so.
        objective: "throughput", "latency" or "energy" (samples per joule).
        tolerance: Share of the best that may be given up for a smaller batch.
        batch_sizes: Measure exactly these, each at least once if the budget holds it.
        max_batch_size: Propose nothing larger.
        memory_limit: Bytes, "8GiB", or "80%" of the free memory; never more than is free.
        latency_limit: Seconds that a step may take.
        optimizer: "sgd", "momentum" or "adam", in training.
        library: "cubatch": our kernels, on a GPU only; "im2col": the vendor's GEMM through CuPy, or NumPy's
            BLAS, in float32 only. "auto" is the first on a GPU and the second on the CPU; the result says which.
        recompute: Forget activations and compute them again in the backward pass.
        budget: Seconds of measuring, at most: it ends sooner where the answer is known. What the very first step
            takes, which may load and compile, does not count; the last step that is begun may exceed it.
        isolate: Measure in a worker process that may die: True, False, or "auto": on a GPU, and on the CPU
            if a candidate's plan exceeds a quarter of the limit.
        store: Keep timings and reuse them: True, False, a path, or "refresh" to start over: what was timed of this
            question, and which kernels won on this GPU, is forgotten.
        seed: Draws parameters, data and the order of the sweeps.
        progress: Called with a `profiler.Event` after everything that happens.

    Returns:
        TuningResult: `batch_size` is the answer, `reasons` say why, `measurements` hold every candidate.

    Raises:
        InvalidArgument: If an argument makes no sense; its children name a spec, name or dtype.
        DoesNotFit: If not even one sample fits (also a MemoryError).
        UnsupportedLayer: If the engine cannot run one of the layers.
        DeviceNotAvailable: If the device is not in this machine.
        NothingMeasured: If no candidate could be measured; says how they ended.
        KeyboardInterrupt: As it came; what was measured is kept, and `partial` on it holds the result so far.

    Example:
        >>> result = autotune("mlp", device="cpu", batch_sizes=[8, 16], budget=2.0, store=False)
        >>> result.batch_size in {8, 16}
        True
    """
    spec, found = models.resolve(layer_spec), probe.resolve(device)
    arithmetic.check_dtype(found, dtype)
    _check(budget, seed, progress, tolerance=tolerance, latency_limit=latency_limit)
    _check_choices(isolate=isolate, recompute=recompute, store=store)
    goal = Goal(objective=objective, tolerance=tolerance, latency_limit=latency_limit)
    library = arithmetic.resolve_library(library, found, dtype)
    if objective == "energy" and found.kind == "cpu":
        raise EnergyNotAvailable(str(found))
    if max_batch_size is not None:
        max_batch_size = checks.check_batch_size(max_batch_size, "max_batch_size")
    asked = _sizes(batch_sizes, max_batch_size)
    shape: dict[str, Any] = {
        "mode": mode,
        "dtype": dtype,
        "optimizer": optimizer,
        "library": library,
        "recompute": recompute,
    }
    parts.footprint(spec, batch_size=1, device=found, **shape)  # words that mean nothing never reach the store
    identity = shape | {
        "spec": spec.to_mapping(),
        "device": found.uuid or found.name,
        "mig": found.mig,
        "objective": objective,
        "tolerance": tolerance,
        "batch_sizes": asked,
        "max_batch_size": max_batch_size,
        "memory_limit": memory_limit,
        "latency_limit": latency_limit,
        "seed": seed,
    }
    limit = room.memory_limit(found, memory_limit)
    # What cannot run at all never reaches the store.
    _check_layers(spec)
    fitting = fit.max_batch_size(spec, max(1, limit.bytes), device=found, **shape)
    with _open(store, identity, conditions(found), budget) as run:
        run.notes += [*_notes(found, dtype), *limit.told()]
        winners = _winners(store) if library == "cubatch" else None
        # Here, once: a worker that dies leaves its own to the next one. Who measures unkept takes them from nobody.
        if store == "refresh" and winners is not None and run.is_kept:
            run.notes += _forgotten(winners, found)
        if run.ladder is None:
            largest: int | None
            steps, largest = ladder.within(
                spec, found, room=limit.bytes, max_batch_size=max_batch_size, batch_sizes=asked, **shape
            )
            steps = ladder.timed(steps, spec, found, mode=mode, dtype=dtype, library=library, recompute=recompute)
            run.save_ladder(steps, {"memory_bytes": limit.bytes, "largest_batch_size": largest, "note": limit.note})
            memory_bytes = limit.bytes
        else:
            steps = [_refused(candidate, limit.bytes) for candidate in run.ladder]
            memory_bytes, largest = limit.bytes, fitting
            if run.limit is not None and steps == [*run.ladder]:  # nothing is refused that was not
                memory_bytes, largest = run.limit["memory_bytes"], run.limit["largest_batch_size"]
        factory = FactoryRef(
            "cubatch.measure.network_runner:network_runner",
            {
                "spec": spec.to_mapping(),
                "device": "cpu" if found.kind == "cpu" else f"cuda:{found.index}",
                "mode": mode,
                "dtype": dtype,
                "optimizer": optimizer,
                "library": library,
                "recompute": recompute,
                "seed": seed,
                "choice_seconds": _CHOICE_SHARE * budget,
                "winners": None if winners is None else str(winners),
            },
        )
        isolated = _is_isolated(isolate, found, steps, limit.bytes)

        def extend(size: int) -> Candidate:
            planned = plan(spec, batch_size=size, device=found, **shape).total
            added = attrs.evolve(ladder.between(size, steps), predicted_peak_bytes=planned)
            return ladder.timed([added], spec, found, mode=mode, dtype=dtype, library=library, recompute=recompute)[0]

        measure = functools.partial(
            walk.measure_in_worker if isolated else walk.measure,
            extend=None if asked else extend,
            # What does not divide among the threads of a CPU leaves some of them idle.
            multiple=arithmetic.tensor_core_multiple(found, dtype)
            or (found.threads if found.kind == "cpu" else None)
            or 1,
        )
        setting = {
            "spec": spec.to_mapping(),
            "input_shape": list(as_network(spec).input_shape),
            **shape,
            "limits": {
                "max_batch_size": max_batch_size,
                "memory_bytes": memory_bytes,
                "latency_seconds": latency_limit,
            },
            "budget_seconds": budget,
            "seed": seed,
            "l2": _l2(spec, steps, found, shape),
            "device": _device(found, limit.free_bytes),
            "environment": environment(found),
        }

        def answer(measured: Measured, **more: Any) -> TuningResult:
            rungs = [*steps, *measured.added]
            sizes, rows = [rung.batch_size for rung in rungs], {}
            if library == "cubatch":  # now, so that what won in this run is known
                chosen = kernel_choice.kept_choice(found, winners)
                rows = on_sms.layer_rows(spec, sizes, found, mode=mode, dtype=dtype, recompute=recompute, choose=chosen)
            return answers.answer(
                rungs,
                measured,
                goal=goal,
                setting=setting,
                largest_batch_size=largest,
                asked=asked is not None,
                flops_per_sample=spec.flops(mode),
                roofline_seconds={
                    size: seconds
                    for size in sizes
                    if (seconds := roofline.roofline_seconds(spec, size, found, mode, dtype)) is not None
                },
                layers=rows,
                **more,
            )

        measured = _measured(measure, factory, steps, run, goal, budget, seed, progress, answer, found.threads or 1)
        return answer(measured, notes=run.notes)


def autotune_callable(
    make_step: Callable[[int], Callable[[], object]],
    *,
    max_batch_size: int,
    device: Device | str | None = None,
    memory_limit: int | str | None = None,
    objective: str = "throughput",
    tolerance: float = 0.01,
    latency_limit: float | None = None,
    batch_sizes: Iterable[int] | None = None,
    budget: float = 60.0,
    seed: int = 0,
    progress: Callable[[walk.Event], None] | None = None,
) -> TuningResult:
    """
    Find the fastest batch size of anything that can be called: CuPy, PyTorch, NumPy, or your own.

    It is timed in this process, with CUDA events of CuPy or PyTorch, whichever is loaded and has a
    GPU; with neither by the host's clock, so a step must then return only when it is done.  Nothing
    is stored: a callable has no name that would still mean the same tomorrow.

    Args:
        make_step: make_step(n) prepares a step of batch size n and returns it: a callable without
            arguments that enqueues one step on the current stream.
        max_batch_size: The largest size to try; there is no plan that could know it.
        device: What the result says it ran on; None is the first GPU, else the CPU.
        memory_limit: A step that makes CuPy or PyTorch hold more than this counts as out of memory.
        objective, tolerance, latency_limit, batch_sizes, budget, seed, progress: As for `autotune`.

    Returns:
        TuningResult: As from `autotune`; what only a plan could know is None.

    Raises:
        InvalidArgument: If an argument makes no sense.
        NothingMeasured: If no size could be measured.

    Example:
        NumPy, as it stands:

        >>> import numpy as np
        >>> def make_step(n):
        ...     x, w = np.ones((n, 64)), np.ones((64, 64))
        ...     return lambda: x @ w
        >>> result = autotune_callable(make_step, max_batch_size=8, device="cpu", budget=5.0)
        >>> result.largest_measured
        8

        CuPy:

        >>> def make_step(n):                                                     # doctest: +SKIP
        ...     x, w = cupy.random.rand(n, 4096), cupy.random.rand(4096, 4096)
        ...     return lambda: x @ w

        PyTorch, a training step:

        >>> def make_step(n):                                                     # doctest: +SKIP
        ...     x = torch.randn(n, 3, 224, 224, device="cuda")
        ...     y = torch.randint(1000, (n,), device="cuda")
        ...     def step():
        ...         optimizer.zero_grad(set_to_none=True)
        ...         torch.nn.functional.cross_entropy(model(x), y).backward()
        ...         optimizer.step()
        ...     return step
    """
    if not callable(make_step):
        raise InvalidArgument("make_step", make_step, "callable: make_step(n) gives a step of batch size n")
    found = probe.resolve(device)
    _check(budget, seed, progress, tolerance=tolerance, latency_limit=latency_limit)
    goal = Goal(objective=objective, tolerance=tolerance, latency_limit=latency_limit)
    limit = room.memory_limit(found, memory_limit)
    asked = _sizes(batch_sizes, checks.check_batch_size(max_batch_size, "max_batch_size"))
    steps = ladder.plain_candidates(max_batch_size, batch_sizes=asked)
    setting = {
        "limits": {
            "max_batch_size": max_batch_size,
            "memory_bytes": None if memory_limit is None else limit.bytes,
            "latency_seconds": latency_limit,
        },
        "budget_seconds": budget,
        "seed": seed,
        "l2": "warm",
        "device": _device(found, limit.free_bytes),
        "environment": environment(found),
    }

    def answer(measured: Measured, **more: Any) -> TuningResult:
        rungs = [*steps, *measured.added]
        return answers.answer(rungs, measured, goal=goal, setting=setting, asked=asked is not None, **more)

    measure = functools.partial(walk.measure, extend=None if asked else functools.partial(ladder.between, steps=steps))
    with store.open_run(None, identity={}, conditions={}, budget=budget) as run:
        factory = functools.partial(CallableRunner, make_step, limit.bytes if memory_limit is not None else None)
        measured = _measured(measure, factory, steps, run, goal, budget, seed, progress, answer, found.threads or 1)
    if isinstance(clocks.callable_clock(), clocks.EventClock):
        return answer(measured, notes=run.notes)
    notes = [*run.notes, "Timed by the host's clock: no library with CUDA events is loaded and has a GPU."]
    if memory_limit is not None:
        notes.append("memory_limit was not watched: no library that says what it holds is loaded and has a GPU.")
    return answer(measured, notes=notes)


def _measured(
    measure: Callable[..., Measured],
    factory: RunnerFactory,
    steps: Sequence[Candidate],
    run: store.Run,
    goal: Goal,
    budget: float,
    seed: int,
    progress: Callable[[walk.Event], None] | None,
    answer: Callable[..., TuningResult],
    threads: int,
) -> Measured:
    """Measure what is not kept yet, and note who else was busy; on Ctrl-C hand out what there is."""
    if run.finished:
        run.notes.append("Answered from the store, nothing was measured now; --fresh (store='refresh') measures anew.")
        return run.kept
    recorder, before = Recorder(run.kept, run), load.snapshot()
    try:
        measured = measure(
            factory, steps, goal=goal, kept=run.kept, keep=recorder, budget=budget, seed=seed, progress=progress
        )
    except (KeyboardInterrupt, SystemExit) as stop:
        stop.partial = answer(recorder.measured, notes=run.notes, partial=True)  # type: ignore[union-attr]
        raise
    met = load.between(before, load.snapshot())
    run.notes += [sentence] if met is not None and (sentence := met.sentence(threads)) else []
    run.finish()
    return measured


def _notes(device: Device, dtype: str) -> list[str]:
    """Say what a dtype means on this device, where it is not what its name promises."""
    if dtype == "float32" or arithmetic.has_tensor_cores(device, dtype) is not False:
        return []
    return [f"{device} has no Tensor Cores for {dtype}: it is how numbers are stored, arithmetic is float32."]


def _open(place: bool | str | Path, identity: Mapping[str, Any], held: Mapping[str, Any], budget: float) -> store.Run:  # noqa: FBT001
    """Open the run that `store=` means."""
    if place is False:
        return store.open_run(None, identity=identity, conditions=held, budget=budget)
    path = sqlite_file.default_path() if place is True or place == "refresh" else Path(place)
    return store.open_run(path, identity=identity, conditions=held, budget=budget, refresh=place == "refresh")


def _winners(place: bool | str | Path) -> Path | None:  # noqa: FBT001
    """Say in which file the variants that won are kept: beside the store, so that no store is no file."""
    if place is False:
        return None
    return kernel_choice.path_beside(sqlite_file.default_path() if place is True or place == "refresh" else Path(place))


def _forgotten(winners: Path, device: Device) -> list[str]:
    """Forget which variants won on a GPU; a file that cannot be used is a sentence of the result."""
    try:
        kernel_choice.forget(winners, device)
    except StoreError as error:
        return [f"Kernel choices of earlier runs could not be forgotten: {error}"]
    return []


def _check(budget: float, seed: int, progress: object, **numbers: float | None) -> None:
    """Check what `autotune` and `autotune_callable` share; how large other numbers may be, Goal checks."""
    if not _is_number(budget) or not 0 < budget < float("inf"):
        raise InvalidArgument("budget", budget, "a positive number of seconds")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InvalidArgument("seed", seed, "a whole number, at least 0")
    if progress is not None and not callable(progress):
        raise InvalidArgument("progress", progress, "callable, or None")
    for name, value in numbers.items():
        if not _is_number(value) and not (value is None and name == "latency_limit"):
            raise InvalidArgument(name, value, "a number")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_choices(*, isolate: object, recompute: object, store: object) -> None:
    if not (isinstance(isolate, bool) or isolate == "auto"):
        raise InvalidArgument("isolate", isolate, 'True, False or "auto"')
    if not isinstance(recompute, bool):
        raise InvalidArgument("recompute", recompute, "True or False")
    if not isinstance(store, bool | str | Path):
        raise InvalidArgument("store", store, 'True, False, "refresh" or a path')


def _sizes(batch_sizes: Iterable[int] | None, top: int | None) -> list[int] | None:
    """Read a list of batch sizes, each once and ascending; None is no list."""
    return None if batch_sizes is None else [step.batch_size for step in ladder.asked_for(batch_sizes, top)]


def _check_layers(spec: Spec) -> None:
    """Refuse a layer that the engine cannot run before anything is measured."""
    from cubatch.engine import layers

    for node in as_network(spec).nodes:
        layers.check(node.layer, node.name)


def _refused(candidate: Candidate, limit: int) -> Candidate:
    """Mark a kept candidate whose plan no longer fits."""
    planned = candidate.predicted_peak_bytes
    return attrs.evolve(candidate, over_limit=candidate.over_limit or (planned is not None and planned > limit))


def _is_isolated(isolate: bool | str, device: Device, steps: Sequence[Candidate], limit: int) -> bool:  # noqa: FBT001
    """Decide once for all candidates whether they run in a worker."""
    if isolate != "auto":
        return bool(isolate)
    planned = max((step.predicted_peak_bytes or 0 for step in steps if not step.over_limit), default=0)
    return device.kind == "cuda" or planned > _ISOLATE_SHARE * limit


def _l2(spec: Spec, steps: Sequence[Candidate], device: Device, shape: Mapping[str, Any]) -> str:
    """Say whether the smallest candidate finds its input in the L2 from the step before."""
    if not isinstance(spec, Layer) or not steps or not device.l2_bytes:
        return "warm"
    laid_out = plan(spec, batch_size=steps[0].batch_size, device=device, **shape)
    return "cold" if laid_out.total - laid_out.fixed_bytes >= 2 * device.l2_bytes else "warm"


def _device(found: Device, free_bytes: int | None) -> dict[str, Any]:
    """Give the facts of the device as the result's JSON has them."""
    names = (
        "name", "kind", "compute_capability", "num_sms", "uuid", "mig", "memory_bytes", "power_limit_watts", "threads"
    )  # fmt: skip
    facts = found.to_mapping()
    return {name: facts[name] for name in names} | {"free_bytes": free_bytes}

"""
autotune(): the whole walk, top to bottom.

Each line of the walk takes records and returns records; no step calls back into an earlier one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from cubatch import checks
from cubatch.choices import Dtype, Measurable, Mode, Objective, Optimizer
from cubatch.engine import layers
from cubatch.engine.conditions import conditions
from cubatch.errors import InvalidArgument, StoreError
from cubatch.hardware import arithmetic, host, probe, quota
from cubatch.hardware import room as hardware_room
from cubatch.hardware.facts import Device
from cubatch.hardware.room import MemoryLimit
from cubatch.measure import clocks, kernel_choice
from cubatch.measure.callable_runner import CallableRunner
from cubatch.measure.goal import Goal
from cubatch.measure.records import Measured, Recorder
from cubatch.memory import fit
from cubatch.network.graph import as_network
from cubatch.network.models import SpecLike
from cubatch.search import walk
from cubatch.tuning import progress as progresses
from cubatch.tuning import runners, store, tune_devices, turns
from cubatch.tuning import story as stories
from cubatch.tuning.ladder import Ladder, added, between, plain, propose, timed
from cubatch.tuning.limits import Limits
from cubatch.tuning.results import TuningResult
from cubatch.tuning.story import Story
from cubatch.workload import Workload


def autotune(
    layer_spec: SpecLike,
    *,
    device: Device | str | None = None,
    devices: int | Sequence[Device | str] | None = None,
    mode: Mode = "inference",
    dtype: Dtype = "float32",
    objective: Objective = "throughput",
    tolerance: float = 0.01,
    batch_sizes: Iterable[int] | None = None,
    max_batch_size: int | None = None,
    memory_limit: int | str | None = None,
    latency_limit: float | None = None,
    optimizer: Optimizer = "sgd",
    library: Measurable = "auto",
    recompute: bool = False,
    budget: float = 60.0,
    sweeps: int | None = None,
    isolate: bool | str = "auto",
    store: bool | str | Path = True,  # noqa: A002, RUF100 - the contract's name
    seed: int = 0,
    progress: Callable[[walk.Event], None] | None = None,
) -> TuningResult:
    """
    Find the batch size at which a layer or network really runs fastest on a device, and say why.

    The candidates come from the device and the layers (`candidates`) and are bounded by the computed memory plan
    (`footprint`).  A few far apart are timed first, then whichever promises most for its seconds, also sizes between,
    until the answer is known: the smallest whose median is within `tolerance` of the best, by latency the largest.

    Args:
        layer_spec: A layer, a Network, a mapping, a model's name or a path to a .toml or .json file.
        device: None: the first GPU, else the CPU. "cpu", "cuda", "cuda:1", or a Device that is present.
        devices: Several that share a training step: how many, or a list of them. Sizes and rates are then those of one,
            the slowest one's time and the fullest one's memory count, and `data_parallel` says what sharing costs.
        mode: "inference", or "training": forward, backward and optimiser step.
        dtype: "float32", "tf32" (sm_80 on), "float16", "bfloat16"; the CPU takes float32 only. 16-bit types are
            storage: sums are float32, training steps float32 master weights, and float16 scales its loss. Without
            Tensor Cores for them products are float32 too, and the result says so.
        objective: "throughput", "latency" or "energy" (samples per joule).
        tolerance: Share of the best that may be given up for a smaller batch.
        batch_sizes: Measure exactly these, each at least once if the budget holds it.
        max_batch_size: Propose nothing larger.
        memory_limit: Bytes, "8GiB", or "80%" of the free memory; never more than is free.
        latency_limit: Seconds that a step may take.
        optimizer: "sgd", "momentum" or "adam", in training.
        library: "cubatch": our kernels, on a GPU only; "im2col": the vendor's GEMM through CuPy, or NumPy's
            BLAS, in float32 only. "auto" is the first on a GPU and the second on the CPU; the result says which.
            "onnxruntime": ONNX Runtime, of an .onnx file, inference only; its sizes are bounded as for
            `autotune_module`, and the batch of a file that has it fixed is made open.
        recompute: Forget activations and compute them again in the backward pass.
        budget: Seconds of measuring, at most: it ends sooner where the answer is known. What the very first step
            takes, which may load and compile, does not count, nor the first hang; the last step that is begun may
            exceed it.
        sweeps: Compare instead of searching: visit each of `batch_sizes` so often, in shuffled sweeps, budget allowing.
        isolate: Measure in a process that may die: True, False, "auto": on a GPU, or for plans above 1/4 of the limit.
        store: Keep timings and reuse them: True, False, a path, or "refresh" to start over: what was timed of this
            question, and which kernels won on this GPU, is forgotten.
        seed: Draws parameters, data and the order of the sweeps.
        progress: Called with a `search.walk.Event` after everything that happens. None shows a bar in a notebook.

    Returns:
        TuningResult: `batch_size` is the answer, `reasons` say why, `measurements` hold every candidate.

    Raises:
        InvalidArgument: If an argument makes no sense; its children name a spec, name or dtype.
        DoesNotFit: If not even one sample fits (also a MemoryError).
        UnsupportedLayer: If the engine cannot run one of the layers.
        DeviceNotAvailable: If the device is not in this machine.
        EnergyNotAvailable: If the objective is energy, and the device a CPU or one whose energy cannot be read.
        NothingMeasured: If no candidate could be measured; says how they ended.
        KeyboardInterrupt, or what `progress` raises: As it came; what was measured is kept, and `partial` on it holds
            the result so far. `is_kept` on it is False where there is no store, or it could not be written.

    Example:
        >>> result = autotune("mlp", device="cpu", batch_sizes=[8, 16], budget=2.0, store=False)
        >>> result.batch_size in {8, 16}
        True
    """
    # The question: whatever makes no sense is refused here, before the store is opened.
    goal = Goal.of(objective=objective, tolerance=tolerance, latency_limit=latency_limit)
    limits = Limits.of(batch_sizes, max_batch_size, budget=budget, seed=seed, sweeps=sweeps)
    if library == "onnxruntime":
        from cubatch.tuning.tune_onnxruntime import tune_file

        return tune_file(
            layer_spec, device, devices=devices, mode=mode, dtype=dtype, recompute=recompute, isolate=isolate,
            goal=goal, limits=limits, memory_limit=memory_limit, store=store, progress=progress,
        )  # fmt: skip
    parts = tune_devices.sharing(devices, device, mode)
    work = Workload.of(
        layer_spec, parts[0] if parts else device, mode=mode, dtype=dtype, optimizer=optimizer, library=library,
        recompute=recompute, present=True,
    )  # fmt: skip
    _check_choices(work, parts or [work.device], goal, isolate=isolate, place=store, progress=progress)
    tune_devices.check(work, parts, isolate=isolate)
    room = tune_devices.memory_limit(parts, work.device, memory_limit)

    with _open(store, work, parts, goal, limits, memory_limit, room) as run:
        run.notes += [*_notes(work), *room.told()]
        winners = _winners(store, run, work)

        # The candidates: those of an earlier call again, or new ones.  What is finished is told as it was measured.
        ladder = _kept_ladder(run)
        if ladder is None or not run.finished:
            largest = fit.largest(work, max(1, room.bytes))
            ladder = ladder.within(room, largest) if ladder else timed(work, propose(work, limits, room, largest))
            facts = {"memory_bytes": ladder.memory_bytes, "largest_batch_size": ladder.largest, "note": room.note}
            run.save_ladder(ladder.candidates, {**(run.limit or {}), **facts})

        # The timings: visits until the answer is known, here or in a worker that may die.
        story = stories.of_network(work, goal, limits, room, ladder, winners, parts)
        factory = runners.factory(work, limits, winners, parts)
        is_isolated = parts is not None or runners.is_isolated(isolate, work.device, ladder, room)
        measure = functools.partial(
            walk.measure,
            runners.isolated(factory, limits) if is_isolated else factory,
            extend=None if limits.batch_sizes else functools.partial(added, work, ladder),
            multiple=story.multiple,
        )
        measured = measured_by(measure, story, run, progress, work.device)

        # The answer, and why.
        return tune_devices.with_exchange(story.answer(measured, run), run, factory, parts, limits)


def autotune_callable(
    make_step: Callable[[int], Callable[[], object]],
    *,
    max_batch_size: int,
    device: Device | str | None = None,
    memory_limit: int | str | None = None,
    objective: Objective = "throughput",
    tolerance: float = 0.01,
    latency_limit: float | None = None,
    batch_sizes: Iterable[int] | None = None,
    budget: float = 60.0,
    seed: int = 0,
    progress: Callable[[walk.Event], None] | None = None,
) -> TuningResult:
    """
    Find the fastest batch size of anything that can be called: CuPy, PyTorch, NumPy, JAX, or your own.

    It is timed in this process, with CUDA events of CuPy or PyTorch, whichever is loaded and has a
    GPU; with neither by the host's clock, so a step must then return only when it is done, or return what it computes:
    `block_until_ready` of the last step's result, or of what is in its tuples, lists, dictionaries and, where JAX is
    loaded, trees of JAX's, is called before the clock is read.  A step that never comes back is not ended, only told of
    after half a minute, as nothing but Ctrl-C could end it, and a size whose steps are long may take the whole budget.
    Nothing is stored: a callable has no name that would still mean the same tomorrow.

    Args:
        make_step: make_step(n) prepares a step of batch size n and returns it: a callable without
            arguments that enqueues one step on the current stream.
        max_batch_size: The largest size to try; there is no plan that could know it.
        device: Where it runs, CuPy's and PyTorch's current device meanwhile; None leaves them theirs, and the result
            says the first GPU, else the CPU.
        memory_limit: A step that makes CuPy and PyTorch hold more than this counts as out of memory.
        objective, tolerance, latency_limit, batch_sizes, budget, seed, progress: As for `autotune`.

    Returns:
        TuningResult: As from `autotune`; what only a plan could know is None.

    Raises:
        InvalidArgument: If an argument makes no sense.
        EnergyNotAvailable: As from `autotune`.
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
    goal = Goal.of(objective=objective, tolerance=tolerance, latency_limit=latency_limit)
    limits = Limits.of(batch_sizes, checks.check_batch_size(max_batch_size, "max_batch_size"), budget=budget, seed=seed)
    check_progress(progress)
    if device is not None or found.kind == "cpu":  # else it is the library's own that is timed
        goal.check_device(found)
    room = hardware_room.memory_limit(found, memory_limit)
    watched = None if memory_limit is None else room.bytes
    index = None if device is None or found.kind == "cpu" else found.index
    ladder = Ladder(tuple(plain(limits)), None, watched)
    story = stories.of_callable(found, goal, limits, room, ladder)
    measure = functools.partial(
        walk.measure,
        functools.partial(CallableRunner, make_step, watched, index),
        extend=None if limits.batch_sizes else functools.partial(between, steps=ladder.candidates),
    )
    with store.open_run(None, identity={}, conditions={}, budget=budget) as run:
        measured = measured_by(measure, story, run, progress, found)
    if not isinstance(clocks.callable_clock(), clocks.EventClock):
        run.notes.append(
            "Timed by the host's clock: no library with CUDA events is loaded and has a GPU. A step ends when it "
            "returns, or when block_until_ready of what it returned does."
        )
        if watched is not None:
            run.notes.append(
                "memory_limit was not watched: no library that says what it holds is loaded and has a GPU."
            )
    return story.answer(measured, run)


def measured_by(
    measure: Callable[..., Measured],
    story: Story,
    run: store.Run,
    progress: Callable[[walk.Event], None] | None,
    device: Device,
    worker_pid: int | None = None,
) -> Measured:
    """
    Measure what is not kept yet, and note who else was busy; on Ctrl-C hand out what there is.

    What was kept from a busy machine is not mixed with what a quiet one shows: the sizes read again would win.
    """
    before = [f'While timings that are kept were taken: "{sentence}"' for sentence in run.disturbed]
    if run.finished:
        answered = f"Answered from the store, nothing was measured now; {run.anew}."
        run.caveats += [answered, *before]
        return run.kept
    if before and not run.was_begun_anew and turns.is_quiet(device):
        run.begin_anew()
        before = ["What was kept from a busy machine does not count: it is quiet now, and all is measured anew."]
    elif before:
        before.append(f"This run went on with them; {run.anew}.")
    run.caveats += before
    recorder, limits = Recorder(run.kept, run), story.limits
    with (
        story.told_on_interrupt(recorder, run),
        _others_told(run, device, worker_pid),
        progresses.shown(progress) as told,
    ):
        measured = measure(
            story.ladder.candidates, goal=story.goal, kept=run.kept, keep=recorder, budget=limits.budget,
            seed=limits.seed, sweeps=limits.sweeps, progress=told, on_host=device.kind == "cpu",
        )  # fmt: skip
    run.finish()
    return measured


@contextlib.contextmanager
def _others_told(run: store.Run, device: Device, worker_pid: int | None) -> Iterator[None]:
    """Have the turn to measure, tell and keep who else was busy, and tell of a quota, which stays, however it ends."""
    met: list[str] = []
    periods = host.cpu_periods()
    try:
        with turns.alone(device, worker_pid) as met:
            run.save_disturbed(met)  # who measures here now is known also after a kill
            yield
    finally:
        run.save_disturbed(met)
        held_up = quota.held_up(periods, host.cpu_periods())
        run.caveats += [*met, *([held_up] if held_up else [])]


def _notes(work: Workload) -> list[str]:
    """Say what a dtype means on this device, where it is not what its name promises."""
    if work.dtype == "float32" or arithmetic.has_tensor_cores(work.device, work.dtype) is not False:
        return []
    return [f"{work.device} has no Tensor Cores for {work.dtype}: it is how numbers are stored, arithmetic is float32."]


def _open(
    place: bool | str | Path,  # noqa: FBT001
    work: Workload,
    parts: Sequence[Device] | None,
    goal: Goal,
    limits: Limits,
    memory_limit: int | str | None,
    room: MemoryLimit,
) -> store.Run:
    """Open the run that `store=` means, under all that its timings depend on."""
    identity = work.settings | {
        "spec": work.spec.to_mapping(),
        "device": work.device.uuid or work.device.name,
        "mig": work.device.mig,
        **attrs.asdict(goal),
        **limits.identity,
        "memory_limit": memory_limit,
    }
    if parts is not None:
        identity["devices"] = [part.uuid or part.name for part in parts]
    return store.open_run(
        store.path_of(place), identity=identity, conditions=conditions(work.device), budget=limits.budget,
        memory_bytes=room.bytes, refresh=place == "refresh",
    )  # fmt: skip


def _winners(place: bool | str | Path, run: store.Run, work: Workload) -> Path | None:  # noqa: FBT001
    """
    Say in which file the variants that won are kept: beside the store, so that no store is no file.

    They are forgotten here, once: a worker that dies leaves its own to the next one.  Who measures unkept takes them
    from nobody.
    """
    path = store.path_of(place)
    if path is None or work.library != "cubatch":
        return None
    winners = kernel_choice.path_beside(path)
    if place == "refresh" and run.is_kept:
        try:
            kernel_choice.forget(winners, work.device)
        except StoreError as error:
            run.notes.append(f"Kernel choices of earlier runs could not be forgotten: {error}")
    return winners


def _kept_ladder(run: store.Run) -> Ladder | None:
    """Give the ladder that an earlier call left."""
    if run.ladder is None:
        return None
    limit = run.limit or {"memory_bytes": None, "largest_batch_size": None}
    return Ladder(run.ladder, limit.get("largest_batch_size"), limit.get("memory_bytes"))


def _check_choices(
    work: Workload, devices: Sequence[Device], goal: Goal, *, isolate: object, place: object, progress: object
) -> None:
    """Refuse what these devices, this engine or this function cannot do."""
    if not (isinstance(isolate, bool) or isolate == "auto"):
        raise InvalidArgument("isolate", isolate, 'True, False or "auto"')
    store.check_place(place)
    check_progress(progress)
    for device in devices:
        goal.check_device(device)
    for node in as_network(work.spec).nodes:
        layers.check(node.layer, node.name)


def check_progress(progress: object) -> None:
    """Refuse what cannot be called."""
    if progress is not None and not callable(progress):
        raise InvalidArgument("progress", progress, "callable, or None")

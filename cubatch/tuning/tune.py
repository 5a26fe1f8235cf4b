"""autotune() and autotune_callable(): find the fastest batch size of a network or of any function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cubatch import checks
from cubatch.choices import Dtype, Measurable, Mode, Objective, Optimizer
from cubatch.errors import InvalidArgument
from cubatch.hardware import probe
from cubatch.hardware import room as hardware_room
from cubatch.hardware.facts import Device
from cubatch.network.models import SpecLike
from cubatch.search.events import Event
from cubatch.tuning import session
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.subject import Subject
from cubatch.tuning.subjects.callable_subject import CallableSubject
from cubatch.tuning.subjects.network_subject import NetworkSubject


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
    store: bool | str | Path = True,  # noqa: A002, RUF100 - a public name, see docs/reference/api.md
    seed: int = 0,
    progress: Callable[[Event], None] | None = None,
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
    request = Request.of(
        objective=objective, tolerance=tolerance, latency_limit=latency_limit, batch_sizes=batch_sizes,
        max_batch_size=max_batch_size, budget=budget, seed=seed, sweeps=sweeps, memory_limit=memory_limit,
        store=store, progress=progress,
    )  # fmt: skip
    subject: Subject
    if library == "onnxruntime":
        from cubatch.tuning.subjects.onnx_subject import OnnxSubject

        subject = OnnxSubject.of(
            layer_spec, device, request, devices=devices, mode=mode, dtype=dtype, recompute=recompute, isolate=isolate
        )
    else:
        subject = NetworkSubject.of(
            layer_spec, device, request, devices=devices, mode=mode, dtype=dtype, optimizer=optimizer,
            library=library, recompute=recompute, isolate=isolate,
        )  # fmt: skip
    return session.tune(subject, request)


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
    progress: Callable[[Event], None] | None = None,
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
        raise InvalidArgument("make_step", make_step, "callable: make_step(n) returns a step of batch size n")
    resolved, top = probe.resolve(device), checks.check_batch_size(max_batch_size, "max_batch_size")
    request = Request.of(
        objective=objective, tolerance=tolerance, latency_limit=latency_limit, batch_sizes=batch_sizes,
        max_batch_size=top, budget=budget, seed=seed, memory_limit=memory_limit, store=False, progress=progress,
    )  # fmt: skip
    is_current = device is None and resolved.kind != "cpu"  # the device is the library's own
    if not is_current:
        request.goal.check_device(resolved)
    memory = hardware_room.memory_limit(resolved, memory_limit)
    subject = CallableSubject(
        make_step=make_step, device=resolved, memory=memory,
        watched_bytes=None if memory_limit is None else memory.bytes,
        index=None if device is None or resolved.kind == "cpu" else resolved.index,
    )  # fmt: skip
    return session.tune(subject, request)

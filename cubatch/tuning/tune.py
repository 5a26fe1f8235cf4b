"""autotune() and autotune_callable(): find the fastest batch size of a network or of any function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from cubatch import checks
from cubatch.choices import Dtype, Measurable, Mode, Objective, Optimizer
from cubatch.errors import InvalidArgument
from cubatch.hardware import memory_limit as hardware_memory, probe
from cubatch.hardware.facts import Device
from cubatch.network.models import SpecLike
from cubatch.search.events import Event
from cubatch.tuning import session
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.subject import Subject
from cubatch.tuning.subjects.callable_subject import CallableSubject
from cubatch.tuning.subjects.network_subject import NetworkSubject
from cubatch.user_code import is_torch_module, takes


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
    current: int | None = None,
    multiple_of: int = 1,
    divides: int | None = None,
    memory_limit: int | str | None = None,
    latency_limit: float | None = None,
    optimizer: Optimizer = "sgd",
    library: Measurable = "auto",
    recompute: bool = False,
    dims: Mapping[str, int] | None = None,
    threads: int | None = None,
    budget: float = 60.0,
    sweeps: int | None = None,
    isolate: bool | str = "auto",
    store: bool | str | Path = True,  # noqa: A002, RUF100 - a public name, see docs/reference/api.md
    seed: int = 0,
    progress: Callable[[Event], None] | None = None,
) -> TuningResult:
    """
    Find the batch size at which a layer or network runs fastest on a device.

    The candidates come from the device and the layers (see `candidates`) and are bounded by the memory plan (see
    `footprint`). The search times a few sizes far apart, then sizes from which it expects most, until the expected
    loss of stopping is small.

    Args:
        layer_spec: A layer, a Network, a mapping, a model's name, or a path to a .toml, .json or .onnx file.
        device: None: the first GPU, else the CPU. "cpu", "cuda", "cuda:1", or a Device that is present.
        devices: Devices that share a training step: a number or a list. Sizes and rates are then those of one device;
            the slowest time and the smallest memory count, and `data_parallel` has the cost of sharing.
        mode: "inference", or "training": forward, backward and optimizer step.
        dtype: "float32", "tf32" (sm_80 on), "float16" or "bfloat16"; the CPU takes float32 only. 16-bit types are
            storage: sums are float32, training steps have float32 master weights, and float16 scales its loss. Without
            Tensor Cores for the dtype, products are float32 too; a note in the result reports it.
        objective: "throughput", "latency" or "energy" (samples per joule).
        tolerance: Share of the best value that may be given up for a smaller batch; by latency, for a larger one.
        batch_sizes: Measure exactly these, each at least once if the budget allows it.
        max_batch_size: Propose nothing larger.
        current: The batch size that you use now. It is measured second. It is recommended unless another is better by
            more than the tolerance and the noise, and the first sentence compares with it.
        multiple_of, divides: Propose only sizes that are a multiple of one number, and divide another.
        memory_limit: Bytes, "8GiB", or "80%" of the free memory; never more than is free.
        latency_limit: Longest allowed step in seconds.
        optimizer: "sgd", "momentum" or "adam", in training.
        library: "cubatch": cubatch kernels, on a GPU only. "im2col": the vendor's GEMM through CuPy, or NumPy's BLAS,
            in float32 only. "auto": the first on a GPU, the second on the CPU. "onnxruntime": ONNX Runtime, for an
            .onnx file and inference only; memory is bounded as in `autotune_module`, and a fixed batch axis is made
            symbolic.
        dims: With library="onnxruntime", extents of open axes other than the batch: {"sequence": 128}. The batch is the
            axis whose name begins with "batch", else axis 0 of the first input, unless `dims` has it. Also values of
            integer inputs that decide how much is computed, such as lengths.
        threads: For ONNX Runtime on the CPU, threads of an instance. As many instances as the CPUs allow then run
            at the same time, each bound to CPUs of its own. Sizes and rates are those of one of them.
        recompute: Discard activations and compute them again in the backward pass.
        budget: Time limit of measuring in seconds; the search ends earlier if the answer is known. The very first step,
            which may load and compile code, and the first hang do not count. The last step may exceed it.
        sweeps: Compare instead of search: number of trials of each of `batch_sizes`, in shuffled rounds, within the
            budget. None: search.
        isolate: Measure in a worker process: True, False, or "auto": on a GPU, or for plans above 1/4 of the limit.
        store: Cache timings and reuse them: True, False, a path, or "refresh". The last discards the cached
            timings of this request and the kernel choices of this GPU first.
        seed: Draws parameters, data and the order of rounds.
        progress: Called with a `search.events.Event` after each timing and outcome. None shows a bar in a notebook.

    Returns:
        TuningResult: `batch_size` is the recommendation, `reasons` explain it, `measurements` has every candidate.

    Raises:
        InvalidArgument: If an argument is invalid. Its subclasses are for a spec, an unknown name and a dtype.
        DoesNotFit: If not even one sample fits (also a MemoryError).
        UnsupportedLayer: If the engine cannot run one of the layers.
        DeviceNotAvailable: If the device is not in this machine.
        EnergyNotAvailable: If the objective is energy, and the energy of the device cannot be read.
        NothingMeasured: If no candidate could be measured; the message lists how each ended.
        KeyboardInterrupt, or an exception that `progress` raises: It has the result so far as `partial`, and `is_kept`:
            whether the timings are cached.

    Example:
        >>> result = autotune("mlp", device="cpu", batch_sizes=[8, 16], budget=2.0, store=False)
        >>> result.batch_size in {8, 16}
        True
    """
    request = Request.of(
        objective=objective, tolerance=tolerance, latency_limit=latency_limit, batch_sizes=batch_sizes,
        max_batch_size=max_batch_size, budget=budget, seed=seed, sweeps=sweeps, current=current,
        multiple_of=multiple_of, divides=divides,
        memory_limit=memory_limit, store=store, progress=progress,
    )  # fmt: skip
    checks.check_optimizer(mode, optimizer)
    subject: Subject
    if library == "onnxruntime":
        from cubatch.tuning.subjects.onnx_subject import OnnxSubject

        subject = OnnxSubject.of(
            layer_spec, device, request, devices=devices, mode=mode, dtype=dtype, recompute=recompute,
            isolate=isolate, dims=dims, threads=threads,
        )  # fmt: skip
    else:
        if dims:
            raise InvalidArgument("dims", dims, 'left out unless library="onnxruntime" runs an .onnx file')
        if threads is not None:
            allowed = "left out for a network, which cubatch's own engine runs as one instance"
            remedy = 'An .onnx file (library="onnxruntime") and "package.module:build" of PyTorch run as several.'
            raise InvalidArgument("threads", threads, allowed, remedy)
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
    current: int | None = None,
    multiple_of: int = 1,
    divides: int | None = None,
    budget: float = 60.0,
    seed: int = 0,
    progress: Callable[[Event], None] | None = None,
) -> TuningResult:
    """
    Find the fastest batch size of any function: CuPy, PyTorch, NumPy, JAX, or your own.

    Steps run in this process. They are timed with CUDA events if CuPy or PyTorch is loaded and has a GPU, else by the
    host's clock. By the host's clock a step must return only when it is done, or return its result. Before the clock is
    read, `block_until_ready` is called on the result, or on the items of tuples, lists, dictionaries and JAX trees.
    A step that returns a coroutine, future or iterator is rejected. A step must run one batch. If the largest
    takes less than 0.7 times the seconds of the smallest, there is no recommendation. A step that hangs is not ended; a
    message names it after half a minute, and Ctrl-C ends it. Long steps may take the whole budget. Timings are not
    cached, since a function has no lasting identity.

    Args:
        make_step: make_step(n) prepares a step of batch size n and returns it: a function without arguments that
            enqueues one step on the current stream.
        max_batch_size: The largest size to try; there is no memory plan.
        device: The device, which becomes current in CuPy and PyTorch while steps run. None changes nothing; the result
            then names the first GPU, else the CPU.
        memory_limit: Bytes, "8GiB", or "80%" of the free memory. A step after which CuPy and PyTorch hold more counts
            as out of memory. None: no limit.
        objective, tolerance, latency_limit, batch_sizes, current, multiple_of, divides: As for `autotune`.
        budget, seed, progress: As for `autotune`.

    Returns:
        TuningResult: As from `autotune`; fields that need a plan are None.

    Raises:
        InvalidArgument: If an argument is invalid, or `make_step` returns no function without arguments.
        EnergyNotAvailable: As from `autotune`.
        NothingMeasured: If no size could be measured.

    Example:
        NumPy:

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
    is_usable = callable(make_step) and takes(make_step, 1, follow_wrapped=False)  # a decorator may add arguments
    if not is_usable or is_torch_module(make_step):
        remedy = "Hand a module to autotune_module()." if is_torch_module(make_step) else ""
        allowed = "a function of one argument: make_step(n) returns a step of batch size n"
        raise InvalidArgument("make_step", make_step, allowed, remedy)
    resolved, top = probe.resolve(device), checks.check_batch_size(max_batch_size, "max_batch_size")
    request = Request.of(
        objective=objective, tolerance=tolerance, latency_limit=latency_limit, batch_sizes=batch_sizes,
        max_batch_size=top, current=current, multiple_of=multiple_of, divides=divides,
        budget=budget, seed=seed, memory_limit=memory_limit, store=False,
        progress=progress,
    )  # fmt: skip
    is_current = device is None and resolved.kind != "cpu"  # the device is the library's own
    if not is_current:
        request.goal.check_device(resolved)
    memory = hardware_memory.memory_limit(resolved, memory_limit)
    subject = CallableSubject(
        make_step=make_step, device=resolved, memory=memory,
        watched_bytes=None if memory_limit is None else memory.bytes,
        index=None if device is None or resolved.kind == "cpu" else resolved.index,
    )  # fmt: skip
    return session.tune(subject, request)

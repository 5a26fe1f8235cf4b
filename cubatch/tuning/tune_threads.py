"""autotune_threads(): on a CPU, the number of threads, instances and the batch size that are fastest together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cubatch import checks
from cubatch.errors import InvalidArgument
from cubatch.hardware import host
from cubatch.tuning import tune
from cubatch.tuning.results import TuningResult
from cubatch.tuning.threads_result import ThreadsResult
from cubatch.tuning.tune_each import tune_each
from cubatch.tuning.tune_module import autotune_module


def autotune_threads(
    module: str | Path,
    threads: Iterable[int],
    *,
    batches: Any = None,
    budget: float = 60.0,
    **options: Any,
) -> ThreadsResult:
    """
    Find the threads of an instance, the number of instances and the batch size that are fastest together on the CPU.

    With each number of threads, as many instances as the CPUs allow step at the same time.  Each is a process bound to
    CPUs of its own.  On a CPU single samples in several instances are often as fast as batches.

    Args:
        module: The path of an ONNX file, which runs in ONNX Runtime, or "package.module:build" of a torch.nn.Module.
        threads: Threads of an instance: (1, 2, 4).
        batches: For a module: as for `autotune_module`.
        budget: Seconds of measuring at most, for all numbers of threads together.
        options: The other arguments of `autotune` for an ONNX file, or of `autotune_module`. A memory limit is shared
            by the instances. The objective is the highest rate of all instances; `latency_limit` bounds their steps.

    Returns:
        ThreadsResult: A tuning result for each number of threads, and the best of them.

    Raises:
        InvalidArgument: If an argument is out of range, or does not apply.
        CubatchError: The first error, if no number of threads could be tuned.
        KeyboardInterrupt, or an exception that `progress` raises: `partial` is the ThreadsResult so far.

    Example:
        >>> result = autotune_threads("model.onnx", (1, 2, 4), budget=30.0)            # doctest: +SKIP
        >>> result.threads, result.batch_size, result.reasons[0]                      # doctest: +SKIP
    """
    is_onnx = isinstance(module, str | Path) and Path(module).suffix == ".onnx"
    options, library = {"device": "cpu", **options}, "onnxruntime" if is_onnx else "torch"
    if (given := options.pop("library", library)) != library:
        raise InvalidArgument("library", given, f'"{library}" or left out for {module}')
    checks.check_options(options, tune.autotune if is_onnx else autotune_module)
    if is_onnx:
        if batches is not None:
            raise InvalidArgument("batches", batches, "left out for an ONNX file, whose axes have names")
        tune_file = functools.partial(tune.autotune, module, library="onnxruntime")
        return over_threads(tune_file, threads, budget=budget, **options)
    if not isinstance(module, str):
        allowed = "the path of an ONNX file, or the name of the function that builds a module, 'package.module:build'"
        raise InvalidArgument("module", type(module).__name__, allowed, "Instances run in processes of their own.")
    return over_threads(functools.partial(autotune_module, module, batches), threads, budget=budget, **options)


def over_threads(
    tune_with: Callable[..., TuningResult], threads: Iterable[int], *, budget: float, **options: Any
) -> ThreadsResult:
    """
    Return the result of tuning with each number of threads.

    Args:
        tune_with: A public tuning function, with all other arguments filled in.
        budget: Seconds of measuring at most, for all numbers of threads together.
        options: Further arguments of the function.

    Raises:
        InvalidArgument: If a number of threads or the budget is out of range, or the objective is not throughput.
        CubatchError, KeyboardInterrupt: As for `autotune_threads`.
    """
    checks.check_kind("threads", threads, Iterable, "numbers of threads, such as (1, 2, 4)")
    most = host.cpu_threads()
    counts = sorted({checks.check_whole("threads", each, most=most) for each in threads})
    if not counts:
        raise InvalidArgument("threads", (), "at least one number of threads")
    if (objective := options.get("objective", "throughput")) != "throughput":
        remedy = "The threads are those of the highest rate; a latency limit bounds the time of a step."
        raise InvalidArgument("objective", objective, '"throughput" for several numbers of threads', remedy)
    return tune_each(
        counts,
        lambda count, seconds: tune_with(threads=count, budget=seconds, **options),
        lambda results, failed: ThreadsResult(results=results, failed=failed),
        budget=budget,
    )

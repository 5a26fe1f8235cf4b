"""autotune_extents() and autotune_threads(): tune once for each of several values, with equal shares of one budget."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cubatch import checks
from cubatch.errors import CubatchError, InvalidArgument
from cubatch.frameworks import batch_sources, torch_inputs
from cubatch.hardware import host
from cubatch.tuning import tune
from cubatch.tuning.extents_result import ExtentsResult
from cubatch.tuning.results import TuningResult
from cubatch.tuning.threads_result import ThreadsResult
from cubatch.tuning.tune_module import autotune_module

_Result = TypeVar("_Result")


def autotune_extents(
    module: Any,
    extents: Mapping[str, Iterable[int]],
    *,
    batches: Any = None,
    budget: float = 60.0,
    **options: Any,
) -> ExtentsResult:
    """
    Find the fastest batch size of a PyTorch module or an ONNX file at each of several sequence lengths or resolutions.

    The extents are tuned in descending order, each with an equal share of the budget that is left.  So the largest, if
    it does not fit, leaves its share to the others.  Memory is bounded at each extent.

    Args:
        module: A torch.nn.Module, or the path of an ONNX file, which runs in ONNX Runtime.
        extents: The axis and its extents: {"sequence": (128, 512, 2048)}.
        batches: For a module: a function that makes the inputs of a batch size and an extent,
            `batches(n, sequence=128)`, or its name "package.module:function".  An ONNX file has named axes.
        budget: Seconds of measuring at most, for all extents together.
        options: The other arguments of `autotune_module`, or of `autotune` for an ONNX file.

    Returns:
        ExtentsResult: A tuning result for each extent, the token budget, and `with_lengths` for samples of unequal
            length.

    Raises:
        InvalidArgument: If an argument is out of range, or does not apply. Also if `batches` makes equal inputs
            at the smallest and the largest extent.
        CubatchError: The first error, if no extent could be tuned.
        KeyboardInterrupt, or an exception that `progress` raises: `partial` is the ExtentsResult so far.

    Example:
        >>> def batches(n, sequence):                                                 # doctest: +SKIP
        ...     return torch.randint(0, 1000, (n, sequence))
        >>> result = autotune_extents(model, {"sequence": (128, 512)}, batches=batches) # doctest: +SKIP
        >>> result.batch_sizes, result.token_budget                                   # doctest: +SKIP
    """
    axis, chosen = _only_axis(extents)
    is_onnx = _is_onnx(module, batches, options)
    dims = options.pop("dims", None) or {}
    if is_onnx:
        checks.check_kind("dims", dims, Mapping, "a mapping from names of axes to extents")
        if axis in dims:
            raise InvalidArgument("dims", dims, f"extents of other axes than {axis}, which is tuned")
    else:
        if isinstance(module, str | Path):
            allowed = "a torch.nn.Module or the path of an ONNX file"
            raise InvalidArgument("module", str(module), allowed, "Build the module first, and pass it.")
        batches = batch_sources.load(batches) if isinstance(batches, str) else batches
        if not callable(batches):
            raise InvalidArgument("batches", batches, f"a function batches(n, {axis}=...) that makes the inputs")
        ends = [functools.partial(batches, **{axis: extent}) for extent in (chosen[0], chosen[-1])]
        if len(chosen) > 1 and torch_inputs.are_alike(ends, torch_inputs.DRAWN_SIZES[0]):
            given = f"inputs that are the same at {axis}={chosen[0]} and {axis}={chosen[-1]}"
            raise InvalidArgument("batches", given, f"a function whose inputs depend on {axis}")

    def tune_one(extent: int, seconds: float) -> TuningResult:
        if is_onnx:
            options.update(library="onnxruntime", dims={**dims, axis: extent})
            return tune.autotune(module, budget=seconds, **options)
        made = functools.update_wrapper(functools.partial(batches, **{axis: extent}), batches)
        return autotune_module(module, made, budget=seconds, **options)

    return tune_each(
        chosen[::-1],
        tune_one,
        lambda results, failed: ExtentsResult(
            axis=axis, results=dict(sorted(results.items())), failed=dict(sorted(failed.items()))
        ),
        budget=budget,
    )


def _only_axis(extents: Mapping[str, Iterable[int]]) -> tuple[str, list[int]]:
    allowed = 'one axis with its extents, such as {"sequence": (128, 512)}'
    if not isinstance(extents, Mapping) or len(extents) != 1:
        raise InvalidArgument("extents", extents, allowed)
    ((axis, given),) = extents.items()
    if not isinstance(axis, str) or isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidArgument("extents", extents, allowed)
    ascending = sorted({checks.check_whole(f"extents[{axis!r}]", extent) for extent in given})
    if not ascending:
        raise InvalidArgument("extents", extents, allowed)
    return axis, ascending


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
    options = {"device": "cpu", **options}
    if _is_onnx(module, batches, options):
        tune_file = functools.partial(tune.autotune, module, library="onnxruntime")
        return over_threads(tune_file, threads, budget=budget, **options)
    if not isinstance(module, str) or ":" not in module:
        allowed = "the path of an ONNX file, or the name of the function that builds a module, 'package.module:build'"
        given = module if isinstance(module, str) else type(module).__name__
        raise InvalidArgument("module", given, allowed, "Instances run in processes of their own.")
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


def _is_onnx(module: Any, batches: Any, options: dict[str, Any]) -> bool:
    """
    Return whether a module is the path of an ONNX file, which takes no `batches`; reject options that do not apply.

    `options` are arguments of `autotune` for an ONNX file, else of `autotune_module`. `library`, which the module
    decides, is removed from them.
    """
    is_onnx = isinstance(module, str | Path) and Path(module).suffix.lower() == ".onnx"
    library = "onnxruntime" if is_onnx else "torch"
    if (given := options.pop("library", None)) not in (None, library):
        raise InvalidArgument("library", given, f'"{library}" or left out for {module}')
    checks.check_options(options, tune.autotune if is_onnx else autotune_module)
    if is_onnx and batches is not None:
        raise InvalidArgument("batches", batches, "left out for an ONNX file, whose axes have names")
    return is_onnx


def tune_each(
    values: Sequence[int],  # extents or numbers of threads
    tune_one: Callable[[int, float], TuningResult],  # tunes with a value, within its seconds of measuring
    # makes the common result of the tuning results and the messages of errors, both by value
    make_result: Callable[[Mapping[int, TuningResult], Mapping[int, str]], _Result],
    *,
    budget: Any,  # seconds of measuring at most, for all values together
) -> _Result:
    """
    Return the common result of tuning with each value, one after the other.

    Each has an equal share of the budget that is left: later values get the seconds that earlier ones did not use.
    A value that fails uses the seconds until its error.

    Raises:
        InvalidArgument: If the budget is no finite number above 0.
        CubatchError: The error of the first value, if tuning failed with all values.
        KeyboardInterrupt, or an exception that `progress` raises: `partial` is the common result so far, if any.
    """
    left = checks.check_number("budget", budget, above=0.0, unit="seconds")
    results, errors = dict[int, TuningResult](), dict[int, CubatchError]()

    def common() -> _Result:
        return make_result(results, {value: str(error) for value, error in errors.items()})

    for place, value in enumerate(values):
        share, began = left / (len(values) - place), time.monotonic()
        try:
            results[value] = tune_one(value, share)
            spent = results[value].seconds_spent or 0.0
        except CubatchError as error:
            errors[value] = error
            spent = time.monotonic() - began  # with the seconds of starting, which count for no result
        except BaseException as stop:
            if (partial := getattr(stop, "partial", None)) is not None:
                results[value] = partial
            if results:
                stop.partial = common()  # type: ignore[attr-defined]
            raise
        left -= min(share, spent)
    if not results:
        raise next(iter(errors.values()))
    return common()

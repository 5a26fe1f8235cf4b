"""autotune_extents(): the fastest batch size at several extents of another axis, such as the length of sequences."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cubatch import checks
from cubatch.errors import InvalidArgument
from cubatch.frameworks import batch_sources
from cubatch.tuning import tune
from cubatch.tuning.extents_result import ExtentsResult
from cubatch.tuning.results import TuningResult
from cubatch.tuning.tune_each import tune_each
from cubatch.tuning.tune_module import autotune_module


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

    The extents are tuned in ascending order, each with an equal share of the budget.  Memory is bounded at each
    extent.

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
        InvalidArgument: If an argument is out of range, or does not apply.
        CubatchError: The first error, if no extent could be tuned.
        KeyboardInterrupt, or an exception that `progress` raises: `partial` is the ExtentsResult so far.

    Example:
        >>> def batches(n, sequence):                                                 # doctest: +SKIP
        ...     return torch.randint(0, 1000, (n, sequence))
        >>> result = autotune_extents(model, {"sequence": (128, 512)}, batches=batches) # doctest: +SKIP
        >>> result.batch_sizes, result.token_budget                                   # doctest: +SKIP
    """
    axis, chosen = _only_axis(extents)
    is_onnx = isinstance(module, str | Path) and Path(module).suffix == ".onnx"
    checks.check_options(options, tune.autotune if is_onnx else autotune_module)
    if isinstance(module, str | Path) and not is_onnx:
        raise InvalidArgument("module", str(module), "a torch.nn.Module or the path of an ONNX file", "Build it first.")
    if is_onnx and batches is not None:
        raise InvalidArgument("batches", batches, "left out for an ONNX file, whose axes have names")
    if not is_onnx:
        batches = batch_sources.load(batches) if isinstance(batches, str) else batches
        if not callable(batches):
            raise InvalidArgument("batches", batches, f"a function batches(n, {axis}=...) that makes the inputs")

    def tune_one(extent: int, seconds: float) -> TuningResult:
        if is_onnx:
            fixed = {"library": "onnxruntime", "dims": {**options.get("dims", {}), axis: extent}}
            return tune.autotune(module, budget=seconds, **{**options, **fixed})
        made = functools.update_wrapper(functools.partial(batches, **{axis: extent}), batches)
        return autotune_module(module, made, budget=seconds, **options)

    return tune_each(
        chosen,
        tune_one,
        lambda results, failed: ExtentsResult(axis=axis, results=results, failed=failed),
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

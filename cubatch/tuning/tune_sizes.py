"""autotune_sizes(): the fastest batch size at several extents of another axis, such as the length of sequences."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping
from typing import Any

from cubatch import checks
from cubatch.errors import CubatchError, InvalidArgument
from cubatch.frameworks import batch_sources
from cubatch.tuning import tune
from cubatch.tuning.results import TuningResult
from cubatch.tuning.sizes_result import SizesResult
from cubatch.tuning.tune_module import autotune_module


def autotune_sizes(
    module: Any,
    sizes: Mapping[str, Iterable[int]],
    *,
    batches: Any = None,
    budget: float = 60.0,
    **options: Any,
) -> SizesResult:
    """
    Find the fastest batch size of a PyTorch module or an ONNX file at each of several sequence lengths or resolutions.

    The extents are tuned in ascending order, each with an equal share of the budget that is left.  Memory is bounded at
    each extent.

    Args:
        module: A torch.nn.Module, or the path of an ONNX file, which runs in ONNX Runtime.
        sizes: The axis and its extents: {"sequence": (128, 512, 2048)}.
        batches: For a module: a function that makes the inputs of a batch size and an extent,
            `batches(n, sequence=128)`, or its name "package.module:function".  An ONNX file has named axes.
        budget: Seconds of measuring at most, for all extents together.
        options: The other arguments of `autotune_module`, or of `autotune` for an ONNX file.

    Returns:
        SizesResult: A tuning result for each extent, the token budget, and `with_lengths` for samples of unequal
            length.

    Raises:
        InvalidArgument: If an argument is out of range, or not for all extents.
        CubatchError: The first error, if no extent could be tuned.

    Example:
        >>> def batches(n, sequence):                                                 # doctest: +SKIP
        ...     return torch.randint(0, 1000, (n, sequence))
        >>> result = autotune_sizes(model, {"sequence": (128, 512)}, batches=batches) # doctest: +SKIP
        >>> result.batch_sizes, result.token_budget                                   # doctest: +SKIP
    """
    axis, extents = _only_axis(sizes)
    is_onnx = isinstance(module, str) and module.endswith(".onnx")
    if is_onnx and batches is not None:
        raise InvalidArgument("batches", batches, "left out for an ONNX file, whose axes have names")
    if isinstance(module, str) and not is_onnx:
        raise InvalidArgument("module", module, "a torch.nn.Module or the path of an ONNX file", "Build it first.")
    if not is_onnx:
        batches = batch_sources.load(batches) if isinstance(batches, str) else batches
        if not callable(batches):
            raise InvalidArgument("batches", batches, f"a function batches(n, {axis}=...) that makes the inputs")
    checks.check_number("budget", budget, above=0.0)
    results, errors, spent = dict[int, TuningResult](), dict[int, CubatchError](), 0.0
    for place, extent in enumerate(extents):
        share = max(0.0, budget - spent) / (len(extents) - place) or budget
        start = time.perf_counter()
        try:
            if is_onnx:
                results[extent] = tune.autotune(
                    module, library="onnxruntime", dims={axis: extent}, budget=share, **options
                )
            else:
                made = functools.partial(batches, **{axis: extent})
                results[extent] = autotune_module(module, made, budget=share, **options)
        except CubatchError as error:
            errors[extent] = error
            spent += min(share, time.perf_counter() - start)
        else:
            spent += results[extent].seconds_spent or 0.0
    if not results:
        raise next(iter(errors.values()))
    return SizesResult(axis=axis, results=results, failed={extent: str(error) for extent, error in errors.items()})


def _only_axis(sizes: Mapping[str, Iterable[int]]) -> tuple[str, list[int]]:
    """Return the axis and its extents, ascending."""
    allowed = 'one axis with its extents, such as {"sequence": (128, 512)}'
    if not isinstance(sizes, Mapping) or len(sizes) != 1:
        raise InvalidArgument("sizes", sizes, allowed)
    ((axis, given),) = sizes.items()
    if not isinstance(axis, str) or isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidArgument("sizes", sizes, allowed)
    extents = sorted({checks.check_whole(f"sizes[{axis!r}]", extent) for extent in given})
    if not extents:
        raise InvalidArgument("sizes", sizes, allowed)
    return axis, extents

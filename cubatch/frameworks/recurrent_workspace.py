"""
What oneDNN keeps of a recurrent layer for its backward pass: the gates and states of all time steps.

PyTorch's kernel for tensors without data returns an empty tensor in its place.  So the real operator runs at tiny
extents.  The bytes grow linearly with the time steps, with the samples, and with the hidden size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from cubatch.frameworks.lazy_torch import torch

OPERATOR = "aten::mkldnn_rnn_layer"
_TINY = (2, 8)  # time steps, and samples
_MOST_HIDDEN = 512  # of a layer that is run; its weights grow with the square


def completed(arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
    """
    Return the results of OPERATOR on tensors without data, with what it keeps for the backward pass.

    Args:
        arguments: Its arguments.
        results: Its results; the last one is what it keeps, empty without data and in inference.
    """
    steps, samples, _ = arguments[0].shape
    gates, hidden = arguments[2].shape
    is_trained = arguments[-1]
    if not is_trained or results[-1].numel():
        return tuple(results)
    size = _kept_bytes(steps, samples, gates // hidden, hidden, arguments[0].dtype, mode=arguments[9])
    return (*results[:-1], torch.empty(size, dtype=torch.uint8))


def _kept_bytes(steps: int, samples: int, gates: int, hidden: int, dtype: Any, *, mode: int) -> int:
    """Return the bytes that a layer keeps, from four runs at the extents in _TINY."""
    run = min(hidden, _MOST_HIDDEN)
    by_samples = [_line([_run(t, n, gates, run, dtype=dtype, mode=mode) for t in _TINY], steps) for n in _TINY]
    return math.ceil(_line(by_samples, samples) * hidden / run)


def _line(ends: Sequence[float], count: int) -> float:
    """Return a value at `count` by a line through two values at the extents in _TINY."""
    few, many = _TINY
    return ends[0] + (ends[1] - ends[0]) * (count - few) / (many - few)


@functools.lru_cache(maxsize=64)
def _run(steps: int, samples: int, gates: int, hidden: int, *, dtype: Any, mode: int) -> int:
    """Return the bytes that a recurrent layer with one input channel keeps for its backward pass, by a run on zeros."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        shapes = [(steps, samples, 1), (gates * hidden, 1), (gates * hidden, hidden), *[(gates * hidden,)] * 2]
        given = [torch.zeros(shape, dtype=dtype) for shape in [*shapes, *[(samples, hidden)] * 2]]
        # reverse, batch_sizes, mode, hidden_size, num_layers, has_biases, bidirectional, batch_first, train
        settings: tuple[Any, ...] = (False, [], mode, hidden, 1, True, False, False, True)
        try:
            *_, workspace = torch.ops.aten.mkldnn_rnn_layer(*given, *settings)
        except RuntimeError:
            if dtype == torch.float32:
                raise
            # oneDNN trains no layer of this data type on this CPU.
            whole = _run(steps, samples, gates, hidden, dtype=torch.float32, mode=mode)
            return int(whole * dtype.itemsize // torch.float32.itemsize)
        return int(workspace.nbytes)

"""
Bytes that oneDNN allocates in a recurrent layer: results kept for the backward pass, and scratch memory.

PyTorch's kernels for tensors without data know neither.  So the real operator runs at few time steps, and PyTorch's
record of allocations is read.  The bytes grow linearly with the time steps, and from 128 samples on with the samples.
Below that, oneDNN 3.12 multiplies the inputs of all time steps at once in its forward pass.  Weights are reordered;
those of a hidden size that is a multiple of 256 once more in the backward pass.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from cubatch.frameworks.lazy_torch import torch

OPERATOR = "aten::mkldnn_rnn_layer"
_BACKWARD = "aten::mkldnn_rnn_layer_backward"
_STEPS = (2, 4)
_MOST_SAMPLES, _MOST_HIDDEN = 128, 512  # that are run
_ALIGNED = 256  # hidden sizes whose multiples have other reordered weights


@attrs.frozen
class _Taken:
    """Bytes that a layer takes next to inputs and results: kept for the backward pass, and during either pass."""

    reserve: int  # for the backward pass
    forward: int  # while the forward pass runs
    backward: int  # while the backward pass runs; 0 in inference


@attrs.frozen
class _Layer:
    """Extents and type of one layer in one direction."""

    samples: int
    inputs: int
    gates: int
    hidden: int
    dtype: Any  # of PyTorch
    mode: int  # PyTorch's number of the kind of layer
    training: bool

    @classmethod
    def of(cls, arguments: Sequence[Any], mode: int) -> _Layer:
        """Return the layer of an operator by its first arguments: input, and weights of input and hidden state."""
        first, inner = arguments[0], arguments[2]
        gates, hidden = inner.shape
        return cls(first.shape[1], first.shape[2], gates // hidden, hidden, first.dtype, mode, torch.is_grad_enabled())

    @property
    def weights(self) -> int:
        """Bytes of the weight matrices of the input and of the hidden state."""
        return int(self.gates * self.hidden * (self.inputs + self.hidden) * self.dtype.itemsize)


def completed(arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
    """
    Return the results of OPERATOR on tensors without data, with a tensor of the bytes kept for the backward pass.

    That tensor is the last result, which is empty without data and in inference.
    """
    layer = _Layer.of(arguments, arguments[9])
    if not layer.training or results[-1].numel():
        return tuple(results)
    size = _bytes(layer, arguments[0].shape[0], lambda taken: taken.reserve, weights=False)
    return (*results[:-1], torch.empty(size, dtype=torch.uint8))


def scratch_bytes(name: str, arguments: Sequence[Any]) -> int:
    """Return the bytes that operator `name` takes only while it runs; 0 unless it is oneDNN's recurrent layer."""
    if name == OPERATOR:
        layer = _Layer.of(arguments, arguments[9])
        return _bytes(layer, arguments[0].shape[0], lambda taken: taken.forward, weights=True)
    if name == _BACKWARD:
        layer = attrs.evolve(_Layer.of(arguments, arguments[14]), training=True)
        return _bytes(layer, arguments[0].shape[0], lambda taken: taken.backward, weights=True)
    return 0


def _bytes(layer: _Layer, steps: int, part: Callable[[_Taken], int], *, weights: bool) -> int:
    """
    Return the bytes that `part` selects at a number of time steps, extrapolated from runs at those in _STEPS.

    `weights` is whether these bytes include reordered weights.
    """
    hidden = min(layer.hidden, _MOST_HIDDEN + layer.hidden % _ALIGNED)
    inputs = math.ceil(layer.inputs * hidden / layer.hidden)
    run = attrs.evolve(layer, samples=min(layer.samples, _MOST_SAMPLES), hidden=hidden, inputs=inputs)
    few, many = (part(_run(run, count)) for count in _STEPS)
    taken = few + (many - few) * (steps - _STEPS[0]) / (_STEPS[1] - _STEPS[0])
    single = part(_run(attrs.evolve(run, samples=1), _STEPS[0]))  # nearly all are weights
    reordered = single // run.weights * run.weights if weights else 0
    grown = (taken - reordered) * layer.hidden / run.hidden * layer.samples / run.samples
    return max(0, math.ceil(reordered * layer.weights / run.weights + grown))


@functools.lru_cache(maxsize=256)
def _run(layer: _Layer, steps: int) -> _Taken:
    """Return the bytes that a layer takes in a run on zeros, in a thread without the modes and profiler of this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_run_here, layer, steps).result()


def _run_here(layer: _Layer, steps: int) -> _Taken:
    """Return the bytes that a layer takes in a run on zeros in this thread."""
    rows, states = layer.gates * layer.hidden, (layer.samples, layer.hidden)
    shapes = [(steps, layer.samples, layer.inputs), (rows, layer.inputs), (rows, layer.hidden), (rows,), (rows,)]
    kind = (layer.mode, layer.hidden, 1, True)  # hidden_size, num_layers, has_biases
    with torch.set_grad_enabled(layer.training):
        given = [torch.zeros(shape, dtype=layer.dtype) for shape in [*shapes, states, states]]
        try:
            # reverse, batch_sizes; bidirectional, batch_first, train
            forward = (*given, False, [], *kind, False, False, layer.training)
            (*outputs, reserve), taken = _watched(torch.ops.aten.mkldnn_rnn_layer, *forward)
            if not layer.training:
                return _Taken(0, taken, 0)
            # reverse; train, bidirectional, batch_sizes, batch_first
            backward = (*given, *outputs, *outputs, False, *kind, True, False, [], False, reserve)
            _, later = _watched(torch.ops.aten.mkldnn_rnn_layer_backward, *backward)
        except RuntimeError:
            if layer.dtype == torch.float32:
                raise
            # oneDNN has no layer of this data type on this CPU.
            whole = _run_here(attrs.evolve(layer, dtype=torch.float32), steps)
            share = layer.dtype.itemsize / torch.float32.itemsize
            return _Taken(*(int(part * share) for part in attrs.astuple(whole)))
    return _Taken(int(reserve.nbytes), taken, later)


def _watched(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Return the results of a function of PyTorch, and the peak bytes of its other allocations on the CPU."""
    from torch import autograd

    settings = torch._C._profiler._ExperimentalConfig()  # noqa: SLF001 - the constructor wants one
    flags = (False, True, False, False, False)  # report_input_shapes, profile_memory, with_stack, _flops, _modules
    config = autograd.ProfilerConfig(autograd.ProfilerState.CPU, *flags, settings)
    autograd._enable_profiler_legacy(config)  # noqa: SLF001 - the only one that records without a preparation
    try:
        results = function(*arguments)
    finally:
        threads = autograd._disable_profiler_legacy()  # noqa: SLF001
    sizes = [event.cpu_memory_usage() for event in threads[0] if event.kind() == "memory_alloc"]
    made = sum(each.nbytes for each in results if each is not None)
    return results, max(itertools.accumulate(sizes, initial=0)) - made

"""
Scratch memory of each operation of a step, for `library="im2col"` and for the cubatch kernels.

`TABLE` has a row for each layer type.  A type without a row cannot be planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import attrs

from cubatch.hardware.facts import Device
from cubatch.kernels.padding import filter_bytes
from cubatch.kernels.workspace import attention_scratch, depthwise_grid, misc, product_scratch
from cubatch.memory import blocks, conv_blocks
from cubatch.memory.blocks import Attend, AttendBackward, Curve, Ends, Flat, Need, Norm, Pool, Products, RowNorm, Scores
from cubatch.memory.schedule_records import FLOAT32_BYTES, LOSS_SCALE_BYTES, PASSES_OF, Op, Schedule
from cubatch.network import layers
from cubatch.network.layer import Layer, extents

CPU_TILE_BYTES = 2 * 2**20
GPU_TILE_BYTES = 256 * 2**20


def kernel_workspace_bytes(op: Op, program: Schedule, samples: int, dtype: str, device: Device) -> int:
    """
    Return the scratch memory of one operation on cubatch kernels, in bytes.

    Args:
        op, program: The operation and its schedule.
        samples: Samples that it works on at once.
        dtype: Storage of the elements, or "tf32".
        device: The GPU, which decides variants and slices.

    Raises:
        InvalidArgument: If the device's SMs or compute capability are unknown.
    """
    if op.layer is not None:
        kind = "backward by sums" if "log_sums" in op.reads else _pass(op, program)
        own = _layer_bytes(extents(op.layer), kind, samples, dtype, device)
        if op.computed is not None and (shape := op.computed.convolution) is not None:
            own += filter_bytes(shape, dtype)
        if op.summed is None:
            return own
        h, w, channels = op.summed.layer.output_shape
        return own + misc.norm_sums_workspace(samples * h * w, channels, dtype, device)
    if op.kind == "update":
        is_scaled = dtype in LOSS_SCALE_BYTES and not program.single  # a layer on its own has no optimizer step
        return misc.loss_scale_workspace(program.network.parameters, dtype) if is_scaled else 0
    h, w, classes = program.network.output_shape
    return misc.softmax_cross_entropy_workspace(samples * h * w, classes, device)


@lru_cache(maxsize=1 << 16)
def _layer_bytes(layer: Layer, kind: str, samples: int, dtype: str, device: Device) -> int:
    # Cached, since networks repeat layers, and planning repeats batch sizes.
    return TABLE[type(layer)].kernels(layer, kind, samples, dtype, device)


def im2col_workspace_bytes(op: Op, program: Schedule, samples: int, itemsize: int, device: Device) -> int:
    """
    Return the scratch memory of one operation of `library="im2col"` in bytes, for elements of at least 4 bytes.

    The rule is that of `blocks`.  The target is 2 MiB on a CPU (an L2 and a core's part of an L3), 256 MiB on a GPU.
    """
    target = CPU_TILE_BYTES if device.kind == "cpu" else GPU_TILE_BYTES
    if op.node is None:
        if op.kind == "update":  # an "item" is a parameter and its gradient
            return blocks.workspace_bytes([Flat(itemsize=2 * itemsize)], program.network.parameters, target)
        h, w, classes = program.network.output_shape
        return blocks.workspace_bytes([Scores(itemsize=itemsize, channels=classes)], samples * h * w, target)
    needs, items = im2col_needs(op, program, itemsize)
    return blocks.workspace_bytes(needs, samples * items, target)


def im2col_needs(op: Op, program: Schedule, itemsize: int) -> Scratch:
    """
    Return the scratch memory of each part of a layer's operation, and the number of its items in a sample.

    An item is what the type of `Need` counts: a sample, a position or an element. An operation without a layer needs
    none: ((), 0). The schedule's mode decides what the forward pass saves.
    """
    return _needs(op.node.layer, _pass(op, program), itemsize, op.ending) if op.node is not None else ((), 0)


@lru_cache(maxsize=4096)
def _needs(layer: Layer, kind: str, itemsize: int, ending: frozenset[str]) -> tuple[tuple[Need, ...], int]:
    return TABLE[type(layer)].im2col(layer, kind, itemsize, *([ending] if ending else []))


def _pass(op: Op, program: Schedule) -> str:
    """Return "inference" for a forward pass whose layer would save more in training, else the kind of the operation."""
    saves = op.node is not None and op.node.layer.saved_elements()
    return "inference" if saves and program.mode == "inference" else op.kind


Scratch = tuple[tuple[Need, ...], int]
"""Needs of an operation's parts in order, and the number of their items in a sample."""


@attrs.frozen
class Row:
    """Functions that compute the scratch memory of a layer type, for both libraries."""

    # scratch memory of `library="im2col"` by layer, pass, and bytes of an element; with an epilogue other than a ReLU
    # also by `Op.ending`. The pass is "forward" or "backward", or "inference" for a forward pass that saves less than
    # in training
    im2col: Callable[..., Scratch]
    # bytes of cubatch kernels by layer, pass, samples, dtype and device. The pass may also be "backward by sums": the
    # gradients of attention whose weights are not stored
    kernels: Callable[[Any, str, int, str, Device], int]


# Arguments as in `Row.im2col`.


def _no_scratch(_layer: Layer, _kind: str, _itemsize: int) -> Scratch:
    return (), 0


def _inputs_and_outputs(layer: Layer, _kind: str, _itemsize: int) -> Scratch:
    elements = math.prod(layer.output_shape) + sum(math.prod(shape) for shape in layer.input_shapes)
    return (Flat(itemsize=2 * FLOAT32_BYTES),), elements


def _convolution(layer: layers.Conv2d, kind: str, itemsize: int, ending: frozenset[str] = blocks.PLAIN) -> Scratch:
    shape = layer.convolution
    if kind == "forward":
        return tuple(conv_blocks.conv2d_forward(shape, itemsize, ending)), 1
    return (*conv_blocks.conv2d_wgrad(shape, itemsize), *conv_blocks.conv2d_dgrad(shape, itemsize, ending)), 1


def _linear(layer: layers.Linear, kind: str, itemsize: int, ending: frozenset[str] = blocks.PLAIN) -> Scratch:
    h, w, c = layer.input_shape
    if ending:
        return (Ends(itemsize=itemsize, row=layer.k if kind == "forward" else c),), h * w
    return ((Flat(itemsize=itemsize),), math.prod(layer.output_shape)) if kind == "forward" else ((), 0)


def _pool(layer: layers.MaxPool2d | layers.AvgPool2d, _kind: str, itemsize: int) -> Scratch:
    vertical, horizontal = layer.axes
    channels = layer.input_shape[2]
    need = Pool(itemsize=itemsize, rows=vertical.out, vertical=vertical, horizontal=horizontal, channels=channels)
    return (need,), 1


def _global_pool(layer: Layer, _kind: str, itemsize: int, ending: frozenset[str] = blocks.PLAIN) -> Scratch:
    return ((Flat(itemsize=itemsize * layer.input_shape[2]),), 1) if ending else ((), 0)


def _by_position(need: Callable[..., Need]) -> Callable[..., Scratch]:
    """
    Return a function for `Row.im2col` of layers that process each position (pixel or token) of the input alone.

    `need` returns the scratch memory for an element size in bytes and a number of channels.
    """

    def scratch(layer: Layer, _kind: str, itemsize: int, _ending: frozenset[str] = blocks.PLAIN) -> Scratch:
        h, w, c = layer.input_shapes[0]
        return (need(itemsize=itemsize, channels=c),), h * w

    return scratch


def _flag_or_draw(layer: Layer, _kind: str, _itemsize: int) -> Scratch:
    return (Flat(itemsize=FLOAT32_BYTES),), math.prod(layer.output_shape)


def _curve(layer: Layer, _kind: str, itemsize: int) -> Scratch:
    return (Curve(itemsize=itemsize),), math.prod(layer.output_shape)


def _layer_scale(
    layer: layers.LayerScale, kind: str, itemsize: int, ending: frozenset[str] = blocks.PLAIN
) -> Scratch:  # fmt: skip
    h, w, c = layer.input_shape
    if kind != "forward":
        return _by_position(Norm)(layer, kind, itemsize)
    return ((Ends(itemsize=itemsize, row=c),), h * w) if ending else ((), 0)


def _attention(layer: layers.Attention, kind: str, itemsize: int) -> Scratch:
    h, w, c = layer.input_shape
    sizes = {"itemsize": itemsize, "tokens": h * w, "channels": c, "heads": layer.heads}
    return (AttendBackward(**sizes) if kind == "backward" else Attend(**sizes, saves=kind == "forward"),), 1


def _sums_of_products(layer: layers.Scale, kind: str, itemsize: int) -> Scratch:
    h, w, c = layer.input_shape
    return ((), 0) if kind == "forward" else ((Products(itemsize=itemsize, rows=h * w, channels=c),), 1)


# Arguments as in `Row.kernels`.


def _no_bytes(_layer: Layer, _kind: str, _samples: int, _dtype: str, _device: Device) -> int:
    return 0


def _convolution_bytes(layer: layers.Conv2d, kind: str, samples: int, dtype: str, device: Device) -> int:
    shape = layer.convolution
    if depthwise_grid.supports(shape):
        return 0 if kind == "forward" else depthwise_grid.depthwise_wgrad_workspace(shape, samples, dtype, device)
    return max(product_scratch.conv2d_workspace(pass_, shape, samples, dtype, device) for pass_ in PASSES_OF[kind])


def _linear_bytes(layer: layers.Linear, kind: str, samples: int, dtype: str, device: Device) -> int:
    h, w, c = layer.input_shape
    sizes = samples * h * w, c, layer.k
    return max(product_scratch.linear_workspace(pass_, sizes, dtype, device) for pass_ in PASSES_OF[kind])


def _by_rows(backward: Callable[..., int], forward: Callable[..., int] | None = None) -> Callable[..., int]:
    """
    Return a function for `Row.kernels` that passes rows, channels, dtype and device to `backward` or `forward`.

    `forward` None: the forward pass needs no scratch memory.
    """

    def num_bytes(layer: Layer, kind: str, samples: int, dtype: str, device: Device) -> int:
        h, w, c = layer.input_shapes[0]
        function = backward if kind == "backward" else forward
        return function(samples * h * w, c, dtype, device) if function else 0

    return num_bytes


def _tokens_bytes(layer: layers.Tokens, kind: str, samples: int, dtype: str, device: Device) -> int:
    columns = math.prod(layer.output_shape)
    return misc.column_sums_workspace(samples, columns, dtype, device) if kind == "backward" else 0


def _attention_bytes(layer: layers.Attention, kind: str, samples: int, dtype: str, device: Device) -> int:
    h, w, c = layer.input_shape
    shape = (samples, h * w, c), layer.heads, dtype, device
    if kind.startswith("backward"):
        return attention_scratch.attention_backward_workspace(*shape, by_sums=kind != "backward")
    return attention_scratch.attention_workspace(*shape, saves=kind == "forward")


NOTHING = Row(_no_scratch, _no_bytes)
NOT_WRITTEN = Row(_inputs_and_outputs, _no_bytes)
"""For types that the engine cannot run, so that they can be planned: inputs and outputs in float32, no kernels."""

TABLE: dict[type[Layer], Row] = {
    layers.Conv2d: Row(_convolution, _convolution_bytes),
    layers.Linear: Row(_linear, _linear_bytes),
    layers.MaxPool2d: Row(_pool, _no_bytes),
    layers.AvgPool2d: Row(_pool, _no_bytes),
    layers.GlobalAvgPool: Row(_global_pool, _no_bytes),
    layers.BatchNorm2d: Row(
        _by_position(Norm), _by_rows(misc.batch_norm_backward_workspace, misc.batch_norm_workspace)
    ),
    layers.LayerNorm: Row(_by_position(RowNorm), _by_rows(misc.layer_norm_backward_workspace)),
    layers.LayerScale: Row(_layer_scale, _by_rows(misc.layer_scale_backward_workspace)),
    layers.ReLU: Row(_flag_or_draw, _no_bytes),
    **dict.fromkeys(
        (layers.ReLU6, layers.HardSwish, layers.HardSigmoid, layers.Sigmoid, layers.SiLU, layers.GELU),
        Row(_curve, _no_bytes),
    ),
    layers.Softmax: Row(_by_position(Scores), _no_bytes),
    layers.Dropout: Row(_flag_or_draw, _no_bytes),
    layers.Flatten: NOTHING,
    layers.Add: NOTHING,
    layers.Scale: Row(_sums_of_products, _no_bytes),
    layers.Concat: NOTHING,
    layers.Slice: NOTHING,
    layers.Tokens: Row(_no_scratch, _tokens_bytes),
    layers.ClassToken: NOTHING,
    layers.Attention: Row(_attention, _attention_bytes),
    layers.Opaque: NOT_WRITTEN,
}
"""Scratch memory of each layer type, in the order of `LAYERS`."""

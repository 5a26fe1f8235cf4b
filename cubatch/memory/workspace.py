"""
Scratch memory of every operation of a step, on the engine's own code and on the hand-written kernels.

`TABLE` has a row for every kind of layer: what it needs on either.  A kind without a row cannot be planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import attrs

from cubatch.hardware.facts import Device
from cubatch.kernels.workspace import attention_scratch, depthwise_grid, misc, product_scratch
from cubatch.memory import blocks, conv_blocks
from cubatch.memory.attention_blocks import Attend, AttendBackward
from cubatch.memory.blocks import Curve, Ends, Flat, Need, Norm, Pool, Products, RowNorm, Scores
from cubatch.memory.schedule_records import FLOAT32_BYTES, LOSS_SCALE_BYTES, Op, Schedule
from cubatch.network import layers
from cubatch.network.layer import Layer, extents

CPU_TILE_BYTES = 2 * 2**20
GPU_TILE_BYTES = 256 * 2**20


def kernel_workspace_bytes(op: Op, program: Schedule, samples: int, dtype: str, device: Device) -> int:
    """
    Size the scratch memory of one operation on a GPU.

    Args:
        op: The operation.
        program: The schedule it is of.
        samples: Samples it is handed.
        dtype: Storage of the elements, or "tf32".
        device: Whose SMs are to be filled; variants and slices follow from it.

    Raises:
        InvalidArgument: If the device's SMs or compute capability are not known.
    """
    if op.node is not None:
        return _layer_bytes(extents(op.node.layer), _pass(op, program), samples, dtype, device)
    if op.kind == "update":
        is_scaled = dtype in LOSS_SCALE_BYTES and not program.single  # a layer on its own is not stepped
        return misc.loss_scale_workspace(program.network.parameters, dtype) if is_scaled else 0
    h, w, classes = program.network.output_shape
    return misc.softmax_cross_entropy_workspace(samples * h * w, classes, device)


@lru_cache(maxsize=1 << 16)
def _layer_bytes(layer: Layer, kind: str, samples: int, dtype: str, device: Device) -> int:
    """Give the workspace of a layer; cached, since networks repeat layers and many plans ask for each."""
    return TABLE[type(layer)].ours(layer, kind, samples, dtype, device)


def im2col_workspace_bytes(op: Op, program: Schedule, samples: int, itemsize: int, device: Device) -> int:
    """
    Size the scratch memory of one operation: by the rule of `blocks`, which the engine follows too.

    The target is 2 MiB on a CPU, an L2 and a core's part of an L3, and 256 MiB on a GPU.

    Args:
        op: The operation.
        program: The schedule it is of.
        samples: Samples it is handed.
        itemsize: Bytes of the elements that it computes with: at least those of float32.
        device: Whose cache is to be kept to, or filled.
    """
    target = CPU_TILE_BYTES if device.kind == "cpu" else GPU_TILE_BYTES
    if op.node is None:
        if op.kind == "update":  # an "item" is a parameter and its gradient
            return blocks.workspace_bytes([Flat(itemsize=2 * itemsize)], program.network.parameters, target)
        h, w, classes = program.network.output_shape
        return blocks.workspace_bytes([Scores(itemsize=itemsize, classes=classes)], samples * h * w, target)
    needs, items = im2col_needs(op, program, itemsize)
    return blocks.workspace_bytes(needs, samples * items, target)


def im2col_needs(op: Op, program: Schedule, itemsize: int) -> Scratch:
    """Say what an operation of a layer needs on the engine's own code, part after part."""
    return _needs(op.node.layer, _pass(op, program), itemsize, op.ending) if op.node is not None else ((), 0)


@lru_cache(maxsize=4096)
def _needs(layer: Layer, kind: str, itemsize: int, ending: frozenset[str]) -> tuple[tuple[Need, ...], int]:
    """Say what an operation of a layer needs, and how many items of the needs' kind are in a sample."""
    return TABLE[type(layer)].im2col(layer, kind, itemsize, *([ending] if ending else []))


def _pass(op: Op, program: Schedule) -> str:
    """Give the pass as the rows know it: "inference" of a layer that in training would keep more than its output."""
    keeps = op.node is not None and op.node.layer.saved_elements()
    return "inference" if keeps and program.mode == "inference" else op.kind


Scratch = tuple[tuple[Need, ...], int]
"""What an operation needs, part after part, and how many items of the needs' kind are in a sample."""


@attrs.frozen
class Row:
    """
    What a kind of layer needs.

    Attributes:
        im2col: On the engine's own code, from the layer, its pass, and the bytes of an element; of one that does more
            than itself and a ReLU also `Op.ending`.  The pass is "forward" or "backward", or "inference" for a forward
            pass that keeps nothing of what the layer would save in training.
        ours: Bytes on the hand-written kernels, from the layer, its pass, samples, dtype and device.
    """

    im2col: Callable[..., Scratch]
    ours: Callable[[Any, str, int, str, Device], int]


# Needs of the engine's own code: arguments as of `Row.im2col`.


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
    vertical, horizontal = layer.window
    channels = layer.input_shape[2]
    need = Pool(itemsize=itemsize, rows=vertical.out, vertical=vertical, horizontal=horizontal, channels=channels)
    return (need,), 1


def _norm(layer: layers.BatchNorm2d, _kind: str, itemsize: int, _ending: frozenset[str] = blocks.PLAIN) -> Scratch:
    h, w, c = layer.input_shape
    return (Norm(itemsize=itemsize, channels=c),), h * w


def _scores(layer: layers.Softmax, _kind: str, itemsize: int) -> Scratch:
    h, w, c = layer.input_shape
    return (Scores(itemsize=itemsize, classes=c),), h * w


def _flag_or_draw(layer: layers.ReLU | layers.Dropout, _kind: str, _itemsize: int) -> Scratch:
    return (Flat(itemsize=FLOAT32_BYTES),), math.prod(layer.output_shape)


def _curve(layer: Layer, _kind: str, itemsize: int) -> Scratch:
    return (Curve(itemsize=itemsize),), math.prod(layer.output_shape)


def _layer_norm(layer: layers.LayerNorm, _kind: str, itemsize: int) -> Scratch:
    h, w, c = layer.input_shape
    return (RowNorm(itemsize=itemsize, channels=c),), h * w


def _layer_scale(layer: layers.LayerScale, kind: str, itemsize: int) -> Scratch:
    h, w, c = layer.input_shape
    return ((), 0) if kind == "forward" else ((Norm(itemsize=itemsize, channels=c),), h * w)


def _attention(layer: layers.Attention, kind: str, itemsize: int) -> Scratch:
    h, w, c = layer.input_shape
    if kind == "backward":
        return (AttendBackward(itemsize=itemsize, tokens=h * w, channels=c, heads=layer.heads),), 1
    saves = kind == "forward"
    return (Attend(itemsize=itemsize, tokens=h * w, channels=c, heads=layer.heads, saves=saves),), 1


def _sums_of_products(layer: layers.Scale, kind: str, itemsize: int) -> Scratch:
    h, w, c = layer.input_shape
    return ((), 0) if kind == "forward" else ((Products(itemsize=itemsize, rows=h * w, channels=c),), 1)


# Bytes of the hand-written kernels: arguments as of `Row.ours`.


def _no_bytes(_layer: Layer, _kind: str, _samples: int, _dtype: str, _device: Device) -> int:
    return 0


def _convolution_bytes(layer: layers.Conv2d, kind: str, samples: int, dtype: str, device: Device) -> int:
    shape, forward = layer.convolution, kind == "forward"
    if depthwise_grid.supports(shape):
        return 0 if forward else depthwise_grid.depthwise_wgrad_workspace(shape, samples, dtype, device)
    gradients = (product_scratch.conv2d_wgrad_workspace, product_scratch.conv2d_dgrad_workspace)
    return max(
        part(shape, samples, dtype, device) for part in ((product_scratch.conv2d_workspace,) if forward else gradients)
    )


def _linear_bytes(layer: layers.Linear, kind: str, samples: int, dtype: str, device: Device) -> int:
    h, w, c = layer.input_shape
    gradients = (product_scratch.linear_wgrad_workspace, product_scratch.linear_dgrad_workspace)
    parts = (product_scratch.linear_workspace,) if kind == "forward" else gradients
    return max(part(samples * h * w, c, layer.k, dtype, device) for part in parts)


def _norm_bytes(layer: layers.BatchNorm2d, kind: str, samples: int, dtype: str, device: Device) -> int:
    h, w, c = layer.input_shape
    part = misc.batch_norm_workspace if kind == "forward" else misc.batch_norm_backward_workspace
    return part(samples * h * w, c, dtype, device)


def _layer_norm_bytes(layer: layers.LayerNorm, kind: str, samples: int, dtype: str, device: Device) -> int:
    h, w, c = layer.input_shape
    return misc.batch_norm_backward_workspace(samples * h * w, c, dtype, device) if kind == "backward" else 0


def _layer_scale_bytes(layer: layers.LayerScale, kind: str, samples: int, dtype: str, device: Device) -> int:
    h, w, c = layer.input_shape
    return misc.layer_scale_backward_workspace(samples * h * w, c, dtype, device) if kind == "backward" else 0


def _tokens_bytes(layer: layers.Tokens, kind: str, samples: int, dtype: str, device: Device) -> int:
    columns = math.prod(layer.output_shape)
    return misc.column_sums_workspace(samples, columns, dtype, device) if kind == "backward" else 0


def _attention_bytes(layer: layers.Attention, kind: str, samples: int, dtype: str, device: Device) -> int:
    h, w, c = layer.input_shape
    extents = samples, h * w, c, layer.heads, dtype, device
    if kind == "backward":
        return attention_scratch.attention_backward_workspace(*extents)
    return attention_scratch.attention_workspace(*extents, saves=kind == "forward")


NOTHING = Row(_no_scratch, _no_bytes)
NOT_WRITTEN = Row(_inputs_and_outputs, _no_bytes)
"""
Of a kind that the engine has no code for, so that a plan of it can be shown though not run: what its inputs and
outputs take in float32, on kernels nothing.
"""

TABLE: dict[type[Layer], Row] = {
    layers.Conv2d: Row(_convolution, _convolution_bytes),
    layers.Linear: Row(_linear, _linear_bytes),
    layers.MaxPool2d: Row(_pool, _no_bytes),
    layers.AvgPool2d: Row(_pool, _no_bytes),
    layers.GlobalAvgPool: NOTHING,
    layers.BatchNorm2d: Row(_norm, _norm_bytes),
    layers.LayerNorm: Row(_layer_norm, _layer_norm_bytes),
    layers.LayerScale: Row(_layer_scale, _layer_scale_bytes),
    layers.ReLU: Row(_flag_or_draw, _no_bytes),
    layers.ReLU6: Row(_curve, _no_bytes),
    layers.HardSwish: Row(_curve, _no_bytes),
    layers.HardSigmoid: Row(_curve, _no_bytes),
    layers.Sigmoid: Row(_curve, _no_bytes),
    layers.SiLU: Row(_curve, _no_bytes),
    layers.GELU: Row(_curve, _no_bytes),
    layers.Softmax: Row(_scores, _no_bytes),
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
"""What each kind of layer needs; the order is that of `LAYERS`."""

"""Scratch memory of every operation of a step, on the engine's own code and on the hand-written kernels."""

from __future__ import annotations

import math
from functools import lru_cache

from cubatch.hardware.facts import Device
from cubatch.kernels.workspace import depthwise, misc, products
from cubatch.memory import blocks
from cubatch.memory.blocks import Curve, Flat, Need, Norm, Pool, Products, Scores
from cubatch.memory.schedule import FLOAT32_BYTES, LOSS_SCALE_BYTES, Op, Schedule
from cubatch.network.layer import Layer, extents
from cubatch.network.layers import (
    Add,
    AvgPool2d,
    BatchNorm2d,
    Concat,
    Conv2d,
    Dropout,
    GlobalAvgPool,
    HardSigmoid,
    HardSwish,
    Linear,
    MaxPool2d,
    ReLU,
    ReLU6,
    Scale,
    Sigmoid,
    SiLU,
    Softmax,
)


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
        size = device.compute_capability, device.num_sms, str(device)
        return _layer_bytes(extents(op.node.layer), op.kind, samples, dtype, size)
    if op.kind == "update":
        is_scaled = dtype in LOSS_SCALE_BYTES and not program.single  # a layer on its own is not stepped
        return misc.loss_scale_workspace(program.network.parameters, dtype) if is_scaled else 0
    h, w, classes = program.network.output_shape
    return misc.softmax_cross_entropy_workspace(samples * h * w, classes, device)


@lru_cache(maxsize=1 << 16)
def _layer_bytes(
    layer: Layer, kind: str, samples: int, dtype: str, size: tuple[tuple[int, int] | None, int | None, str]
) -> int:
    """Size it for a layer; networks repeat layers, and plans for many batch sizes ask for the same."""
    device = Device(compute_capability=size[0], num_sms=size[1], name=size[2])
    forward = kind == "forward"
    h, w, c = layer.input_shapes[0]
    rows = samples * h * w
    if isinstance(layer, Conv2d):
        return _conv2d_bytes(layer, samples, dtype, device, forward=forward)
    if isinstance(layer, Linear):
        k = layer.parameter_shapes["w"][0]
        parts = (
            (products.linear_workspace,)
            if forward
            else (products.linear_wgrad_workspace, products.linear_dgrad_workspace)
        )
        return max(part(rows, c, k, dtype, device) for part in parts)
    if isinstance(layer, BatchNorm2d):
        part = misc.batch_norm_workspace if forward else misc.batch_norm_backward_workspace
        return part(rows, c, dtype, device)
    return 0


def _conv2d_bytes(layer: Conv2d, samples: int, dtype: str, device: Device, *, forward: bool) -> int:
    shape = layer.convolution
    if depthwise.supports(shape):
        return 0 if forward else depthwise.depthwise_wgrad_workspace(shape, samples, dtype, device)
    parts = (
        (products.conv2d_workspace,) if forward else (products.conv2d_wgrad_workspace, products.conv2d_dgrad_workspace)
    )
    return max(part(shape, samples, dtype, device) for part in parts)


CPU_TILE_BYTES = 768 * 2**10
GPU_TILE_BYTES = 256 * 2**20


def im2col_workspace_bytes(op: Op, program: Schedule, samples: int, itemsize: int, device: Device) -> int:
    """
    Size the scratch memory of one operation: by the rule of `scratch`, which the engine follows too.

    The target is three quarters of a megabyte on a CPU, which stays in the L2 of a core, and 256 MiB on a GPU.

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
    needs, items = _needs(op.node.layer, op.kind, itemsize)
    return blocks.workspace_bytes(needs, samples * items, target)


@lru_cache(maxsize=4096)
def _needs(layer: Layer, kind: str, itemsize: int) -> tuple[tuple[Need, ...], int]:  # noqa: C901, PLR0911 - by kind
    """Say what an operation of a layer needs, and how many items of the needs' kind are in a sample."""
    is_forward = kind == "forward"
    h, w, c = layer.input_shapes[0]
    outputs = math.prod(layer.output_shape)
    if isinstance(layer, Conv2d):
        shape = layer.convolution
        if is_forward:
            return tuple(blocks.conv2d_forward(shape, itemsize)), 1
        return (*blocks.conv2d_wgrad(shape, itemsize), *blocks.conv2d_dgrad(shape, itemsize)), 1
    if isinstance(layer, MaxPool2d | AvgPool2d):
        axes = layer.window
        return (Pool(itemsize=itemsize, rows=axes[0].out, vertical=axes[0], horizontal=axes[1], channels=c),), 1
    if isinstance(layer, BatchNorm2d):
        return (Norm(itemsize=itemsize, channels=c),), h * w
    if isinstance(layer, Softmax):
        return (Scores(itemsize=itemsize, classes=c),), h * w
    if isinstance(layer, ReLU | Dropout):  # a flag, or a random number
        return (Flat(itemsize=FLOAT32_BYTES),), outputs
    if isinstance(layer, ReLU6 | Sigmoid | SiLU | HardSigmoid | HardSwish):
        return (Curve(itemsize=itemsize),), outputs
    if isinstance(layer, Scale):
        return ((), 0) if is_forward else ((Products(itemsize=itemsize, rows=h * w, channels=c),), 1)
    if isinstance(layer, Linear):  # its output turned around
        return ((Flat(itemsize=itemsize),), outputs) if is_forward else ((), 0)
    if isinstance(layer, Add | Concat | GlobalAvgPool):
        return (), 0
    # What the engine has no code for yet: room for its inputs and outputs in float32.
    return (Flat(itemsize=2 * FLOAT32_BYTES),), outputs + sum(math.prod(shape) for shape in layer.input_shapes)

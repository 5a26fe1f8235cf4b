"""Layers as hand-written kernels see them: the products of their passes, and the scratch memory of their operations."""

from __future__ import annotations

from functools import lru_cache

from cubatch import depthwise_scratch, kernel_scratch, product_scratch
from cubatch.hardware import Device
from cubatch.kinds import BatchNorm2d, Conv2d, Linear
from cubatch.layer import Layer, Pass, extents
from cubatch.schedule import LOSS_SCALE_BYTES, Op, Schedule
from cubatch.variants import Problem
from cubatch.windows import ConvShape, conv_shape

_PRODUCTS = {Pass.FPROP: "gemm_nt", Pass.DGRAD: "gemm_nn", Pass.WGRAD: "gemm_tn"}


def workspace_bytes(op: Op, program: Schedule, samples: int, dtype: str, device: Device) -> int:
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
        return kernel_scratch.loss_scale_workspace(program.network.parameters, dtype) if is_scaled else 0
    h, w, classes = program.network.output_shape
    return kernel_scratch.softmax_cross_entropy_workspace(samples * h * w, classes, device)


@lru_cache(maxsize=1 << 14, typed=True)  # NumPy's integers equal ours and are no JSON
def problem_of(layer: Layer, pass_: Pass, batch_size: int, dtype: str) -> Problem | None:
    """
    Describe a pass of a layer as the tiled kernels see it; None for one that they do not run.

    Args:
        layer: The layer.
        pass_: Which of its passes.
        batch_size: Samples.
        dtype: Storage of the elements, or "tf32".

    Example:
        >>> problem_of(Linear(c=512, k=10), Pass.FPROP, 32, "float32")
        Problem(operation='gemm_nt', dtype='float32', m=32, n=10, k=512, groups=1, phases=1, vector=4)
    """
    if isinstance(layer, Conv2d):
        shape = _shape(layer)
        if depthwise_scratch.supports(shape):
            return None
        vector = product_scratch.widest_vector(dtype, shape.c // layer.groups, shape.k // layer.groups)
        return product_scratch.conv2d_problem(f"conv2d_{pass_.value}", shape, batch_size, dtype, vector)
    if isinstance(layer, Linear):
        (product,) = layer.gemms(pass_, batch_size)
        (k, c), operation = layer.parameter_shapes["w"], _PRODUCTS[pass_]
        # Gradients read rows of k too.
        vector = product_scratch.widest_vector(dtype, *((c,) if pass_ is Pass.FPROP else (c, k)))
        return Problem(operation, dtype, product.m, product.n, product.k, vector=vector)
    return None


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
            (product_scratch.linear_workspace,)
            if forward
            else (product_scratch.linear_wgrad_workspace, product_scratch.linear_dgrad_workspace)
        )
        return max(part(rows, c, k, dtype, device) for part in parts)
    if isinstance(layer, BatchNorm2d):
        part = kernel_scratch.batch_norm_workspace if forward else kernel_scratch.batch_norm_backward_workspace
        return part(rows, c, dtype, device)
    return 0


def _shape(layer: Conv2d) -> ConvShape:
    filters = layer.parameter_shapes["w"]
    return conv_shape(layer.input_shape, filters, layer.stride, layer.pad, layer.dilation, layer.groups)


def _conv2d_bytes(layer: Conv2d, samples: int, dtype: str, device: Device, *, forward: bool) -> int:
    shape = _shape(layer)
    if depthwise_scratch.supports(shape):
        return 0 if forward else depthwise_scratch.depthwise_wgrad_workspace(shape, samples, dtype, device)
    parts = (
        (product_scratch.conv2d_workspace,)
        if forward
        else (product_scratch.conv2d_wgrad_workspace, product_scratch.conv2d_dgrad_workspace)
    )
    return max(part(shape, samples, dtype, device) for part in parts)

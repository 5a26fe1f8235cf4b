"""
A convolution by cuDNN, through PyTorch: the ways that it has, of which the fastest is its best.

* channels last: the arrays as cubatch has them.  What cuDNN likes on tensor cores.
* NCHW: in float32, where many of its algorithms know nothing else.  The arrays are turned before anything is timed.
* fused: bias, residual and ReLU in one call of cuDNN's, instead of three kernels of PyTorch.

What our kernels do in an epilogue is otherwise a kernel of PyTorch's each: see `finished`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from cubatch.bench.calls import keeping
from cubatch.bench.cases import Case
from cubatch.network.layers import Conv2d
from cubatch.network.passes import Pass

_EPS = 1e-5
"""The least that cuDNN takes: with less PyTorch has another kernel."""

Step = Callable[[], Any]
Tensors = Mapping[str, Any]


def steps(torch: types.ModuleType, case: Case, layer: Conv2d) -> dict[str, Callable[[Tensors], Step]]:
    """
    Return the ways to do a case, by the text of each; the first is as our kernels do it.

    Args:
        torch: PyTorch.
        case: The call.
        layer: Its convolution, padded alike on both sides of an axis.

    Returns:
        dict: Functions that give the step for tensors, which are NHWC as the arrays are.
    """
    if not torch.cuda.is_available():
        return {"torch": lambda tensors: _step(torch, case, layer, tensors)}
    found = {"cuDNN (torch)": lambda tensors: _step(torch, case, layer, tensors)}
    if case.dtype == "float32":
        found["cuDNN (torch, NCHW)"] = lambda tensors: _step(torch, case, layer, tensors, is_nchw=True)
    if case.pass_ is Pass.FPROP and case.options.get("relu") and "scale" not in case.operands:
        found["cuDNN (torch, fused)"] = lambda tensors: _step(torch, case, layer, tensors, is_fused=True)
    return found


def finished(torch: Any, case: Case, y: Any, tensors: Tensors) -> Any:
    """
    Apply what a case's epilogue does after a bias, as PyTorch runs it eagerly: one kernel for each term.

    Args:
        torch: PyTorch.
        case: The call.
        y: The result of the product, with channels at axis 1; may be overwritten.
        tensors: Arrays of the case, laid out as `y`.
    """
    scale, residual, positive = (tensors.get(name) for name in ("scale", "residual", "positive"))
    if scale is not None:
        # Statistics of nothing: a batch norm in inference is then the factor and term alone.
        mean, variance = torch.zeros_like(scale), torch.full_like(scale, 1 - _EPS)
        y = torch.nn.functional.batch_norm(y, mean, variance, scale, tensors["shift"], eps=_EPS)
    if residual is not None:
        y = y.add_(residual)
    if positive is not None:
        y = torch.ops.aten.threshold_backward(y, positive, 0)
    return torch.relu_(y) if case.options.get("relu") else y


def _step(
    torch: types.ModuleType,
    case: Case,
    layer: Conv2d,
    tensors: Tensors,
    *,
    is_nchw: bool = False,
    is_fused: bool = False,
) -> Step:
    # The same memory, seen as NCHW with the channels last.
    seen = {name: each.permute(0, 3, 1, 2) if each.ndim > 1 else each for name, each in tensors.items()}
    if is_nchw:
        seen = {name: each.contiguous() for name, each in seen.items()}
    convolve = _forward if case.pass_ is Pass.FPROP else _gradient
    return keeping(convolve(torch, case, layer, seen, is_fused=is_fused))


def _geometry(layer: Conv2d) -> tuple[list[int], list[int], list[int]]:
    return list(layer.stride), [layer.pad[0], layer.pad[2]], list(layer.dilation)


def _forward(torch: Any, case: Case, layer: Conv2d, tensors: Tensors, *, is_fused: bool) -> Callable[[], Any]:
    x, w, b, residual = (tensors.get(name) for name in ("x", "w", "b", "residual"))
    geometry = _geometry(layer)
    if is_fused and residual is not None:
        return lambda: torch.cudnn_convolution_add_relu(x, w, residual, 1.0, b, *geometry, layer.groups)
    if is_fused:
        return lambda: torch.cudnn_convolution_relu(x, w, b, *geometry, layer.groups)

    def forward() -> Any:
        return finished(torch, case, torch.nn.functional.conv2d(x, w, b, *geometry, layer.groups), tensors)

    return forward


def _gradient(torch: Any, case: Case, layer: Conv2d, tensors: Tensors, *, is_fused: bool) -> Callable[[], Any]:
    del is_fused
    wanted = [case.pass_ is Pass.DGRAD, case.pass_ is Pass.WGRAD, "db" in tensors]
    # What is not wanted is asked for its shape alone.
    x, w = (tensors.get(name, tensors.get(other)) for name, other in (("x", "out"), ("w", "dw")))
    backward, dy, geometry = torch.ops.aten.convolution_backward, tensors["dy"], _geometry(layer)
    biases = [layer.k] if "db" in tensors else None

    def gradients() -> Any:
        dx, dw, db = backward(dy, x, w, biases, *geometry, False, [0, 0], layer.groups, wanted)  # noqa: FBT003 - not transposed
        return (None if dx is None else finished(torch, case, dx, tensors)), dw, db

    return gradients

"""
A convolution by cuDNN, through PyTorch: the ways that it has, of which the fastest is its best.

* channels last: the arrays as ours are.  What cuDNN likes on tensor cores.
* NCHW: in float32, where many of its algorithms know nothing else.  The arrays are turned before anything is timed.
* fused: bias, residual and ReLU in one call of cuDNN's, in the place of three kernels of PyTorch's.

PyTorch returns results in memory of its own, which would be the same each time and stay in the L2; so the step of
each set of arrays keeps its last result, and there are as many in turn as there are sets.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from cubatch.bench.cases import Case
from cubatch.network.layers import Conv2d
from cubatch.network.passes import Pass

Step = Callable[[], Any]
Tensors = Mapping[str, Any]


def steps(torch: types.ModuleType, case: Case, layer: Conv2d) -> dict[str, Callable[[Tensors], Step]]:
    """
    Give the ways to do a case, by what is said of each; the first is as our kernels do it.

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
    if case.pass_ is Pass.FPROP and _clamps(case):
        found["cuDNN (torch, fused)"] = lambda tensors: _step(torch, case, layer, tensors, is_fused=True)
    return found


def _clamps(case: Case) -> bool:
    return "residual" in case.operands or bool(case.options.get("relu", False))


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
    work = convolve(torch, case, layer, seen, is_fused=is_fused)
    kept: list[Any] = []

    def step() -> Any:
        kept.clear()  # its memory is what the next result of this set is put into
        kept.append(work())
        return kept[0]

    return step


def _geometry(layer: Conv2d) -> tuple[list[int], list[int], list[int]]:
    return list(layer.stride), [layer.pad[0], layer.pad[2]], list(layer.dilation)


def _forward(torch: Any, case: Case, layer: Conv2d, tensors: Tensors, *, is_fused: bool) -> Callable[[], Any]:
    x, w, b, residual = (tensors.get(name) for name in ("x", "w", "b", "residual"))
    geometry, clamps = _geometry(layer), _clamps(case)
    if is_fused and residual is not None:
        return lambda: torch.cudnn_convolution_add_relu(x, w, residual, 1.0, b, *geometry, layer.groups)
    if is_fused:
        return lambda: torch.cudnn_convolution_relu(x, w, b, *geometry, layer.groups)

    def forward() -> Any:
        y = torch.nn.functional.conv2d(x, w, b, *geometry, layer.groups)
        if residual is not None:
            y.add_(residual)
        if clamps:
            torch.relu_(y)
        return y

    return forward


def _gradient(torch: Any, case: Case, layer: Conv2d, tensors: Tensors, *, is_fused: bool) -> Callable[[], Any]:
    del is_fused
    wanted = [case.pass_ is Pass.DGRAD, case.pass_ is Pass.WGRAD, False]
    # What is not wanted is asked for its shape alone.
    x, w = (tensors.get(name, tensors.get(other)) for name, other in (("x", "out"), ("w", "dw")))
    backward, dy, geometry = torch.ops.aten.convolution_backward, tensors["dy"], _geometry(layer)
    return lambda: backward(dy, x, w, None, *geometry, False, [0, 0], layer.groups, wanted)  # noqa: FBT003 - not transposed

"""
The vendor's side: cuBLAS by the array module's matmul, cuDNN by PyTorch where it is installed.

Float32 means float32 on both sides: TF32 is switched off each time, since the libraries' defaults differ and a
TF32 kernel beside a float32 one is the most common false comparison there is.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from cubatch import kinds
from cubatch.bench.cases import Case
from cubatch.layer import Pass

Step = Callable[[], None]


@attrs.frozen
class Rival:
    """
    How the vendor does a case.

    Attributes:
        name: The library and what of it.
        bind: Gives the step for a set of arrays.
    """

    name: str
    bind: Callable[[Mapping[str, Any]], Step]


def rival(case: Case, module: types.ModuleType, *, benchmark: bool = True) -> Rival | str:
    """
    Find the vendor's way to do a case.

    Args:
        case: The call.
        module: Whose arrays it is done on: CuPy, or NumPy in tests.
        benchmark: Let cuDNN time its algorithms and take the fastest; else it takes the one it expects to be.

    Returns:
        Rival | str: Or the reason why there is none here.
    """
    layer = case.layer
    if not isinstance(layer, kinds.Linear | kinds.Conv2d):
        return "compared with the bandwidth of a copy"
    if case.dtype != "float32":
        return "the vendor's 16-bit products run on Tensor Cores, ours in float32"
    if isinstance(layer, kinds.Linear):
        return _matmul(case, module)
    torch = _torch()
    if torch is not None and module.__name__ == "cupy" and not torch.cuda.is_available():
        torch = None
    if torch is not None and layer.pad[0] == layer.pad[1] and layer.pad[2] == layer.pad[3]:
        return _convolution(torch, case, layer, benchmark=benchmark)
    if _is_plain_product(layer):
        return _matmul(case, module)
    return "PyTorch with CUDA is not installed" if torch is None else "cuDNN pads both sides of an axis alike"


def versions() -> dict[str, str | None]:
    """Give the versions of PyTorch and the cuDNN in it; None for what is not there."""
    torch = _torch()
    cudnn = torch.backends.cudnn.version() if torch is not None else None
    return {"torch": getattr(torch, "__version__", None), "cudnn": None if cudnn is None else str(cudnn)}


def _matmul(case: Case, module: types.ModuleType) -> Rival:
    os.environ["CUPY_TF32"] = "0"  # CuPy reads it with the first product of a process

    def bind(arrays: Mapping[str, Any]) -> Step:
        flat = {name: array.reshape(-1, array.shape[-1]) for name, array in arrays.items()}
        left, right, target = {
            Pass.FPROP: lambda: (flat["x"], flat["w"].T, flat["out"]),
            Pass.DGRAD: lambda: (flat["dy"], flat["w"], flat["out"]),
            Pass.WGRAD: lambda: (flat["dy"].T, flat["x"], flat["dw"]),
        }[case.pass_ or Pass.FPROP]()

        def step() -> None:
            module.matmul(left, right, out=target)

        return step

    return Rival("cuBLAS (cupy.matmul)" if module.__name__ == "cupy" else "numpy.matmul", bind)


def _convolution(torch: types.ModuleType, case: Case, layer: kinds.Conv2d, *, benchmark: bool) -> Rival:
    geometry = (list(layer.stride), [layer.pad[0], layer.pad[2]], list(layer.dilation))

    def bind(arrays: Mapping[str, Any]) -> Step:
        _exact_float32(torch, benchmark=benchmark)
        # The same memory, seen as NCHW with the channels last.
        tensors = {name: torch.from_dlpack(array).permute(0, 3, 1, 2) for name, array in arrays.items()}
        if case.pass_ is Pass.FPROP:
            x, w = tensors["x"], tensors["w"]

            def step() -> None:
                torch.nn.functional.conv2d(x, w, None, *geometry, layer.groups)

            return step
        wanted = [case.pass_ is Pass.DGRAD, case.pass_ is Pass.WGRAD, False]
        # What is not wanted is asked for its shape alone.
        x, w = (tensors.get(name, tensors.get(other)) for name, other in (("x", "out"), ("w", "dw")))
        backward, dy = torch.ops.aten.convolution_backward, tensors["dy"]

        def gradient() -> None:
            backward(dy, x, w, None, *geometry, False, [0, 0], layer.groups, wanted)  # noqa: FBT003 - not transposed

        return gradient

    return Rival("cuDNN (torch)" if torch.cuda.is_available() else "torch", bind)


def _exact_float32(torch: types.ModuleType, *, benchmark: bool) -> None:
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def _is_plain_product(layer: kinds.Conv2d) -> bool:
    return layer.r * layer.s == 1 and layer.groups == 1 and set(layer.stride) == {1} and not any(layer.pad)


def _torch() -> types.ModuleType | None:
    try:
        import torch
    except ImportError:
        return None
    found: types.ModuleType = torch
    return found

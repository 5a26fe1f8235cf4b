"""
The vendor's libraries, with which cubatch kernels are compared: cuBLAS by CuPy or PyTorch, cuDNN by PyTorch.

All compute in the same precision.  Whether float32 may become TF32, and whether sums may be stored in 16 bits, is set
for each case, because the defaults of libraries differ.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from cubatch.bench.calls import Case
from cubatch.bench.check import WINOGRAD
from cubatch.bench.target import failure
from cubatch.network.layers import Attention, Conv2d, Linear
from cubatch.network.passes import Pass

VENDOR = "vendor"
"""Side of the vendor's libraries, including PyTorch's kernels."""

Step = Callable[[], Any]
Tensors = Mapping[str, Any]
EPS = 1e-5  # of norms: the least that cuDNN takes; with less PyTorch uses another kernel


@attrs.frozen
class Rival:
    """An implementation of a case by another library."""

    library: str  # name of the library and of its variant: "cuDNN (torch, NCHW)"
    # returns a step for a set of arrays, which does the case once or enqueues it
    bind: Callable[[Mapping[str, Any]], Step]
    # returns the results by name, laid out as the arrays of the case, from the value of a step. `None` if the step
    # writes into the arrays
    results: Callable[[Any], Mapping[str, Any]] | None = None
    slack: float = 1.0  # factor on the error bound of cubatch kernels
    # number of times that a result is stored, and so rounded, before a later kernel completes it
    stored_between: int = 0


@attrs.frozen
class Way:
    """An implementation of a case with PyTorch."""

    make: Callable[[Tensors], Step]  # returns a step for tensors of the case, which returns its results
    names: tuple[str, ...]  # names of the results in their order; empty if the step writes into the tensors
    is_image: bool = True  # whether tensors of four axes are viewed as NCHW
    slack: float = 1.0  # factor on the error bound
    stored: int = 0  # number of further times that a result is stored, and so rounded, before a later kernel reads it


Ways = Mapping[str, Callable[[Any, Case], Mapping[str, Way]]]
"""By operation, a function of PyTorch and a case that returns PyTorch's ways by the name of the library."""


def rivals(case: Case, module: types.ModuleType, *, others: Ways | None = None) -> list[Rival] | str:
    """
    Return the implementations of a case by other libraries, beginning with that in cubatch's array layout.

    Args:
        module: Array module: CuPy, or NumPy in tests.
        others: By name of the operation, functions that make the implementations of operations other than products and
            attention; None: such operations have no rivals.

    Returns:
        list | str: The implementations, or the reason why there is none, as text.
    """
    try:
        torch, layer = torch_of(module), case.layer
        is_product = isinstance(layer, Linear) or (isinstance(layer, Conv2d) and _is_plain_product(layer))
        is_narrow = case.dtype == "float32" or (torch is None and case.dtype == "float16")
        if is_product and not case.epilogue and is_narrow and (isinstance(layer, Linear) or torch is None):
            # CuPy gives cuBLAS little scratch memory, has no bfloat16, and allows TF32 once per process.
            os.environ["CUPY_TF32"] = "0"  # CuPy reads it with the first product of a process
            library = "cuBLAS (cupy.matmul)" if module.__name__ == "cupy" else "numpy.matmul"
            return [Rival(library, lambda arrays: _matmul(case, arrays, module.matmul))]
        if torch is None:
            return "PyTorch with CUDA is not installed"
        ways = _ways(torch, case, others or {})
    except Exception as error:  # noqa: BLE001 - cubatch kernels are timed without a rival
        return failure(error)
    if isinstance(ways, str):
        return ways
    return [_rival(torch, module, case, library, way) for library, way in ways.items()]


def _ways(torch: Any, case: Case, others: Ways) -> Mapping[str, Way] | str:
    """Return PyTorch's implementations by library, first that of cubatch's array layout, or the reason for none."""
    layer, on_gpu = case.layer, torch.cuda.is_available()
    if isinstance(layer, Attention):
        return {"SDPA (torch)" if on_gpu else "torch": _attention_way(torch, case)}
    if isinstance(layer, Linear):
        return {"cuBLAS (torch)" if on_gpu else "torch": _linear_way(torch, case)}
    pad = getattr(layer, "pad", (0, 0, 0, 0))
    if (pad[0], pad[2]) != (pad[1], pad[3]):
        return "PyTorch pads both sides of an axis alike"
    if isinstance(layer, Conv2d):
        return _convolution_ways(torch, case, layer, on_gpu=on_gpu)
    if case.operation not in others:
        return "only products, convolutions and attention are compared"
    return others[case.operation](torch, case)


def _rival(torch: Any, module: types.ModuleType, case: Case, library: str, way: Way) -> Rival:
    def bind(arrays: Mapping[str, Any]) -> Step:
        set_precision(torch, case.dtype)
        tensors = {name: _tensor(torch, array) for name, array in case.unpadded(arrays).items()}
        if way.is_image:  # the same memory, seen as NCHW with the channels last
            tensors = {name: each.permute(0, 3, 1, 2) if each.ndim == 4 else each for name, each in tensors.items()}  # noqa: PLR2004
        return keeping(way.make(tensors)) if way.names else way.make(tensors)

    def results(returned: Any) -> dict[str, Any]:
        arrays = {}
        for name, tensor in zip(way.names, returned if isinstance(returned, tuple) else (returned,), strict=True):
            laid_out = tensor.permute(0, 2, 3, 1) if way.is_image and tensor.ndim == 4 else tensor  # noqa: PLR2004
            shape, padded = case.operands[name].shape, case.operands[name].padded
            arrays[name] = _array(torch, laid_out.detach().reshape(*shape[:-1], shape[-1] - padded), module)
        return arrays

    return Rival(
        library, bind, results if way.names else None, slack=way.slack, stored_between=len(case.epilogue) + way.stored
    )  # fmt: skip


def torch_of(module: types.ModuleType) -> types.ModuleType | None:
    """Return PyTorch; None if it is missing, or lacks CUDA and `module` is CuPy, whose arrays it then cannot take."""
    torch = _torch()
    return None if torch is not None and module.__name__ == "cupy" and not torch.cuda.is_available() else torch


def versions() -> dict[str, str | None]:
    """Return the versions of "torch" and its "cudnn"; None if missing, and for a cuDNN that rejects this GPU."""
    torch, version = _torch(), None
    with contextlib.suppress(RuntimeError):  # a cuDNN without this GPU's architecture
        version = torch.backends.cudnn.version() if torch is not None else None
    return {"torch": getattr(torch, "__version__", None), "cudnn": None if version is None else str(version)}


def set_precision(torch: Any, dtype: str) -> None:
    """Make PyTorch use TF32 only for the dtype "tf32", sum in float32, and let cuDNN choose algorithms by timing."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def keeping(work: Step) -> Step:
    """
    Return a step that runs `work` and holds its last result until its next run.

    Libraries allocate their results.  Held results have different memory for each set of arrays, so that they do not
    stay in the L2.
    """
    results: list[Any] = []

    def step() -> Any:
        results.clear()  # frees the memory that the next result of this set takes
        results.append(work())
        return results[0]

    return step


def ended(torch: Any, case: Case, y: Any, tensors: Tensors) -> Any:
    """
    Return `y` after the epilogue of a case without its bias, as in PyTorch's eager mode: one kernel for each term.

    Args:
        y: Result with channels at axis 1; may be overwritten.
        tensors: Tensors of the case, laid out as `y`.
    """
    scale, residual, positive = (tensors.get(name) for name in ("scale", "residual", "positive"))
    if scale is not None:
        # Statistics of nothing: a batch norm in inference is then the scale and the shift alone.
        mean, variance = torch.zeros_like(scale), torch.full_like(scale, 1 - EPS)
        y = torch.nn.functional.batch_norm(y, mean, variance, scale, tensors["shift"], eps=EPS)
    if residual is not None:
        y = y.add_(residual)
    if positive is not None:
        y = torch.ops.aten.threshold_backward(y, positive, 0)
    return torch.relu_(y) if case.options.get("relu") else y


# --- products ------------------------------------------------------------------------------------------------------


def _matmul(case: Case, arrays: Mapping[str, Any], multiply: Callable[..., Any]) -> Step:
    flat = {name: array.reshape(-1, array.shape[-1]) for name, array in arrays.items()}
    left, right, target = {
        Pass.FPROP: lambda: (flat["x"], flat["w"].T, flat["out"]),
        Pass.DGRAD: lambda: (flat["dy"], flat["w"], flat["out"]),
        Pass.WGRAD: lambda: (flat["dy"].T, flat["x"], flat["dw"]),
    }[case.pass_ or Pass.FPROP]()

    def step() -> None:
        multiply(left, right, out=target)

    return step


def _linear_way(torch: Any, case: Case) -> Way:
    """
    Return PyTorch's implementation of a pass of a linear layer.

    Without an epilogue it writes its result into the tensor of the case, else it returns new tensors.
    """

    def make(tensors: Mapping[str, Any]) -> Step:
        if not case.epilogue:
            return _matmul(case, tensors, torch.mm)

        def step() -> Any:
            if case.pass_ is Pass.WGRAD:
                return torch.mm(tensors["dy"].T, tensors["x"]), tensors["dy"].sum(0)
            if case.pass_ is Pass.DGRAD:
                y = torch.mm(tensors["dy"], tensors["w"])
            elif "b" in tensors:
                y = torch.addmm(tensors["b"], tensors["x"], tensors["w"].T)
            else:
                y = torch.mm(tensors["x"], tensors["w"].T)
            return ended(torch, case, y, tensors)

        return step

    return Way(make, case.results if case.epilogue else (), is_image=False)


def _convolution_ways(torch: Any, case: Case, layer: Conv2d, *, on_gpu: bool) -> dict[str, Way]:
    """
    Return PyTorch's implementations of a convolution's pass by name: "torch" on a CPU, several of cuDNN on a GPU.

    * Channels last: the arrays as cubatch has them, which suits tensor cores.
    * NCHW: in float32, where many algorithms of cuDNN support nothing else. The arrays are copied before timing.
    * Fused: bias, residual and ReLU in one call of cuDNN instead of three kernels of PyTorch.
    """
    slack = WINOGRAD if layer.r * layer.s > 1 and set(layer.stride) == {1} else 1.0  # libraries have fast algorithms
    geometry = [list(layer.stride), [layer.pad[0], layer.pad[2]], list(layer.dilation)]

    def forward(tensors: Mapping[str, Any]) -> Step:
        x, w, b = tensors["x"], tensors["w"], tensors.get("b")
        return lambda: ended(torch, case, torch.nn.functional.conv2d(x, w, b, *geometry, layer.groups), tensors)

    def gradient(tensors: Mapping[str, Any]) -> Step:
        wanted = [case.pass_ is Pass.DGRAD, case.pass_ is Pass.WGRAD, "db" in tensors]
        # A tensor whose gradient is not wanted gives its shape alone.
        x, w = (tensors.get(name, tensors.get(other)) for name, other in (("x", "out"), ("w", "dw")))
        biases, dy = [layer.k] if "db" in tensors else None, tensors["dy"]

        def step() -> Any:
            dx, dw, db = torch.ops.aten.convolution_backward(
                dy, x, w, biases, *geometry, False, [0, 0], layer.groups, wanted  # noqa: FBT003 - not transposed
            )  # fmt: skip
            if case.pass_ is Pass.DGRAD:
                return ended(torch, case, dx, tensors)
            return (dw, db) if "db" in tensors else dw

        return step

    def fused(tensors: Mapping[str, Any]) -> Step:
        x, w, b, residual = (tensors.get(name) for name in ("x", "w", "b", "residual"))
        if residual is not None:
            return lambda: torch.cudnn_convolution_add_relu(x, w, residual, 1.0, b, *geometry, layer.groups)
        return lambda: torch.cudnn_convolution_relu(x, w, b, *geometry, layer.groups)

    plain = forward if case.pass_ is Pass.FPROP else gradient
    if not on_gpu:
        return {"torch": Way(plain, case.results, slack=slack)}
    ways = {"cuDNN (torch)": Way(plain, case.results, slack=slack)}
    if case.dtype == "float32":
        ways["cuDNN (torch, NCHW)"] = Way(
            lambda tensors: plain({name: each.contiguous() for name, each in tensors.items()}),
            case.results,
            slack=slack,
        )
    if case.pass_ is Pass.FPROP and case.options.get("relu") and "scale" not in case.operands:
        ways["cuDNN (torch, fused)"] = Way(fused, case.results, slack=slack)
    return ways


def _attention_way(torch: Any, case: Case) -> Way:
    """
    Return the implementation of attention by linear layers and PyTorch's scaled_dot_product_attention.

    A backward pass is that of PyTorch's graph, whose forward pass runs before anything is timed.  It reads values that
    its own forward pass has rounded, which the bound of cubatch kernels does not cover.
    """
    heads, functional = case.options["heads"], torch.nn.functional
    given = ("x", "w_in", "w_out", "b_in", "b_out")

    def attend(x: Any, w_in: Any, w_out: Any, b_in: Any = None, b_out: Any = None) -> Any:
        n, c = x.shape[0], x.shape[-1]
        qkv = functional.linear(x.reshape(n, -1, c), w_in, b_in).view(n, -1, 3, heads, c // heads)
        mixed = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        return functional.linear(mixed.transpose(1, 2).reshape(n, -1, c), w_out, b_out)

    def forward(tensors: Mapping[str, Any]) -> Step:
        keeps = "keep" in case.arrays
        leaves = {name: tensors[name].detach().requires_grad_(keeps) for name in given if name in tensors}

        def step() -> Any:
            with torch.set_grad_enabled(keeps):
                return attend(**leaves)

        return step

    def backward(tensors: Mapping[str, Any]) -> Step:
        values = {name: tensors[name] for name in given if name in tensors}
        # The value of a bias changes no gradient.
        values |= {name: torch.zeros_like(tensors[f"d{name}"]) for name in given[3:] if f"d{name}" in tensors}
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in values.items()}
        y = attend(**leaves)
        dy = tensors["dy"].reshape(y.shape)
        return lambda: torch.autograd.grad(y, list(leaves.values()), dy, retain_graph=True)

    if case.pass_ is Pass.FPROP:  # PyTorch keeps other values for its backward pass: only the output is compared
        return Way(forward, ("out",), is_image=False)
    names = ("out", *(f"d{name}" for name in given[1:] if f"d{name}" in case.operands))
    return Way(backward, names, is_image=False, stored=8)


def _tensor(torch: Any, array: Any) -> Any:
    """Return a tensor on the memory of an array; the elements of a uint16 array are the bits of bfloat16."""
    if array.dtype == np.uint16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _array(torch: Any, tensor: Any, module: types.ModuleType) -> Any:
    """Return an array of `module` on the memory of a tensor, uint16 for bfloat16; the inverse of `_tensor`."""
    if tensor.dtype == torch.bfloat16:
        return module.from_dlpack(tensor.view(torch.int16)).view(np.uint16)
    return module.from_dlpack(tensor)


def _is_plain_product(layer: Conv2d) -> bool:
    return layer.r * layer.s == 1 and layer.groups == 1 and set(layer.stride) == {1} and not any(layer.pad)


def _torch() -> types.ModuleType | None:
    try:
        import torch
    except (ImportError, OSError, RuntimeError):  # missing, or its libraries do not load
        return None
    module: types.ModuleType = torch
    return module

"""
Whom our kernels are timed beside: the functions in RIVALS, each of which does a case or says why it cannot.

Today that is the vendor: cuBLAS by the array module's matmul or PyTorch's, cuDNN by PyTorch where it is installed.
Another is a function in RIVALS: tables, JSON and figures show whoever is there, by its key.

All compute in the same precision.  Whether float32 may become TF32, and whether sums may be kept in 16 bits,
is said each time and for every library: defaults differ, and a TF32 kernel beside a float32 one is the most common
false comparison there is.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
import numpy as np

from cubatch.bench import cudnn, sdpa
from cubatch.bench.calls import keeping
from cubatch.bench.cases import Case
from cubatch.errors import DeviceFailed
from cubatch.network import layers
from cubatch.network.passes import Pass

VENDOR = "vendor"
"""Name of the vendor's libraries, whichever of them does a case."""

Step = Callable[[], Any]
_NO_TORCH = "PyTorch with CUDA is not installed"

_WINOGRAD = 32.0
"""
How many times more a convolution without strides may be off: libraries have fast algorithms for it.

Winograd's F(4 x 4, 3 x 3) computes A' ((G w) * (B' x)).  Of random data the variance of its worst output along one
axis is the sum of A^2 (sum of G^2) (sum of B^2), over the 3 of a direct sum: 31; along both it is the square of that.
FFTs are off by less than a direct sum.
"""


_SAVED_ANEW = 64.0
"""
The same of attention's gradients in 16 bits: they read mixed values that their own forward pass has rounded, not those
that are given, which are exact to our bound.  Measured on a CPU: 9 of our bounds in float16, 40 in bfloat16.
"""


@attrs.frozen
class Rival:
    """
    How a rival does a case.

    Attributes:
        library: The library and what of it.
        bind: Gives the step for a set of arrays: what does the case once, or enqueues it.
        results: Gives the results by name, laid out as the case's arrays, from what a step returns, all that are
            compared; None: the step writes them into the arrays.
        slack: How many of the bounds of our kernels they may be off.
        stored_between: How often a result is stored by one kernel for the next, where our kernels store it once.
        alternatives: Other ways of the same library, of which the fastest is its best.
        name: Its key in RIVALS, which heads its columns; `rivals` fills it in.
    """

    library: str
    bind: Callable[[Mapping[str, Any]], Step]
    results: Callable[[Any], Mapping[str, Any]] | None = None
    slack: float = 1.0
    stored_between: int = 0
    alternatives: tuple[Rival, ...] = ()
    name: str = attrs.field(default="", kw_only=True)


@attrs.frozen
class Missing:
    """
    A rival that cannot do a case here.

    Attributes:
        reason: Why, as the end of a sentence.
        name: Its key in RIVALS; `rivals` fills it in.
    """

    reason: str
    name: str = attrs.field(default="", kw_only=True)


class Find(Protocol):
    """How a way to do a case is requested of a rival: see `rivals`, whose arguments it is given."""

    def __call__(self, case: Case, module: types.ModuleType, *, benchmark: bool) -> Rival | Missing:
        """Return the way to do a case, or why there is none."""


def rivals(case: Case, module: types.ModuleType, *, benchmark: bool = True) -> list[Rival | Missing]:
    """
    Ask every rival for its way to do a case.

    Args:
        case: The call.
        module: Whose arrays it is done on: CuPy, or NumPy in tests.
        benchmark: Let a library time its algorithms and take the fastest; else it takes the one it expects to be.

    Returns:
        list: In the order of RIVALS, each with its alternatives behind it.
    """
    found: list[Rival | Missing] = []
    for name, find in RIVALS.items():
        try:
            answer = find(case, module, benchmark=benchmark)
        except Exception as error:  # noqa: BLE001 - whatever a library raises, the others take part
            answer = Missing(failure(error))
        others = () if isinstance(answer, Missing) else answer.alternatives
        found += [attrs.evolve(one, name=name) for one in (answer, *others)]
    return found


def failure(error: Exception) -> str:
    """
    Return why a rival that raised an error is missing.

    Raises:
        DeviceFailed: If nothing more runs in this process: that is nobody's answer.
    """
    if isinstance(error, DeviceFailed) and error.is_fatal:
        raise error
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _vendor(case: Case, module: types.ModuleType, *, benchmark: bool) -> Rival | Missing:
    layer, torch = case.layer, torch_of(module)
    if layer is None or not layer.gemms(Pass.FPROP, 1):
        return Missing("compared with the bandwidth of a copy")
    if layer.products_in_turn:
        return _attention(torch, case, module)
    # PyTorch is handed the convolution's own fields, of which the windows' geometry has no padding behind the input.
    conv = layer if isinstance(layer, layers.Conv2d) else None
    if conv is None:
        return _product(torch, case, module)
    return _any_convolution(torch, case, module, conv, benchmark=benchmark)


def _any_convolution(
    torch: types.ModuleType | None, case: Case, module: types.ModuleType, layer: layers.Conv2d, *, benchmark: bool
) -> Rival | Missing:
    """Convolve by cuDNN where it can, else as a product where that is one."""
    if torch is not None and layer.pad[0] == layer.pad[1] and layer.pad[2] == layer.pad[3]:
        return _convolution(torch, case, module, layer, benchmark=benchmark)
    if _is_plain_product(layer) and not case.epilogue:
        return _product(torch, case, module)
    return Missing(_NO_TORCH if torch is None else "cuDNN pads both sides of an axis alike")


RIVALS: dict[str, Find] = {VENDOR: _vendor}


def torch_of(module: types.ModuleType) -> types.ModuleType | None:
    """Return PyTorch, if it is installed and can take a module's arrays: CuPy's only with CUDA."""
    torch = _torch()
    return None if torch is not None and module.__name__ == "cupy" and not torch.cuda.is_available() else torch


def versions() -> dict[str, str | None]:
    """Return the versions of PyTorch and the cuDNN in it; None for what is not there, or does not take this GPU."""
    torch, version = _torch(), None
    with contextlib.suppress(RuntimeError):  # a cuDNN that no longer knows the GPU's architecture
        version = torch.backends.cudnn.version() if torch is not None else None
    return {"torch": getattr(torch, "__version__", None), "cudnn": None if version is None else str(version)}


def set_precision(torch: types.ModuleType, dtype: str, *, benchmark: bool) -> None:
    """
    Tell PyTorch's libraries how to compute: float32 as float32 unless TF32 is asked for, all sums in float32.

    Args:
        torch: PyTorch.
        dtype: One of `hardware.DTYPES`.
        benchmark: Let cuDNN time its algorithms.
    """
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _product(torch: types.ModuleType | None, case: Case, module: types.ModuleType) -> Rival | Missing:
    """
    Multiply by cuBLAS: plain float32 from the array module, all else from PyTorch, whose kernels do the epilogue.

    CuPy gives cuBLAS little scratch memory, knows no bfloat16 without another package, and allows TF32 once for a
    whole process; its float16 is the second choice.
    """
    if not case.epilogue and (case.dtype == "float32" or (torch is None and case.dtype == "float16")):
        os.environ["CUPY_TF32"] = "0"  # CuPy reads it with the first product of a process
        library = "cuBLAS (cupy.matmul)" if module.__name__ == "cupy" else "numpy.matmul"
        return Rival(library, lambda arrays: _matmul(case, arrays, module.matmul))
    if torch is None:
        return Missing(_NO_TORCH)

    def bind(arrays: Mapping[str, Any]) -> Step:
        set_precision(torch, case.dtype, benchmark=True)
        tensors = {name: _tensor(torch, array) for name, array in arrays.items()}
        return _finished_product(torch, case, tensors) if case.epilogue else _matmul(case, tensors, torch.mm)

    def results(returned: Any) -> dict[str, Any]:
        return {name: _array(torch, each, module) for name, each in zip(case.results, returned, strict=True)}

    library = ("cuBLAS (torch)" if case.epilogue else "cuBLAS (torch.mm)") if torch.cuda.is_available() else "torch"
    return Rival(library, bind, results if case.epilogue else None, stored_between=len(case.epilogue))


def _finished_product(torch: types.ModuleType, case: Case, tensors: Mapping[str, Any]) -> Step:
    """Return a linear layer's pass with its epilogue; a step returns the results in the case's order."""
    flat = {name: each.reshape(-1, each.shape[-1]) if each.ndim > 1 else each for name, each in tensors.items()}

    def step() -> tuple[Any, ...]:
        if case.pass_ is Pass.WGRAD:
            return torch.mm(flat["dy"].T, flat["x"]), flat["dy"].sum(0)
        if case.pass_ is Pass.DGRAD:
            y = torch.mm(flat["dy"], flat["w"])
        elif "b" in flat:
            y = torch.addmm(flat["b"], flat["x"], flat["w"].T)
        else:
            y = torch.mm(flat["x"], flat["w"].T)
        return (cudnn.finished(torch, case, y, flat),)

    return keeping(step)


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


def _convolution(
    torch: types.ModuleType, case: Case, module: types.ModuleType, layer: layers.Conv2d, *, benchmark: bool
) -> Rival:
    place = {Pass.FPROP: None, Pass.DGRAD: 0, Pass.WGRAD: 1}[case.pass_ or Pass.FPROP]
    is_fast = layer.r * layer.s > 1 and set(layer.stride) == {1}

    def results(returned: Any) -> dict[str, Any]:
        found = {case.results[0]: (returned if place is None else returned[place]).permute(0, 2, 3, 1)}
        if "db" in case.results:
            found["db"] = returned[2]
        return {name: _array(torch, each, module) for name, each in found.items()}

    def rival(library: str, step: Callable[[Mapping[str, Any]], Step]) -> Rival:
        def bind(arrays: Mapping[str, Any]) -> Step:
            set_precision(torch, case.dtype, benchmark=benchmark)
            return step({name: _tensor(torch, array) for name, array in case.unpadded(arrays).items()})

        slack = _WINOGRAD if is_fast else 1.0
        return Rival(library, bind, results, slack=slack, stored_between=len(case.epilogue))

    first, *others = (rival(library, step) for library, step in cudnn.steps(torch, case, layer).items())
    return attrs.evolve(first, alternatives=tuple(others))


def _attention(torch: types.ModuleType | None, case: Case, module: types.ModuleType) -> Rival | Missing:
    if torch is None:
        return Missing(_NO_TORCH)
    # What PyTorch keeps for its backward pass is not ours: of a pass that keeps, the output alone is compared.
    names = ("out",) if "keep" in case.lists else ("out", *(name for name in case.results if name != "out"))

    def bind(arrays: Mapping[str, Any]) -> Step:
        set_precision(torch, case.dtype, benchmark=True)
        return sdpa.step(torch, case, {name: _tensor(torch, array) for name, array in arrays.items()})

    def results(returned: Any) -> dict[str, Any]:
        found = returned if isinstance(returned, tuple) else (returned,)
        detached = (each.detach().contiguous() for each in found)
        return {name: _array(torch, each, module) for name, each in zip(names, detached, strict=True)}

    library = "SDPA (torch)" if torch.cuda.is_available() else "torch"
    reads_its_own = "dy" in case.operands and case.dtype in {"float16", "bfloat16"}
    return Rival(library, bind, results, slack=_SAVED_ANEW if reads_its_own else 1.0)


def _tensor(torch: types.ModuleType, array: Any) -> Any:
    """Return an array's memory to PyTorch; 16 unsigned bits are those of bfloat16."""
    if array.dtype == np.uint16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _array(torch: types.ModuleType, tensor: Any, module: types.ModuleType) -> Any:
    """Return a tensor's memory to the array module, as `_tensor` took it."""
    if tensor.dtype == torch.bfloat16:
        return module.from_dlpack(tensor.view(torch.int16)).view(np.uint16)
    return module.from_dlpack(tensor)


def _is_plain_product(layer: layers.Conv2d) -> bool:
    return layer.r * layer.s == 1 and layer.groups == 1 and set(layer.stride) == {1} and not any(layer.pad)


def _torch() -> types.ModuleType | None:
    try:
        import torch
    except (ImportError, OSError, RuntimeError):  # not there, or its libraries do not load
        return None
    found: types.ModuleType = torch
    return found

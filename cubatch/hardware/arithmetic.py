"""Number formats, Tensor Cores, peak rates and the kernel library of a device."""

from __future__ import annotations

from cubatch.errors import InvalidArgument, UnknownName, UnsupportedDtype
from cubatch.hardware import architectures
from cubatch.hardware.facts import BYTES_PER_ELEMENT, DTYPES, Device

TENSOR_CORE_MULTIPLES = {"tf32": 4, "float16": 8, "bfloat16": 8}


def tensor_core_multiple(device: Device, dtype: str) -> int | None:
    """Return the multiple of channels and batch sizes that Tensor Cores need; None without them for the dtype."""
    return TENSOR_CORE_MULTIPLES.get(dtype) if has_tensor_cores(device, dtype) else None


LIBRARIES = ("auto", "cubatch", "im2col")


def resolve_library(library: str, device: Device, dtype: str = "float32") -> str:
    """
    Return the library that runs: "cubatch" (cubatch kernels) or "im2col" (products of a BLAS).

    "auto" becomes "cubatch" on a GPU whose SMs and compute capability are known, else "im2col".  A BLAS takes float32
    only: it would round to 16 bits between products, where kernels sum in float32.

    Raises:
        InvalidArgument: If the library is unknown, or does not run on the device.
        UnsupportedDtype: If "im2col" would compute in 16 bits.

    Example:
        >>> from cubatch.hardware.probe import device
        >>> resolve_library("auto", device("v100-sxm2-16gb"), "float16")
        'cubatch'
    """
    if not isinstance(library, str) or library not in LIBRARIES:
        remedy = "A PyTorch module is timed by autotune_module." if library == "torch" else ""
        raise InvalidArgument("library", library, "one of " + ", ".join(LIBRARIES), remedy)
    if library == "cubatch" and device.kind == "cpu":
        raise InvalidArgument("library", library, '"im2col" or "auto"', "The kernels of cubatch need an NVIDIA GPU.")
    if library == "cubatch" and device.compute_capability is not None:
        check_kernels(device)
    if library == "auto":
        known = device.num_sms is not None and device.compute_capability is not None
        library = "cubatch" if device.kind == "cuda" and known else "im2col"
        if library == "im2col" and device.kind == "cuda" and dtype != "float32":
            allowed = f"a GPU whose num_sms and compute_capability are known, to compute in {dtype}"
            raise InvalidArgument("device", str(device), allowed)
    if library == "im2col" and dtype != "float32":
        remedy = 'On a GPU, library="cubatch" takes it.'
        raise UnsupportedDtype(dtype, 'library="im2col"', ("float32",), remedy)
    return library


def check_kernels(device: Device) -> None:
    """Raise InvalidArgument if a GPU is too old for cubatch kernels; GPUs newer than all known ones are accepted."""
    if architectures.like(device.compute_capability or (99, 0)).is_compiled_for:
        return
    oldest = next(each.arch for each in architectures.known().values() if each.is_compiled_for)
    remedy = f"No kernel is compiled for {device.arch}; predictions for the vendor's libraries need none."
    raise InvalidArgument("device", str(device), f"a GPU of {oldest} or newer for the kernels of cubatch", remedy)


def check_dtype(device: Device, dtype: str) -> None:
    """
    Raise UnsupportedDtype if the device cannot compute with a dtype, UnknownName if no dtype has this name.

    A dtype that is no text raises InvalidArgument.

    float16 and bfloat16 run on every GPU: without Tensor Cores, values are stored in 16 bits and computed in float32.
    The mode tf32 of Tensor Cores exists from sm_80 on.
    """
    if not isinstance(dtype, str):
        raise InvalidArgument("dtype", dtype, "one of " + ", ".join(DTYPES))
    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, DTYPES)
    supported = supported_dtypes(device)
    if dtype not in supported:
        raise UnsupportedDtype(dtype, str(device), supported, _dtype_remedy(device))


def supported_dtypes(device: Device) -> tuple[str, ...]:
    """
    List the dtypes that a device supports.

    Example:
        >>> from cubatch.hardware.probe import device
        >>> supported_dtypes(device("t4"))
        ('float32', 'float16', 'bfloat16')
    """
    if device.kind == "cpu":
        return ("float32",)
    capability = device.compute_capability
    has_tf32 = capability is not None and "tf32" in architectures.like(capability).tensor_dtypes
    return tuple(dtype for dtype in DTYPES if dtype != "tf32" or has_tf32)


def _dtype_remedy(device: Device) -> str:
    if device.kind == "cpu":
        return 'Use dtype="float32", or name the GPU as device.'
    major, minor = next(key for key, each in architectures.known().items() if "tf32" in each.tensor_dtypes)
    return f'tf32 needs compute capability {major}.{minor} or higher; use dtype="float32" or "float16".'


def peak_flops_per_second(device: Device, dtype: str) -> float | None:
    """
    Return the peak rate with a dtype in FLOP/s, None if unknown; raise InvalidArgument if no dtype has this name.

    16-bit storage without Tensor Cores is computed in float32, at the float32 rate.
    """
    if dtype not in BYTES_PER_ELEMENT:
        raise InvalidArgument("dtype", dtype, "one of " + ", ".join(BYTES_PER_ELEMENT))
    rates = device.peak_flops_per_second
    if dtype in rates:
        return rates[dtype]
    computed_in_float32 = dtype in {"float16", "bfloat16"} and has_tensor_cores(device, dtype) is False
    return rates.get("float32") if computed_in_float32 else None


def has_tensor_cores(device: Device, dtype: str) -> bool | None:
    """
    Return whether a device has Tensor Cores for a dtype; None where it is not known.

    Tensor Cores of Volta and Turing take float16 only; tf32 and bfloat16 need sm_80.
    """
    if dtype == "float32" or device.kind == "cpu":
        return False
    capability = device.compute_capability
    if capability is not None and dtype not in architectures.like(capability).tensor_dtypes:
        return False
    return device.tensor_cores

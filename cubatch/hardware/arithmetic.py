"""What a device computes with: number formats, Tensor Cores, peak rates, the library that runs."""

from __future__ import annotations

from cubatch.errors import InvalidArgument, UnknownName, UnsupportedDtype
from cubatch.hardware import architectures
from cubatch.hardware.facts import BYTES_PER_ELEMENT, DTYPES, Device

TENSOR_CORE_MULTIPLES = {"tf32": 4, "float16": 8, "bfloat16": 8}


def tensor_core_multiple(device: Device, dtype: str) -> int | None:
    """Return what channels and batches are to be multiples of for Tensor Cores; None where there are none."""
    return TENSOR_CORE_MULTIPLES.get(dtype) if has_tensor_cores(device, dtype) else None


LIBRARIES = ("auto", "cubatch", "im2col")


def resolve_library(library: str, device: Device, dtype: str = "float32") -> str:
    """
    Return which kernels "auto" stands for: our own on a GPU whose facts are known, else a BLAS.

    Args:
        library: "auto", "cubatch" or "im2col".
        device: What it is to run on.
        dtype: What is to be computed with, which the device takes; a BLAS takes float32 only, since between its
            products everything would be rounded to 16 bits where kernels sum in float32.

    Raises:
        InvalidArgument: If the library is unknown, or not for this device or dtype.

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
            wanted = f"a GPU whose num_sms and compute_capability are known, to compute in {dtype}"
            raise InvalidArgument("device", str(device), wanted)
    if library == "im2col" and dtype != "float32":
        remedy = 'On a GPU, library="cubatch" takes it.'
        raise UnsupportedDtype(dtype, 'library="im2col"', ("float32",), remedy)
    return library


def check_kernels(device: Device) -> None:
    """
    Refuse a GPU that no kernel is compiled for; those that are newer than the table may do.

    Raises:
        InvalidArgument: If it is too old.
    """
    if architectures.like(device.compute_capability or (99, 0)).is_compiled_for:
        return
    oldest = next(one.arch for one in architectures.known().values() if one.is_compiled_for)
    remedy = f"No kernel is compiled for {device.arch}; predictions for the vendor's libraries need none."
    raise InvalidArgument("device", str(device), f"a GPU of {oldest} or newer for the kernels of cubatch", remedy)


def check_dtype(device: Device, dtype: str) -> None:
    """
    Refuse a dtype that the device cannot compute with.

    float16 and bfloat16 run on every GPU: where it has no Tensor Cores for them, storage is 16 bits wide
    and arithmetic float32. tf32 is a mode of Tensor Cores that exists from sm_80 on.

    Args:
        device: What it is to run on.
        dtype: One of "float32", "tf32", "float16", "bfloat16".

    Raises:
        UnknownName: If there is no such dtype.
        UnsupportedDtype: If the device does not have it (also an InvalidArgument).

    Example:
        >>> from cubatch.hardware.probe import device
        >>> check_dtype(device("v100-sxm2-16gb"), "bfloat16")
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
    List the dtypes that a device takes.

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
        return 'Use dtype="float32", or name the GPU that it is for as device.'
    major, minor = next(first for first, one in architectures.known().items() if "tf32" in one.tensor_dtypes)
    return f'tf32 needs compute capability {major}.{minor} or higher; use dtype="float32" or "float16".'


def peak_flops_per_second(device: Device, dtype: str) -> float | None:
    """
    Return the rate that arithmetic on a dtype can reach, or None where it is not known.

    16-bit storage without Tensor Cores for it is computed in float32, so it has the float32 rate.

    Args:
        device: The GPU or CPU.
        dtype: One of "float32", "tf32", "float16", "bfloat16".

    Raises:
        InvalidArgument: If there is no such dtype.

    Example:
        >>> volta = Device(name="V100", compute_capability=(7, 0), tensor_cores=True,
        ...                peak_flops_per_second={"float32": 15.7e12, "float16": 125e12})
        >>> peak_flops_per_second(volta, "bfloat16")
        15700000000000.0
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
    Return whether a device has Tensor Cores that take a dtype; None where it is not known.

    Those of Volta and Turing take float16 only; tf32 and bfloat16 came with sm_80.

    Example:
        >>> volta = Device(name="V100", compute_capability=(7, 0), tensor_cores=True)
        >>> has_tensor_cores(volta, "float16"), has_tensor_cores(volta, "bfloat16")
        (True, False)
    """
    if dtype == "float32" or device.kind == "cpu":
        return False
    capability = device.compute_capability
    if capability is not None and dtype not in architectures.like(capability).tensor_dtypes:
        return False
    return device.tensor_cores

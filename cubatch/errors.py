"""
Every exception that cubatch raises on purpose.

    CubatchError
    ├── InvalidArgument (ValueError)        a value that cannot be used, and what can
    │   ├── InvalidSpec                     the same, inside a layer, network or spec file
    │   ├── UnknownName                     no such model, device, layer type or key; lists near names
    │   └── UnsupportedDtype                the device has no such arithmetic
    ├── UnsupportedLayer                    the engine cannot run this layer (specs, memory, candidates can)
    ├── DeviceNotAvailable                  the device is real but not in this machine
    ├── DeviceFailed                        the GPU or its driver reported an error that is not about memory
    ├── CompileError                        a kernel that the compiler refuses, with its log
    ├── OutOfMemory (MemoryError)           bytes asked, bytes free, and where known the layer and tensor
    │   ├── DoesNotFit                      not even one sample fits
    │   └── OverLimit                       it may need more memory than allowed, and was not tried
    ├── NothingMeasured                     no candidate gave a usable measurement
    ├── EnergyNotAvailable                  the energy objective needs power figures that are unavailable
    ├── TimedOut                            a measurement did not end by its deadline
    ├── WorkerFailed                        the measuring process could not start or broke the protocol
    │   └── WorkerDied                      it ended while it measured, but not by a lack of memory
    ├── StoreError                          the store cannot be opened or read
    ├── InvalidData (ValueError)            a data set or result file that is not what it should be
    └── MissingDependency (ImportError)     an optional library is not installed; gives the install line
        └── UnsupportedVersion              it is, in a version that cubatch is not written for

An error carries its facts as attributes; `args` holds them too, so that errors pickle and compare. Foreign exceptions
(CUDA, CuPy, NVML, SQLite) are translated where they occur, by type and status code, never by text.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cubatch.units import format_bytes, format_seconds, shown

_LISTED_NAMES = 32
# Statuses after which a context answers nothing else: kernels that faulted, hung or broke an assertion, and unknown.
_FATAL = frozenset({700, 702, 709, 710, *range(714, 720), 999})


class CubatchError(Exception):
    """Base of everything that cubatch raises on purpose."""


def _with(remedy: str, text: str) -> str:
    return f"{text}. {remedy}" if remedy else text


class InvalidArgument(CubatchError, ValueError):
    """
    An argument that cannot be used.

    Args:
        field: Name or path of the argument, as the user would write it.
        value: The rejected value.
        allowed: The accepted values, as a phrase: "at least 1".
        remedy: The next step, when `allowed` does not already say it.
    """

    def __init__(self, field: str, value: object, allowed: str, remedy: str = "") -> None:
        super().__init__(field, value, allowed, remedy)
        self.field, self.value, self.allowed, self.remedy = field, value, allowed, remedy

    def __str__(self) -> str:
        return _with(self.remedy, f"{self.field} must be {self.allowed}, got {shown(self.value)}")


class InvalidSpec(InvalidArgument):
    """An invalid layer, network or spec file; `field` is the path of the value, such as `layers[3] (conv2d).stride`."""


class UnknownName(InvalidArgument):
    """
    An unknown name; the message lists similar names.

    Args:
        field: The kind of name: "model", "device", "layers[2].type".
        value: The name that was given.
        known: All accepted names.
        remedy: How to list the names, or another next step.
    """

    def __init__(self, field: str, value: object, known: Iterable[str], remedy: str = "") -> None:
        self.known = tuple(known)
        self.near = tuple(near_names(value, self.known) if isinstance(value, str) else ())
        CubatchError.__init__(self, field, value, self.known, remedy)
        self.field, self.value = field, value
        self.allowed, self.remedy = "one of the known names", remedy

    def __str__(self) -> str:
        if self.near:
            hint = "did you mean " + " or ".join(map(shown, self.near)) + "?"
        elif len(self.known) <= _LISTED_NAMES:
            hint = "known: " + ", ".join(self.known)
        else:
            hint = f"{len(self.known)} names are known, none is near"
        hint += f"{'' if self.near else '.'} {self.remedy}" if self.remedy else ""
        return f"unknown {self.field} {shown(self.value)}; {hint}"


class UnsupportedDtype(InvalidArgument):
    """The device cannot compute with `dtype`; `supported` lists the dtypes that it can, `remedy` is the next step."""

    def __init__(self, dtype: str, device: str, supported: Sequence[str], remedy: str = "") -> None:
        CubatchError.__init__(self, dtype, device, tuple(supported), remedy)
        self.field, self.value, self.remedy = "dtype", dtype, remedy
        self.dtype, self.device, self.supported = dtype, device, tuple(supported)
        self.allowed = "one of " + ", ".join(self.supported)

    def __str__(self) -> str:
        takes = ", ".join(self.supported)
        return _with(self.remedy, f"dtype {shown(self.dtype)} is not available on {self.device}, which takes {takes}")


class UnsupportedLayer(CubatchError):
    """The cubatch engine cannot run `layer` because of `reason`; its spec, memory plan and candidates still work."""

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(layer, reason)
        self.layer, self.reason = layer, reason

    def __str__(self) -> str:
        return (
            f"the engine cannot run {self.layer}: {self.reason}. cubatch memory, candidates and predict work for it; "
            "to tune the network in another framework, hand its step to autotune_callable()."
        )


class DeviceNotAvailable(CubatchError):
    """This machine lacks the device, or this process cannot use it; `reason` is the cause, `remedy` the next step."""

    def __init__(self, device: str, reason: str, remedy: str = "") -> None:
        super().__init__(device, reason, remedy)
        self.device, self.reason, self.remedy = device, reason, remedy

    def __str__(self) -> str:
        return _with(self.remedy, f"device {shown(self.device)} cannot be used: {self.reason}")


class DeviceFailed(CubatchError):
    """
    The GPU, a CUDA library or the driver reported an error that is not about memory.

    Args:
        operation: The operation that failed: "cuInit".
        status: The reported status, in words.
        remedy: The next step, where there is one.
        cuda_status: The status code, if the CUDA driver or runtime reported it; None for other libraries.
    """

    def __init__(self, operation: str, status: str, remedy: str = "", cuda_status: int | None = None) -> None:
        super().__init__(operation, status, remedy, cuda_status)
        self.operation, self.status, self.remedy, self.cuda_status = operation, status, remedy, cuda_status

    @classmethod
    def by_driver(cls, operation: str, cuda_status: int, remedy: str = "") -> DeviceFailed:
        """Return the error of the call `operation`, for which the CUDA driver returned the code `cuda_status`."""
        return cls(operation, f"CUDA driver status {cuda_status}", remedy, cuda_status)

    @property
    def is_fatal(self) -> bool:
        """Whether all later GPU calls of this process fail too; False if only this call failed."""
        return self.cuda_status in _FATAL

    def __str__(self) -> str:
        return _with(self.remedy, f"{self.operation} failed with {self.status}")


class CompileError(CubatchError):
    """
    A kernel does not compile, or its code must not be launched.

    Args:
        kernel: The variant's name.
        arch: The target: "sm_70".
        options: Options of the compiler.
        log: The compiler's log, or the defect of its output.
    """

    def __init__(self, kernel: str, arch: str, options: Sequence[str], log: str) -> None:
        super().__init__(kernel, arch, tuple(options), log)
        self.kernel, self.arch, self.options, self.log = kernel, arch, tuple(options), log

    def __str__(self) -> str:
        return f"kernel {self.kernel} does not compile for {self.arch} ({' '.join(self.options)}):\n{self.log.strip()}"


class OutOfMemory(CubatchError, MemoryError):
    """
    More memory was requested than the device has.

    Args:
        what: The operation: "training mnist-cnn at batch size 4096".
        needed_bytes: Requested bytes; None if unknown.
        available_bytes: Bytes that were free, or that the process held for the operation; None if unknown.
        tensor: The largest tensor: "conv2.y (1024, 14, 14, 64) of layer conv2, axis 0 is the batch".
        largest_batch_size: Largest batch that would fit; None if unknown.
        remedy: The next step, if there is one.
    """

    if not TYPE_CHECKING:  # mypy would check calls against it instead of __init__
        __new__ = CubatchError.__new__  # MemoryError's, the next one, refuses subclasses of two classes

    def __init__(
        self, what: str, needed_bytes: int | None = None, available_bytes: int | None = None, tensor: str = "",
        largest_batch_size: int | None = None, remedy: str = "",
    ) -> None:  # fmt: skip
        super().__init__(what, needed_bytes, available_bytes, tensor, largest_batch_size, remedy)
        self.what, self.tensor, self.remedy = what, tensor, remedy
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes
        self.largest_batch_size = largest_batch_size

    def __str__(self) -> str:
        text = f"out of memory: {self.what}"
        if self.needed_bytes is not None:
            text += f" needs {format_bytes(self.needed_bytes)}"
        if self.available_bytes is not None:
            text += f", {format_bytes(self.available_bytes)} are free"
            if self.needed_bytes is not None:
                text += f" (short by {format_bytes(max(0, self.needed_bytes - self.available_bytes))})"
        if self.tensor:
            text += f"; the largest tensor is {self.tensor}"
        if self.largest_batch_size is not None:
            text += f"; the largest batch that fits is {self.largest_batch_size}"
        return _with(self.remedy, text)


class DoesNotFit(OutOfMemory):
    """
    A step at batch size 1 needs more memory than it may use on the device.

    Args:
        spec: The name of the network.
        device: The name of the device.
        needed_bytes: Bytes of a step at batch size 1.
        available_bytes: Bytes that the step may use.
        mode: "inference" or "training".
        tensor: The largest tensor, as in OutOfMemory.
    """

    def __init__(
        self, spec: str, device: str, needed_bytes: int, available_bytes: int, mode: str, tensor: str = ""
    ) -> None:
        CubatchError.__init__(self, spec, device, needed_bytes, available_bytes, mode, tensor)
        self.spec, self.device, self.mode = spec, device, mode
        self.what, self.tensor, self.largest_batch_size, self.remedy = spec, tensor, 0, ""
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes

    def __str__(self) -> str:
        needed, available = self.needed_bytes or 0, self.available_bytes or 0
        training = 'pass mode="inference" if you do not train, ' if self.mode == "training" else ""
        largest = f"; the largest tensor is {self.tensor}" if self.tensor else ""
        return (
            f"{self.spec} does not fit on {self.device} even at batch size 1: it needs {format_bytes(needed)}, "
            f"{format_bytes(available)} may be used (short by {format_bytes(needed - available)}){largest}. Raise the "
            f"memory limit if you set one, {training}use a smaller dtype, or free memory held by other processes."
        )


class OverLimit(OutOfMemory):
    """A batch size was not tried: by the memory of smaller batch sizes it may need more than the memory limit."""


class NothingMeasured(CubatchError):
    """
    No candidate gave a measurement that can be recommended.

    Args:
        reason: How the trials of the candidates ended.
        remedy: The next step.
        lead: The beginning of the message, before the reason.
    """

    def __init__(self, reason: str, remedy: str, lead: str = "no batch size could be measured") -> None:
        super().__init__(reason, remedy, lead)
        self.reason, self.remedy, self.lead = reason, remedy, lead

    def __str__(self) -> str:
        return f"{self.lead}: {self.reason}. {self.remedy}"


class EnergyNotAvailable(CubatchError):
    """The energy objective needs a power reading that the device does not give."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.device = device

    def __str__(self) -> str:
        return f'{self.device} reports no power or energy; use objective="throughput" or "latency"'


class TimedOut(CubatchError):
    """The measurement `what` did not end within `seconds`."""

    def __init__(self, what: str, seconds: float, remedy: str = "") -> None:
        super().__init__(what, seconds, remedy)
        self.what, self.seconds, self.remedy = what, seconds, remedy

    def __str__(self) -> str:
        return _with(self.remedy, f"{self.what} did not come back within {format_seconds(self.seconds)}")


class WorkerFailed(CubatchError):
    """The measuring process could not start, or did not answer as its protocol requires; `reason` is the cause."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason, remedy)
        self.reason, self.remedy = reason, remedy

    def __str__(self) -> str:
        return _with(self.remedy, f"the measuring process failed: {self.reason}")


class WorkerDied(WorkerFailed):
    """The measuring process ended while it measured, by a signal or by itself, but not by a lack of memory."""


class StoreError(CubatchError):
    """The SQLite file of cached timings at `path` cannot be used; `reason` is the cause."""

    def __init__(self, path: str, reason: str, remedy: str = "Pass store=False, or another path.") -> None:
        super().__init__(path, reason, remedy)
        self.path, self.reason, self.remedy = path, reason, remedy

    def __str__(self) -> str:
        return f"the store {self.path} cannot be used: {self.reason}. {self.remedy}"


class InvalidData(CubatchError, ValueError):
    """A data set, result or other file at `path` is missing, damaged or of a wrong format; `reason` is the cause."""

    def __init__(self, path: str, reason: str, remedy: str = "") -> None:
        super().__init__(path, reason, remedy)
        self.path, self.reason, self.remedy = path, reason, remedy

    def __str__(self) -> str:
        return _with(self.remedy, f"{self.path}: {self.reason}")


class MissingDependency(CubatchError, ImportError):
    """The `library` that `purpose` needs is not installed; the optional `extra` of cubatch installs it."""

    def __init__(self, library: str, purpose: str, extra: str) -> None:
        super().__init__(library, purpose, extra)
        self.library, self.purpose, self.extra = library, purpose, extra

    def __str__(self) -> str:
        return f"{self.purpose} needs {self.library}, which is not installed. {install_command(self.extra)}"


class UnsupportedVersion(MissingDependency):
    """
    An optional library is installed in a version that cubatch is not written for.

    Args:
        wanted: Supported versions: "CuPy 13 or 14".
        installed: The installed version.
        extra: The extra of cubatch that installs a supported one.
    """

    def __init__(self, wanted: str, installed: str, extra: str) -> None:
        super().__init__(wanted, installed, extra)
        self.wanted, self.installed = wanted, installed

    def __str__(self) -> str:
        return f"cubatch needs {self.wanted}, found {self.installed}. {install_command(self.extra)}"


def install_command(extra: str) -> str:
    """Return a sentence with the pip command that installs cubatch and an optional extra from a source checkout."""
    return f"In a checkout of cubatch, run: pip install '.[{extra}]'"


def near_names(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return at most `count` names of `known` that are similar to `name`, most similar first; empty if none is."""
    return difflib.get_close_matches(name.lower(), known, n=count, cutoff=0.6)


# (module, class, attribute with the status, statuses that mean memory).  cudaErrorMemoryAllocation and
# CUDA_ERROR_OUT_OF_MEMORY are 2, CUBLAS_STATUS_ALLOC_FAILED 3, CUDNN_STATUS_ALLOC_FAILED 2 up to cuDNN 8, since 9
# INTERNAL_ERROR_*_ALLOCATION_FAILED 4003 and 4004.  torch.AcceleratorError carries the CUDA runtime's code.
_BY_STATUS = (
    ("cupy_backends.cuda.api.runtime", "CUDARuntimeError", "status", (2,)),
    ("cupy_backends.cuda.api.driver", "CUDADriverError", "status", (2,)),
    ("cupy_backends.cuda.libs.cublas", "CUBLASError", "status", (3,)),
    ("cupy_backends.cuda.libs.cudnn", "CuDNNError", "status", (2, 4003, 4004)),
    ("torch", "AcceleratorError", "error_code", (2,)),
)
_BY_TYPE = (("torch", "OutOfMemoryError"), ("torch.cuda", "OutOfMemoryError"))
# Texts of PyTorch's plain RuntimeErrors: its allocator on the CPU, and the status of a library on a GPU.
_TORCH_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """
    Return whether an exception means that memory ran out.

    It is recognized by type: MemoryError with its subclasses in cubatch, NumPy and CuPy, and PyTorch's own type. Errors
    of the CUDA runtime, driver, cuBLAS and cuDNN in CuPy are recognized by status code. Only PyTorch's RuntimeError on
    the CPU, and of a library on a GPU, has neither; it is recognized by its text.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("CUDA out of memory"))
        (True, False)
    """
    is_torch = type(error) is RuntimeError and any(text in str(error) for text in _TORCH_TEXTS)
    if is_torch or isinstance(error, MemoryError) or any(_is_instance(error, *of) for of in _BY_TYPE):
        return True
    known = [(attribute, codes) for module, name, attribute, codes in _BY_STATUS if _is_instance(error, module, name)]
    return any(getattr(error, attribute, None) in codes for attribute, codes in known)


def _is_instance(error: BaseException, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(error, kind)

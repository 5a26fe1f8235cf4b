"""
Which exceptions of other libraries mean that memory ran out: by type and status code, never by text.

Texts change between releases and are the reason why other finders miss an out-of-memory or take an
ordinary mistake for one.  Nothing is imported: a library that raised is in `sys.modules`.
"""

from __future__ import annotations

import sys

# (module, class, attribute with the status, statuses that mean memory).
# cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY are 2, CUBLAS_STATUS_ALLOC_FAILED is 3.
# CUDNN_STATUS_ALLOC_FAILED is 2 up to cuDNN 8; since 9 there are INTERNAL_ERROR_HOST_ALLOCATION_FAILED
# (4003) and _DEVICE_ALLOCATION_FAILED (4004).  torch.AcceleratorError carries the CUDA runtime's code.
_BY_STATUS = (
    ("cupy_backends.cuda.api.runtime", "CUDARuntimeError", "status", (2,)),
    ("cupy_backends.cuda.api.driver", "CUDADriverError", "status", (2,)),
    ("cupy_backends.cuda.libs.cublas", "CUBLASError", "status", (3,)),
    ("cupy_backends.cuda.libs.cudnn", "CuDNNError", "status", (2, 4003, 4004)),
    ("torch", "AcceleratorError", "error_code", (2,)),
)
_BY_TYPE = (("torch", "OutOfMemoryError"), ("torch.cuda", "OutOfMemoryError"))


def is_out_of_memory(error: BaseException) -> bool:
    """
    Say whether an exception means that memory ran out.

    Known are MemoryError with all its children (cubatch's, NumPy's and CuPy's OutOfMemoryError),
    the status codes of the CUDA runtime, driver, cuBLAS and cuDNN as CuPy raises them, and
    PyTorch's own type.  PyTorch on the CPU raises a plain RuntimeError that only its text tells
    apart: that is an error, not an out-of-memory.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("CUDA out of memory"))
        (True, False)
    """
    if isinstance(error, MemoryError):
        return True
    if any(_is_instance(error, module, name) for module, name in _BY_TYPE):
        return True
    return any(
        _is_instance(error, module, name) and getattr(error, attribute, None) in statuses
        for module, name, attribute, statuses in _BY_STATUS
    )


def _is_instance(error: BaseException, module: str, name: str) -> bool:
    found = getattr(sys.modules.get(module), name, None)
    return isinstance(found, type) and isinstance(error, found)

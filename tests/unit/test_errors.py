"""Out of memory is told by type and status code; lookalike classes stand in for the libraries."""

from __future__ import annotations

import sys
import types

import pytest

from cubatch.errors import DoesNotFit, OutOfMemory, OverLimit, WorkerFailed, is_out_of_memory


class StatusError(RuntimeError):
    """As CuPy's: a RuntimeError with a status."""

    def __init__(self, status: int) -> None:
        super().__init__("cudaErrorMemoryAllocation: out of memory")
        self.status = self.error_code = status


def pretend(monkeypatch: pytest.MonkeyPatch, module: str, name: str, cls: type) -> None:
    """Put a module with one class where an imported library would be."""
    fake = types.ModuleType(module)
    setattr(fake, name, cls)
    monkeypatch.setitem(sys.modules, module, fake)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemory("x"),
        DoesNotFit("s", "d", 2, 1, "inference"),
        type("OutOfMemoryError", (MemoryError,), {})(),
    ],
)
def test_every_memory_error_is_out_of_memory(error: BaseException) -> None:
    """Python's, NumPy's, CuPy's and our own all derive from MemoryError."""
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    ("module", "name", "memory", "other"),
    [
        ("cupy_backends.cuda.api.runtime", "CUDARuntimeError", 2, 700),  # cudaErrorIllegalAddress
        ("cupy_backends.cuda.api.runtime", "CUDARuntimeError", 2, 3),  # cudaErrorInitializationError
        ("cupy_backends.cuda.api.driver", "CUDADriverError", 2, 1),
        ("cupy_backends.cuda.libs.cublas", "CUBLASError", 3, 13),  # CUBLAS_STATUS_EXECUTION_FAILED
        ("cupy_backends.cuda.libs.cudnn", "CuDNNError", 2, 9),  # CUDNN_STATUS_NOT_SUPPORTED: a mistake, not memory
        ("cupy_backends.cuda.libs.cudnn", "CuDNNError", 4004, 4001),
        ("torch", "AcceleratorError", 2, 700),
    ],
)
def test_a_status_decides_whatever_the_text_says(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, memory: int, other: int
) -> None:
    """The same class with the same words is out of memory by its allocation status and an error by any other."""
    cls = type(name, (StatusError,), {})
    pretend(monkeypatch, module, name, cls)
    assert is_out_of_memory(cls(memory))
    assert not is_out_of_memory(cls(other))


@pytest.mark.parametrize("module", ["torch", "torch.cuda"])
def test_torch_is_known_by_its_type(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """torch.OutOfMemoryError is a RuntimeError without a status."""
    cls = type("OutOfMemoryError", (RuntimeError,), {})
    pretend(monkeypatch, module, "OutOfMemoryError", cls)
    assert is_out_of_memory(cls())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        StatusError(2),
        type("OutOfMemoryError", (RuntimeError,), {})(),
        WorkerFailed("out of memory"),
    ],
)
def test_words_and_names_decide_nothing(error: BaseException) -> None:
    """A text, a class of the same name from elsewhere, or a status of an unknown class is an error like any other."""
    assert not is_out_of_memory(error)


def test_memory_that_pytorch_cannot_have_is_known_by_its_allocator_or_a_status() -> None:
    """On the CPU, and for a GPU's library, it is a bare RuntimeError; other words, or another class, are an error."""
    said = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
    assert is_out_of_memory(RuntimeError(f"{said} allocate 70368744177664 bytes. Error code 12"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0: can't allocate memory"))
    assert not is_out_of_memory(ValueError(said))
    assert not is_out_of_memory(type("Own", (RuntimeError,), {})(said))


def test_nothing_is_imported_to_find_out() -> None:
    """Asking loads no GPU library."""
    before = set(sys.modules)
    is_out_of_memory(RuntimeError())
    assert not {name.split(".")[0] for name in set(sys.modules) - before} & {"cupy", "cupy_backends", "torch"}


@pytest.mark.parametrize("kind", [OutOfMemory, OverLimit, DoesNotFit])
def test_errors_about_memory_are_made_again_without_their_arguments(kind: type[OutOfMemory]) -> None:
    """As tblib, which Dask installs, copies and unpickles an error: a new instance, then its attributes."""
    again = kind.__new__(kind)
    assert isinstance(again, kind)
    assert isinstance(again, MemoryError)

"""CuPy through made-up modules: which versions are taken, and what is said of the others."""

from __future__ import annotations

import pickle
import sys
import tomllib
import types
from pathlib import Path

import pytest

import cubatch
from cubatch.errors import DeviceFailed, MissingDependency, OutOfMemory, UnsupportedVersion
from cubatch.hardware import gpu_library


def install(monkeypatch, version, cuda):
    """Put a CuPy of a version, made for a CUDA, in the place of the real one."""
    fake = types.ModuleType("cupy")
    fake.__version__ = version
    fake.cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(runtimeGetVersion=lambda: cuda))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.mark.parametrize(
    ("version", "cuda"), [("13.0.0", 12020), ("13.6.0", 13000), ("14.2.0", 12090), ("14.0b1", 13020)]
)
def test_the_releases_that_cubatch_is_written_for_are_taken(monkeypatch, version, cuda):
    """CuPy 13 and 14, on CUDA 12 and 13, release candidates too."""
    fake = install(monkeypatch, version, cuda)
    assert gpu_library.cupy() is fake


@pytest.mark.parametrize(
    ("version", "cuda", "found"),
    [
        ("12.3.0", 12020, "CuPy 12.3.0 for CUDA 12"),
        ("15.0.0", 13000, "CuPy 15.0.0 for CUDA 13"),
        ("13.6.0", 11080, "CuPy 13.6.0 for CUDA 11"),
        ("14.0.0", 14000, "CuPy 14.0.0 for CUDA 14"),
        ("14.0.0", 60032830, "CuPy 14.0.0 for CUDA 60032"),  # AMD's
        ("unknown", 12090, "CuPy unknown for CUDA 12"),
    ],
)
def test_other_releases_are_refused_in_a_sentence(monkeypatch, version, cuda, found):
    """It says what is there, what is wanted and how to get it."""
    install(monkeypatch, version, cuda)
    with pytest.raises(UnsupportedVersion) as caught:
        gpu_library.cupy()
    assert str(caught.value) == (
        f"cubatch needs CuPy 13 or 14 for CUDA 12 or 13, found {found}. "
        "In a checkout of cubatch, run: pip install '.[cuda12x]'"
    )
    assert isinstance(caught.value, MissingDependency)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_machine_without_cupy_is_told_what_needs_it(monkeypatch):
    """And the line that installs it."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependency, match="launching needs cupy, which is not installed"):
        gpu_library.cupy("launching")


def test_what_is_installed_is_what_is_taken():
    """The extras bring releases that are not refused, and the project says for which Pythons it is."""
    project = tomllib.loads((Path(cubatch.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for cuda in gpu_library.CUDA_RELEASES:
        (wanted,) = [line for line in project["optional-dependencies"][f"cuda{cuda}x"] if line.startswith("cupy")]
        assert wanted.startswith(f"cupy-cuda{cuda}x[ctk]>={min(gpu_library.CUPY_RELEASES)}.")
        assert wanted.endswith(f",<{max(gpu_library.CUPY_RELEASES) + 1}")
    stated = {line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line}
    assert stated == {"3.11", "3.12", "3.13", "3.14"}


class CUDARuntimeError(RuntimeError):
    """CuPy's, which has the driver's number and says its name first."""

    def __init__(self, status, name):
        super().__init__(f"{name}: something went wrong")
        self.status = status


@pytest.fixture
def runtime(monkeypatch):
    """CuPy's module of the runtime."""
    module = types.ModuleType("cupy_backends.cuda.api.runtime")
    module.CUDARuntimeError = CUDARuntimeError
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("runtime")
def test_cupys_errors_become_ours_with_the_drivers_number():
    """A fault says that a kernel before may have done it; what refuses a call says only what it refuses."""
    with pytest.raises(DeviceFailed) as fault, gpu_library.translating("waiting for the GPU"):
        raise CUDARuntimeError(700, "cudaErrorIllegalAddress")
    assert (fault.value.is_fatal, fault.value.cuda_status) == (True, 700)
    assert "waiting for the GPU failed with cudaErrorIllegalAddress. A kernel that was launched earlier" in str(
        fault.value
    )
    with pytest.raises(DeviceFailed) as refusal, gpu_library.translating("copying"):
        raise CUDARuntimeError(1, "cudaErrorInvalidValue")
    assert str(refusal.value) == "copying failed with cudaErrorInvalidValue"


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("error", [CUDARuntimeError(2, "cudaErrorMemoryAllocation"), MemoryError("CuPy's pool")])
def test_a_want_of_memory_is_ours_too(error):
    """By the driver's number or by type, which CuPy's pool has: one sentence, and what was raised is its cause."""
    with pytest.raises(OutOfMemory) as caught, gpu_library.translating("using the GPU"):
        raise error
    assert str(caught.value) == "out of memory: using the GPU"
    assert caught.value.__cause__ is error


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("error", [RuntimeError("torch's"), KeyError("x"), OutOfMemory("a batch", 9, 5)])
def test_other_errors_stay_what_they_are(error):
    """Those of other libraries are theirs, and ours say already what was wanted."""
    with pytest.raises(type(error)) as caught, gpu_library.translating("copying"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(("blocking", "is_late"), [(None, True), ("0", True), ("1", False)])
def test_a_launch_that_waits_for_its_kernel_is_to_blame_itself(monkeypatch, blocking, is_late):
    """CUDA_LAUNCH_BLOCKING=1 makes every launch one."""
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    if blocking is not None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    assert bool(gpu_library.late(719)) == is_late
    assert gpu_library.late(1) == ""

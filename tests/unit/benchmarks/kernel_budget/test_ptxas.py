"""The assembler on its own: found where it is installed, and its answer is NVRTC's."""

from __future__ import annotations

import stat
from importlib import metadata

import pytest

from benchmarks.kernel_budget import ptxas
from tests.unit.kernels.wheels import Distribution

PTX = ".version 8.8\n.target sm_80\n.address_size 64\n.visible .entry idle() { ret; }\n"


@pytest.fixture
def fake(tmp_path):
    """Make programs that say a version."""

    def make(name, version, code=0):
        path = tmp_path / name / "ptxas"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V{version}'\nexit {code}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return make


def test_it_is_looked_for_in_wheels_then_the_toolkit_then_on_the_path(monkeypatch, tmp_path, fake):
    """Each with the build that it says; a program that fails or is not there is passed over."""
    wheels = {"nvidia-cuda-nvcc-cu12": [str(fake("wheel", "12.9.86"))], "nvidia-cuda-nvcc": [str(fake("bad", "1", 1))]}
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(*wheels[name]))
    fake("toolkit/bin", "12.4.1")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", str(fake("path", "13.0.1").parent), prepend=":")

    found = ptxas._installed.__wrapped__()
    assert [one.version for one in found] == ["12.9.86", "12.4.1", "13.0.1"]
    monkeypatch.setattr(ptxas, "_installed", lambda: found)
    assert ptxas.of_version("12.4.1") == found[1]
    assert ptxas.of_version("12.4") is None


def test_a_wheel_that_is_not_installed_is_passed_over(monkeypatch):
    """And so is a toolkit that is not there."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert ptxas._installed.__wrapped__() == ()


def test_machine_code_comes_with_what_was_said():
    """The pinned assembler makes an ELF file and tells the registers."""
    found = ptxas.of_version("12.9.86").assemble(PTX, "sm_80")
    assert (found.error, found.ptx, found.cubin[:4]) == ("", PTX, b"\x7fELF")
    assert "Compiling entry function 'idle' for 'sm_80'" in found.log


def test_what_does_not_assemble_comes_back_as_an_error_with_the_log():
    """As NVRTC's programs do: nothing is raised, and there is no code."""
    found = ptxas.of_version("12.9.86").assemble(PTX.replace("ret;", "bad;"), "sm_80")
    assert found.error.startswith("ptxas ended with")
    assert found.cubin == b""
    assert "unit.ptx" in found.log

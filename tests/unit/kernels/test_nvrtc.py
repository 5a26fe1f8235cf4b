"""NVRTC is found where it may be, and the one that knows the architecture is taken."""

from __future__ import annotations

from importlib import metadata

import pytest

from cubatch.errors import DeviceFailed, InvalidArgument, MissingDependency
from cubatch.kernels.toolchain import nvrtc
from tests.unit.kernels.wheels import Distribution


class Library:
    """A library as far as the choice between several goes."""

    def __init__(self, version, archs):
        self.version, self.archs = version, archs


OLD, NEW = Library("12.9.86", (52, 70, 90)), Library("13.0.88", (75, 90, 110))


@pytest.fixture
def installed(monkeypatch):
    """Say which libraries there are, by path."""

    def say(**libraries):
        monkeypatch.setattr(nvrtc, "candidates", lambda: (*libraries, "missing"))
        monkeypatch.setattr(nvrtc, "_load", libraries.get)

    return say


@pytest.mark.parametrize(("arch", "library"), [(52, OLD), (90, OLD), (75, NEW), (110, NEW)])
def test_the_first_that_knows_the_architecture_is_taken(installed, arch, library):
    """With both wheels there is nothing to choose by hand."""
    installed(old=OLD, new=NEW)
    assert nvrtc.for_arch(arch) is library


def test_without_any_the_error_gives_the_line_that_installs_it(installed):
    """The extra brings NVRTC alone, no CuPy."""
    installed()
    with pytest.raises(MissingDependency) as caught:
        nvrtc.for_arch(80)
    assert "pip install '.[kernels]'" in str(caught.value)


@pytest.mark.parametrize(
    ("arch", "remedy"),
    [(70, "pip install '.[kernels]'"), (37, "sm_52 or newer"), (130, "pip install -U nvidia-cuda-nvrtc")],
)
def test_an_architecture_that_none_knows_is_an_error_with_versions_lists_and_remedy(installed, arch, remedy):
    """Volta with CUDA 13 is the case that people will meet."""
    installed(new=NEW)
    with pytest.raises(InvalidArgument) as caught:
        nvrtc.for_arch(arch)
    text = str(caught.value)
    assert "NVRTC 13.0.88 knows sm_75, sm_90, sm_110" in text
    assert f"got 'sm_{arch}'" in text
    assert remedy in text


def test_it_is_looked_for_in_wheels_of_both_layouts_then_the_toolkit_then_the_loader(monkeypatch, tmp_path):
    """The library itself, not its built-in functions nor the alternative build."""
    wheels = {
        "nvidia-cuda-nvrtc-cu12": [
            f"nvidia/cuda_nvrtc/lib/{name}"
            for name in ("libnvrtc-builtins.so.12.9", "libnvrtc.alt.so.12", "libnvrtc.so.12", "__init__.py")
        ],
        "nvidia-cuda-nvrtc": ["nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cu13/lib/libnvrtc-builtins.so.13.0"],
    }
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(*wheels[name]))
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libnvrtc.so").touch()
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)

    assert nvrtc.candidates.__wrapped__() == (
        "/site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "/site/nvidia/cu13/lib/libnvrtc.so.13",
        str(tmp_path / "lib64/libnvrtc.so"),
        *nvrtc._SYSTEM,
    )


def test_a_wheel_that_is_not_installed_is_passed_over(monkeypatch):
    """And so is a toolkit that is not there."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setenv("CUDA_PATH", "/nowhere")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert nvrtc.candidates.__wrapped__() == nvrtc._SYSTEM


def test_a_file_that_is_no_library_is_passed_over(tmp_path):
    """A broken install is as none; the next place may have a whole one."""
    path = tmp_path / "libnvrtc.so.12"
    path.write_text("not a library")
    assert nvrtc._load(str(path)) is None


def test_the_real_one_gives_its_build_and_its_architectures():
    """The pinned wheel compiles for everything from Maxwell to Blackwell."""
    found = nvrtc.for_arch(52)
    assert found.version == metadata.version("nvidia-cuda-nvrtc-cu12")
    assert {52, 61, 70, 75, 80, 86, 89, 90, 100, 120} <= set(found.archs)


def test_compiling_gives_text_code_and_log():
    """A program without an architecture of its own ends as PTX."""
    source = 'extern "C" __global__ void k() {}'
    found = nvrtc.for_arch(80)
    program = found.compile(source, "k.cu", ("-arch=sm_80", "--ptxas-options=-v"))
    assert (program.error, program.cubin[:4]) == ("", b"\x7fELF")
    assert ".entry k(" in program.ptx
    assert "Compiling entry function 'k' for 'sm_80'" in program.log
    assert found.compile(source, "k.cu", ()).cubin == b""


def test_what_does_not_compile_comes_back_with_nvrtcs_name_of_it():
    """A wrong option and a wrong source are told apart."""
    found = nvrtc.for_arch(80)
    assert found.compile("nonsense", "k.cu", ("-arch=sm_80",)).error == "NVRTC_ERROR_COMPILATION"
    wrong = found.compile("", "k.cu", ("--no-such-option",))
    assert (wrong.error, wrong.cubin) == ("NVRTC_ERROR_INVALID_OPTION", b"")
    assert "no-such-option" in wrong.log


def test_nvrtcs_own_failure_is_an_error_of_ours():
    """It names the call and the status."""
    with pytest.raises(DeviceFailed, match="nvrtcGetPTX failed with NVRTC_ERROR_INVALID_PROGRAM"):
        nvrtc.for_arch(80)._call("nvrtcGetPTX", None, None)

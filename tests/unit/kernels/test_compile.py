"""Kernels compile for GPUs that are not here; nothing stale is reused, nothing that is wrong passes."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import cubatch
from cubatch.errors import CompileError, InvalidArgument
from cubatch.kernels.toolchain import compile as compiler, cubins, nvrtc
from cubatch.kernels.toolchain.compile import compile_kernel, compile_unit, read_resources, warnings_of
from cubatch.kernels.toolchain.cubins import Resources
from cubatch.kernels.variant import kernels
from tests.unit import kernel_tree

ROOT = Path(cubatch.__file__).parent.parent

# As NVRTC 12.9.86 wrote it for two entries and a function that is not inlined.
LOG = """\
nvrtc: warning: Architectures prior to '<compute/sm>_75' are deprecated and may be removed in a future release
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'two' for 'sm_70'
ptxas info    : Function properties for two
ptxas         .     88 bytes stack frame, 104 bytes spill stores, 112 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 96 bytes cumulative stack size, 4096 bytes smem, 372 bytes cmem[0]
ptxas info    : Compile time = 15.507 ms
ptxas info    : Compiling entry function 'one' for 'sm_70'
ptxas info    : Function properties for one
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers, 372 bytes cmem[0]
ptxas info    : Compile time = 1.347 ms
ptxas info    : Function properties for _Z4slowPKfi
ptxas         .     8 bytes stack frame, 3 bytes spill stores, 4 bytes spill loads
"""
PTX = """
.visible .entry one(
\t.param .u64 one_param_0
)
{
.visible .entry two(
\t.param .align 8 .b8 two_param_0[64],
\t.param .u32 two_param_1
)
.maxntid 1024, 1, 1
.minnctapersm 2
{
"""


@pytest.fixture
def tree(tmp_path):
    """Make a folder of small kernels."""
    return kernel_tree.make(tmp_path / "kernels")


@pytest.fixture
def build(tree, tmp_path):
    """Compile a kernel of that folder and keep it in another."""

    def call(kernel, arch="sm_80", folder=tmp_path / "cache"):
        return compile_kernel(kernel, arch, root=tree, folder=folder)

    return call


@pytest.fixture
def compiled(monkeypatch):
    """Count what NVRTC really compiles."""
    names = []
    real = nvrtc.Nvrtc.compile

    def compile_(self, source, name, options):
        names.append(Path(name).name)
        return real(self, source, name, options)

    nvrtc.for_arch(80)  # loading asks for the version with a program of its own
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", compile_)
    return names


def sections(cubin):
    """Give the size of each section of an ELF file of 64 bits, by name."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + size * index) for index in range(count)]
    text = headers[names][4]
    return {cubin[text + head[0] : cubin.index(0, text + head[0])].decode(): head[5] for head in headers}


@pytest.mark.parametrize("arch", ["sm_52", "sm_80", "sm_90", "sm_90a", "sm_120"])
def test_machine_code_and_resources_come_without_a_gpu(build, arch):
    """Both entries are in the code; shared memory is the source's 256 floats, threads are the launch bounds."""
    cubin = build(kernel_tree.kernel("sums"), arch)

    parts = sections(cubin.path.read_bytes())
    assert {".text.sums", ".text.doubled"} <= set(parts)
    found = cubin.resources["sums"]
    assert (found.shared_bytes, found.threads, found.spill_bytes) == (1024, 256, 0)
    assert 2 <= found.registers <= 255
    # The log does not count what the system reserves; from sm_90 on the code's own section does.
    reserved = 1024 if arch in ("sm_90", "sm_90a", "sm_120") else 0
    assert parts[".nv.shared.sums"] == found.shared_bytes + reserved
    assert cubin.nvrtc == "12.9.86"


def test_a_second_call_compiles_nothing(build, compiled):
    """Another entry of the same unit is the same unit."""
    first = build(kernel_tree.kernel("doubled"))
    again = build(kernel_tree.kernel("doubled"))
    other = build(kernel_tree.kernel("sums"))

    assert compiled == ["small.cu"]
    assert first == again == other


@pytest.mark.parametrize("file", ["common/scale.cuh", "common/factor.cuh", "small/small.cu"])
def test_another_byte_in_the_source_or_any_header_is_compiled_anew(build, tree, compiled, file):
    """Also in a header that only a header includes: a stale cubin is a wrong answer."""
    (tree / "common/scale.cuh").write_text('#pragma once\n#include "factor.cuh"\n#define SCALE FACTOR\n')
    (tree / "common/factor.cuh").write_text("#define FACTOR 2.0f\n")
    before = build(kernel_tree.kernel())

    (tree / file).write_text((tree / file).read_text().replace("2.0f", "3.0f") + "// changed\n")
    after = build(kernel_tree.kernel())

    assert len(compiled) == 2
    assert before.path != after.path


@pytest.mark.parametrize("what", ["arch", "defines", "flags", "version"])
def test_whatever_changes_the_code_changes_the_key(build, monkeypatch, compiled, what):
    """Architecture, macros, flags and the compiler's build are in it."""
    before = build(kernel_tree.kernel())

    if what == "flags":
        monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-DOTHER"))
    elif what == "version":
        monkeypatch.setattr(nvrtc.for_arch(80), "version", "12.9.99")
    changed = (("CB_ELEMENT", "double"),) if what == "defines" else (("CB_ELEMENT", "float"),)
    after = build(kernel_tree.kernel(defines=changed), "sm_86" if what == "arch" else "sm_80")

    assert len(compiled) == 2
    assert before.path != after.path


def test_a_file_that_the_source_does_not_reach_changes_nothing(build, tree, compiled):
    """Editing one family does not throw away the others."""
    build(kernel_tree.kernel())
    (tree / "common/other.cuh").write_text("// new\n")
    (tree / "configs.toml").write_text("")
    build(kernel_tree.kernel())

    assert len(compiled) == 1


@pytest.mark.parametrize("damage", ["code gone", "facts cut", "facts gone"])
def test_a_damaged_entry_is_compiled_again_and_mended(build, compiled, damage):
    """A cache that was cleaned in part must not reach the GPU."""
    kept = build(kernel_tree.kernel())
    code, facts = kept.path.read_bytes(), kept.path.with_suffix(".json")
    {
        "code gone": kept.path.unlink,
        "facts cut": lambda: facts.write_text(facts.read_text()[:-5]),
        "facts gone": facts.unlink,
    }[damage]()

    again = build(kernel_tree.kernel())

    assert len(compiled) == 2
    assert again.path.read_bytes() == code
    build(kernel_tree.kernel())
    assert len(compiled) == 2


def test_a_survey_keeps_what_is_known_and_a_launch_then_compiles_the_code(build, tree, tmp_path, compiled):
    """Hundreds of units for all architectures would be hundreds of megabytes of code that nobody loads."""
    known = compile_unit(kernel_tree.kernel(), "sm_80", root=tree, folder=tmp_path / "cache", code=False)
    again = compile_unit(kernel_tree.kernel(), "sm_80", root=tree, folder=tmp_path / "cache", code=False)
    assert len(compiled) == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".json"]

    whole = build(kernel_tree.kernel())

    assert len(compiled) == 2
    assert whole.path.read_bytes().startswith(b"\x7fELF")
    assert known == again
    assert (known.path, known.resources) == (whole.path, whole.resources)


def test_a_folder_that_cannot_be_made_costs_a_warning_and_no_more(build, tmp_path, compiled):
    """The code is there for this process, and compiled once."""
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "kernels"

    with pytest.warns(UserWarning, match="cannot be written"):
        cubin = build(kernel_tree.kernel(), folder=folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = build(kernel_tree.kernel(), folder=folder)

    assert cubin == again
    assert cubin.path.read_bytes().startswith(b"\x7fELF")
    assert len(compiled) == 1


def test_the_folder_is_in_the_users_cache(monkeypatch, tmp_path):
    """XDG_CACHE_HOME moves it, as it moves the store."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cubins.default_folder() == tmp_path / "cubatch" / "kernels"


def test_processes_may_compile_the_same_at_the_same_time(tree, tmp_path):
    """Both get the code; no part of a file is left behind."""
    code = (
        "import sys; from pathlib import Path; from cubatch.kernels.toolchain.compile import compile_kernel; "
        "from tests.unit import kernel_tree; root, folder = map(Path, sys.argv[1:]); "
        "cubin = compile_kernel(kernel_tree.kernel(), 'sm_80', root=root, folder=folder); "
        "print(len(cubin.path.read_bytes()))"
    )
    command = [sys.executable, "-c", code, str(tree), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in running]

    assert len(set(outputs)) == 1
    assert int(outputs[0]) > 0
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".cubin", ".json"]


def test_an_error_names_kernel_architecture_options_and_what_the_compiler_said(build, tree):
    """So that it can be mended from the message alone."""
    (tree / "small/small.cu").write_text("void nonsense(;\n")

    with pytest.raises(CompileError) as caught:
        build(kernel_tree.kernel())

    error = caught.value
    assert (error.kernel, error.arch) == ("doubled_f32", "sm_80")
    assert {"-arch=sm_80", "-DCB_ELEMENT=float", "-ftz=false"} <= set(error.options)
    assert "small.cu(1): error" in error.log
    assert all(part in str(error) for part in ("doubled_f32", "sm_80", "-DCB_ELEMENT=float", error.log.strip()))
    assert pickle.loads(pickle.dumps(error)).args == error.args


def test_a_missing_header_and_a_missing_source_are_compile_errors(build, tree):
    """The file that is not there is named."""
    (tree / "common/scale.cuh").unlink()
    with pytest.raises(CompileError, match=r"scale\.cuh"):
        build(kernel_tree.kernel())
    with pytest.raises(CompileError, match=r"there is no .*small/none\.cu"):
        build(kernel_tree.kernel(source="small/none.cu"))


def test_an_entry_that_is_not_in_the_source_is_an_error_that_lists_those_that_are(build):
    """A renamed function must not be found out at the launch."""
    for _ in range(2):  # compiled, and from what was kept
        with pytest.raises(CompileError, match=r"no extern \"C\" entry tripled .*(doubled, sums|sums, doubled)"):
            build(kernel_tree.kernel("tripled"))


def test_a_kernel_is_not_compiled_for_what_it_is_not_meant_for(build, compiled):
    """It would fail in the assembler, with a worse text."""
    with pytest.raises(InvalidArgument, match=r"doubled_f32 is meant for, sm_80\+, got 'sm_75'"):
        build(kernel_tree.kernel(min_arch=80), "sm_75")
    assert compiled == []


def test_launch_bounds_that_cannot_be_kept_are_an_error(build, tree):
    """Two blocks of 1024 threads do not fit on sm_86; the assembler drops the bound, and registers with it."""
    (tree / "small/spills.cu").write_text(kernel_tree.SPILLS)
    greedy = kernel_tree.kernel("spills", source="small/spills.cu", threads=1024)

    with pytest.raises(CompileError, match="minnctapersm will be ignored"):
        build(greedy, "sm_86")


def test_spilled_registers_are_found(build, tree):
    """32 registers cannot hold 64 values at a time: some are stored and loaded again, 4 bytes each way."""
    (tree / "small/spills.cu").write_text(kernel_tree.SPILLS)

    found = build(kernel_tree.kernel("spills", source="small/spills.cu", threads=1024)).resources["spills"]

    assert found.registers == 32
    assert found.spill_bytes > 0
    assert found.spill_bytes % 4 == 0
    assert found.threads == 1024


def test_the_log_is_read_entry_by_entry():
    """Spills are stores and loads; those of a function that is called count for whoever may call it."""
    assert read_resources(LOG, PTX) == {
        "two": Resources(32, 104 + 112 + 7, 4096, 1024),
        "one": Resources(12, 7, 0, None),
    }


def test_warnings_are_listed_but_for_the_age_of_an_architecture():
    """12.9 warns below sm_75 on every compilation."""
    said = "k.cu(5): warning #177-D: variable was never used\nptxas warning : something\n"
    hint = 'Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"\n'

    assert warnings_of(LOG) == ()
    assert warnings_of(LOG + said + hint) == ("warning #177-D: variable was never used", "warning : something")


def test_hopper_kernels_are_compiled_for_the_target_that_has_wgmma():
    """sm_90a, whose code runs on no other GPU, so that all others stay with sm_90."""
    targets = {
        kernel.family: compiler.options(kernel, "sm_90")[0] for kernel in kernels() if kernel.runs_on(90)
    }  # fmt: skip
    assert targets.pop("hopper") == "-arch=sm_90a"
    assert set(targets.values()) == {"-arch=sm_90"}
    assert not any(kernel.runs_on(arch) for kernel in kernels() if kernel.family == "hopper" for arch in (80, 89, 100))

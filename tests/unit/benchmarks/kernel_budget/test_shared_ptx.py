"""What architectures have in common is compiled once, and gives what NVRTC gives each of them."""

from __future__ import annotations

import pytest

from benchmarks.kernel_budget import ptxas, sass, shared_ptx
from benchmarks.kernel_budget.check import SharingCompiler, check
from cubatch.errors import CompileError
from cubatch.kernels import survey
from cubatch.kernels.toolchain import compile as compiler, nvrtc
from cubatch.kernels.toolchain.compile import compile_unit, options, read_resources, warnings_of
from cubatch.kernels.toolchain.nvrtc import Program
from cubatch.kernels.variant import arch_number, kernels, kernels_path
from tests.unit import kernel_tree


def compiled(kernel, arch):
    """Compile by NVRTC alone."""
    root = kernels_path()
    text = (root / kernel.source).read_text()
    return nvrtc.for_arch(arch_number(arch)).compile(
        text, str(root / kernel.source), (*options(kernel, arch), f"-I{root}")
    )


def groups():
    """List architectures that share PTX, for each family and element type: with its variant that compiles fastest."""
    found = {}
    for kernel in kernels():
        if kernel.family == "hopper":
            continue
        for arch in survey.ARCHS:
            if kernel.runs_on(arch_number(arch)):
                group = (kernel.family, kernel.dtype, shared_ptx.shared_ptx(kernel, arch))
                found.setdefault(group, {}).setdefault(kernel, []).append(arch)
    shared = {
        group: pairs
        for group, members in found.items()
        if (pairs := [(kernel, archs) for kernel, archs in members.items() if len(archs) > 1])
    }
    usual = cover(shared)
    for group, pairs in shared.items():
        marks = [] if group in usual else [pytest.mark.thorough]
        yield pytest.param(*min(pairs, key=size), id=" ".join(group), marks=marks)


def size(pair):
    """Return the elements of a variant's tile, or of one thread's vector: larger ones take longer to compile."""
    kernel, tile = pair[0], pair[0].tile
    return kernel.vector if tile is None else tile.m * tile.n


def cover(groups):
    """Choose a few groups in which each family, element type and first architecture occurs."""
    chosen, left = set(), {fact for group in groups for fact in group}
    while left:
        chosen.add(best := max(groups, key=lambda group: len(left.intersection(group))))
        left.difference_update(best)
    return chosen


@pytest.mark.parametrize(("kernel", "archs"), list(groups()))
def test_what_is_derived_is_what_nvrtc_makes(kernel, archs):
    """Instructions, registers, spills and shared memory; up to sm_90, where cubins name no build, the whole file."""
    first, other = archs[0], archs[-1]
    derived = shared_ptx.derive(kernel, other, "12.9.86", {first: compiled(kernel, first)}, code=True)
    wanted = compiled(kernel, other)
    assert sass.texts(derived.cubin) == sass.texts(wanted.cubin)
    assert read_resources(derived.log, derived.ptx) == read_resources(wanted.log, wanted.ptx)
    assert warnings_of(derived.log) == warnings_of(wanted.log)
    if arch_number(other) < 100:
        assert derived.cubin == wanted.cubin


@pytest.mark.parametrize(
    ("facts", "names"),
    [
        ({}, "52 52 70 70 70 70 70 90 100 100"),
        ({"dtype": "bfloat16"}, "52 52 70 70 80 80 80 90 100 100"),
        ({"family": "mma"}, "52 61 70 75 80 80 80 90 100 100"),
    ],
)
def test_a_group_is_named_after_its_first_architecture(facts, names):
    """Conversion to bfloat16, tensor cores and griddepcontrol part what is the same; what was not compared is alone."""
    kernel = kernel_tree.kernel(**facts)
    archs = [f"sm_{number}" for number in (52, 61, 70, 75, 80, 86, 89, 90, 100, 120)]
    assert [shared_ptx.shared_ptx(kernel, arch) for arch in archs] == [f"sm_{name}" for name in names.split()]
    assert shared_ptx.shared_ptx(kernel, "sm_87") == "sm_87"


# A source of its own: what other tests could keep for the whole process is not found.
SOURCE_THAT_WARNS = """
extern "C" __global__ void __launch_bounds__(256) doubled(const float* x, float* y) {
  int idle;
  y[threadIdx.x] = 2 * x[threadIdx.x];
}
"""


@pytest.mark.parametrize("assembler", [True, False])
def test_a_check_compiles_what_is_shared_once(tmp_path, monkeypatch, assembler):
    """With an assembler one compilation for sm_70 to sm_89, without one for each; the rows are the same."""
    root = kernel_tree.make(tmp_path / "kernels", small=SOURCE_THAT_WARNS)
    if not assembler:
        monkeypatch.setattr(ptxas, "_installed", tuple)
    seen, real = [], nvrtc.Nvrtc.compile
    archs = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89")

    def compile_(self, source, name, given):
        seen.append(name)
        return real(self, source, name, given)

    nvrtc.for_arch(70)  # loading asks for the version with a program of its own
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", compile_)
    rows = [each.row for each in check([kernel_tree.kernel()], archs, root=root, folder=tmp_path / "cache")]
    assert len(seen) == (1 if assembler else len(archs))
    assert [row.arch for row in rows] == list(archs)
    for row in rows:
        assert row.figures.spill_bytes == 0
        assert [problem for problem in row.problems if '"idle" was declared but never referenced' in problem]


def compile_shared(arch, programs, root, folder):
    """Compile the small kernel with what other architectures left."""
    kernel = kernel_tree.kernel()
    return compile_unit(
        kernel, arch, root=root, folder=folder, compiler=SharingCompiler(kernel, arch, code=True, programs=programs)
    )


def test_an_assembler_that_fails_is_a_compile_error_with_its_log(tmp_path, monkeypatch):
    """Of the architecture at hand, though another of the group was compiled; a warning does not hide the cause."""
    root, known = kernel_tree.make(tmp_path / "kernels", small=SOURCE_THAT_WARNS), {}
    compile_shared("sm_80", known, root, tmp_path / "cache")
    monkeypatch.setattr(ptxas.Ptxas, "assemble", lambda *_: Program("ptxas ended with 1", "unit.ptx: fatal"))
    with pytest.raises(CompileError, match=r"sm_86[\s\S]*ptxas ended with 1[\s\S]*idle[\s\S]*unit\.ptx: fatal"):
        compile_shared("sm_86", known, root, tmp_path / "cache")
    assert list(known) == ["sm_80"]


def test_what_is_derived_is_found_by_who_compiles_for_one_architecture(tmp_path, monkeypatch):
    """The key is the same, and so is the code."""
    root, known, folder = kernel_tree.make(tmp_path / "kernels", small=SOURCE_THAT_WARNS), {}, tmp_path / "cache"
    for arch in ("sm_80", "sm_86"):
        compile_shared(arch, known, root, folder)
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *_: pytest.fail("compiled again"))
    found = compiler.compile_kernel(kernel_tree.kernel(), "sm_86", root=root, folder=folder)
    assert found.path.read_bytes() == known["sm_86"].cubin

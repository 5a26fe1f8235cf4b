"""Instructions of machine code, as NVIDIA's disassembler lists them."""

from __future__ import annotations

import json

import attrs
import pytest

from cubatch import compile as compiler
from cubatch import disassembly, kernel_survey
from cubatch.errors import DeviceFailed, MissingDependency
from tests.unit import kernel_tree

SOURCE = """
extern "C" __global__ void __launch_bounds__(32) with_cores(const unsigned* a, float* y) {
  float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(a[threadIdx.x]), "r"(a[threadIdx.x + 32]), "r"(a[threadIdx.x + 64]));
  y[threadIdx.x] = d0 + d1 + d2 + d3;
}
extern "C" __global__ void __launch_bounds__(32) without(const float* a, float* y) {
  y[threadIdx.x] = a[threadIdx.x] * a[threadIdx.x + 32] + y[threadIdx.x];
}
"""


@pytest.fixture
def kernels(tmp_path):
    """Give two kernels of family mma, of which one uses tensor cores, and the folder of their sources."""
    root = kernel_tree.make(tmp_path / "kernels", one=SOURCE)
    facts = {"family": "mma", "source": "small/one.cu", "threads": 32}
    return [kernel_tree.kernel(entry, **facts) for entry in ("with_cores", "without")], root


def test_instructions_are_counted_by_entry(kernels, tmp_path):
    """One mma is one HMMA in its own entry only; the product of floats is an FFMA in the other."""
    (with_cores, _), root = kernels
    cubin = compiler.compile_unit(with_cores, "sm_80", root=root, folder=tmp_path / "cubins")

    found = disassembly.count_opcodes(cubin)

    assert found["with_cores"]["HMMA"] == 1
    assert found["without"]["FFMA"] == 1
    assert "HMMA" not in found["without"]


def test_a_count_is_kept_until_the_code_changes(kernels, tmp_path, monkeypatch):
    """The second reading starts no program; other machine code under the same name is read anew."""
    (with_cores, _), root = kernels
    cubin = compiler.compile_unit(with_cores, "sm_80", root=root, folder=tmp_path / "cubins")
    first = disassembly.count_opcodes(cubin)
    monkeypatch.setattr(disassembly, "find_nvdisasm", lambda: None)

    assert disassembly.count_opcodes(cubin) == first

    cubin.path.write_bytes(cubin.path.read_bytes() + b"\0")
    with pytest.raises(MissingDependency, match="nvidia-cuda-nvdisasm"):
        disassembly.count_opcodes(cubin)


def test_what_is_no_machine_code_is_an_error_with_the_programs_words(tmp_path, kernels):
    """A file that was cut short says so, instead of counting nothing."""
    (with_cores, _), root = kernels
    cubin = compiler.compile_unit(with_cores, "sm_80", root=root, folder=tmp_path / "cubins")
    broken = tmp_path / "broken.cubin"
    broken.write_bytes(b"no code")

    with pytest.raises(DeviceFailed, match="nvdisasm failed"):
        disassembly.count_opcodes(attrs.evolve(cubin, path=broken))


def test_the_survey_misses_tensor_cores_where_a_family_promises_them(kernels, tmp_path):
    """Of two kernels that claim to be of family mma, the one without HMMA is a problem, from sm_75 on."""
    found, root = kernels

    rows = kernel_survey.survey(found, ["sm_80"], root=root, folder=tmp_path / "cubins")

    assert {row.kernel.entry: row.problems for row in rows} == {
        "with_cores": (),
        "without": ("no HMMA in its machine code",),
    }
    kept = next((tmp_path / "cubins").glob("*.opcodes.json"))
    assert json.loads(kept.read_text())["opcodes"]["with_cores"]["HMMA"] == 1

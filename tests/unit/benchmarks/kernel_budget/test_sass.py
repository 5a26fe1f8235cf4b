"""Instructions of machine code that is compiled here; `test_loops` compares those of real kernels with a listing."""

from __future__ import annotations

import pytest

from benchmarks.kernel_budget import sass
from benchmarks.kernel_budget.check import check
from cubatch.errors import InvalidData
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


@pytest.mark.parametrize("broken", [b"", b"no code", b"\x7fELF" + bytes(20)])
def test_what_is_no_machine_code_is_an_error(broken):
    """A file that was cut short says so, instead of counting nothing."""
    with pytest.raises(InvalidData, match="cubin"):
        sass.count_opcodes(broken)


def test_the_check_misses_tensor_cores_where_a_family_promises_them(kernels, tmp_path):
    """Of two kernels that claim to be of family mma, the one without HMMA is a problem."""
    found, root = kernels

    rows = [each.row for each in check(found, ["sm_80"], root=root, folder=tmp_path / "cubins")]

    assert {row.kernel.entry: row.problems for row in rows} == {
        "with_cores": (),
        "without": ("no HMMA in its machine code",),
    }


def test_the_check_misses_the_wait_of_kernels_that_may_be_launched_early(kernels, tmp_path):
    """From Hopper on a kernel without griddepcontrol.wait could run before its operands are there."""
    found, root = kernels

    rows = [each.row for each in check(found, ["sm_90"], root=root, folder=tmp_path / "cubins")]

    assert all("no ACQBULK in its machine code" in row.problems for row in rows)

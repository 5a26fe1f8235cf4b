"""Which kernels OpenBLAS is told to use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cubatch.engine import blas

AVX512 = "avx512f avx512cd avx512bw avx512dq avx512vl"


def _cpuinfo(vendor, family, flags):
    lines = (f"vendor_id\t: {vendor}", f"cpu family\t: {family}", "model\t\t: 2", f"flags\t\t: fpu avx2 {flags}")
    return "\n".join(("processor\t: 0", *lines, "bogomips\t: 5192\n"))


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "kernels"),
    [
        ("AuthenticAMD", 26, AVX512, "SkylakeX"),  # Zen 5: unknown to OpenBLAS 0.3.31
        ("AuthenticAMD", 25, AVX512, None),  # Zen 4: known
        ("AuthenticAMD", 26, "avx512f", None),  # a virtual machine that hides part of AVX-512
        ("GenuineIntel", 26, AVX512, None),  # Intel's families mean something else
    ],
)
def test_kernels_follow_from_vendor_family_and_flags(vendor, family, flags, kernels):
    """Asking for kernels that the CPU cannot run would end the process."""
    assert blas.kernels_for(_cpuinfo(vendor, family, flags)) == kernels


def test_a_machine_that_says_nothing_is_left_alone():
    """/proc/cpuinfo of other architectures has none of the fields."""
    assert blas.kernels_for("Features: fp asimd\n") is None


def test_the_users_choice_and_a_loaded_numpy_are_left_alone(monkeypatch):
    """NumPy is loaded in this process, so it is too late."""
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    assert blas.choose_kernels() is None
    assert "OPENBLAS_CORETYPE" not in os.environ


def test_choosing_loads_no_numpy():
    """Otherwise it would always come too late."""
    script = "import sys; from cubatch.engine import blas; blas.choose_kernels(); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

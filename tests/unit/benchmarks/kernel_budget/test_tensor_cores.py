"""What is written for tensor cores is compiled to their instructions, and to nothing that stands in for them."""

from __future__ import annotations

import pytest

from benchmarks.kernel_budget.sass import count_opcodes
from cubatch.kernels import variant
from cubatch.kernels.toolchain import compile as compiler

TILES = {"float16": "128x128x32", "bfloat16": "128x128x32", "tf32": "128x128x16"}


CASES = [*((arch, "float16") for arch in (70, 75, 80, 90, 120)), (80, "bfloat16"), (120, "tf32")]


@pytest.mark.parametrize(("arch", "dtype"), CASES)
def test_a_product_is_of_hmma_instructions(arch, dtype):
    """A warp's 64 x 32 x 32 are 32 of 16 x 8 x 16: 64 of half the depth, or 8 x 8 x 4 in four steps, four at a time."""
    tile = f"{TILES[dtype]}_s2" if arch < 80 else TILES[dtype]
    found = variant.find("gemm_nt", dtype, family="mma", tile=tile)
    code = compiler.compile_kernel(found, f"sm_{arch}").path.read_bytes()
    seen = count_opcodes(code)[found.entry]
    assert seen["HMMA"] == {70: 4 * 64, 75: 64}.get(arch, 32)
    assert seen.get("LDSM", 0) >= (0 if arch == 70 else 12)
    assert ("LDGSTS" in seen) == (arch >= 80)
    assert not {"STL", "LDL"} & seen.keys()

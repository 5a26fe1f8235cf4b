"""Variants are what configs.toml says: every combination once, each with its macros, found without ambiguity."""

from __future__ import annotations

import attrs
import pytest

from cubatch.errors import InvalidArgument, UnknownName
from cubatch.kernels import variant as module
from cubatch.kernels.variant import Tile, arch_number, find, kernels, kernels_path, variants

CONFIGS = """
[tiles.large]
name = "128x64x8"
m = 128
n = 64
k = 8
thread_m = 8
thread_n = 4
threads = 256
stages = 2
min_blocks = 2
min_arch = 70

[tiles.small]
m = 32
n = 32
k = 8
thread_m = 4
thread_n = 4
threads = 64
stages = 1
max_arch = 89

[[modules]]
source = "simt/gemm.cu"
family = "simt"
operations = ["gemm_nt", "gemm_nn"]
entry = "gemm"
name = "{operation}_{dtype}_simt_{tile}_v{vector}"
dtypes = ["float32", "float16"]
tiles = ["large", "small"]
vectors = [4, 1]
min_arch = 60
dynamic_shared_bytes = 1024

[[modules]]
source = "simt/conv.cu"
family = "simt"
operations = ["linear", "conv2d_fprop"]
computed_by = { linear = "conv2d_fprop" }
entry = "{operation}"
name = "{operation}_{dtype}_simt"
threads = 64
dtypes = ["float16"]

[[modules]]
source = "misc/pool.cu"
family = "misc"
operations = ["max_pool", "average_pool"]
name = "{operation}_{dtype}_w{WINDOW}"
threads = 128
dtypes = ["bfloat16"]
axes = { WINDOW = [2, 3] }
"""


@pytest.fixture(autouse=True)
def configured(tmp_path, monkeypatch):
    """Put a package beside which these kernels are in the place of the real one."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/configs.toml").write_text(CONFIGS)
    monkeypatch.setattr(module, "_PACKAGE", tmp_path / "cubatch")


def test_kernels_are_found_in_a_checkout_and_in_a_wheel(tmp_path):
    """Inside the package where a wheel put them, else beside it."""
    assert kernels_path() == tmp_path / "kernels"
    (tmp_path / "cubatch/_kernels").mkdir(parents=True)
    assert kernels_path() == tmp_path / "cubatch/_kernels"


def test_every_combination_is_there_once_in_the_order_of_the_file():
    """2 operations x 2 types x 2 tiles x 2 vectors, then 2 operations, then 2 operations x 2 windows."""
    names = [kernel.name for kernel in kernels()]

    assert len(names) == len(set(names)) == 16 + 2 + 4
    assert names[:3] == [
        "gemm_nt_f32_simt_128x64x8_v4",
        "gemm_nn_f32_simt_128x64x8_v4",
        "gemm_nt_f32_simt_128x64x8_v1",
    ]
    assert names[-4:] == ["max_pool_bf16_w2", "average_pool_bf16_w2", "max_pool_bf16_w3", "average_pool_bf16_w3"]


def test_a_tiled_kernel_carries_its_tile_as_macros_and_its_operation_selects_the_code():
    """One symbol, one compile unit for each operation; the stricter limit on the architecture holds."""
    found = find("gemm_nt", "float16", vector=4, family="simt", tile="128x64x8")

    assert (found.source, found.entry, found.threads, found.dynamic_shared_bytes) == ("simt/gemm.cu", "gemm", 256, 1024)
    assert dict(found.defines) == {
        "CB_ELEMENT": "half_t", "VECTOR": "4", "TILE_M": "128", "TILE_N": "64", "TILE_K": "8", "THREAD_M": "8",
        "THREAD_N": "4", "NUM_STAGES": "2", "MIN_BLOCKS": "2", "OPERATION_GEMM_NT": "1",
    }  # fmt: skip
    assert found.tile == Tile("128x64x8", 128, 64, 8, 8, 4, 256, 2, 2, 70)
    assert (found.min_arch, found.max_arch) == (70, None)


def test_a_tile_without_a_name_of_its_own_has_that_of_its_table():
    """And its upper limit on the architecture joins the lower one of its module."""
    found = find("gemm_nn", "float32", tile="small", vector=1)

    assert found.name == "gemm_nn_f32_simt_small_v1"
    assert (found.min_arch, found.max_arch, found.where) == (60, 89, "sm_60 to sm_89")
    assert attrs.evolve(found, min_arch=89).where == "sm_89"
    assert [found.runs_on(arch) for arch in (52, 60, 89, 90)] == [False, True, True, False]


def test_operations_without_a_common_entry_share_a_compile_unit():
    """Their names are the symbols, and their macros are equal."""
    pools = [find(operation, "bfloat16", WINDOW=3) for operation in ("max_pool", "average_pool")]

    assert [kernel.entry for kernel in pools] == ["max_pool", "average_pool"]
    assert pools[0].defines == pools[1].defines == (("CB_ELEMENT", "bfloat16_t"), ("WINDOW", "3"))
    assert (pools[0].threads, pools[0].tile, pools[0].vector, pools[0].where) == (128, None, 1, "any")


def test_an_operation_may_be_computed_by_the_code_of_another():
    """It has a name of its own, and the other's symbol and compile unit."""
    linear, convolution = (find(operation, "float16") for operation in ("linear", "conv2d_fprop"))

    assert (linear.name, linear.operation) == ("linear_f16_simt", "linear")
    assert linear.entry == convolution.entry == "conv2d_fprop"
    assert linear.defines == convolution.defines == (("CB_ELEMENT", "half_t"), ("OPERATION_CONV2D_FPROP", "1"))


def test_variants_are_those_of_the_type_that_run_on_the_architecture():
    """The large tile needs sm_70, the small one ends with sm_89."""

    def tiles(arch):
        return {kernel.tile.name for kernel in variants("gemm_nt", "float32", arch)}

    assert [tiles(arch) for arch in (52, 61, 80, 90)] == [set(), {"small"}, {"small", "128x64x8"}, {"128x64x8"}]
    assert variants("max_pool", "float32", 80) == ()


def test_what_is_not_there_is_an_error_with_what_is():
    """Near names, the types, the variants that are left."""
    with pytest.raises(UnknownName, match="did you mean 'gemm_nt'"):
        variants("gemm_tt", "float32", 80)
    with pytest.raises(UnknownName, match="unknown operation 'softmax'"):
        find("softmax", "float32")
    with pytest.raises(InvalidArgument, match="dtype must be one of float32, float16, bfloat16, tf32, got 'int8'"):
        variants("gemm_nt", "int8", 80)
    with pytest.raises(InvalidArgument, match="max_pool_bf16_w2, max_pool_bf16_w3"):
        find("max_pool", "bfloat16")
    with pytest.raises(InvalidArgument, match="not of: none"):
        find("max_pool", "bfloat16", WINDOW=5)


@pytest.mark.parametrize("arch", ["70", "sm_", "compute_70", "sm_70x", "7.0"])
def test_an_architecture_is_spelled_as_the_compiler_does(arch):
    """Anything else is refused before the compiler is asked."""
    with pytest.raises(InvalidArgument, match="such as 'sm_70'"):
        arch_number(arch)

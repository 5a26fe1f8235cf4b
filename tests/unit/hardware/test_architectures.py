"""
The table of architectures says what NVIDIA prints, and its reader gives what the table says.

What is printed is written out in `published` once more, so that a slip in the table is seen.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import cubatch
from benchmarks.kernel_budget import shared_ptx
from cubatch.errors import UnknownName
from cubatch.estimate.vendor import fitted
from cubatch.hardware import architectures, arithmetic
from cubatch.hardware.architectures import Every
from cubatch.hardware.facts import Device
from cubatch.kernels import resources, survey, variant
from cubatch.kernels.toolchain import compile as compiler
from tests.unit.hardware.published import NAMES, SAME_PTX, SMS

FILE = Path(cubatch.__file__).parent / "data" / "architectures.toml"
WHOLE = tomllib.loads(FILE.read_text(encoding="utf-8"))
EVERY = WHOLE["every"]
TABLES = {name: table for name, table in WHOLE.items() if name != "every"}
BY_CAPABILITY = {tuple(table["compute_capability"]): table for table in TABLES.values()}
KEPLER = (3, 7)

KINDS = {
    "name": str, "compute_capability": list, "threads_per_sm": int, "warps_per_sm": int, "blocks_per_sm": int,
    "registers_per_sm": int, "registers_per_block": int, "partitions": int, "shared_kib_per_sm": int,
    "shared_kib_per_block": int, "shared_reserved_bytes": int, "shared_unit_bytes": int, "shared_carveouts_kib": list,
    "float32_lanes": int, "tensor_dtypes": list, "instructions": list, "surveyed": bool, "kin": str,
    "power_limited": bool, "tensor_measured": bool, "source": str,
}  # fmt: skip
OPTIONAL = {
    "barriers_per_sm": int, "tensor_cores": int, "boards_without": bool, "mma_fma": dict, "wgmma_fma": dict,
    "target": str, "last_cuda": str, "ptx": dict, "same_instructions": str, "instruction_bytes": int,
}  # fmt: skip

every_table = pytest.mark.parametrize(("name", "table"), TABLES.items(), ids=list(TABLES))


def gpu(table, **facts):
    """Give a device of which the compute capability alone is known."""
    return Device(name="card", compute_capability=tuple(table["compute_capability"]), **facts)


def variants_of(family, dtype):
    """List what configs.toml has of a family and element type."""
    return [found for found in variant.kernels() if (found.family, found.dtype) == (family, dtype)]


@every_table
def test_a_table_has_every_field_and_no_other(name, table):
    """A misspelt field would be read by nobody; what is optional is absent, never empty."""
    kinds = KINDS | {field: kind for field, kind in OPTIONAL.items() if field in table}
    assert {field: type(value) for field, value in table.items()} == kinds
    major, minor = table["compute_capability"]
    assert name == f"sm_{major}{minor}"
    assert table["name"] == NAMES.get(major) or major in {7, 8}
    assert len(table["source"]) > 40


def test_the_tables_are_in_order_and_none_is_missing():
    """In the file and in the record that the reader makes of it."""
    assert list(BY_CAPABILITY) == sorted(BY_CAPABILITY) == list(SMS)
    assert list(architectures.known()) == list(SMS)


@pytest.mark.parametrize("asked", [(3, 5), (99, 0), "sm_70", "7.0", 7.0, None, [7, 1], (7,), (7, [0])])
def test_an_unknown_compute_capability_is_an_error(asked):
    """Nothing is guessed for an architecture outside the table, whatever was written for it."""
    with pytest.raises(UnknownName) as caught:
        architectures.of(asked)

    assert caught.value.field == "compute_capability"
    assert "7.0" in caught.value.known


@pytest.mark.parametrize(
    ("asked", "like"),
    [((0, 0), (3, 7)), ((3, 5), (3, 7)), ((3, 7), (3, 7)), ((7, 1), (7, 0)), ((9, 9), (9, 0)), ((99, 0), (12, 1))],
)
def test_an_architecture_outside_the_table_is_taken_for_the_one_before_it(asked, like):
    """Where a guess is better than nothing: the oldest of all for what is older."""
    assert architectures.like(asked) is architectures.of(like)
    assert architectures.numbered(10 * asked[0] + asked[1]) is (architectures.of(like) if asked == like else None)


def test_what_holds_for_every_architecture():
    """Of launches and of how registers are given out, by the CUDA Programming Guide and NVIDIA's header."""
    facts = Every(
        warp_threads=32, threads_per_block=1024, registers_per_thread=255, register_unit=256, partitions_at_launch=4,
        barriers_per_block=16, shared_bytes_without_opting_in=48 * 1024, cuda="12.9", source=EVERY["source"],
    )  # fmt: skip
    assert architectures.every() == facts


@every_table
def test_lanes_are_those_of_the_architecture_papers(name, table):
    """The model of the vendor's libraries was fitted with 128 of Kepler's 192."""
    capability = tuple(table["compute_capability"])
    assert table["float32_lanes"] == SMS[capability].cores
    assert fitted.lanes(gpu(table)) == min(128, SMS[capability].cores)


@every_table
def test_tensor_cores_came_with_volta_and_their_types_with_ampere(name, table):
    """Boards of Turing may lack them; tf32 and bfloat16 came with 8.0."""
    capability = tuple(table["compute_capability"])
    dtypes = ["float16", "bfloat16", "tf32"][: 0 if capability < (7, 0) else 1 if capability < (8, 0) else 3]
    assert table["tensor_dtypes"] == dtypes
    assert architectures.of(capability).has_tensor_cores is (None if capability == (7, 5) else capability >= (7, 0))
    board = gpu(table, tensor_cores=bool(dtypes))
    assert [one for one in ("float16", "bfloat16", "tf32") if arithmetic.has_tensor_cores(board, one)] == dtypes
    assert arithmetic.has_tensor_cores(board, "float32") is False
    assert arithmetic.has_tensor_cores(gpu(table), "float16") is (None if dtypes else False)
    assert ("tf32" in arithmetic.supported_dtypes(board)) == (capability >= (8, 0))
    if "tensor_cores" in table:
        assert table["tensor_cores"] == SMS[capability].tensor_cores


@every_table
def test_rates_of_mma_sync_and_wgmma_are_the_published_ones(name, table):
    """Of float16, which is bfloat16's too, and of tf32; before 9.0 mma.sync is all that the Tensor Cores do."""
    capability = tuple(table["compute_capability"])
    names = ("float16", "tf32")
    cores, fma = SMS[capability].tensor_cores, SMS[capability].tensor_fma
    if capability < (9, 0) and cores and fma:
        assert table["mma_fma"]["float16"] == cores * fma
    assert table.get("mma_fma", {}) == dict(zip(names, SMS[capability].mma, strict=False))
    assert table.get("wgmma_fma", {}) == dict(zip(names, SMS[capability].wgmma, strict=False))
    assert ("wgmma" in table["instructions"]) == bool(SMS[capability].wgmma)


def test_every_kernel_is_checked_for_the_architectures_that_are_surveyed():
    """One of each generation and size of SM, from Maxwell to Blackwell, in this order."""
    assert tuple("sm_{}{}".format(*capability) for capability, sm in SMS.items() if sm.surveyed) == survey.ARCHS


def test_the_budget_has_figures_of_every_architecture_that_is_surveyed():
    """Of each variant wherever it runs; one that was not compiled for an architecture has no occupancy there."""
    figures, numbers = resources.recorded_figures().figures, [variant.arch_number(arch) for arch in survey.ARCHS]
    for kernel in variant.kernels():
        assert sorted(figures[kernel.name]) == [number for number in numbers if kernel.runs_on(number)], kernel.name


@every_table
def test_what_shares_ptx_is_what_was_compared(name, table):
    """By the first of those that share it; those that share none are named by themselves."""
    kernels = {
        "plain": variants_of("simt", "float32")[0],
        "bfloat16": variants_of("simt", "bfloat16")[0],
        "mma": variants_of("mma", "float16")[0],
    }
    number = variant.arch_number(name)
    for kind, kernel in kernels.items():
        wanted = next((f"sm_{group[0]}" for group in SAME_PTX[kind] if number in group), name)
        assert shared_ptx.shared_ptx(kernel, name) == wanted
    assert table.get("same_instructions") == ("sm_86" if name == "sm_89" else None)


@every_table
def test_targets_are_those_of_the_compiler(name, table):
    """The accelerated one for wgmma alone, and an older release of CUDA where the newest has dropped it."""
    number = variant.arch_number(name)
    hopper = variants_of("hopper", "float16")[0]
    assert hopper.runs_on(number) == ("wgmma" in table["instructions"]) == ("target" in table)
    if name == "sm_90":
        assert compiler.options(hopper, name)[0] == "-arch=sm_90a"
    assert compiler.options(variants_of("simt", "float32")[0], name)[0] == f"-arch={name}"
    last = "11.8" if number < 50 else "12.9" if number <= 72 else None
    assert table.get("last_cuda") == last
    assert architectures.of(table["compute_capability"]).is_compiled_for == (number >= 50)
    assert table.get("instruction_bytes") == (16 if number >= 70 else None)


@every_table
def test_kernels_run_where_their_instructions_are(name, table):
    """Rings are filled by cp.async, products go to tensor cores of the type."""
    if tuple(table["compute_capability"]) == KEPLER:
        return
    number = variant.arch_number(name)
    rings = [one for one in variant.kernels() if one.tile and (one.tile.stages or 0) > 2 and one.family != "hopper"]
    assert rings
    assert any(one.runs_on(number) for one in rings) == ("cp.async" in table["instructions"])
    for dtype in ("float16", "bfloat16", "tf32"):
        assert any(one.runs_on(number) for one in variants_of("mma", dtype)) == (dtype in table["tensor_dtypes"])
    assert ("ldmatrix" in table["instructions"]) == (number >= 75)
    assert ("tma" in table["instructions"]) == ("griddepcontrol" in table["instructions"]) == (number >= 90)


@every_table
def test_predictions_take_the_same_for_alike(name, table):
    """GPUs of one kin, those whose clock falls with their power, and those whose Tensor Cores were measured."""
    capability = tuple(table["compute_capability"])
    board = gpu(table, peak_flops_per_second={"float32": 30e12}, power_limit_watts=100.0)
    half = SMS[capability].cores == 64
    kin = "P100" if capability == (6, 0) else "Maxwell and Pascal" if capability < (7, 0) else "Volta, Turing, A100"
    assert fitted.kin_of(board) == table["kin"] == (kin if capability < (7, 0) or half else "later")
    assert table["power_limited"] == (fitted.sustained(board) < 1) == (capability[0] in {6, 7})
    assert table["tensor_measured"] == (capability == (7, 0))

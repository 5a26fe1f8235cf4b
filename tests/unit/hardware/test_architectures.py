"""The table of architectures says what the code's own tables say, so that one can take the place of the others."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path

import pytest

import cubatch
from cubatch.estimate.vendor import fitted, passes
from cubatch.hardware import arithmetic, catalogue, facts, probe, waves
from cubatch.hardware.facts import SM_LIMITS, Device
from cubatch.kernels import ranking, survey, variant
from cubatch.kernels.toolchain import compile as compiler
from cubatch.kernels.toolchain import nvrtc, sass, shared_ptx
from tests.unit.hardware import test_catalogue

FILE = Path(cubatch.__file__).parent / "data" / "architectures.toml"
REFERENCE = Path(__file__).with_name("occupancy_reference.csv")
WHOLE = tomllib.loads(FILE.read_text(encoding="utf-8"))
EVERY = WHOLE["every"]
TABLES = {name: table for name, table in WHOLE.items() if name != "every"}
BY_CAPABILITY = {tuple(table["compute_capability"]): table for table in TABLES.values()}
NOT_IN_THE_CODE = {(3, 7), (7, 2)}  # K80 and Xavier, of which the code has no limits
KEPLER = (3, 7)

NAMES = {3: "Kepler", 5: "Maxwell", 6: "Pascal", 9: "Hopper", 10: "Blackwell", 11: "Blackwell", 12: "Blackwell"}
KINDS = {
    "name": str, "compute_capability": list, "threads_per_sm": int, "warps_per_sm": int, "blocks_per_sm": int,
    "registers_per_sm": int, "registers_per_block": int, "partitions": int, "shared_kib_per_sm": int,
    "shared_kib_per_block": int, "shared_reserved_bytes": int, "shared_unit_bytes": int, "shared_carveouts_kib": list,
    "float32_lanes": int, "tensor_dtypes": list, "instructions": list, "surveyed": bool, "kin": str,
    "power_limited": bool, "tensor_measured": bool, "source": str,
}  # fmt: skip
OPTIONAL = {
    "barriers_per_sm": int, "tensor_cores": int, "boards_without": bool, "tensor_fma": dict, "geforce_share": float,
    "mma_fma": dict, "wgmma_fma": dict, "target": str, "last_cuda": str, "ptx": dict, "same_instructions": str,
    "instruction_bytes": int,
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
    """Those of the code, and the two that it lacks."""
    assert list(BY_CAPABILITY) == sorted(BY_CAPABILITY)
    assert set(BY_CAPABILITY) == set(SM_LIMITS) | NOT_IN_THE_CODE
    assert set(SM_LIMITS).isdisjoint(NOT_IN_THE_CODE)


@pytest.mark.parametrize("capability", SM_LIMITS, ids=str)
def test_limits_are_those_of_the_code(capability):
    """And by that those of NVIDIA's header, with which another test compares the code's."""
    table = BY_CAPABILITY[capability]
    assert SM_LIMITS[capability] == facts.SmLimits(
        threads_per_sm=table["threads_per_sm"],
        warps_per_sm=table["warps_per_sm"],
        blocks_per_sm=table["blocks_per_sm"],
        registers_per_sm=table["registers_per_sm"],
        registers_per_block=table["registers_per_block"],
        shared_bytes_per_sm=1024 * table["shared_kib_per_sm"],
        shared_bytes_per_block=1024 * table["shared_kib_per_block"],
        reserved_shared_bytes=table["shared_reserved_bytes"],
        shared_unit_bytes=table["shared_unit_bytes"],
        shared_carveouts=tuple(1024 * size for size in table["shared_carveouts_kib"]),
        partitions=table["partitions"],
    )


@every_table
def test_limits_hang_together(name, table):
    """Also of those that the code does not have."""
    assert table["threads_per_sm"] == EVERY["warp_threads"] * table["warps_per_sm"]
    assert table["registers_per_block"] <= table["registers_per_sm"]
    assert 1024 * table["shared_kib_per_block"] + table["shared_reserved_bytes"] <= 1024 * table["shared_kib_per_sm"]
    assert table["shared_carveouts_kib"] == sorted(set(table["shared_carveouts_kib"]))
    assert table["shared_carveouts_kib"][-1] == table["shared_kib_per_sm"]
    assert table["shared_kib_per_block"] >= EVERY["shared_kib_without_opting_in"]


def test_limits_that_the_code_lacks_are_those_of_the_sources():
    """NVIDIA's header has Xavier with the V100; a K80 has twice the registers of its generation and 112 KiB."""
    limits = [field for field in KINDS if "per_sm" in field or "shared" in field or "per_block" in field]
    assert [TABLES["sm_72"][field] for field in limits] == [TABLES["sm_70"][field] for field in limits]
    kepler = {field: TABLES["sm_37"][field] for field in ("warps_per_sm", "blocks_per_sm", "registers_per_sm")}
    assert kepler == {"warps_per_sm": 64, "blocks_per_sm": 16, "registers_per_sm": 128 * 1024}
    assert (TABLES["sm_37"]["shared_kib_per_sm"], TABLES["sm_37"]["shared_kib_per_block"]) == (112, 48)


def test_what_holds_for_every_architecture():
    """Of launches and of how registers are given out."""
    assert EVERY["warp_threads"] == waves.WARP_THREADS == ranking._WARP
    assert EVERY["threads_per_block"] == waves.MAX_THREADS_PER_BLOCK
    assert EVERY["registers_per_thread"] == waves.MAX_REGISTERS_PER_THREAD
    assert EVERY["register_unit"] == waves.REGISTER_UNIT
    assert EVERY["partitions_at_launch"] == waves.PARTITIONS_AT_LAUNCH
    assert EVERY["barriers_per_block"] == waves.MAX_BARRIERS_PER_BLOCK
    assert EVERY["shared_kib_without_opting_in"] * 1024 == 48 * 1024


@pytest.mark.parametrize("capability", SM_LIMITS, ids=str)
def test_barriers_are_counted_where_the_code_counts_them(capability):
    """A launch of one barrier has the whole pool as its limit."""
    found = waves.occupancy(compute_capability=capability, threads_per_block=32, registers_per_thread=8)
    assert found.limits.get("barriers") == BY_CAPABILITY[capability].get("barriers_per_sm")


def test_occupancy_by_the_table_is_what_nvidias_header_says():
    """The reference launches, worked out here from the file alone."""
    rows = list(csv.DictReader(REFERENCE.read_text(encoding="ascii").splitlines()))
    assert len(rows) == 150
    for row in rows:
        assert _blocks(row) == int(row["blocks_per_sm"]), row


def _blocks(row):
    """Count the blocks of a launch that an SM holds."""
    table = TABLES["sm_" + row["compute_capability"].replace(".", "")]
    warps = -(-int(row["threads_per_block"]) // EVERY["warp_threads"])
    limits = [
        table["warps_per_sm"] // warps,
        table["blocks_per_sm"],
        table.get("barriers_per_sm", table["blocks_per_sm"]),
    ]
    if registers := int(row["registers_per_thread"]):
        unit = EVERY["register_unit"]
        a_warp = -(-registers * EVERY["warp_threads"] // unit) * unit
        at_launch = -(-warps // EVERY["partitions_at_launch"]) * EVERY["partitions_at_launch"] * a_warp
        in_partition = table["registers_per_sm"] // table["partitions"] // a_warp
        limits.append(in_partition * table["partitions"] // warps if at_launch <= table["registers_per_block"] else 0)
    reserved, unit = table["shared_reserved_bytes"], table["shared_unit_bytes"]
    a_block = -(-(int(row["shared_bytes_per_block"]) + reserved) // unit) * unit
    if a_block:
        wanted = max(a_block, int(row["shared_carveout_bytes"] or 1024 * table["shared_kib_per_sm"]))
        sizes = [1024 * size for size in table["shared_carveouts_kib"] if 1024 * size >= wanted]
        fits = a_block - reserved <= 1024 * table["shared_kib_per_block"]
        limits.append(sizes[0] // a_block if fits else 0)
    return min(limits)


@every_table
def test_lanes_are_those_of_the_code(name, table):
    """For Kepler, where nothing runs, the code has 128 of 192."""
    capability, lanes = tuple(table["compute_capability"]), table["float32_lanes"]
    assert lanes == (192 if capability == KEPLER else arithmetic.lanes(gpu(table)))
    assert (lanes == 64) == (capability in facts.HALF_RATE)


@every_table
def test_tensor_cores_are_those_of_the_code(name, table):
    """Which boards have them, and which types they take."""
    has = None if table.get("boards_without") else bool(table["tensor_dtypes"])
    assert probe._tensor_cores(tuple(table["compute_capability"])) is has
    assert bool(table.get("tensor_cores", 4)) == bool(table["tensor_dtypes"])
    board = gpu(table, tensor_cores=bool(table["tensor_dtypes"]))
    taken = [dtype for dtype in ("float16", "bfloat16", "tf32") if arithmetic.has_tensor_cores(board, dtype)]
    assert table["tensor_dtypes"] == taken
    assert ("tf32" in table["tensor_dtypes"]) == ("tf32" in arithmetic.supported_dtypes(board))


@every_table
def test_rates_of_mma_sync_are_those_of_the_code(name, table):
    """A capability that the code's table lacks has those of the last before it."""
    capability = tuple(table["compute_capability"])
    known = [rates for one, rates in ranking._TENSOR_RATES.items() if one <= capability]
    if not table["tensor_dtypes"]:
        assert not known
        assert "mma_fma" not in table
        return
    assert (table["mma_fma"]["float16"], table["mma_fma"].get("tf32", 0)) == known[-1]
    assert ("wgmma" in table["instructions"]) == ("wgmma_fma" in table)
    if "wgmma_fma" in table:
        assert (table["wgmma_fma"]["float16"], table["wgmma_fma"]["tf32"]) == ranking._WGMMA_RATES


@every_table
def test_peak_rates_are_those_of_the_catalogue(name, table):
    """Boards print what follows from their chip's rate, or from a share of it if they are GeForce."""
    if "tensor_fma" not in table:
        return
    capability, rates = tuple(table["compute_capability"]), table["tensor_fma"]
    assert rates["float16"] == test_catalogue.FMA_PER_CLOCK[capability] * table["tensor_cores"]
    assert rates.get("tf32", rates["float16"] / 2) == rates["float16"] / 2
    boards = [one for one in catalogue.all_devices() if one.compute_capability == capability and one.num_sms]
    seen = set()
    for board in boards:
        if "float16" in board.peak_flops_per_second:
            share = table.get("geforce_share", 1) if "GeForce" in board.name else 1
            clock = test_catalogue.LOWER_CLOCK.get(board.slug, board.clock_hz / 1e6) * 1e6
            by_clock = 2 * rates["float16"] * share * board.num_sms * clock
            assert 0.9 <= board.peak_flops_per_second["float16"] / by_clock <= 1.06, board.slug
            seen.add(share)
    assert table.get("geforce_share", 1) in seen


def test_boards_have_the_name_and_the_cores_of_their_architecture():
    """Of every GPU of the catalogue."""
    for slug, board in test_catalogue.TABLE.items():
        table = BY_CAPABILITY[tuple(board["compute_capability"])]
        assert board["architecture"] == table["name"], slug
        if "num_sms" in board:
            assert board["cuda_cores"] == table["float32_lanes"] * board["num_sms"], slug
        if board.get("tensor_cores"):
            assert board["tensor_cores"] == table["tensor_cores"] * board["num_sms"], slug


def test_every_kernel_is_checked_for_the_architectures_that_are_surveyed():
    """In this order."""
    assert tuple(name for name, table in TABLES.items() if table["surveyed"]) == survey.ARCHS


@every_table
def test_what_shares_ptx_is_what_the_code_has(name, table):
    """By the first of those that share it; those that share none are named by themselves."""
    kernels = {
        "plain": variants_of("simt", "float32")[0],
        "bfloat16": variants_of("simt", "bfloat16")[0],
        "mma": variants_of("mma", "float16")[0],
    }
    shared = {kind: table.get("ptx", {}).get(kind, name) for kind in kernels}
    assert shared == {kind: shared_ptx.shared_ptx(found, name) for kind, found in kernels.items()}
    assert table.get("same_instructions") == shared_ptx._SAME_INSTRUCTIONS.get(name)


@every_table
def test_targets_are_those_of_the_compiler(name, table):
    """The accelerated one for wgmma alone, and an older release of CUDA where the newest has dropped it."""
    number = variant.arch_number(name)
    hopper = variants_of("hopper", "float16")[0]
    assert hopper.runs_on(number) == ("wgmma" in table["instructions"]) == ("target" in table)
    if "target" in table:
        assert compiler.options(hopper, name)[0] == f"-arch={table['target']}"
    first, last = nvrtc._CUDA_12_9
    assert (table.get("last_cuda") == "12.9") == (first <= number <= last)
    assert ("last_cuda" in table) == (number <= last)
    assert ("instruction_bytes" in table) == (number >= sass.OLDEST)
    assert table.get("instruction_bytes", sass._INSTRUCTION_BYTES) == sass._INSTRUCTION_BYTES


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
    assert ("tma" in table["instructions"]) == (number >= 90)


@every_table
def test_predictions_take_the_same_for_alike(name, table):
    """GPUs of one kin, those whose clock falls with their power, and those whose Tensor Cores were measured."""
    board = gpu(table, peak_flops_per_second={"float32": 30e12}, power_limit_watts=100.0)
    assert table["kin"] == fitted.kin_of(board)
    assert table["power_limited"] == (fitted.sustained(board) < 1)
    assert table["tensor_measured"] == (tuple(table["compute_capability"]) == passes._MEASURED_TENSOR_CORES)

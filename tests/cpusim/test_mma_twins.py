"""
Each name of common/device_mma.cuh against NumPy's matrix products: on the CPU the twins, on a GPU the instructions.

Where a lane's elements lie is written out here from the PTX ISA's sections on "Matrix Fragments for mma.m8n8k4",
".m16n8k8" and ".m16n8k16" and on ldmatrix, once more and apart from tests/cpusim/cpusim_mma.h.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cubatch.kernels.launch import CudaLauncher
from cubatch.kernels.variant import Kernel, kernels_path
from tests.cpusim import building
from tests.cpusim.simulator import SCHEDULES, SimulationError, Simulator
from tests.kernels import conftest
from tests.kernels.cases import encoded

pytestmark = pytest.mark.skipif(bool(building.reason_to_skip()), reason=building.reason_to_skip())

VOLTA = 70
LANES = np.arange(32)
GROUP, WITHIN = LANES // 4, LANES % 4
"""groupID and threadID_in_group of the PTX ISA."""


def twin(entry, threads=32):
    return Kernel(
        name=entry, family="twins", source=str(Path(__file__).parent / "mma_twins.cu"), operation=entry, entry=entry,
        dtype="float32", threads=threads, defines=(),
    )  # fmt: skip


def simulate(entry, arch, arguments, *, grid=1, threads=32, schedule="shuffled"):
    """Launch on the CPU."""
    Simulator(arch, schedule=schedule).launch(twin(entry, threads), (grid, 1, 1), arguments)


def on_gpu(gpu):
    """Give what launches on copies in a GPU's memory, and brings them back."""
    import cupy

    def launch(entry, arch, arguments, *, grid=1, threads=32, schedule=""):
        major, minor = gpu.compute_capability
        own = 10 * major + minor
        if own != arch if arch == VOLTA else own < arch:
            pytest.skip(f"sm_{own} has other instructions")
        copies = [cupy.asarray(value) if isinstance(value, np.ndarray) else value for value in arguments]
        CudaLauncher(gpu).bind(twin(entry, threads), (grid, 1, 1), copies)()
        for value, copy in zip(arguments, copies, strict=True):
            if isinstance(value, np.ndarray):
                value[...] = copy.get()

    return launch


@pytest.fixture(params=["cpusim", conftest.CUDA])
def launch(request):
    """Give what runs an entry of mma_twins.cu, of the architecture that has its instruction first."""
    return simulate if request.param == "cpusim" else on_gpu(conftest.target("cuda").device)


def m16n8(k):
    """Give (row, column) of a lane's elements of A, B and C, each [element][lane], of 16-bit m16n8k8 and m16n8k16."""
    a = [(GROUP + (8 if i in {2, 3, 6, 7} else 0), 2 * WITHIN + i % 2 + (8 if i >= 4 else 0)) for i in range(k // 2)]
    b = [(2 * WITHIN + i % 2 + (8 if i >= 2 else 0), GROUP) for i in range(k // 4)]
    c = [(GROUP + (8 if i >= 2 else 0), 2 * WITHIN + i % 2) for i in range(4)]
    return a, b, c


def m16n8k8_tf32():
    a = [(GROUP + (8 if i in {1, 3} else 0), WITHIN + (4 if i >= 2 else 0)) for i in range(4)]
    b = [(WITHIN + (4 if i else 0), GROUP) for i in range(2)]
    return a, b, m16n8(8)[2]


def m8n8k4(a_layout, b_layout):
    """The product of a lane's own group: rows and columns within 8 x 8 x 4."""
    low, upper = LANES % 4, np.where(LANES < 16, 0, 4)
    a = [(low + upper, 0 * LANES + i) if a_layout == "row" else (i % 4 + upper, low) for i in range(4)]
    b = [(low, i % 4 + upper) if b_layout == "row" else (0 * LANES + i, low + upper) for i in range(4)]
    c = [((LANES & 1) + (i & 2) + upper, (i & 4) + (LANES & 2) + (i & 1)) for i in range(8)]
    return a, b, c


def packed(matrix, places, dtype):
    """Give registers[32][4] that hold a lane's elements of a matrix."""
    values = np.stack([matrix[row, column] for row, column in places], axis=1)
    words = np.full((32, 4), 0xFFFFFFFF, np.uint32)  # NaN where nothing is read
    stored = np.ascontiguousarray(encoded(values, dtype)).view(np.uint32)
    words[:, : stored.shape[1]] = stored
    return words


def drawn(random, shape):
    """Small integers: their products and sums are exact in every type."""
    return random.integers(-8, 9, shape).astype(np.float32)


def run(launch, entry, arch, a, b, c):
    sums = np.full((32, 8), np.nan, np.float32)
    sums[:, : c.shape[1]] = c
    launch(entry, arch, [a, b, sums], schedule=SCHEDULES[len(entry) % 4])
    return sums


@pytest.mark.parametrize(
    ("entry", "arch", "dtype", "places", "k"),
    [
        ("m16n8k8_f16", 75, "float16", m16n8(8), 8),
        ("m16n8k16_f16", 80, "float16", m16n8(16), 16),
        ("m16n8k16_bf16", 80, "bfloat16", m16n8(16), 16),
        ("m16n8k8_tf32", 80, "float32", m16n8k8_tf32(), 8),
    ],
)
def test_a_product_of_16_by_8_is_that_of_the_matrices_in_the_fragments(launch, entry, arch, dtype, places, k):
    """Every element of A, B and C is where the PTX ISA puts it, and the sum goes on from C."""
    random = np.random.default_rng(k)
    a, b, c = drawn(random, (16, k)), drawn(random, (k, 8)), drawn(random, (16, 8))
    rows, columns = (np.stack(axis, axis=1) for axis in zip(*places[2], strict=True))
    got = run(launch, entry, arch, packed(a, places[0], dtype), packed(b, places[1], dtype), c[rows, columns])
    assert np.array_equal(got[:, :4], (a @ b + c)[rows, columns])
    assert np.isnan(got[:, 4:]).all()


@pytest.mark.parametrize("a_layout", ["row", "col"])
@pytest.mark.parametrize("b_layout", ["row", "col"])
def test_four_products_of_8_by_8_go_on_side_by_side(launch, a_layout, b_layout):
    """Lanes 4 q to 4 q + 3 and 16 + 4 q to 19 + 4 q multiply matrices of their own."""
    random = np.random.default_rng(4)
    places = m8n8k4(a_layout, b_layout)
    a, b, c = drawn(random, (4, 8, 4)), drawn(random, (4, 4, 8)), drawn(random, (4, 8, 8))
    group = LANES // 4 % 4

    def registers(matrices, where):
        values = np.stack([matrices[group, row, column] for row, column in where], axis=1)
        words = np.full((32, 4), 0xFFFFFFFF, np.uint32)
        words[:, :2] = np.ascontiguousarray(values.astype(np.float16)).view(np.uint32)
        return words

    rows, columns = (np.stack(axis, axis=1) for axis in zip(*places[2], strict=True))
    mine = group[:, None]
    operands = registers(a, places[0]), registers(b, places[1])
    got = run(launch, f"m8n8k4_{a_layout}_{b_layout}", VOLTA, *operands, c[mine, rows, columns])
    assert np.array_equal(got, (a @ b + c)[mine, rows, columns])


def test_sums_are_float32_and_products_exact(launch):
    """2048 + 1 in float16 would stay 2048, a square has more bits; a GPU may cut off the last of float32."""
    a, b, c = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32), np.full((16, 8), 2048, np.float32)
    third = np.float32(np.float16(1 / 3))
    a[:, 0], b[0], a[:, 9], b[9] = 1, 1, third, third
    places = m16n8(16)
    rows, columns = (np.stack(axis, axis=1) for axis in zip(*places[2], strict=True))
    operands = packed(a, places[0], "float16"), packed(b, places[1], "float16")
    got = run(launch, "m16n8k16_f16", 80, *operands, c[rows, columns])[:, :4].astype(np.float64)
    assert (abs(got - (2049 + float(third) ** 2)) <= 2.0**-12).all()


def test_tf32_sees_ten_bits_after_the_point():
    """What is below is cut off, so operands are rounded beforehand."""
    a, b = np.zeros((16, 8), np.float32), np.zeros((8, 8), np.float32)
    a[:, 3], b[3] = 1 + 2.0**-10 + 2.0**-11, 1
    places = m16n8k8_tf32()
    operands = packed(a, places[0], "float32"), packed(b, places[1], "float32")
    got = run(simulate, "m16n8k8_tf32", 80, *operands, np.zeros((32, 4)))
    assert (got[:, :4] == 1 + 2.0**-10).all()


def test_rounding_to_tf32_is_to_nearest_with_ties_away_from_zero(launch):
    """Ten bits after the point; infinities stay, NaN loses its last 13 bits, what is too large becomes infinite."""
    random = np.random.default_rng(0)
    bits = np.concatenate(
        [
            random.integers(0, 2**32, 100_000, dtype=np.uint32),
            (np.arange(1000, dtype=np.uint32) << 13) + np.uint32(0x3F800FFF),  # around ties
            (np.arange(1000, dtype=np.uint32) << 13) + np.uint32(0x3F801000),
            np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF], np.uint32),
            np.array([0x7F800001, 0x7F801000, 0x7FFFFFFF, 0xFF801FFF, 0xFFC00000], np.uint32),  # NaN
        ]
    )
    got = np.empty_like(bits)
    launch("round_to_tf32", 80, [bits, got, np.int32(bits.size)], grid=-(-bits.size // 128), threads=128)
    with np.errstate(all="ignore"):
        x = bits.view(np.float32).astype(np.float64)
        exponent = np.maximum(np.floor(np.log2(np.abs(x))), -126)
        unit = 2.0 ** (exponent - 10)
        want = np.sign(x) * np.floor(np.abs(x) / unit + 0.5) * unit
        want = np.where(np.isfinite(x) & (x != 0), np.where(np.abs(want) >= 2.0**128, np.sign(x) * np.inf, want), x)
        is_nan = np.isnan(x)
        assert np.array_equal(got[~is_nan].view(np.float32).astype(np.float64), want[~is_nan])
    assert np.array_equal(got[is_nan], bits[is_nan] // 2**13 * 2**13)
    assert not (got & 0x1FFF).any()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_matrices_of_shared_memory_are_dealt_to_lanes(launch, schedule):
    """Lane 8 i + r names row r of matrix i; a lane gets two neighbours of a row, transposed two of a column."""
    random = np.random.default_rng(5)
    rows = np.arange(64 * 8, dtype=np.uint16).reshape(64, 8)
    order = random.permutation(64)[:32].astype(np.int32)
    plain, transposed = np.empty((32, 4), np.uint32), np.empty((32, 4), np.uint32)
    arguments = [rows.view(np.uint32), order, plain, transposed]
    launch("load_matrices", 75, arguments, schedule=schedule)
    matrices = rows[order].reshape(4, 8, 8)
    for got, source in ((plain, matrices), (transposed, matrices.transpose(0, 2, 1))):
        pairs = got.view(np.uint16).reshape(32, 4, 2)
        for matrix in range(4):
            for i in range(2):
                assert np.array_equal(pairs[:, matrix, i], source[matrix, GROUP, 2 * WITHIN + i])


@pytest.mark.parametrize(("which", "said"), [(0, "misaligned"), (1, "outside of shared memory")])
def test_a_row_that_cannot_be_read_is_an_error(which, said):
    """A GPU would fault, or read something else."""
    with pytest.raises(SimulationError, match=rf"{said}.*mma_twins\.cu:\d+"):
        Simulator(80).launch(twin("misuse"), (1, 1, 1), [np.zeros(4, np.uint32), np.int32(which)])


@pytest.mark.parametrize("arch", [70, 75, 80])
def test_an_atoms_sums_cover_its_tile_in_pairs(arch):
    """Each of 16 x 16 places once; sums 2 i and 2 i + 1 are neighbours in a row, for the epilogue stores them so."""
    places = np.empty((32, 8, 2), np.int32)
    Simulator(arch).launch(twin("atom_places"), (1, 1, 1), [places])
    assert len({tuple(place) for place in places.reshape(-1, 2)}) == 256
    assert places.min() == 0
    assert places.max() == 15
    assert np.array_equal(places[:, 1::2], places[:, ::2] + [0, 1])
    assert (places[:, ::2, 1] % 2 == 0).all()


def test_every_name_of_the_gpu_branch_has_a_twin():
    """What a kernel may call exists in both branches, so that no kernel compiles for one alone."""
    text = (kernels_path() / "common/device_mma.cuh").read_text()
    gpu = text[text.index("#if defined(__CUDACC__)") : text.index("#else\n\n#include")]
    cpu = (Path(__file__).parent / "cpusim_mma.h").read_text()
    names = [set(re.findall(r"(?:#define|CB_DEVICE \w+) (cb_\w+)", source)) for source in (gpu, cpu)]
    assert len(names[0]) == 8
    assert names[0] == names[1]

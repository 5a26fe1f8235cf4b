"""
What no kept answer of a GPU shows of the tensor cores' twins: Volta's products, misuse, and where sums lie.

Where a lane's elements lie is written out here from the PTX ISA's section "Matrix Fragments for mma.m8n8k4", once
more and apart from tests/cpusim/cpusim_mma.h. Later instructions: tests/gpu/test_conformance.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cubatch.kernels.variant import Kernel
from tests.cpusim import building
from tests.cpusim.simulator import SimulationError, Simulator

pytestmark = pytest.mark.skipif(bool(building.reason_to_skip()), reason=building.reason_to_skip())

LANES = np.arange(32)


def twin(entry, threads=32):
    return Kernel(
        name=entry, family="twins", source=str(Path(__file__).parent / "mma_twins.cu"), operation=entry, entry=entry,
        dtype="float32", threads=threads, defines=(),
    )  # fmt: skip


def m8n8k4(a_layout, b_layout):
    """The product of a lane's own group: rows and columns within 8 x 8 x 4."""
    low, upper = LANES % 4, np.where(LANES < 16, 0, 4)
    a = [(low + upper, 0 * LANES + i) if a_layout == "row" else (i % 4 + upper, low) for i in range(4)]
    b = [(low, i % 4 + upper) if b_layout == "row" else (0 * LANES + i, low + upper) for i in range(4)]
    c = [((LANES & 1) + (i & 2) + upper, (i & 4) + (LANES & 2) + (i & 1)) for i in range(8)]
    return a, b, c


def drawn(random, shape):
    """Small integers: their products and sums are exact in every type."""
    return random.integers(-8, 9, shape).astype(np.float32)


@pytest.mark.parametrize("a_layout", ["row", "col"])
@pytest.mark.parametrize("b_layout", ["row", "col"])
def test_four_products_of_8_by_8_go_on_side_by_side(a_layout, b_layout):
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
    sums = c[mine, rows, columns]
    Simulator(70).launch(twin(f"m8n8k4_{a_layout}_{b_layout}"), (1, 1, 1), [*operands, sums])
    assert np.array_equal(sums, (a @ b + c)[mine, rows, columns])


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

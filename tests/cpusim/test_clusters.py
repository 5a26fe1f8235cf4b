"""Clusters of the simulator: two blocks that write to each other's shared memory, and what they must not do."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import numpy as np
import pytest

from cubatch.kernels.tensor_map import TensorMap
from tests.cpusim import building
from tests.cpusim.planting import MODES, twin
from tests.cpusim.simulator import SimulationError, Simulator

BUILD = os.environ.get("CUBATCH_CPUSIM", "plain")

pytestmark = pytest.mark.skipif(bool(building.reason_to_skip()), reason=building.reason_to_skip())

HALVES = attrs.evolve(
    twin("halves", 128, 2 * 32 * 128 + 16), source=str(Path(__file__).parent / "clusters.cu"), family="hopper"
)
X = np.random.default_rng(0).integers(1, 2**15, (128, 64)).astype(np.uint16)


def swizzled(rows):
    """Give rows of 128 bytes as they lie in shared memory: 16-byte pieces of row r in the order i ^ r % 8."""
    pieces = rows.reshape(-1, 8, 16)
    order = np.arange(8) ^ (np.arange(len(pieces)) % 8)[:, None]
    return np.take_along_axis(pieces, order[..., None], axis=1)


def run(which=0, blocks=4, only=None, **options):
    """Give what blocks saw, or those of them that ran: 64 rows of 128 bytes each, as they lay in shared memory."""
    y = np.zeros((blocks, 8192), np.uint8)
    arguments = [TensorMap(X, "bfloat16", (64, 128), (64, 32)), y, np.int32(which)]
    Simulator(90, BUILD, blocks=only, **options).launch(HALVES, (blocks, 1, 1), arguments)
    return y


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_each_block_loads_half_of_a_tile_for_both(mode):
    """Ranks, the barriers of both and copies to both: two clusters, each with the rows of its own blocks."""
    seen = run(schedule=mode[0], copies=mode[1])
    for cluster in range(2):
        want = swizzled(X[64 * cluster :][:64].view(np.uint8)).reshape(-1)
        for rank in range(2):
            np.testing.assert_array_equal(seen[2 * cluster + rank], want)


def test_a_barrier_of_the_cluster_is_a_wait_for_all_before_it():
    """Blocks that meet once more at their end need not have waited for each arrival."""
    assert run(which=8).any()


def test_a_block_runs_with_its_cluster():
    """Of a grid of two clusters that of block 3 alone, whose blocks are 2 and 3."""
    seen = run(only=[(3, 0, 0), (2, 0, 0)])
    assert [bool(rows.any()) for rows in seen] == [False, False, True, True]


MISUSES = {
    1: "a barrier of another block without a cb_cluster_sync since its initialisation",
    2: "no block of that rank is in the cluster",
    3: "a copy to a block that is not in the cluster",
    4: "another block of the cluster|when its block ends",
    5: "divergent barrier: a thread returned before it: threads 0-127 of rank 0 wait in cb_cluster_sync",
    6: "deadlock: threads 0-127 of rank 0 wait in cb_barrier_wait at .*; threads 0-127 of rank 1 wait",
    7: "returns without a wait for what another block of the cluster does|reached that has returned",
}


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("which", MISUSES)
def test_misuse_is_an_error_with_its_place(which, mode):
    """In every order of threads and copies, also in those in which all would go well by chance."""
    with pytest.raises(SimulationError, match=MISUSES[which]) as caught:
        run(which, schedule=mode[0], copies=mode[1])
    assert "clusters.cu:" in str(caught.value)


def test_a_grid_is_of_whole_clusters():
    """As the driver refuses it."""
    with pytest.raises(SimulationError, match="a grid that is no multiple of its clusters"):
        run(blocks=3)

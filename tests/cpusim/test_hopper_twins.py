"""What Hopper's instructions must not be given. Their answers: tests/gpu/test_conformance.py."""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import pytest

from cubatch.kernels.tensor_map import TensorMap
from tests.cpusim import building
from tests.cpusim.planting import twin
from tests.cpusim.simulator import SimulationError, Simulator

pytestmark = pytest.mark.skipif(bool(building.reason_to_skip()), reason=building.reason_to_skip())

MISUSES = {
    0: "a barrier that was not initialised",
    1: "more arrivals at a barrier than it expects",
    2: r"deadlock: thread 0 waits in cb_barrier_wait at tests/cpusim/hopper_misuse\.cu:\d+",
    3: "more bytes arrive than the barrier expects, 128, the last",
    4: "a copy is still under way when its block ends",
    5: "a tile that is not aligned to 128 bytes",
    6: "a tile outside of shared memory",
    7: "a copy of another kind of map",
    8: "a store still reads shared memory when its thread returns",
    9: "a barrier is 8 bytes of shared memory",
    10: "a descriptor of another swizzle",
    11: "threads of a warpgroup disagree on a product",
    12: "a product is still under way when a thread of its warpgroup returns",
    13: "an operation of a warpgroup that has lost a thread",
    14: "no block of that rank is in the cluster",
    15: "a barrier without a cb_barrier_init_fence after its initialisation",
    16: "a tile that no copy and no cb_write has written is read",
    17: r"what thread \d+ wrote without a cb_proxy_fence after it is read",
    18: r"what thread \d+ wrote without a cb_proxy_fence after it is read",
    19: "a product on sums without a cb_wgmma_fence since they were waited for",
    20: "sums that were written while a product was under way",
    21: "a product on a part of the sums of products under way",
    22: "a product on sums without a cb_wgmma_fence since they were waited for",
    23: "a tile outside of shared memory",
    24: "products on more sets of sums under way than cpusim keeps",
    25: "a store that starts before the first row or column",
    26: "a store that starts before the first row or column",
    27: "a tile that starts between multiples of 16 bytes",
    28: "a tile that starts between multiples of 16 bytes",
}


@pytest.mark.parametrize("which", MISUSES)
def test_misuse_is_an_error_with_its_place(which):
    """What a GPU would answer with a hang, with wrong numbers or with an illegal instruction."""
    x, y = np.zeros((64, 64), np.float16), np.zeros(128, np.float32)
    described = TensorMap(x, "float16", (64, 64), (64, 64))
    source = str(Path(__file__).parent / "hopper_misuse.cu")
    kernel = attrs.evolve(twin("misuse", 128, 8192 + 16), source=source)
    with pytest.raises(SimulationError, match=MISUSES[which]) as caught:
        Simulator(90, schedule="in_order").launch(kernel, (1, 1, 1), [described, y, np.int32(which)])
    assert "hopper_misuse.cu:" in str(caught.value)

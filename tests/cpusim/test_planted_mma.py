"""
The proof that the simulator finds the bugs of tensor-core kernels: each is planted in kernels/mma itself.

A mutant is a copy of the sources with a line changed; what it computes must be wrong, or refused, in every order of
threads and copies that the table names.
"""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from cubatch.engine.native import conv
from cubatch.engine.native.context import Context
from cubatch.hardware.facts import Device
from cubatch.kernels import variant
from cubatch.kernels.ranking import SplitKernel
from tests.cpusim import building, planting
from tests.cpusim.planting import LATE, MODES, WRONG, not_in, running, seen_always
from tests.cpusim.simulator import SimulationError, Simulator
from tests.kernels import cases

pytestmark = planting.IN_PLACE

KERNELS = variant.kernels_path()
ANY = MODES[:1]  # for what has nothing to do with an order
AHEAD, IN_TURN = "128x64x32", "128x128x32"
"""A tile whose fragments are read a step ahead, and one where each step reads its own."""

# 4 taps of 72 filters: 9 steps, three times around the ring; part of a tile along all three axes.
DRAWN = cases.Conv(n=2, h=9, w=8, c=88, k=72, r=2, s=2, pad=(1, 0, 0, 1))
RING = KERNELS / "common" / "ring.cuh"
A100 = Device(name="A100", compute_capability=(8, 0), num_sms=4)

WAIT_AHEAD = "          wait_for_copies();\n          cb_sync();\n"
FIRST_WAIT = "  }\n  wait_for_copies();\n  cb_sync();\n"
WAIT_IN_TURN = "    if constexpr (!READS_AHEAD) {\n      wait_for_copies();\n      cb_sync();\n"
COPIED = "      copy_group(sums, group, slab);\n      cb_sync_warp();\n"
STORED = "      }\n      cb_sync_warp();\n    }\n"


@attrs.frozen
class Bug:
    """
    A changed line, which is there once, and where it must show.

    Attributes:
        file: The source.
        old, new: The line.
        modes: (schedule, copies) in which it must not come out right.
        tile: Of the kernel.
    """

    file: str
    old: str
    new: str
    modes: tuple[tuple[str, str], ...] = MODES
    tile: str = AHEAD


BUGS = {
    "no barrier after the wait": Bug("main_loop.cuh", WAIT_AHEAD, WAIT_AHEAD.replace("cb_sync();", ""), modes=LATE),
    "no barrier after the wait in turn": Bug(
        "main_loop.cuh", WAIT_IN_TURN, WAIT_IN_TURN.replace("cb_sync();", ""), modes=LATE, tile=IN_TURN
    ),
    "no wait": Bug("main_loop.cuh", WAIT_AHEAD, WAIT_AHEAD.replace("wait_for_copies();", ""), modes=LATE),
    "a wait for a tile too few": Bug("ring.cuh", "wait<NUM_STAGES - 2>", "wait<NUM_STAGES - 1>", modes=LATE),
    "no wait for the first tile": Bug("ring.cuh", FIRST_WAIT, FIRST_WAIT.replace("wait_for_copies();", ""), modes=LATE),
    "a tile ahead too many": Bug(
        "main_loop.cuh", "const u32 written = read == 0 ? AROUND : STAGE,", "const u32 written = STAGE * (read < 0),"
    ),
    "the wrong stage": Bug("main_loop.cuh", "onward = read == NUM_STAGES - 1", "onward = read == NUM_STAGES - 2"),
    "another swizzle where rows are read": Bug(
        "fragments.cuh",
        "((place ^ (step * 2 * CHUNK)) + i",
        "((place + step * 2 * CHUNK) + i",
        modes=ANY,
    ),
    "another swizzle where columns are read": Bug(
        "fragments.cuh",
        "((place ^ (i * 2 * CHUNK)) + step",
        "((place + i * 2 * CHUNK) + step",
        modes=ANY,
    ),
    "another swizzle where columns are written": Bug(
        "loaders.cuh", "first ^ (i * STEP", "first + (i * STEP", modes=ANY
    ),
    "no barrier of the warp before rows are stored": Bug(
        "store.cuh", COPIED, COPIED.replace("cb_sync_warp();", ""), modes=not_in("reversed")
    ),
    "no barrier of the warp before the slab is filled again": Bug(
        "store.cuh", STORED, STORED.replace("cb_sync_warp();", ""), modes=not_in("in_order")
    ),
}

CASES = seen_always(BUGS, "no wait", "another swizzle where rows are read")


def mutant(name):
    """Give the kernel with a bug, or that of a tile as it is."""
    bug, paths = BUGS.get(name), [*(KERNELS / "mma").iterdir(), RING]
    tile, changes = (bug.tile, [(bug.file, bug.old, bug.new)]) if bug else (name, [])
    found = variant.find("conv2d_dgrad", "float16", family="mma", tile=tile, vector=8)
    return planting.mutant(f"mma {name}", found, paths, changes)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Compile everything at once: two compilers at a time rather than one between the tests."""
    building.precompile([mutant(name) for name in (AHEAD, IN_TURN, *running(CASES))], 80)


def outcome(chosen, mode):
    """Give the gradient of integers, whose sums are exact: "right", WRONG, or the error."""
    random = np.random.default_rng(3)
    dy, w = (random.integers(-2, 3, shape).astype(np.float16) for shape in (DRAWN.y_shape, DRAWN.w_shape))
    dx = np.full(DRAWN.x_shape, np.nan, np.float16)
    simulator = Simulator(80, schedule=mode[0], copies=mode[1], seed=3)
    where = Context(device=A100, launcher=simulator, chooser=lambda *_: SplitKernel(chosen))
    try:
        conv.conv2d_dgrad(where, dy, w, x_shape=DRAWN.x_shape, out=dx, **DRAWN.options)
    except SimulationError as error:
        return str(error)
    want = cases.conv2d_dgrad(DRAWN, dy.astype(np.float64), w.astype(np.float64))
    return "right" if np.array_equal(dx, want) else WRONG


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("tile", [AHEAD, IN_TURN])
def test_the_kernel_as_it_is_passes(tile, mode):
    """No false alarm in any order of threads and copies."""
    assert outcome(mutant(tile), mode) == "right"


@pytest.mark.parametrize("name", CASES)
def test_the_bug_is_caught(name):
    """In every mode that the table names: a wrong result, or an error that says where it happened."""
    found = {mode: outcome(mutant(name), mode) for mode in BUGS[name].modes}
    assert {mode: text for mode, text in found.items() if text == "right"} == {}

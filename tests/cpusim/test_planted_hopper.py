"""
The proof that the simulator finds the bugs of warp-specialised kernels: each is planted in kernels/hopper itself.

A mutant is a copy of the sources with a few lines changed; what it computes must be wrong, or refused, in every order
of threads and copies that the table names.
"""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np
import pytest

from cubatch.engine.native import conv, hopper
from cubatch.engine.native.context import Context
from cubatch.hardware import catalogue
from cubatch.kernels import tensor_map, variant
from cubatch.kernels.ranking import SplitKernel
from tests.cpusim import building, planting
from tests.cpusim.planting import ANY_FIRST, EARLY, LATE, MODES, WRONG, not_in, running, seen_always
from tests.cpusim.simulator import SimulationError
from tests.kernels import cases

pytestmark = planting.IN_PLACE

SOURCES = variant.kernels_path() / "hopper"
USUAL, SWAPPED, CLUSTERED = (
    variant.find("conv2d_fprop", "float16", family="hopper", tile=tile)
    for tile in ("128x256x64", "256x64x64", "128x256x64_c2")
)
PHASED, PHASED_SWAPPED = (
    variant.find("conv2d_dgrad_phases", "float16", tile=tile) for tile in ("256x128x64", "256x64x64")
)
H200 = attrs.evolve(catalogue.find("h200-sxm"), num_sms=2)

# Two tiles a block, 12 steps each: three times around the ring; 4 blocks of 64 columns are stored of each.  Of clusters
# the same.  Of swapped tiles two for each consumer of a block, 18 steps each: four times around the ring and a half.
DRAWN = cases.Conv(n=10, h=7, w=10, c=72, k=200, r=3, s=2, stride=(2, 1), pad=(2, 1, 0, 1))

# A gradient of four phases: two tiles of rows each, the last one cut off, and several of columns.
STRIDED = cases.Conv(n=11, h=9, w=11, c=136, k=72, r=3, s=3, stride=(2, 2), pad=(1, 1, 1, 1))

DRAWS = 4
"""Of the schedules that are drawn: how often copies happen and others go first is drawn too."""

WAIT = "    cb_wgmma_commit();\n    cb_wgmma_wait<1>();\n    if (step > 0) release(shared, before);\n"
LAST = "  if (count > 0) release(shared, before);\n"
FULL = "    cb_barrier_wait(shared.full(ring.stage), ring.parity);\n"
EMPTIED = "    u64* full = shared.full(ring.stage);\n    cb_barrier_expect(full, "
EMPTY = f"    wait_empty(shared, ring);\n{EMPTIED}"
JOIN = (
    "  cb_barrier_arrive(shared.joined(consumer));  // all have read before one of them signals it\n"
    "  cb_barrier_wait(shared.joined(consumer), joins++ & 1);\n"
)
FULL_OF_TERM = "  cb_barrier_wait(shared.full(ring.stage), ring.parity);\n  const auto apply"


@attrs.frozen
class Bug:
    """
    Changes of lines, each of which is there once, and what must come of them.

    Attributes:
        changes: (file, old, new).
        pattern: Part of the outcome.
        modes: (schedule, copies) in which it must come.
        kernel: The variant that has it.
        staged: Whether the output lies where the copy engine cannot store it.
    """

    changes: tuple[tuple[str, str, str], ...]
    pattern: str = ""
    modes: tuple[tuple[str, str], ...] = MODES
    kernel: variant.Kernel = USUAL
    staged: bool = False


BUGS = {
    "no wait on full": Bug(
        (("main_loop.cuh", f"{FULL}    const u64 b", "    const u64 b"),), modes=LATE
    ),
    "no wait on full for what is added": Bug((("main_loop.cuh", FULL_OF_TERM, "  const auto apply"),), modes=LATE),
    "no wait for those that add": Bug((("main_loop.cuh", JOIN, "  (void)joins;\n"),), modes=ANY_FIRST),
    "no wait on empty": Bug((("main_loop.cuh", f"{EMPTY}STAGE_BYTES", EMPTIED + "STAGE_BYTES"),)),
    "no wait on empty for what is added": Bug((("main_loop.cuh", f"{EMPTY}A_BYTES", EMPTIED + "A_BYTES"),)),
    "release before the products are waited for": Bug((
        ("main_loop.cuh", WAIT, "    cb_wgmma_commit();\n    release(shared, ring.stage);\n    cb_wgmma_wait<1>();\n"),
        ("main_loop.cuh", LAST, "  (void)before;\n"),
    ), modes=EARLY),
    "release of the stage that is being read": Bug((
        ("main_loop.cuh", WAIT, "    cb_wgmma_commit();\n    cb_wgmma_wait<1>();\n    release(shared, ring.stage);\n"),
        ("main_loop.cuh", LAST, "  (void)before;\n"),
    ), modes=EARLY),
    "one release too many": Bug(
        (("main_loop.cuh", "if (step > 0) release", "release"),), modes=not_in("reversed")
    ),
    "no release": Bug((("main_loop.cuh", "if (step > 0) release", "if (step > 1) release"),)),
    "the producer waits for the wrong phase": Bug(
        (("main_loop.cuh", "cb_barrier_wait(shared.empty(ring.stage), ring.parity ^ 1)",
          "cb_barrier_wait(shared.empty(ring.stage), ring.parity)"),),
        "deadlock",
    ),
    "the phase is not turned": Bug((("walk.cuh", "      parity ^= 1;\n", ""),)),
    "too few bytes expected": Bug((("main_loop.cuh", "(full, STAGE_BYTES)", "(full, STAGE_BYTES - 128)"),)),
    "too many bytes expected": Bug(
        (("main_loop.cuh", "(full, STAGE_BYTES)", "(full, STAGE_BYTES + 128)"),), "deadlock"
    ),
    "another swizzle": Bug(
        (("operands.cuh", "return cb_matrix_descriptor(tile, ", "return (u64)3 << 62 ^ cb_matrix_descriptor(tile, "),),
        "another swizzle",
    ),
    "no wait for the last products": Bug((("main_loop.cuh", "  cb_wgmma_wait<0>();\n", ""),)),
    "a wait for all but the last products": Bug((("main_loop.cuh", "cb_wgmma_wait<0>()", "cb_wgmma_wait<1>()"),)),
    "products that are never committed": Bug((("main_loop.cuh", "    cb_wgmma_commit();\n", ""),)),
    "no fence between sums and products": Bug(
        (("main_loop.cuh", "    cb_wgmma_fence();\n", ""),), "a product on sums without a cb_wgmma_fence"
    ),
    "no fence before a tile is stored": Bug(
        (("store.cuh", "    cb_proxy_fence();\n    cb_sync_warp();\n", "    cb_sync_warp();\n"),),
        "wrote without a cb_proxy_fence after it is read",
    ),
    "a fence after the barrier that hands over": Bug(
        (("store.cuh", "    cb_proxy_fence();\n    cb_sync_warp();\n",
          "    cb_sync_warp();\n    cb_proxy_fence();\n"),),
        "wrote without a cb_proxy_fence after it is read",
        modes=not_in("reversed"),
    ),
    "a fence of the storing lane alone": Bug(
        (("store.cuh", "    cb_proxy_fence();\n    cb_sync_warp();\n",
          "    if (cb_lane() == 0) cb_proxy_fence();\n    cb_sync_warp();\n"),),
        "wrote without a cb_proxy_fence after it is read",
    ),
    "no fence of new barriers": Bug(
        (("implicit_gemm.cu", "    cb_barrier_init_fence();\n", ""),), "without a cb_barrier_init_fence"
    ),
    "no barrier of the warp before it stores": Bug(
        (("store.cuh", "    cb_proxy_fence();\n    cb_sync_warp();\n", "    cb_proxy_fence();\n"),),
        modes=not_in("reversed"),
    ),
    "no wait before a tile is filled again": Bug(
        (("store.cuh", "  if (cb_lane() == 0) cb_tma_store_wait_read<TURNS - 1>();\n", ""),), modes=LATE
    ),
    "no wait for the last stores": Bug(
        (("implicit_gemm.cu", "    if (cb_lane() == 0) cb_tma_store_wait_read<0>();", "    //"),),
        "a store still reads shared memory",
        modes=LATE[:2],
    ),
}  # fmt: skip

# Of a swapped tile: the same once more where a wait is missing, and what it alone can get wrong.
BUGS |= {
    f"swapped, {name}": attrs.evolve(BUGS[name], kernel=SWAPPED)
    for name in ("no wait on full", "no wait on empty", "no release", "no wait for the last products")
}
BUGS |= {f"swapped, {name}": attrs.evolve(bug, kernel=SWAPPED) for name, bug in {
    "no wait for the turn": Bug(
        (("implicit_gemm.cu", "        wait_turn(shared, consumer, round);\n", "        (void)round;\n"),)
    ),
    "a turn that is not passed on": Bug(
        (("main_loop.cuh", "    cb_barrier_arrive(shared.turn(1 - consumer));\n", ""),), "deadlock"
    ),
    "a turn of one thread": Bug(
        (("implicit_gemm.cu", "cb_barrier_init(shared.turn(consumer), WARPGROUP)",
          "cb_barrier_init(shared.turn(consumer), 1)"),)
    ),
    "the first one waits for the second": Bug(
        (("main_loop.cuh", "round + consumer + 1", "round + consumer"),)
    ),
    "stages of two readers": Bug(
        (("implicit_gemm.cu", "READERS * CLUSTER", "NUM_CONSUMERS * CLUSTER"),), "deadlock"
    ),
    "a ring that waits for its consumer": Bug(
        (("implicit_gemm.cu", "          ring.skip(task.count + num_terms(walk));\n", ""),)
    ),
    "stages of terms that are not skipped": Bug((("implicit_gemm.cu", "task.count + num_terms(walk)", "task.count"),)),
    "terms counted that are not there": Bug(
        (("main_loop.cuh", "(walk.adds_tiles ? 1 : 0)", "1 + (walk.adds_tiles ? 1 : 0)"),), "deadlock"
    ),
    "no wait for the other warps of a strip": Bug(
        (("store.cuh", "    cb_barrier_wait(shared.joined(warp / 4), joins++ & 1);\n", "    (void)joins;\n"),),
        modes=ANY_FIRST,
    ),
    "no wait before a strip's tile is filled again": Bug(
        (("store.cuh", "    if (stores) cb_tma_store_wait_read<0>();\n", ""),), modes=LATE
    ),
    "no fence before a strip is stored": Bug(
        (("store.cuh", "    cb_proxy_fence();\n    const bool stores", "    const bool stores"),),
        "wrote without a cb_proxy_fence after it is read",
    ),
    "stages that are not skipped": Bug((("walk.cuh", "    stage = (int)(to % NUM_STAGES);\n", ""),)),
    "phases that are not skipped": Bug((("walk.cuh", "    parity ^= to / NUM_STAGES & 1;\n", ""),)),
}.items()}  # fmt: skip

# Of a swapped tile whose strips go through shared memory one by one.
BUGS |= {f"staged, {name}": attrs.evolve(bug, kernel=SWAPPED, staged=True) for name, bug in {
    "no barrier between staging and finishing": Bug(
        (("store.cuh", "      stage_strip(strip, staging);\n      cb_sync_warp();\n",
          "      stage_strip(strip, staging);\n"),),
    ),
    "no barrier before staging is filled again": Bug(
        (("store.cuh", "first, columns);\n      cb_sync_warp();\n", "first, columns);\n"),),
    ),
}.items()}  # fmt: skip

# Of the phases of a stride: terms that are gathered, and rows that warps store.
FINISHED = "    finish_tile(epilogue, strip, first, columns, tile);\n    cb_sync_warp();\n    store_rows"
BUGS |= {f"phases, {name}": attrs.evolve(bug, kernel=PHASED) for name, bug in {
    "no barrier before rows are stored": Bug(
        (("store.cuh", FINISHED, FINISHED.replace("    cb_sync_warp();\n", "")),),
    ),
    "no barrier before places change": Bug(
        (("store.cuh", "tile, places, first, columns);\n    cb_sync_warp();\n", "tile, places, first, columns);\n"),),
    ),
}.items()}  # fmt: skip
BUGS |= {f"phases, swapped, {name}": attrs.evolve(bug, kernel=PHASED_SWAPPED) for name, bug in {
    "no wait for the other warps of a strip": BUGS["swapped, no wait for the other warps of a strip"],
    "no barrier before places change": Bug(
        (("store.cuh", "walk.n - task.n);\n      cb_sync_warp();\n", "walk.n - task.n);\n"),),
    ),
}.items()}  # fmt: skip

# Of a cluster: what its two blocks owe each other.
BUGS |= {f"cluster, {name}": attrs.evolve(bug, kernel=CLUSTERED) for name, bug in {
    "no drain": Bug(
        (("implicit_gemm.cu", "for (int stage = 0; CLUSTER > 1 && stage < NUM_STAGES;",
          "for (int stage = 0; stage < 0;"),),
        "another block of the cluster",
    ),
    "a drain of all stages but one": Bug(
        (("implicit_gemm.cu", "for (int stage = 0; CLUSTER > 1 && stage < NUM_STAGES;",
          "for (int stage = 1; stage < NUM_STAGES;"),),
        "another block of the cluster",
    ),
    "filters for one block alone": Bug(
        (("operands.cuh", "cb_tma_load_3d<CLUSTER>(to, b_map, barrier, gather.within * TILE_K, tap, n)",
          "cb_tma_load_3d<1>(to, b_map, barrier, gather.within * TILE_K, tap, n)"),),
        "deadlock",
    ),
    "filters for blocks beyond": Bug(
        (("operands.cuh", "cb_tma_load_3d<CLUSTER>(to, b_map, barrier, gather.within * TILE_K, tap, n)",
          "cb_tma_load_3d<4>(to, b_map, barrier, gather.within * TILE_K, tap, n)"),),
        "a block that is not in the cluster",
    ),
    "arrivals at the first block alone": Bug(
        (("main_loop.cuh", "cb_barrier_arrive_remote(shared.empty(stage), (u32)thread)",
          "cb_barrier_arrive_remote(shared.empty(stage), 0)"),),
    ),
    "arrivals at the own block alone": Bug(
        (("main_loop.cuh", "cb_barrier_arrive_remote(shared.empty(stage), (u32)thread)",
          "cb_barrier_arrive_remote(shared.empty(stage), cb_cluster_rank())"),),
        modes=not_in("in_order", "reversed"),
    ),
    "arrivals of the own consumers are enough": Bug((("implicit_gemm.cu", "READERS * CLUSTER", "READERS"),)),
    "no arrival at the other block": Bug(
        (("main_loop.cuh", "if (thread < CLUSTER) cb_barrier", "if (thread < 1) cb_barrier"),),
    ),
    "blocks that do not wait for each other's barriers": Bug(
        (("implicit_gemm.cu", "    cb_cluster_sync();\n", "    cb_sync();\n"),), "without a cb_cluster_sync"
    ),
}.items()}  # fmt: skip

CASES = seen_always(BUGS, "no wait on full", "swapped, no wait for the turn", "cluster, no drain")
CORRECT = {
    "none": USUAL,
    "none, swapped": SWAPPED,
    "none, staged": SWAPPED,
    "none, cluster": CLUSTERED,
    "none, phases": PHASED,
    "none, phases, swapped": PHASED_SWAPPED,
}


def mutant(name):
    """Give the kernel with a bug, or as it is."""
    kernel, changes = (BUGS[name].kernel, BUGS[name].changes) if name in BUGS else (CORRECT[name], ())
    return planting.mutant(name, kernel, SOURCES.iterdir(), changes)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Compile everything at once: two compilers at a time rather than one between the tests."""
    building.precompile([mutant(name) for name in [*CORRECT, *running(CASES)]], 90)


def outcome(chosen, mode, *, staged=False):
    """
    Convolve integers and add others, exact sums: "right", else WRONG or the error of the first draw that is not.

    Kernels of gradients compute that of an input, and mask it.

    Args:
        chosen: The kernel.
        mode: Schedule and copies.
        staged: Whether the output starts at 8 bytes more than the copy engine can store.
    """
    changed = {"c": 136} if chosen.tile == SWAPPED.tile else {}
    random, drawn = np.random.default_rng(3), attrs.evolve(DRAWN, **changed)
    given, taken, terms = drawn.x_shape, drawn.y_shape, ("residual",)
    if is_gradient := chosen.operation.startswith("conv2d_dgrad"):
        drawn, terms = STRIDED, ("residual", "positive")
        given, taken = drawn.y_shape, drawn.x_shape
    x, w = (random.integers(-2, 3, shape).astype(np.float16) for shape in (given, drawn.w_shape))
    ends = {name: random.integers(-2, 3, taken).astype(np.float16) for name in terms}
    product = cases.conv2d_dgrad if is_gradient else cases.conv2d
    want = product(drawn, x.astype(np.float64), w.astype(np.float64)) + ends["residual"]
    want = np.where(ends["positive"] > 0, want, 0) if is_gradient else want
    run = functools.partial(conv.conv2d_dgrad, x_shape=taken) if is_gradient else conv.conv2d
    for simulator in planting.simulators(90, mode, DRAWS):
        start = 4 if staged else 0
        y = np.full(math.prod(taken) + start, np.nan, np.float16)[start:].reshape(taken)
        where = Context(device=H200, launcher=simulator, chooser=lambda *_: SplitKernel(chosen))
        try:
            run(where, x, w, out=y, **ends, **drawn.options)
        except SimulationError as error:
            return str(error)
        if not np.array_equal(y, want):
            return WRONG
    return "right"


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("name", CORRECT)
def test_the_kernel_as_it_is_passes(name, mode):
    """No false alarm in any order of threads and copies."""
    assert outcome(mutant(name), mode, staged=name == "none, staged") == "right"


@pytest.mark.parametrize("name", CASES)
def test_the_bug_is_caught(name):
    """In every mode that the table names: a wrong result, or an error that says what is wrong."""
    bug = BUGS[name]
    assert planting.missed(bug, lambda mode: outcome(mutant(name), mode, staged=bug.staged)) == {}


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_swapped_corners_are_caught(mode, monkeypatch):
    """The corners of an im2col map are those of w, then of h."""

    def swapped(vertical, horizontal):
        window = tensor_map.window_of(vertical, horizontal)
        return attrs.evolve(window, lower=window.lower[::-1], upper=window.upper[::-1])

    monkeypatch.setattr(hopper, "window_of", swapped)
    assert outcome(USUAL, mode) != "right"

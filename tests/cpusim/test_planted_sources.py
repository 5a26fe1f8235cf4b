"""
Bugs planted in kernels without tensor cores, and in the tile of sm_70: their results must then be others.

They are compared with those of the NumPy engine, or with exact products. Kernels of hopper/, mma/ and attention/ have
files of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from cubatch.engine import functional
from cubatch.engine.native import gemm
from cubatch.engine.native.operations import operations
from cubatch.hardware import catalogue
from cubatch.kernels import variant
from cubatch.kernels.ranking import SplitKernel
from tests.cpusim import planting
from tests.cpusim.planting import seen_always
from tests.cpusim.simulator import SimulationError, Simulator
from tests.kernels import patches, tiles
from tests.kernels.conftest import CPUSIM_DEVICES, Target
from tests.kernels.passes import Passes

pytestmark = planting.IN_PLACE

KERNELS = variant.kernels_path()
X, FILTER = (2, 17, 13, 70), (70, 7, 7, 1)
WINDOW: dict[str, Any] = {"pad": (3, 3, 3, 3), "groups": 70}
NORM = (25, 11, 4, 8)
"""Rows of a tile begin and end inside a sample."""
ROWS, LONG, STRIPS = (300, 128), (9, 25, 25, 8), (6, *X[1:])
"""On one or two SMs, blocks take several rows or strips one after another, and a row lane many rows of its block."""


def check(
    launcher: Target, name: str, arrays: dict[str, tuple[int, ...]], results: dict[str, tuple[int, ...]], **options: Any
) -> None:
    """
    Check that an operation computes the same on kernels and by NumPy, but for rounding.

    `arrays` has the shapes of drawn arguments, `results` those of arrays that the operation fills.
    """
    random = np.random.default_rng(3)
    drawn = {key: random.uniform(0.5, 2, shape).astype(np.float32) for key, shape in arrays.items()}
    drawn |= {key: drawn[key] - np.float32(1.5) for key in {"x", "dy", "beta"} & drawn.keys()}
    filled = []
    for engine in (operations(launcher.context()), functional):
        filled.append({key: np.full(shape, np.nan, np.float32) for key, shape in results.items()})
        getattr(engine, name)(**{key: array.copy() for key, array in drawn.items()}, **filled[-1], **options)
    for key, want in filled[1].items():
        np.testing.assert_allclose(filled[0][key], want, rtol=1e-4, atol=1e-4 * abs(want).max(), err_msg=key)


def of_fprop(launcher: Target) -> None:
    check(launcher, "conv2d", {"x": X, "w": FILTER}, {"out": X}, **WINDOW)


def of_dgrad(launcher: Target) -> None:
    check(launcher, "conv2d_dgrad", {"dy": X, "w": FILTER}, {"out": X}, x_shape=X, **WINDOW)


def of_wgrad(launcher: Target) -> None:
    check(launcher, "conv2d_wgrad", {"x": X, "dy": X}, {"dw": FILTER}, **WINDOW)


def of_norm(launcher: Target) -> None:
    channel = {"mean": (8,), "inv_std": (8,)}
    check(
        launcher, "batch_norm_train", {"x": NORM, "gamma": (8,), "beta": (8,)}, {"out": NORM, **channel},
        activation="silu",
    )  # fmt: skip


def of_gradient(launcher: Target, *, activation: str | None = None, **pooled: tuple[int, ...]) -> None:
    arrays = {"dy": NORM, "x": NORM, **dict.fromkeys(("gamma", "beta", "mean", "inv_std"), (8,))}
    results = {"out": NORM, "dgamma": (8,), "dbeta": (8,)}
    check(launcher, "batch_norm_backward", arrays | pooled, results, activation=activation)


def of_pool(launcher: Target) -> None:
    of_gradient(launcher, activation="silu", pooled=(25, 8))


def of_last_row(launcher: Target) -> None:
    backwards = attrs.evolve(launcher, options={"reverses_sums": True})
    of_norm(backwards)
    of_gradient(backwards)


def of_filter(launcher: Target) -> None:
    drawn = patches.SHAPES["7x7 of stride 2"]
    Passes(launcher, launcher.context(), stored=functools.partial(patches.cut, drawn)).fprop(drawn)


def of_readers(launcher: Target) -> None:
    check(launcher, "global_avg_pool_backward", {"dy": (25, 8), "residual": NORM}, {"out": NORM}, x_shape=NORM)


def of_layer_scale(launcher: Target) -> None:
    check(launcher, "layer_scale", {"x": NORM, "gamma": (8,), "residual": NORM}, {"out": NORM})


def of_product(columns: int, launcher: Target) -> None:
    Passes(launcher, tiles.context(launcher), seed=1).columns((70, columns, 20))


def of_tile(layout: str, dtype: str, tile: str, launcher: Target) -> None:
    """Multiply integers, whose sums are exact, by one tile: several of its rows and columns, the last ones cut off."""
    (m, n, k), random = (152, 144, 72), np.random.default_rng(3)
    a = random.integers(-2, 3, (k, m) if layout == "tn" else (m, k)).astype(dtype)
    b = random.integers(-2, 3, (n, k) if layout == "nt" else (k, n)).astype(dtype)
    out, found = np.full((m, n), np.nan, dtype), variant.find(f"gemm_{layout}", dtype, tile=tile)
    gemm.gemm(launcher.context(chooser=lambda *_: SplitKernel(found)), a, b, layout=layout, out=out)
    left, right = a.T if layout == "tn" else a, b.T if layout == "nt" else b
    np.testing.assert_array_equal(out, left.astype(np.float64) @ right.astype(np.float64))


def with_sms(launcher: Target, num_sms: int) -> Target:
    return attrs.evolve(launcher, device=attrs.evolve(launcher.device, num_sms=num_sms))


def of_rows(launcher: Target) -> None:
    arrays = {"x": ROWS, "gamma": ROWS[1:], "beta": ROWS[1:]}
    check(with_sms(launcher, 1), "layer_norm", arrays, {"out": ROWS})


def of_summed_rows(launcher: Target) -> None:
    arrays = {"dy": ROWS, "x": ROWS, "gamma": ROWS[1:], "statistics": (2, ROWS[0])}
    results = {"out": ROWS, "dgamma": ROWS[1:], "dbeta": ROWS[1:]}
    check(with_sms(launcher, 1), "layer_norm_backward", arrays, results)


def of_summed_tiles(launcher: Target) -> None:
    arrays = {"dy": LONG, "x": LONG, **dict.fromkeys(("gamma", "mean", "inv_std"), (8,))}
    results = {"out": LONG, "dgamma": (8,), "dbeta": (8,)}
    check(with_sms(launcher, 1), "batch_norm_backward", arrays, results)


def of_summed_strips(launcher: Target) -> None:
    check(with_sms(launcher, 2), "conv2d_wgrad", {"x": STRIPS, "dy": STRIPS}, {"dw": FILTER}, **WINDOW)


@attrs.frozen
class Bug:
    """
    A change of a line of a source, which is there once, and a check that must fail.

    Attributes:
        file: The source, under kernels/.
        old, new: The change.
        entry: The kernel that has it.
        check: Runs the kernel and checks its results.
        arch: Compute capability times ten.
    """

    file: str
    old: str
    new: str
    entry: str
    check: Callable[[Target], object]
    arch: int = 80


WIDE, EACH = (functools.partial(of_product, columns) for columns in (12, 10))
FEW_ROWS, FEW_ROWS_NN = (functools.partial(of_tile, layout, "float32", "32x128x16") for layout in ("nt", "nn"))
VOLTA, VOLTA_TN = (functools.partial(of_tile, layout, "float16", "128x128x32_s2_w4") for layout in ("nt", "tn"))
COPIED = "copy_group(sums, group, slab);\n"
BUGS = {
    "taps that are not turned around": Bug(
        "depthwise/convolve.cuh", "turn ? TAPS - 1 - tap : tap", "turn ? tap : tap", "depthwise_s1", of_dgrad
    ),
    "one place for the taps of a vector": Bug(
        "depthwise/convolve.cuh", "place[lane % PLANE] =", "place[0] =", "depthwise_s1", of_fprop
    ),
    "sums that do not begin at zero": Bug(
        "depthwise/convolve.cuh", "[u][k][e] : 0.0f;", "[u][k][e] : sum[j][u][k][e];", "depthwise_s1", of_fprop
    ),
    "one row of gradients for all taps": Bug(
        "depthwise/wgrad.cuh", "errors[j][k][e] = errors[j + 1]", "errors[j][k][e] = errors[OPEN - 1]",
        "depthwise_wgrad_s1", of_wgrad,
    ),
    "a norm without its activation": Bug(
        "misc/batch_norm.cu", "with_activation(last, ActivateAll<V>{values});", "", "batch_norm_activate", of_norm
    ),
    "a slope without the norm's shift": Bug(
        "misc/batch_norm.cu", "if constexpr (SLOPE) load_channels<V>(behind.beta + channel, shift);", "",
        "batch_norm_slope_apply", of_pool,
    ),
    "the gradient of a pool for each pixel": Bug(
        "misc/batch_norm.cu", "share = 1.0f / (float)behind.pixels", "share = 1.0f", "batch_norm_slope_sums", of_pool
    ),
    "one sample for a tile of rows": Bug(
        "misc/batch_norm.cu", "behind.first + (i64)later", "behind.first + 0 * (i64)later", "batch_norm_slope_apply",
        of_pool,
    ),
    "every block at the last row": Bug(
        "common/columns.cuh", "{{(i64)cb_block_x() * num_row_lanes,", "{{0 * (i64)cb_block_x(),",
        "batch_norm_backward_sums", of_last_row,
    ),
    "as many rows in the last turn": Bug(
        "common/columns.cuh", "(left < num_row_lanes ? left : num_row_lanes)", "(left > 0 ? num_row_lanes : 0)",
        "batch_norm_statistics", of_last_row,
    ),
    "taps of a patch by rows": Bug(
        "misc/layout.cu", "* wide + place % wide", "* wide + place / high", "copy_filter", of_filter
    ),
    "patches of fewer channels": Bug("misc/layout.cu", "tap * share", "tap * c", "copy_filter", of_filter),
    "other readers subtracted": Bug(
        "misc/samples.cu", "share[v] + to_float(added", "share[v] - to_float(added", "global_avg_pool_backward",
        of_readers,
    ),
    "one factor for all channels": Bug(
        "misc/samples.cu", "factors[v], to_float(loaded.added", "factors[0], to_float(loaded.added", "scale_add",
        of_layer_scale,
    ),
    "sums read where columns are": Bug(
        "simt/store.cuh", "row.v[place_in_row(kept_column(i, j))];", "row.v[place_in_row(j)];", "gemm_nt", WIDE, 52
    ),
    "single sums read where columns are": Bug(
        "simt/store.cuh", "copy[place_in_piece(i / PIECE, i % PIECE)]",
        "copy[i / PIECE * NUM_THREADS * PIECE + i % PIECE]", "gemm_nt", EACH, 52,
    ),
    "sums of another row": Bug(
        "simt/main_loop.cuh", "value[kept_row(i, j)][kept_column(i, j)]", "value[i][kept_column(i, j)]", "gemm_nt",
        WIDE, 52,
    ),
    # The tile of few rows: four warps side by side, whose threads have 8 rows of 4 columns.
    "all warps at the first columns": Bug(
        "simt/main_loop.cuh", "cb_warp() % WARPS_N * WARP_TILE_N", "0 * WARP_TILE_N", "gemm_nt", FEW_ROWS, 52
    ),
    "a thread's rows side by side": Bug(
        "simt/main_loop.cuh", "row_floats(TILE_M) + i * LANES_M", "row_floats(TILE_M) + i", "gemm_nt", FEW_ROWS, 52
    ),
    "half of the rows of gemm_k": Bug(
        "simt/loaders.cuh", "cb_warp() % K_WARPS * K_LANES) * WIDTH", "0 * K_LANES) * WIDTH", "gemm_nt", FEW_ROWS, 52
    ),
    "a thread's filters in one row": Bug(
        "simt/loaders.cuh", "i * STEP + j * row_floats(EXTENT)", "0 * i * STEP + j * row_floats(EXTENT)", "gemm_nt",
        FEW_ROWS, 52,
    ),
    "a thread's columns in one place": Bug(
        "simt/loaders.cuh", "return i * STEP + j; }", "return 0 * i * STEP + j; }", "gemm_nn", FEW_ROWS_NN
    ),
    "a thread's first rows for all": Bug(
        "simt/store.cuh", "thread.row(number % DOWN * PIECE_ROWS)", "thread.row(number / DOWN * PIECE_ROWS)", "gemm_nt",
        FEW_ROWS, 52,
    ),
    # The tile of sm_70 whose warps have 64 rows and columns: four groups of 16 each way, stored in two turns.
    "all warps at the first rows": Bug(
        "mma/main_loop.cuh", "m(cb_warp() / WARPS_N * WARP_M)", "m(0 * WARP_M)", "gemm_nt", VOLTA, 70
    ),
    "the first 32 of a warp's rows twice": Bug(
        "mma/fragments.cuh", "(place ^ (step * CHUNK)) + i * GROUP", "(place ^ (step * CHUNK)) + i % 2 * GROUP",
        "gemm_nt", VOLTA, 70,
    ),
    "the first 32 of a warp's columns twice": Bug(
        "mma/fragments.cuh", "(place ^ ((i * 2 + j) * CHUNK))", "(place ^ ((i % 2 * 2 + j) * CHUNK))", "gemm_tn",
        VOLTA_TN, 70,
    ),
    "sums of 32 columns over the first": Bug(
        "mma/store.cuh", "n * GROUP + WarpAtom", "n % 2 * GROUP + WarpAtom", "gemm_nt", VOLTA, 70
    ),
    "rows of the first turn stored": Bug(
        "mma/store.cuh", "row += ROW_LANES * EACH", "row += GROUP", "gemm_nt", VOLTA, 70
    ),
    "no barrier of the warp before rows are stored": Bug(
        "mma/store.cuh", f"{COPIED}      cb_sync_warp();\n", COPIED, "gemm_nt", VOLTA, 70
    ),
    # Grids of as many blocks as fit on the SMs: each block has several turns.
    "rows of the first turn": Bug(
        "common/rows.cuh", "first += (i64)cb_num_blocks_x() * at_once", "first += num_rows", "layer_norm", of_rows
    ),
    "rows of two turns": Bug(
        "common/rows.cuh", "first += (i64)cb_num_blocks_x() * at_once", "first += (i64)cb_num_blocks_x()",
        "layer_norm_backward", of_summed_rows,
    ),
    "blocks at neighboring rows": Bug(
        "common/rows.cuh", "first = (i64)cb_block_x() * at_once", "first = (i64)cb_block_x()", "layer_norm_backward",
        of_summed_rows,
    ),
    "tiles without their last row": Bug(
        "common/columns.cuh", "begin + rows_per_tile < rows ? begin + rows_per_tile : rows",
        "begin + rows_per_tile < rows ? begin + rows_per_tile - 1 : rows", "batch_norm_backward_sums", of_summed_tiles,
    ),
    "steps of a row more": Bug(
        "common/columns.cuh", "num_rows), num_rows, num_row_lanes}", "num_rows), num_rows, num_row_lanes + 1}",
        "batch_norm_backward_sums", of_summed_tiles,
    ),
    "strips of the first turn": Bug(
        "depthwise/wgrad.cuh", "item += cb_num_blocks_x() * (u32)walkers", "item += window.num_items",
        "depthwise_wgrad_s1", of_summed_strips,
    ),
    "all blocks at the first strips": Bug(
        "depthwise/wgrad.cuh", "item = cb_block_x() * (u32)walkers + (u32)walker", "item = (u32)walker",
        "depthwise_wgrad_s1", of_summed_strips,
    ),
}  # fmt: skip
CASES = seen_always(BUGS, "taps that are not turned around", "one sample for a tile of rows", "taps of a patch by rows")


class Changed(Simulator):
    """Launches a kernel with a bug in place of the one that has its entry."""

    def __init__(self, bug: Bug) -> None:
        super().__init__(bug.arch)
        self.bug, self.was_bound = bug, False

    def bind(self, kernel: Any, grid: Any, arguments: Any) -> Callable[[], None]:
        """Bind the changed kernel, or another as it is."""
        if kernel.entry == self.bug.entry:
            source = KERNELS / self.bug.file
            paths = {*(KERNELS / kernel.source).parent.iterdir(), source}
            kernel = planting.mutant("source", kernel, paths, [(source.name, self.bug.old, self.bug.new)])
            self.was_bound = True
        return super().bind(kernel, grid, arguments)


def target(arch: int, simulator: Simulator) -> Target:
    return Target(catalogue.find(CPUSIM_DEVICES[arch]), simulator)


@pytest.mark.parametrize("name", {bug.check: name for name, bug in BUGS.items()}.values())
def test_the_kernel_as_it_is_passes(name):
    """What fails with a bug passes without."""
    arch = BUGS[name].arch
    BUGS[name].check(target(arch, Simulator(arch)))


@pytest.mark.parametrize("name", CASES)
def test_the_bug_is_caught(name):
    """By wrong numbers, or by an error of the simulator."""
    simulator = Changed(BUGS[name])
    with pytest.raises((AssertionError, SimulationError)):
        BUGS[name].check(target(simulator.arch, simulator))
    assert simulator.was_bound

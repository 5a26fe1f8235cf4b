"""
Bugs planted in kernels without tensor cores: their results must then be others.

Each source of kernels/ that computes something has a planted bug, here or in another file.

They are compared with those of the NumPy engine, or with exact products. Kernels of hopper/, mma/ and attention/ have
files of their own.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from cubatch.engine import functional
from cubatch.engine.loss_scale import initial_state
from cubatch.engine.native import gemm, naive
from cubatch.engine.native.operations import operations
from cubatch.hardware import catalogue
from cubatch.kernels import variant
from cubatch.kernels.ranking import SplitKernel
from cubatch.network.windows import Window
from tests.cpusim import planting
from tests.cpusim.planting import seen_always
from tests.cpusim.simulator import SimulationError, Simulator
from tests.kernels import cases, patches, tiles, winograd_cases
from tests.kernels.conftest import CPUSIM_DEVICES, Target
from tests.kernels.passes import Passes, clamped

pytestmark = planting.IN_PLACE

KERNELS = variant.kernels_path()
X, FILTER = (2, 17, 13, 70), (70, 7, 7, 1)
WINDOW: dict[str, Any] = {"pad": (3, 3, 3, 3), "groups": 70}
NORM = (25, 11, 4, 8)
"""Rows of a tile begin and end inside a sample."""
ROWS = (300, 128)
"""On one SM, a block takes several rows one after another."""


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


def of_product(columns: int, launcher: Target) -> None:
    Passes(launcher, tiles.context(launcher), seed=1).columns((70, columns, 20))


def of_few_rows(launcher: Target, *, slices: int = 1) -> None:
    """Multiply integers, whose sums are exact, by one tile: several of its rows and columns, the last ones cut off."""
    (m, n, k), random = (152, 144, 72), np.random.default_rng(3)
    a, b = (random.integers(-2, 3, shape).astype(np.float32) for shape in ((m, k), (n, k)))
    out, found = np.full((m, n), np.nan, np.float32), variant.find("gemm_nt", "float32", tile="32x128x16")
    gemm.gemm(launcher.context(chooser=lambda *_: SplitKernel(found, slices)), a, b, layout="nt", out=out)
    np.testing.assert_array_equal(out, a.astype(np.float64) @ b.T.astype(np.float64))


def of_rows(launcher: Target) -> None:
    arrays = {"x": ROWS, "gamma": ROWS[1:], "beta": ROWS[1:]}
    one_sm = attrs.evolve(launcher, device=attrs.evolve(launcher.device, num_sms=1))
    check(one_sm, "layer_norm", arrays, {"out": ROWS})


def of(name: str, arrays: dict[str, Any], results: dict[str, Any], **options: Any) -> Callable[[Target], None]:
    return functools.partial(check, name=name, arrays=arrays, results=results, **options)


def of_update(name: str, arrays: dict[str, Any], launcher: Target, **options: Any) -> None:
    """Check that an operation changes arrays as it does by NumPy."""
    updated = []
    for engine in (operations(launcher.context()), functional):
        updated.append({key: array.copy() for key, array in arrays.items()})
        getattr(engine, name)(**updated[-1], **options)
    for key, want in updated[1].items():
        np.testing.assert_allclose(updated[0][key], want, rtol=1e-5, err_msg=key)


def of_winograd(outputs: int, run: str, launcher: Target) -> None:
    passes = Passes(launcher, launcher.context(chooser=winograd_cases.chooser(outputs)))
    getattr(passes, run)(cases.Conv(n=2, h=9, w=6, c=8, k=12, r=3, s=3, pad=(1, 1, 1, 1)))


def of_naive(launcher: Target) -> None:
    Passes(launcher, launcher.context(), ends=clamped).product("nn", (9, 7, 11), parts=("bias",), run=naive.gemm)


def of_naive_gradient(launcher: Target) -> None:
    drawn = cases.Conv(n=2, h=9, w=7, c=4, k=6, r=3, s=3, stride=(2, 2), pad=(1, 1, 1, 1))
    Passes(launcher, launcher.context()).dgrad(drawn, run=naive.conv2d_dgrad)


def of_attention(width: int, launcher: Target) -> None:
    """Two heads of so many channels: up to 64 all is computed at once, above that weights are stored."""
    c, random = 2 * width, np.random.default_rng(5)
    w_in, w_out = (random.normal(0, c**-0.5, (rows, c)).astype(np.float32) for rows in (3 * c, c))
    x = {"x": (2, 70, 1, c)}
    check(launcher, "attention", x, {"out": x["x"]}, w_in=w_in, w_out=w_out, heads=2)


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


WIDE = functools.partial(of_product, 12)
SLICED = functools.partial(of_few_rows, slices=5)
# More than a block of elementwise kernels, and no whole number of vectors.
MANY, PIXELS, HALF = (1, 7, 101, 7), (2, 9, 11, 8), (2, 5, 6, 8)
STRIDE: dict[str, Any] = {"stride": (2, 2), "pad": (1, 1, 1, 1)}
OF_TWO, OF_SEVEN = (
    of(
        "conv2d_dgrad", {"dy": (2, 5, 6, c), "w": (c, 3, 3, 1)}, {"out": (2, 9, 11, c)}, x_shape=(2, 9, 11, c),
        groups=c, **STRIDE,
    )
    for c in (8, 7)
)  # fmt: skip
STRIDED = of("conv2d_dgrad", {"dy": (2, 5, 6, 20), "w": (20, 3, 3, 8)}, {"out": PIXELS}, x_shape=PIXELS, **STRIDE)
ACTIVATION = of("activation", {"x": MANY}, {"out": MANY}, kind="silu")
AT_ONCE, STORED = (functools.partial(of_attention, width) for width in (8, 68))
OVERFLOW = functools.partial(
    of_update, "update_loss_scale", {"state": initial_state()},
    gradients=[np.append(np.ones(4999), np.inf).astype(np.float16)],
)  # fmt: skip
ADAM = functools.partial(
    of_update, "adam", {name: np.linspace(1, 2, 300, dtype=np.float32) for name in ("parameters", "mean", "square")},
    gradients=[np.linspace(-1, 2, 300, dtype=np.float32)], step=3, lr=0.1,
)  # fmt: skip
BUGS = {
    "taps that are not turned around": Bug(
        "depthwise/convolve.cuh", "turn ? TAPS - 1 - tap : tap", "turn ? tap : tap", "depthwise_s1", of_dgrad
    ),
    "one row of gradients for all taps": Bug(
        "depthwise/wgrad.cuh", "errors[j][k][e] = errors[j + 1]", "errors[j][k][e] = errors[OPEN - 1]",
        "depthwise_wgrad_s1", of_wgrad,
    ),
    "one sample for a tile of rows": Bug(
        "misc/batch_norm.cu", "behind.first + (i64)later", "behind.first + 0 * (i64)later", "batch_norm_slope_apply",
        of_pool,
    ),
    "every block at the last row": Bug(
        "common/columns.cuh", "{{(i64)cb_block_x() * num_row_lanes,", "{{0 * (i64)cb_block_x(),",
        "batch_norm_backward_sums", of_last_row,
    ),
    "taps of a patch by rows": Bug(
        "misc/layout.cu", "* wide + place % wide", "* wide + place / high", "copy_filter", of_filter
    ),
    "other readers subtracted": Bug(
        "misc/samples.cu", "share[v] + to_float(added", "share[v] - to_float(added", "global_avg_pool_backward",
        of_readers,
    ),
    "sums read where columns are": Bug(
        "simt/store.cuh", "row.v[place_in_row(kept_column(i, j))];", "row.v[place_in_row(j)];", "gemm_nt", WIDE, 52
    ),
    "sums of another row": Bug(
        "simt/main_loop.cuh", "value[kept_row(i, j)][kept_column(i, j)]", "value[i][kept_column(i, j)]", "gemm_nt",
        WIDE, 52,
    ),
    # The tile of few rows: four warps side by side, whose threads have 8 rows of 4 columns.
    "half of the rows of gemm_k": Bug(
        "simt/loaders.cuh", "cb_warp() % K_WARPS * K_LANES) * WIDTH", "0 * K_LANES) * WIDTH", "gemm_nt", of_few_rows, 52
    ),
    # A grid of as many blocks as fit on the SMs: each block has several turns.
    "rows of the first turn": Bug(
        "common/rows.cuh", "first += (i64)cb_num_blocks_x() * at_once", "first += num_rows", "layer_norm", of_rows
    ),
    # Elementwise kernels, and what they share.
    "every block at the first elements": Bug(
        "common/elements.cuh", "begin = (i64)cb_block_x()", "begin = 0 * (i64)cb_block_x()", "activation", ACTIVATION
    ),
    "one word for a vector": Bug(
        "common/held.cuh", "word[i] = words.word[i];", "word[i] = words.word[0];", "activation", ACTIVATION
    ),
    "a density that does not grow with its input": Bug(
        "common/activation.cuh", "normal_cdf(saved) + saved * density", "normal_cdf(saved) + density",
        "activation_backward",
        of("activation_backward", {"dy": MANY, "saved": MANY}, {"out": MANY}, kind="gelu"),
    ),
    "one flag of a mask for a vector": Bug(
        "misc/dropout.cu", "loaded.kept.v[v] ? factor", "loaded.kept.v[0] ? factor", "dropout_backward",
        of("dropout_backward", {"dy": MANY}, {"out": MANY}, mask=np.arange(4949).reshape(MANY) % 3 > 0, p=0.25),
    ),
    "an overflow in the first warp alone": Bug(
        "misc/loss_scale.cu", "value |= shared[warp]", "value |= shared[0]", "find_overflow", OVERFLOW
    ),
    "squares not corrected for their start": Bug(
        "misc/optimizer.cu", "sqrtf(u[v]) / root + eps", "sqrtf(u[v]) + eps", "adam", ADAM
    ),
    "the first vector of a range alone": Bug(
        "misc/pointwise.cu", "column < begin + columns;", "column <= begin;", "place_columns",
        of("slice_channels_backward", {"dy": PIXELS}, {"out": (2, 9, 11, 24)}, start=8),
    ),
    "a window too early": Bug(
        "misc/pooling.cu", "(begin + stride - 1) / stride", "begin / stride", "avg_pool2d_backward",
        of("avg_pool2d_backward", {"dy": HALF}, {"out": PIXELS}, window=Window(3, 3, **STRIDE), x_shape=PIXELS),
    ),
    "the last row of each thread alone": Bug(
        "misc/reductions.cu", "sums[0][v] += to_float", "sums[0][v] = to_float", "column_sums",
        of("linear_wgrad", {"x": (300, 12), "dy": (300, 8)}, {"dw": (8, 12), "db": (8,)}),
    ),
    "one position for all": Bug(
        "misc/tokens.cu", "(position + column, added)", "(position + column % channels, added)", "tokens",
        of("tokens", {"x": (3, 4, 2, 8), "token": (8,), "position": (9, 8)}, {"out": (3, 9, 1, 8)}),
    ),
    "squares that are not centered": Bug(
        "misc/moments.cuh", "sum * (sum / count)", "0.0f * sum", "batch_norm_statistics", of_norm
    ),
    # Depthwise convolutions.
    "the first pixel of a row alone": Bug(
        "depthwise/walk.cuh", "(u32)extent) << j;", "(u32)extent);", "depthwise_s1", of_fprop
    ),
    "strips that overlap": Bug(
        "depthwise/window.cuh", "(u32)window.num_columns) * groups}", "(u32)window.num_columns) * (groups / 2)}",
        "depthwise_s1", of_fprop,
    ),
    "gradients that are not negative": Bug(
        "depthwise/depthwise.cu", "bfloat16_t{0xff80}", "bfloat16_t{0}", "depthwise_dgrad_s2", OF_TWO
    ),
    "one column for both of a stride": Bug(
        "depthwise/scalar.cu", "(s + k % up) / up", "s / up", "depthwise_each", OF_SEVEN
    ),
    # Tiled products and convolutions, and kernels that check them.
    "taps of a phase rounded down": Bug(
        "common/conv_geometry.cuh", "(taps - tap + tap_step - 1) / tap_step", "(taps - tap) / tap_step", "conv2d_dgrad",
        STRIDED,
    ),
    "pixels of a phase side by side": Bug(
        "common/product_kernel.cuh", "(within - line * phase_columns) * conv.stride_w",
        "(within - line * phase_columns)", "conv2d_dgrad", STRIDED,
    ),
    "one row of taps": Bug(
        "common/operand_sources.cuh", "down = window.vertical.step;", "down = 0;", "conv2d_dgrad", STRIDED
    ),
    "a residual of one column": Bug(
        "common/epilogue.cuh", "to_float(residual[i].v[j])", "to_float(residual[i].v[0])", "gemm_nt", WIDE, 52
    ),
    "tiles of the first rows": Bug(
        "common/tile_order.cuh", "first + inside - column", "inside - column", "gemm_nt", of_few_rows, 52
    ),
    "slices over the same part of gemm_k": Bug(
        "common/product_run.cuh", "(i64)(begin - 1) * TILE_K", "(i64)(begin / 2) * TILE_K", "gemm_nt", SLICED, 52
    ),
    "the first slice four times": Bug(
        "simt/split_k_reduce.cu", "sum[j] += parts[i].v[j]", "sum[j] += parts[0].v[j]", "split_k_reduce", SLICED, 52
    ),
    "a product turned around": Bug(
        "naive/gemm.cu", "index / product.n, n = index % product.n", "index % product.m, n = index / product.m",
        "gemm_nn", of_naive,
    ),
    "windows without their stride": Bug(
        "naive/conv2d.cu", "above / conv.stride_h, q = before / conv.stride_w", "above, q = before", "conv2d_dgrad",
        of_naive_gradient,
    ),
    "a filter that is not turned around": Bug(
        "winograd/transforms.cu", "turned ? 8 - tap : tap", "turned ? tap : tap", "winograd_filter",
        functools.partial(of_winograd, 2, "dgrad"),
    ),
    "the first point twice": Bug(
        "winograd/cook_toom.cuh", "fmaf(P, odd_p, Q * odd_q)", "fmaf(P, odd_p, P * odd_q)", "winograd_result",
        functools.partial(of_winograd, 4, "fprop"),
    ),
    # Attention in float32.
    "sums that are not scaled down": Bug(
        "attention/attend.cu", "fmaf(sum[i], scale,", "fmaf(sum[i], 1.0f,", "attend", AT_ONCE
    ),
    "scores without their factor": Bug(
        "attention/heads.cu", "sums[i][j] * product.factor", "sums[i][j]", "heads_nt", STORED
    ),
    "all tiles at the first columns": Bug(
        "attention/product.cuh", "(int)(number % tiles_n) * TILE", "0 * TILE", "heads_nn", STORED
    ),
}  # fmt: skip
ALWAYS = "taps that are not turned around", "one sample for a tile of rows", "taps of a patch by rows"
CASES = seen_always(BUGS, *ALWAYS)
CHECKED = {bug.check: name for name, bug in BUGS.items()}
"""A bug of each check."""


class Changed(Simulator):
    """Launches a kernel with a bug in place of the one that has its entry."""

    def __init__(self, bug: Bug) -> None:
        super().__init__(bug.arch)
        self.bug, self.was_bound = bug, False

    def bind(self, kernel: Any, grid: Any, arguments: Any) -> Callable[[], None]:
        """Bind the changed kernel, or another as it is."""
        if kernel.entry == self.bug.entry:
            source = KERNELS / self.bug.file
            paths = {*(KERNELS / kernel.source).parent.iterdir(), *source.parent.iterdir()}
            kernel = planting.mutant("source", kernel, paths, [(source.name, self.bug.old, self.bug.new)])
            self.was_bound = True
        return super().bind(kernel, grid, arguments)


def target(arch: int, simulator: Simulator) -> Target:
    return Target(catalogue.find(CPUSIM_DEVICES[arch]), simulator)


@pytest.mark.parametrize("name", seen_always(CHECKED.values(), *(CHECKED[BUGS[name].check] for name in ALWAYS)))
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


def test_each_source_that_computes_has_a_planted_bug():
    """But for instructions, which twins check, and sources that only have constants, structures or macros."""
    without = {
        "common/device.cuh", "common/device_hopper.cuh", "common/device_mma.cuh", "common/loss_scale.cuh",
        "common/structs.cuh", "mma/implicit_gemm.cu", "simt/implicit_gemm.cu",
    }  # fmt: skip
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_planted_*.py"))
    sources = {path.relative_to(KERNELS).as_posix(): path for path in KERNELS.glob("*/*.cu*")}
    times = collections.Counter(path.name for path in sources.values())
    left = []
    for name, path in sources.items():
        is_clear = times[path.name] == 1 or path.parent.name in {"hopper", "mma"}
        if f'"{name}"' not in text and not (is_clear and f'"{path.name}"' in text):
            left.append(name)
    assert set(left) - without == set()

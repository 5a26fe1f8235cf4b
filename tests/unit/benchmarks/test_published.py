"""Published measurements as cases of the model: columns, filters and what a harness adds, from files written here."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from benchmarks.predictor.published import CONV, GEMM, NEUSIGHT, load, tile_clocks
from cubatch.estimate.vendor.algorithms import Work
from cubatch.network.layers import Conv2d, Linear
from cubatch.network.passes import Pass
from tests.unit.benchmarks.building import CONV_ROW, GEMM_ROW, write
from tests.unit.estimate.building import work_of

NEUSIGHT_ROW = {
    "gpu": "Tesla V100-PCIE-32GB", "batch": 38, "c_in": 893, "c_out": 326, "kernel": 3, "in_hw": 5, "stride": 1,
    "pad": 1, "out_hw": 5, "gflop": 4.9781, "latency_ms": 0.88098, "effective_tflops": 5.651, "grid_x": 3, "grid_y": 6,
    "grid_z": 36, "block_x": 64, "blocks_per_sm_reported": 8.1, "main_kernel_truncated": "volta_sgemm_64x64_nn",
    "cudnn": 8902, "source": "", "position": 0.0,
}  # fmt: skip


FILES = {
    NEUSIGHT: "neusight_conv_test.csv", CONV: "deepbench_conv.csv",
    GEMM: "deepbench_gemm.csv",
}  # fmt: skip


ROWS = {NEUSIGHT: NEUSIGHT_ROW, CONV: CONV_ROW, GEMM: GEMM_ROW}


def read(folder, source, *changes):
    """The measurements of a source that has these rows."""
    write(folder / FILES[source], ROWS[source], *changes)
    return load(folder, source)


def assert_alike(got, want):
    """Two tables of work have the same cases."""
    for field in attrs.fields(Work):
        assert getattr(got, field.name).tolist() == getattr(want, field.name).tolist(), field.name


def test_neusights_columns_are_a_square_convolution(tmp_path):
    """A row is the forward pass of its layer on its GPU, and its shape leaves the batch out."""
    change = {"in_hw": 14, "out_hw": 7, "stride": 2, "c_in": 24, "c_out": 36, "batch": 6, "latency_ms": 3.0}
    (rows,) = read(tmp_path, NEUSIGHT, *[{"gflop": 0.1, "latency_ms": 0.1}] * 4, change)
    layer = Conv2d(h=14, w=14, c=24, k=36, r=3, s=3, pad=1, stride=2)
    assert_alike(rows.work, work_of((layer, Pass.FPROP, 6)))
    assert (rows.gpu.tolist(), rows.shape.tolist()) == (["v100-pcie-32gb"], ["24_36_14_3_2"])
    assert rows.overhead == pytest.approx([1e-4], rel=1e-3)
    assert rows.seconds + rows.overhead == pytest.approx([3e-3])
    assert (rows.dtype, rows.tensor) == ("float32", False)


def test_deepbench_convolutions_have_a_row_for_each_pass(tmp_path):
    """Extents and strides of the two axes are not exchanged, and times are those of their pass."""
    (rows,) = read(tmp_path, CONV, {}, {"n": 8, "fwd_ms": 0.264})
    layer = Conv2d(h=161, w=700, c=1, k=32, r=5, s=20, stride=(2, 3))
    assert_alike(rows.work, work_of(*((layer, pass_, n) for pass_ in Pass for n in (4, 8))))
    assert rows.seconds.tolist() == pytest.approx([132e-6, 264e-6, 210e-6, 210e-6, 280e-6, 280e-6])
    assert rows.overhead.tolist() == [0] * 6
    assert set(rows.shape) == {"1_161_700_32_5_20_2_3"}
    assert set(rows.gpu) == {"titan-x-pascal"}


@pytest.mark.parametrize(
    ("letters", "pass_", "layer", "batch"),
    [
        # Columns first, a product T N is the output of a layer whose filter is stored row by row.
        ("TN", Pass.FPROP, Linear(c=2048, k=1760), 16),
        ("NN", Pass.DGRAD, Linear(c=1760, k=2048), 16),
        ("NT", Pass.WGRAD, Linear(c=1760, k=16), 2048),
    ],
)
def test_deepbench_products_are_passes_of_a_linear_layer(tmp_path, letters, pass_, layer, batch):
    """C of m x n over k, columns first, is the transposed result of the pass that a layer launches like that."""
    (rows,) = read(tmp_path, GEMM, {"a_t": letters[0], "b_t": letters[1]})
    assert_alike(rows.work, work_of((layer, pass_, batch)))
    assert rows.work.flops.tolist() == [2 * 1760 * 16 * 2048]
    assert {rows.work.m[0], rows.work.columns[0]} == {1760, 16}
    assert (rows.work.depth.tolist(), rows.shape.tolist()) == ([2048], ["2048_1760"])


def test_folds_divide_shapes_and_never_rows(tmp_path):
    """All batches, passes and GPUs of a shape are in one fold, whichever other rows are there; no fold is empty."""
    changes = [
        {"k": 32 + i, "n": n, "gpu": gpu} for i in range(60) for n in (4, 8) for gpu in ("Titan Xp", "Titan X (Pascal)")
    ]
    (rows,) = read(tmp_path, CONV, *changes)
    folds = rows.folds(5)
    assert len(rows) == len(folds) == 60 * 2 * 2 * 3
    assert set(folds) == {0, 1, 2, 3, 4}
    of_shape = {shape: set(folds[rows.shape == shape]) for shape in np.unique(rows.shape)}
    assert len(of_shape) == 60
    assert all(len(found) == 1 for found in of_shape.values())
    part = rows.take(rows.work.k > 50)
    assert part.folds(5).tolist() == folds[rows.work.k > 50].tolist()


A100 = {"gpu": "NVIDIA A100 80GB PCIe", "c_in": 64, "kernel": 3, "grid_z": 1, "gflop": 1.0}


def test_clocks_of_tiles_are_those_of_the_busiest_sm(tmp_path):
    """109 blocks are two on one of 108 SMs; a row of the overhead alone, or of unknown tiles, says nothing."""
    tile = {"main_kernel_truncated": "ampere_scudnn_128x64_relu_xregs_large_nn_v1", "grid_x": 109, "grid_y": 1}
    fused = {"main_kernel_truncated": "ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1"}
    small = [{**A100, **tile, "gflop": 0.1, "latency_ms": 0.1}] * 4
    steps = 2 * 128 * 64 * 9 * 64 / 64 / 1.41e6  # ms at 1410 MHz, 64 lanes
    rows = [
        {**A100, **tile, "latency_ms": 0.1 + 30 * 1.5 * steps, "c_in": 30 * 64},
        {**A100, **fused, "grid_x": 108, "grid_y": 2, "c_in": 6400, "latency_ms": 0.1 + 2 * 25600 * 64 / 1.41e6},
        {**A100, "latency_ms": 9.0},
        {**A100, **tile, "latency_ms": 9.0, "c_in": 3},
    ]
    write(tmp_path / FILES[NEUSIGHT], NEUSIGHT_ROW, *small, *rows)
    clocks = tile_clocks(tmp_path)
    assert clocks == {"a100-pcie-80gb": {"128x64": (1.5, 1), "winograd 2x2": (1.0, 1)}}


def test_rows_at_their_base_clock_have_its_rates(tmp_path):
    """Only NeuSight's A100 ran at 1065 of 1410 MHz: its peak falls as its clock does, bandwidth stays."""
    small, long = {"gflop": 0.1, "latency_ms": 0.1}, {"latency_ms": 9.0}
    (rows,) = read(tmp_path, NEUSIGHT, *[small, {**A100, **small}] * 4, long, {**A100, **long})
    slow = rows.at_base_clock()
    before, after = (each.devices["a100-pcie-80gb"] for each in (rows, slow))
    assert (set(slow.devices), len(slow)) == ({"a100-pcie-80gb"}, 1)
    assert after.peak_flops_per_second["float32"] == pytest.approx(19.49e12 * 1065 / 1410)
    assert (after.clock_hz, after.peak_bytes_per_second) == (1065e6, before.peak_bytes_per_second)
    (others,) = read(tmp_path, CONV, {})
    assert not len(others.at_base_clock())

"""Published measurements as cases of the model: columns, filters and what a harness adds, from files written here."""

from __future__ import annotations

import attrs
import pytest

from benchmarks.predictor.published import CONV, GEMM, NEUSIGHT, load
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

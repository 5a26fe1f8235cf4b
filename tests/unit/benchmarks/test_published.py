"""Published measurements as cases of the model: columns, filters and what a harness adds, from files written here."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from benchmarks.predictor import published
from benchmarks.predictor.published import CONV, GEMM, JUSTUS, NEUSIGHT, SOURCES, find_device, load
from cubatch.errors import InvalidArgument, UnknownName
from cubatch.estimate.vendor.algorithms import Work
from cubatch.estimate.vendor.fitted import lanes
from cubatch.hardware import catalogue
from cubatch.network.layers import Conv2d, Linear
from cubatch.network.passes import Pass
from tests.checks import assert_within
from tests.unit.benchmarks.building import CONV_ROW, GEMM_ROW, write
from tests.unit.estimate.building import work_of

NEUSIGHT_ROW = {
    "gpu": "Tesla V100-PCIE-32GB", "batch": 38, "c_in": 893, "c_out": 326, "kernel": 3, "in_hw": 5, "stride": 1,
    "pad": 1, "out_hw": 5, "gflop": 4.9781, "latency_ms": 0.88098, "effective_tflops": 5.651, "grid_x": 3, "grid_y": 6,
    "grid_z": 36, "block_x": 64, "blocks_per_sm_reported": 8.1, "main_kernel_truncated": "volta_sgemm_64x64_nn",
    "cudnn": 8902, "source": "", "position": 0.0,
}  # fmt: skip


JUSTUS_ROW = {
    "gpu": "Tesla V100", "mode": "fwd", "batch": 49, "in_hw": 9, "kernel": 2, "c_in": 224, "c_out": 507, "stride": 3,
    "padding": "SAME", "activation": "sigmoid", "bias": 1, "out_hw": 3, "gflop_fwd": 2.1, "time_ms_median": 1.6895,
    "time_ms_min": 1.6825, "time_ms_max": 1.7, "fwd_tflops": 1.294, "source": "",
}  # fmt: skip


FILES = {
    NEUSIGHT: "neusight_conv_test.csv", JUSTUS: "justus_conv_test.csv", CONV: "deepbench_conv.csv",
    GEMM: "deepbench_gemm.csv",
}  # fmt: skip


ROWS = {NEUSIGHT: NEUSIGHT_ROW, JUSTUS: JUSTUS_ROW, CONV: CONV_ROW, GEMM: GEMM_ROW}


def read(folder, source, *changes):
    """The measurements of a source that has these rows."""
    write(folder / FILES[source], ROWS[source], *changes)
    return load(folder, source)


def assert_alike(got, want):
    """Two tables of work have the same cases."""
    for field in attrs.fields(Work):
        assert getattr(got, field.name).tolist() == getattr(want, field.name).tolist(), field.name


@pytest.mark.parametrize("source", SOURCES)
def test_a_folder_without_files_gives_nothing(tmp_path, source):
    """Whoever has not the files has no rows, and no error."""
    assert load(tmp_path, source) == []


# --- neusight ------------------------------------------------------------------------------------------------

FLOORS = {"Tesla V100-PCIE-32GB": (0.072, 0.162, 0.106), "Tesla P4": (0.067, 0.373, 0.375)}


SHAKE = 0.004  # milliseconds that a small layer takes beyond the harness, evenly


@pytest.fixture(scope="module")
def drifting(tmp_path_factory):
    """Two GPUs' files of 600 rows: a harness that drifts as a parabola, layers without work and layers with."""
    folder, rng = tmp_path_factory.mktemp("neusight"), np.random.default_rng(5)
    for number, (gpu, (a, b, c)) in enumerate(FLOORS.items()):
        x = np.arange(600) / 600
        small = np.arange(600) % 4 == 0
        work = np.where(small, rng.uniform(0, SHAKE, 600), rng.uniform(0.3, 3.0, 600))
        gflop = np.where(small, 0.001, 1.0 + work)
        rows = (
            {"gpu": gpu, "position": x[i], "latency_ms": a + b * x[i] + c * x[i] ** 2 + work[i], "gflop": gflop[i],
             "batch": i + 1}
            for i in range(600)
        )  # fmt: skip
        write(folder / f"neusight_conv_{number}.csv", NEUSIGHT_ROW, *rows)
    return load(folder, NEUSIGHT)


def test_the_drift_of_a_harness_is_recovered_for_each_gpu(drifting):
    """The overhead of every row is the planted parabola, to the shake of the layers that show it."""
    (rows,) = drifting
    assert sorted(rows.devices) == ["p4", "v100-pcie-32gb"]
    for slug, (a, b, c) in zip(("v100-pcie-32gb", "p4"), FLOORS.values(), strict=True):
        of = rows.gpu == slug
        x = (rows.work.n[of] - 1) / 600
        # At the 5 % quantile of an even shake, wherever in the file.
        planted = (a + b * x + c * x**2 + 0.05 * SHAKE) / 1e3
        assert_within(rows.overhead[of], planted, 0.25 * SHAKE / 1e3, axes="r")


def test_rows_of_less_than_twice_the_harness_are_dropped(drifting):
    """What is left is mostly the layer: no row without work, and every row with more than the harness takes."""
    (rows,) = drifting
    assert (rows.seconds >= rows.overhead).all()
    assert not ((rows.work.n - 1) % 4 == 0).any()
    a, b, c = FLOORS["Tesla V100-PCIE-32GB"]
    # The shortest layer with work takes 0.3 ms, more than this harness until x is about 0.9.
    early = (rows.gpu == "v100-pcie-32gb") & ((rows.work.n - 1) / 600 < 0.85)
    assert a + 0.85 * b + 0.85**2 * c < 0.3
    assert early.sum() == sum(1 for i in range(600) if i % 4 and i / 600 < 0.85)


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


# --- justus --------------------------------------------------------------------------------------------------


def test_justus_forward_passes_are_read_without_the_sessions_floor(tmp_path):
    """The floor is the 1 % quantile of a GPU; rows under three floors and rows of training are left out."""
    quick = [{"time_ms_median": 0.2}] * 20
    rest = [
        {"time_ms_median": 0.599, "batch": 2}, {"time_ms_median": 0.601, "batch": 3},
        {"time_ms_median": 9.0, "mode": "fwd+bwd+SGD", "batch": 4},
        {"time_ms_median": 5.0, "activation": "none", "bias": 0, "padding": "VALID", "batch": 5, "out_hw": 3},
        {"time_ms_median": 0.5, "gpu": "Tesla K80", "batch": 6},
        {"time_ms_median": 4.0, "gpu": "Tesla K80", "batch": 7},
    ]  # fmt: skip
    (rows,) = read(tmp_path, JUSTUS, *quick, *rest)
    # The two of the K80: 0.5 + 0.01 x (4 - 0.5).
    assert rows.work.n.tolist() == [3, 5, 7]
    assert rows.overhead == pytest.approx([2e-4, 2e-4, 5.35e-4])
    assert rows.seconds == pytest.approx([4.01e-4, 48e-4, 34.65e-4])
    assert rows.gpu.tolist() == [find_device("Tesla V100").slug] * 2 + ["k80"]
    assert {name: column.tolist() for name, column in rows.extra.items()} == {
        "activation": [1, 0, 1], "bias": [1, 0, 1], "same": [1, 0, 1], "copied": [0, 0, 0],
    }  # fmt: skip
    assert (rows.work.h[0], rows.work.p[0], rows.work.r[0], rows.work.stride_w[0]) == (9, 3, 2, 3)


def test_an_odd_padding_is_copied_to_the_input(tmp_path):
    """Two sides that are padded alike are left to cuDNN; where one gets a pixel more, TensorFlow pads it itself."""
    cases = [
        {"in_hw": 9, "kernel": 2, "stride": 1, "out_hw": 9},  # 9 - 1 + 2 - 9 = 1
        {"in_hw": 9, "kernel": 2, "stride": 1, "out_hw": 8, "padding": "VALID"},
        {"in_hw": 9, "kernel": 3, "stride": 1, "out_hw": 9},  # 2
        {"in_hw": 8, "kernel": 3, "stride": 2, "out_hw": 4},  # 2 x 3 + 3 - 8 = 1
        {"in_hw": 10, "kernel": 1, "stride": 4, "out_hw": 3},  # nothing is padded: 2 x 4 + 1 - 10 is less than nothing
    ]
    (rows,) = read(tmp_path, JUSTUS, *[{"time_ms_median": 0.2}] * 20, *cases)
    assert rows.extra["copied"].tolist() == [1, 0, 0, 1, 0]


# --- deepbench -----------------------------------------------------------------------------------------------


def test_deepbench_convolutions_have_a_row_for_each_pass(tmp_path):
    """Extents and strides of the two axes are not exchanged, and times are those of their pass."""
    (rows,) = read(tmp_path, CONV, {}, {"n": 8, "fwd_ms": 0.264})
    layer = Conv2d(h=161, w=700, c=1, k=32, r=5, s=20, stride=(2, 3))
    assert_alike(rows.work, work_of(*((layer, pass_, n) for pass_ in Pass for n in (4, 8))))
    assert rows.seconds.tolist() == pytest.approx([132e-6, 264e-6, 210e-6, 210e-6, 280e-6, 280e-6])
    assert rows.overhead.tolist() == [0] * 6
    assert set(rows.shape) == {"1_161_700_32_5_20_2_3"}
    assert set(rows.gpu) == {"titan-x-pascal"}
    assert rows.extra == {}


def test_deepbench_rows_that_say_nothing_are_left_out(tmp_path):
    """Inference, passes that were not measured, and times of a few ticks of the clock."""
    (rows,) = read(
        tmp_path, CONV, {"suite": "inference", "n": 1}, {"bwd_inputs_ms": "", "n": 2}, {"bwd_params_ms": 0.019, "n": 3},
        {"fwd_ms": 0.02, "n": 4},
    )  # fmt: skip
    found = sorted(zip(rows.work.n.tolist(), rows.work.pass_.tolist(), strict=True))
    assert found == [(2, 0), (2, 2), (3, 0), (3, 1), (4, 0), (4, 1), (4, 2)]


@pytest.mark.parametrize("source", [CONV, GEMM])
def test_deepbench_precisions_are_sets_of_their_own(tmp_path, source):
    """float32, float16 that is only stored, and Tensor Cores, which have a name; int8 is none of ours."""
    kinds = ("fp16_mixed_tensorop (16b in", "fp32", "int8 (32b accumulate)", "fp16_storage (16b in", "fp32")
    found = read(tmp_path, source, *({"precision": kind, "c": 8, "n": 8 * i} for i, kind in enumerate(kinds, 2)))
    assert [(rows.dtype, rows.tensor, sorted(set(rows.work.n))) for rows in found] == [
        ("float32", False, [24, 48]), ("float16", False, [40]), ("float16", True, [16]),
    ]  # fmt: skip
    assert [rows.name for rows in found] == [source, source, f"{source} tensor"]


def test_what_tensor_cores_do_not_take_is_not_among_theirs(tmp_path):
    """Rows whose channels or extents are no multiple of eight ran on other units; in float32 they are kept."""
    kinds = {"half": "fp16_mixed_tensorop (16b in", "single": "fp32"}
    sizes = [(8, 16), (8, 20), (12, 16), (1, 32)]
    for source, names in ((CONV, ("c", "k")), (GEMM, ("m", "k"))):
        single, half = read(
            tmp_path, source,
            *({"precision": kind, **dict(zip(names, size, strict=True))} for kind in kinds.values() for size in sizes),
        )  # fmt: skip
        assert (len(half), len(single)) == ((3, 12) if source == CONV else (1, 4))
    (_, half) = read(tmp_path, GEMM, {}, *({"precision": kinds["half"], "n": n} for n in (16, 7, 24)))
    assert half.work.n.tolist() == [16, 24]


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


def test_products_of_a_few_ticks_are_left_out(tmp_path):
    """Under 0.02 ms a microsecond is more than a twentieth."""
    (rows,) = read(tmp_path, GEMM, {"time_ms": 0.019, "n": 1}, {"time_ms": 0.02, "n": 2})
    assert rows.work.n.tolist() == [2]


# --- GPUs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_a_gpu_that_nobody_knows_is_an_error(tmp_path, source):
    """A name outside the catalogue is refused, not skipped."""
    with pytest.raises(UnknownName, match="Voodoo 2"):
        read(tmp_path, source, {"gpu": "Voodoo 2"})


def test_boards_that_a_source_does_not_tell_apart_have_one_of_the_catalogue():
    """Names that several boards share are refused by the catalogue, and settled here."""
    for name in ("Tesla V100", "Tesla P100", "A100"):
        with pytest.raises(InvalidArgument, match="Several devices") as caught:
            catalogue.find(name)
        assert find_device(name).slug in str(caught.value)
    assert find_device("Tesla P4").slug == "p4"


@pytest.mark.parametrize(("name", "sms", "megahertz"), [("Tesla K40", 15, 745), ("Tesla K80", 13, 824)])
def test_kepler_is_as_the_sources_had_it(name, sms, megahertz):
    """An SM of Kepler has 192 lanes, of which the model reckons with 128; the catalogue's K80 is the same to 1 %."""
    device = find_device(name)
    assert device.num_sms == sms
    assert device.compute_capability < (5, 0)
    assert device.peak_flops_per_second["float32"] == pytest.approx(sms * 192 * 2 * megahertz * 1e6, rel=0.005)
    assert lanes(device) == 128
    if name == "Tesla K80":
        known = catalogue.find(name)
        assert (known.slug, known.num_sms, known.l2_bytes) == (device.slug, device.num_sms, device.l2_bytes)
        assert known.peak_flops_per_second == pytest.approx(device.peak_flops_per_second)
        assert known.peak_bytes_per_second == pytest.approx(device.peak_bytes_per_second, rel=0.01)


def test_every_row_has_the_facts_and_the_factors_of_its_gpu(tmp_path):
    """Rows of several GPUs in any order, half precision on Tensor Cores at their rate."""
    tensor = {"gpu": "Tesla V100", "precision": "fp16_mixed_tensorop (16b in"}
    gpus = ["Titan Xp", "Tesla V100", "GTX 1080 Ti", "Tesla V100"]
    plain, fast = read(tmp_path, GEMM, *({"gpu": gpu} for gpu in gpus), tensor)
    boards = [find_device(gpu) for gpu in gpus]
    places = plain.places({boards[1].slug: (1.5, 0.5), "gtx-1080-ti": (2.0, 3.0)})
    assert plain.gpu.tolist() == [board.slug for board in boards]
    assert places.peak.tolist() == [board.peak_flops_per_second["float32"] for board in boards]
    assert places.bandwidth.tolist() == [board.peak_bytes_per_second for board in boards]
    assert places.num_sms.tolist() == [board.num_sms for board in boards]
    assert places.lanes.tolist() == [128, 64, 128, 64]
    assert places.compute.tolist() == [1, 1.5, 2, 1.5]
    assert places.memory.tolist() == [1, 0.5, 3, 0.5]
    assert places.element_bytes.tolist() == [4] * 4
    half = fast.places({})
    assert half.peak.tolist() == [boards[1].peak_flops_per_second["float16"]]
    assert half.element_bytes.tolist() == [2]


# --- rows ----------------------------------------------------------------------------------------------------


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


def test_taking_rows_takes_all_of_them(tmp_path):
    """Work, GPU, times, shape and the source's own columns stay together; GPUs without a row are gone."""
    changes = [
        {"time_ms_median": 0.2, "batch": 2}, {"time_ms_median": 0.2, "gpu": "Tesla K80", "batch": 2},
        {"time_ms_median": 2.0, "batch": 8},
        {"time_ms_median": 3.0, "batch": 9, "gpu": "Tesla K80", "bias": 0, "c_in": 7},
    ]  # fmt: skip
    (rows,) = read(tmp_path, JUSTUS, *changes)
    v100 = find_device("Tesla V100").slug
    assert (rows.gpu.tolist(), set(rows.devices)) == ([v100, "k80"], {v100, "k80"})
    part = rows.take(rows.work.n == 9)
    assert (len(part), part.gpu.tolist(), list(part.devices)) == (1, ["k80"], ["k80"])
    assert part.extra["bias"].tolist() == [0]
    assert part.shape.tolist() == ["7_507_9_2_3"]
    # The floor of the K80's two rows: 0.2 + 0.01 x (3 - 0.2).
    assert (part.overhead[0], part.seconds[0]) == (pytest.approx(2.28e-4), pytest.approx(27.72e-4))
    assert part.places({"k80": (2.0, 1.0)}).compute.tolist() == [2]
    nothing = rows.take(np.zeros(2, bool))
    assert (len(nothing), nothing.devices) == (0, {})


def test_sibling_boards_are_known_by_the_names_of_the_sources():
    """Every name of SIBLINGS is a board of the catalogue or Kepler's, so that none is left out by a misspelling."""
    known = {*catalogue.names(), *(find_device(name).slug for name in ("Tesla K40", "Tesla K80"))}
    assert published.SIBLINGS.keys() <= known
    chips = {"GP102": (6, 1), "GM200": (5, 2)}
    for slug, chip in published.SIBLINGS.items():
        if chip in chips:
            assert catalogue.find(slug).compute_capability == chips[chip]
